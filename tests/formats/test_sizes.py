"""Bytes as people write them and say them."""

from __future__ import annotations

import ast
import re
from itertools import pairwise
from pathlib import Path

import pytest

import stoker
from stoker.errors import UsageError
from stoker.formats.sizes import counted, parse_size, say_size


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0", 0),
        ("67108864", 1 << 26),
        ("512MiB", 1 << 29),
        ("1.5 GB", 1_500_000_000),
        ("2tb", 2 * 10**12),
        ("20PB", 20 * 10**15),
        ("2PiB", 2 << 50),
        (7, 7),
    ],
)
def test_a_size_is_read(text, count):
    assert parse_size(text) == count


@pytest.mark.parametrize("text", ["", "lots", "-1", "5 bananas", "1e9", f"{'9' * 400}B"])
def test_what_is_no_size_is_said(text):
    with pytest.raises(UsageError, match="is not a size"):
        parse_size(text)


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (99_950, "100 kB"),
        (268e6, "268 MB"),
        (2.1e12, "2.1 TB"),
        (2e16, "20.0 PB"),
    ],
)
def test_a_size_is_said(count, said):
    assert say_size(count) == said


@pytest.mark.parametrize(
    ("number", "thing", "said"),
    [
        (0, "source", "0 sources"),
        (1, "source", "1 source"),
        (1.0, "epoch", "1 epoch"),
        (1.5, "core", "1.5 cores"),
        (1200, "file", "1,200 files"),
        (1, "loader process", "1 loader process"),
        (2, "loader process", "2 loader processes"),
        (2, "batch", "2 batches"),
    ],
)
def test_one_is_one_and_others_are_many(number: float, thing: str, said: str) -> None:
    assert counted(number, thing) == said


MANY = re.compile(
    r" (sources|epochs|nodes|ranks|files|tasks|faults|documents|GPUs|shards|steps|cores|cards|lanes|members|"
    r"blocks|digests|sequences|processes|pauses)\b"
)


@pytest.mark.long
def test_nothing_is_said_to_be_many_that_may_be_one() -> None:
    """A number in an f-string before a plural: `counted` says both."""
    never_one = {"agree.py", "board.py", "scene.py", "environment.py", "gpu.py", "sections.py"}
    no_number = {"discover.py", "order.py", "restore.py"}
    found = []
    paths = (
        path for path in Path(stoker.__file__).parent.rglob("*.py") if path.name not in never_one | no_number
    )
    for path in sorted(paths):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            for number, word in pairwise(node.values) if isinstance(node, ast.JoinedStr) else ():
                if (
                    isinstance(number, ast.FormattedValue)
                    and isinstance(word, ast.Constant)
                    and MANY.match(str(word.value))
                    and not ast.unparse(number).endswith("f}")  # 1.0 cores
                ):
                    found.append(f"{path.name}:{node.lineno} {ast.unparse(number)}{word.value}")
    assert found == []
