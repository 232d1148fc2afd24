"""The name `stoker` on public package indexes is not ours: nothing that we ship installs by it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.deploy.write import filled

ROOT = Path(__file__).parent.parent
SHIPPED = ("src", "docs", "deploy", "examples", "benchmarks", ".ci")
_PIP = re.compile(r"(?:pip|pipx|uv)3?['\" ]+(?:pip )?(?:install|download|wheel|add)\b(.*)")
# the name, extras and a version, and nothing that says where from: `stoker[x] @ git+...` and files do
_BARE = re.compile(r"(?<![\w./\\$-])stoker(?:\[[^\]]*\])?(?:\s*[=<>~!]=?[^\s'\"]+)?(?=['\"`\s),;]|$)(?!\s*@)")


def bare(text: str) -> list[str]:
    return [line[0] for line in _PIP.finditer(text) if _BARE.search(line[1].partition("#")[0])]


def shipped() -> Iterator[Path]:
    yield from (path for path in ROOT.iterdir() if path.suffix in (".md", ".txt", "") and path.is_file())
    for part in SHIPPED:
        for path in (ROOT / part).rglob("*"):
            if path.is_file() and path.suffix not in (".so", ".pyc", ".jsonl", ".json", ".svg"):
                yield path


def test_nothing_that_we_ship_installs_by_the_bare_name() -> None:
    found = {str(path.relative_to(ROOT)): bare(path.read_text("utf-8")) for path in shipped()}
    assert len(found) > 250
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_the_image_is_built_from_the_projects_wheel() -> None:
    text = filled("Containerfile", version="0.1.0")
    assert bare(text) == []
    assert "COPY ${WHEEL} " in text


@pytest.mark.parametrize(
    "line",
    [
        "pip install stoker",
        "pip install 'stoker[tokens]'",
        "RUN pip install --no-cache-dir 'stoker[gpu]==0.1.0'",
        "hint=\"pip install 'stoker[cuda]'\"",
        "uv add stoker",
        "python -m pip install -U stoker numpy",
    ],
)
def test_a_bare_name_is_seen(line: str) -> None:
    assert bare(line)


@pytest.mark.parametrize(
    "line",
    [
        "pip install '.[tokens]'",
        'pip install "$(ls dist/*.whl)[tokens]"',
        'pip install "stoker[tokens] @ git+$ADDRESS"',
        "pip install /tmp/stoker/x.whl",
        "pip install stoker-0.1.0-py3-none-any.whl",
        "pip install 'pyarrow>=15.0'   # what stoker reads Parquet with",
    ],
)
def test_what_says_where_it_comes_from_is_fine(line: str) -> None:
    assert bare(line) == []
