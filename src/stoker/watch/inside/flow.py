"""Data flow of a training loop, read off its source: which lines make what goes into the loss.

A line of a loop makes a batch where its value goes into the loss and the weights do not go into it. This is a
program slice: names that `loss.backward()` is reached by, followed backwards through the assignments of one
function; order and branches are left aside. What weights are is told by how names are used (`.parameters()`,
`.grad`). A helper that calls backward, or calls one that does, is a sink for what it is given.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

_MOST_BYTES = 150_000  # of a source file: it is parsed once, and the loop waits meanwhile
_OF_WEIGHTS = frozenset(
    {"parameters", "named_parameters", "train", "eval", "zero_grad", "grad", "requires_grad_", "state_dict"}
)
_NO_WEIGHTS = frozenset({"device", "dtype", "config", "training"})  # of a model, that a batch may ask for
_SINKS = frozenset({"backward", "manual_backward"})
_TRAINING = _SINKS | {"zero_grad", "step", "clip_grad_norm_", "clip_grad_value_", "unscale_", "zero_"}
_Scope = ast.FunctionDef | ast.AsyncFunctionDef | ast.Module


class _Line(NamedTuple):
    """One statement: the names it sets and uses, and where it stands."""

    sets: frozenset[str]
    uses: frozenset[str]
    first: int
    last: int


class Flow:
    """One source file."""

    def __init__(self, source: str) -> None:
        if len(source) > _MOST_BYTES:
            raise ValueError("too long to be looked at")
        self._tree = ast.parse(source)
        self._scopes = [
            n for n in ast.walk(self._tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))
        ]
        self._weights = {name for node in ast.walk(self._tree) for name in _named_weights(node)}
        self._trainers = self._find_trainers()

    def trains(self, line: int) -> bool:
        """Does the function around this line take gradients, itself or by another one of this file?"""
        return bool(self._sinks(self._scope(line)))

    def makes_batch(self, line: int) -> bool:
        """Does what this line makes go into the loss, and the weights not into it?"""
        feeds, weighs = self._into_the_loss(line)
        return feeds and not weighs

    def computes(self, line: int) -> bool:
        """Is this line a part of the model's own arithmetic: the loss, what leads to it or follows it?"""
        feeds, weighs = self._into_the_loss(line)
        own = (node for node in _own_nodes(self._scope(line)) if isinstance(node, ast.Call))
        return (feeds and weighs) or any(
            _called(node) in _TRAINING and node.lineno <= line <= (node.end_lineno or 0) for node in own
        )

    def updates_weights(self, line: int) -> bool:
        """Is this line in a function, or in a loop, that reads gradients and trains nothing else?"""
        scope = self._scope(line)
        around = [
            node
            for node in ast.walk(scope)
            if isinstance(node, (ast.For, ast.With)) and node.lineno <= line <= (node.end_lineno or 0)
        ]
        inner = max(around, key=lambda node: node.lineno, default=None)
        place: ast.AST = inner if inner is not None else scope
        if inner is None and (isinstance(scope, ast.Module) or self._sinks(scope)):
            return False
        changes = any(_changes(node) for node in ast.walk(place))
        takes = any(_is_sink(node) for node in ast.walk(place))
        return changes and not takes and any(_reads(node, "grad") for node in ast.walk(place))

    def loop_around(self, line: int) -> tuple[int, int] | None:
        """First and last line of the outermost loop of its function that this line is in."""
        loops = [
            (node.lineno, node.end_lineno or node.lineno)
            for node in _own_nodes(self._scope(line))
            if isinstance(node, (ast.For, ast.While, ast.AsyncFor))
        ]
        return min((one for one in loops if one[0] <= line <= one[1]), default=None)

    def _into_the_loss(self, line: int) -> tuple[bool, bool]:
        """Does the value of this line go into the loss; do the weights go into it?"""
        scope = self._scope(line)
        lines = list(_lines(scope))
        mine = [one for one in lines if one.first <= line <= one.last]
        if not mine:
            return False, False
        one = min(mine, key=lambda one: one.last - one.first)
        wanted = _backwards(self._sinks(scope), lines)
        weights = _forwards(self._weights, lines)
        return bool(one.sets & wanted), bool((one.uses | one.sets) & weights)

    # --- what lies around ---------------------------------------------------------------------------

    def _scope(self, line: int) -> _Scope:
        around = [one for one in self._scopes if one.lineno <= line <= (one.end_lineno or 0)]
        return max(around, key=lambda one: one.lineno, default=self._tree)

    def _find_trainers(self) -> set[str]:
        """Functions that take gradients, or call one that does."""
        found: set[str] = set()
        while True:
            self._trainers = found
            more = {one.name for one in self._scopes if self._sinks(one)}
            if more <= found:
                return found
            found = found | more

    def _sinks(self, scope: _Scope) -> frozenset[str]:
        """Names that go into a backward; `...` where one takes none by name."""
        found: set[str] = set()
        for node in _own_nodes(scope):
            if not isinstance(node, ast.Call):
                continue
            passed = {one.id for one in node.args if isinstance(one, ast.Name)} & self._trainers
            if _is_sink(node) or _called(node) in self._trainers or passed:
                found |= {*_names(node), "..."}
            found |= {name for one in self._scopes if one.name in passed for name in _names(one)}  # a closure
        return frozenset(found)


def _is_sink(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    of_autograd = isinstance(node.func, ast.Attribute) and _reads(node.func.value, "autograd")
    return _called(node) in _SINKS or (of_autograd and _called(node) == "grad")


def _called(node: ast.Call) -> str:
    func = node.func
    return func.attr if isinstance(func, ast.Attribute) else func.id if isinstance(func, ast.Name) else ""


def _reads(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == name


def _changes(node: ast.AST) -> bool:
    """In place: `p -= …`, `p.data = …`, `p.add_(…)`."""
    if isinstance(node, ast.AugAssign):
        return True
    if isinstance(node, ast.Assign):
        return any(isinstance(target, ast.Attribute) and target.attr == "data" for target in node.targets)
    return isinstance(node, ast.Call) and _called(node).endswith("_") and not _called(node).startswith("_")


def _own_nodes(scope: ast.AST) -> Iterator[ast.AST]:
    """Everything in a function but what is in functions within it."""
    for node in ast.iter_child_nodes(scope):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node
            yield from _own_nodes(node)


def _lines(scope: _Scope) -> Iterator[_Line]:
    """The statements of a function that pass values on; of a loop or a `with`, its first line."""
    for node in _own_nodes(scope):
        if isinstance(node, ast.Assign):
            targets, value = node.targets, node.value
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
            targets, value = [node.target], node.value or node.target
        elif isinstance(node, (ast.For, ast.AsyncFor)):
            targets, value = [node.target], node.iter
        elif isinstance(node, ast.NamedExpr):
            targets, value = [node.target], node.value
        else:
            continue
        sets = frozenset(name for target in targets for name in _names(target))
        last = value.end_lineno or node.lineno
        yield _Line(sets, frozenset(_names(value)), node.lineno, last)


def _names(node: ast.AST) -> Iterator[str]:
    """Names in an expression: `a`, and `self.a` for what belongs to an object."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        if node.value.id == "self":
            yield f"self.{node.attr}"
        elif node.attr not in _NO_WEIGHTS:
            yield node.value.id
        return
    if isinstance(node, ast.Name):
        yield node.id
    for child in ast.iter_child_nodes(node):
        yield from _names(child)


def _named_weights(node: ast.AST) -> Iterator[str]:
    """Names that are used as models, weights and optimizers are, or set to what takes gradients."""
    if isinstance(node, ast.Attribute) and node.attr in _OF_WEIGHTS:
        yield from _names(node.value)
    elif isinstance(node, ast.Assign) and any(map(_asks_for_gradients, ast.walk(node.value))):
        for target in node.targets:
            yield from _names(target)


def _asks_for_gradients(node: ast.AST) -> bool:
    return (isinstance(node, ast.keyword) and node.arg == "requires_grad") or _reads(node, "requires_grad_")


def _backwards(wanted: frozenset[str], lines: list[_Line]) -> set[str]:
    """What these names are made of, and so on."""
    found = set(wanted)
    while more := {name for one in lines if one.sets & found for name in one.uses} - found:
        found |= more
    return found


def _forwards(seeds: set[str], lines: list[_Line]) -> set[str]:
    """What is made of these names, and so on."""
    found = set(seeds)
    while more := {name for one in lines if one.uses & found for name in one.sets} - found:
        found |= more
    return found
