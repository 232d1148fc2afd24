"""Imports point down: each part of the package may import only what the table allows."""

from __future__ import annotations

import ast
import re
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import TYPE_CHECKING

import stoker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

ROOT = Path(stoker.__file__).parent
ARCHITECTURE = Path(__file__).parents[1] / "ARCHITECTURE.md"

# From the bottom up. A module of one layer may import the layers named beside it; a word only the words that
# stand before it in this list; a room never another room, and what measures rooms nothing else that measures.
# A package may always import its own modules.
LAYERS = {
    "words": (
        "redact",
        "errors",
        "options",
        "native",
        "mixing",
        "world",
        "processes",
        "formats",
        "urls",
        "network",
        "objectstore",
        "storage",
        "manifest",
        "spans",
        "findings",
        "symptoms",
        "intervals",
        "recording",
        "gpus",
        "machine",
    ),
    "rooms": ("prepare", "stage", "load", "checkpoint", "watch", "diagnose", "doctor"),
    "measuring": ("bench", "tune"),
    "edge": ("feeder", "plan", "deploy", "report", "history", "cli", "integrations"),
}
MAY_IMPORT = {
    "words": ("words",),
    "rooms": ("words",),
    "measuring": ("words", "rooms"),
    "edge": ("words", "rooms", "measuring", "edge"),
}
LAYER_OF = {part: layer for layer, parts in LAYERS.items() for part in parts}


@cache
def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = ("stoker", *path.relative_to(ROOT).with_suffix("").parts)
        found[".".join(parts).removesuffix(".__init__")] = path
    return found


def imports(name: str, path: Path, *, walk: Callable[[ast.AST], Iterable[ast.AST]] = ast.walk) -> set[str]:
    """The stoker modules a module imports anywhere: at its top, in functions, for types only."""
    found: set[str] = set()
    for node in walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(name, path, node)
            found.update(f"{base}.{alias.name}" for alias in node.names)
    known = modules()
    return {_nearest_module(target, known) for target in found if target.partition(".")[0] == "stoker"}


def walk_what_runs_at_import(tree: ast.AST) -> Iterator[ast.AST]:
    """Like ast.walk, but not into functions nor into what only a type checker sees."""
    yield tree
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield from walk_what_runs_at_import(node)


def _absolute(name: str, path: Path, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for _ in range(node.level - 1):
        package = package.rpartition(".")[0]
    return f"{package}.{node.module}" if node.module else package


def _nearest_module(target: str, known: dict[str, Path]) -> str:
    """`from stoker.errors import UsageError` imports stoker.errors."""
    while target not in known:
        target = target.rpartition(".")[0]
    return target


def part(module: str) -> str:
    """`prepare` of stoker.prepare.plan; nothing for the package itself."""
    return module.removeprefix("stoker").lstrip(".").partition(".")[0]


def allowed(importer: str, imported: str) -> bool:
    here, there = part(importer), part(imported)
    if not there or here == there:
        return True  # `from stoker import __version__`, or a module of the same package
    if not here:
        return there != "cli"  # the package offers public names of any layer, each when it is first used
    layer = LAYER_OF[here]
    if layer == "words" == LAYER_OF[there]:
        return LAYERS[layer].index(there) < LAYERS[layer].index(here)
    return LAYER_OF[there] in MAY_IMPORT[layer]


@cache
def all_imports() -> list[tuple[str, str]]:
    return [(name, target) for name, path in modules().items() for target in sorted(imports(name, path))]


def test_every_module_belongs_to_a_layer() -> None:
    assert {part(name) for name in modules()} - {""} <= set(LAYER_OF)


def test_imports_point_down() -> None:
    assert [f"{a} imports {b}" for a, b in all_imports() if not allowed(a, b)] == []


def test_rooms_never_import_each_other() -> None:
    rooms = set(LAYERS["rooms"])
    crossing = [(a, b) for a, b in all_imports() if part(a) != part(b) and {part(a), part(b)} <= rooms]
    assert crossing == []


def test_the_top_level_is_the_list_of_verbs_and_few_words() -> None:
    """At most 14 folders, and one more for each verb that measures the others."""
    folders = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert len(folders - {*LAYERS["measuring"], "history"}) <= 14
    assert folders <= set(LAYER_OF)


def test_each_folder_of_the_top_level_is_explained() -> None:
    explained = re.findall(r"^\| `(\w+)/` \|", ARCHITECTURE.read_text("utf-8"), flags=re.MULTILINE)
    assert set(explained) == {path.parent.name for path in ROOT.glob("*/__init__.py")}


def test_paths_that_the_architecture_names_are_there() -> None:
    """Each below the package, a room of it, or the repository."""
    named = set(re.findall(r"`((?:\w+/)*\w+(?:\.py|\.c|/))`", ARCHITECTURE.read_text("utf-8")))
    bases = (ROOT, *ROOT.glob("*/"), *ROOT.glob("*/*/"), ARCHITECTURE.parent)
    assert [name for name in sorted(named) if not any((base / name).exists() for base in bases)] == []


def test_no_module_is_longer_than_a_reader_s_patience() -> None:
    lengths = {name: len(path.read_text("utf-8").splitlines()) for name, path in modules().items()}
    assert {name: length for name, length in lengths.items() if length > 400} == {}


def test_nobody_imports_the_command_line() -> None:
    assert [a for a, b in all_imports() if part(b) == "cli" and part(a) != "cli"] == []


def test_modules_do_not_import_each_other_in_circles() -> None:
    graph = {
        name: imports(name, path, walk=walk_what_runs_at_import) - {name, "stoker"}
        for name, path in modules().items()
    }
    TopologicalSorter(graph).prepare()  # raises CycleError with the circle in it


def test_the_guard_sees_an_import_inside_a_function(tmp_path: Path) -> None:
    path = tmp_path / "sneaky.py"
    path.write_text("def f():\n    from stoker.cli import main\n    import stoker.prepare.run\n")
    assert imports("stoker.storage", path) == {"stoker.cli", "stoker.prepare.run"}


def test_the_guard_refuses_a_word_that_imports_a_stage() -> None:
    assert not allowed("stoker.storage", "stoker.prepare.run")


def test_what_measures_rooms_may_import_them_and_nothing_above() -> None:
    assert allowed("stoker.bench.disks", "stoker.load.loader")
    assert allowed("stoker.cli.tune", "stoker.tune.trials")
    assert not allowed("stoker.load.loader", "stoker.bench.disks")
    assert not allowed("stoker.tune.trials", "stoker.history.runs")
    assert not allowed("stoker.bench.figures", "stoker.report.summary")
