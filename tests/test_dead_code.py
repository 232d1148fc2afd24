"""Nothing lies dead: what the package defines is used by it, by its benchmarks, examples or documents."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import stoker

SOURCE = Path(stoker.__file__).parent
ROOT = Path(__file__).parent.parent
READERS = ("src/**/*.py", "benchmarks/*.py", "examples/**/*.py", "docs/**/*.py", "pyproject.toml", "setup.py")
_WORD = re.compile(r"\w+")


def words_read() -> Counter[str]:
    paths = {path for pattern in READERS for path in ROOT.glob(pattern)}
    return Counter(word for path in paths for word in _WORD.findall(path.read_text("utf-8")))


def defined(path: Path) -> Iterator[str]:
    """Names of a module's top level but its commands, and what its classes keep to themselves."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.ClassDef):
            yield node.name
            own = (one.name for one in node.body if isinstance(one, functions))
            yield from (name for name in own if name.startswith("_"))
        elif isinstance(node, functions):
            if not any("command" in ast.unparse(one) for one in node.decorator_list):
                yield node.name
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))


def test_what_is_defined_is_used() -> None:
    read = words_read()
    found = [(path, name) for path in sorted(SOURCE.rglob("*.py")) for name in defined(path)]
    times = Counter(name for _, name in found)
    unread = [(path, name) for path, name in found if read[name] <= times[name] and not name.endswith("__")]
    assert [f"{path.relative_to(SOURCE)}: {name}" for path, name in unread] == []


def test_a_name_that_nobody_reads_is_seen(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("def f(): ...\nclass C:\n    def _g(self): ...\nX = 1\nY: int = 2\n")
    assert list(defined(tmp_path / "a.py")) == ["f", "C", "_g", "X", "Y"]
