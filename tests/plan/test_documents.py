"""YAML that every reader takes for the same."""

from __future__ import annotations

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from stoker.plan.documents import dump_yaml

TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=20)
VALUES = st.recursive(
    TEXTS | st.integers() | st.booleans() | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=10,
)


@given(st.dictionaries(TEXTS, VALUES, max_size=4))
def test_what_was_written_is_what_is_read(document: dict[str, object]) -> None:
    assert list(yaml.safe_load_all(dump_yaml([document, document]))) == [document, document]


@pytest.mark.parametrize(
    "text", ["3e-4", "1e5", "0x1f", "0o17", "1_000", "-1", ".5", "+.5e3", "2026-11-15", "1:30", "y", "N"]
)
def test_text_that_kubectl_would_take_for_something_else_is_quoted(text: str) -> None:
    assert dump_yaml([{"a": text}]) == f"a: '{text}'\n"


def test_several_lines_are_a_block() -> None:
    assert dump_yaml([{"a": "b\nc\n"}]) == "a: |\n  b\n  c\n"
