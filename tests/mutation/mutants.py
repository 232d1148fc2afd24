"""Small wrong changes to a module, found by cosmic-ray's operators and one of our own; a sample by a seed."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Operator
from cosmic_ray.plugins import get_operator
from return_none import ReturnNone

_COMPARISONS = "Eq_NotEq NotEq_Eq Lt_LtE Lt_GtE LtE_Lt LtE_Gt Gt_GtE Gt_LtE GtE_Gt GtE_Lt Is_IsNot IsNot_Is"
_ARITHMETIC = "Add_Sub Sub_Add Mul_Div Div_Mul FloorDiv_Mul Mod_FloorDiv Mod_Mul"
_OTHERS = (
    "NumberReplacer AddNot ReplaceUnaryOperator_Delete_Not ReplaceUnaryOperator_Delete_USub ReplaceAndWithOr "
    "ReplaceOrWithAnd ReplaceTrueWithFalse ReplaceFalseWithTrue ReplaceBreakWithContinue "
    "ReplaceContinueWithBreak ZeroIterationForLoop"
)
# What no test of behaviour is meant to see: what only a type checker reads, and flags of records and zip.
_READ_BY_CHECKERS = ("@", "import ", "from ", "__all__")
_FLAGS = ("TYPE_CHECKING", "strict=")


def operators() -> dict[str, Operator]:
    names = [f"ReplaceComparisonOperator_{one}" for one in _COMPARISONS.split()]
    names += [f"ReplaceBinaryOperator_{one}" for one in _ARITHMETIC.split()]
    found: dict[str, Operator] = {name: get_operator(f"core/{name}")() for name in names + _OTHERS.split()}
    return {**found, "ReturnNone": ReturnNone()}


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One change: where, the line before and after, and the whole module with it."""

    module: str
    line: int
    before: str
    after: str
    text: str

    @property
    def key(self) -> tuple[str, str, str]:
        """What it is called in `equivalent.json`: line numbers move."""
        return self.module.removeprefix("src/stoker/"), self.before, self.after

    def __str__(self) -> str:
        return f"{self.module}:{self.line}: {self.before}  ->  {self.after}"


def draw(root: Path, modules: list[str], count: int, *, seed: str) -> list[Mutant]:
    """Places first and then a change there: a number has as many as a comparison, but not more places."""
    known, places = operators(), {}
    for module in modules:
        places.update(_places(known, module, (root / module).read_text("utf-8")))
    random_ = random.Random(seed)
    drawn: list[Mutant] = []
    for module, line, column in random_.sample(sorted(places), len(places)):
        name, occurrence = random_.choice(places[module, line, column])
        one = _mutant(module, (root / module).read_text("utf-8"), known[name], occurrence, line)
        if one.before != one.after and not _is_marker(one) and _compiles(one):
            drawn.append(one)
        if len(drawn) == count:
            break
    return drawn


Places = dict[tuple[str, int, int], list[tuple[str, int]]]


def _places(known: dict[str, Operator], module: str, source: str) -> Places:
    """Line and column, and the changes possible there: an operator, and which of its occurrences."""
    found: Places = defaultdict(list)
    nodes, lines = list(ast_nodes(get_ast(source))), source.splitlines()
    for name, operator in known.items():
        places = [place for node in nodes for place in operator.mutation_positions(node)]
        for occurrence, ((line, column), _) in enumerate(places):
            if _means_something(lines[line - 1]):
                found[module, line, column].append((name, occurrence))
    return found


def _is_marker(one: Mutant) -> bool:
    """The `*` before arguments that want their names is no product, nor the `/` in its place a quotient."""
    return one.after == one.before.replace("*,", "/,", 1)


def _means_something(text: str) -> bool:
    text = text.strip()
    return not (text.startswith(_READ_BY_CHECKERS) or any(word in text for word in _FLAGS))


def _mutant(module: str, source: str, operator: Operator, occurrence: int, line: int) -> Mutant:
    changed = mutate_code(source, operator, occurrence) or source
    old, new = source.splitlines(), changed.splitlines()
    at = next((n for n, (was, now) in enumerate(zip(old, new, strict=False)) if was != now), line - 1)
    return Mutant(module=module, line=at + 1, before=old[at].strip(), after=new[at].strip(), text=changed)


def _compiles(one: Mutant) -> bool:
    try:
        compile(one.text, one.module, "exec")
    except (SyntaxError, ValueError):
        return False
    return True
