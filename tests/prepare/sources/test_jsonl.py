"""The C extractor against its Python twin: the same texts, the same lines left out."""

from __future__ import annotations

import json
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stoker.prepare.sources.jsonl import extract_native, extract_python, parse
from stoker.prepare.sources.records import NoText, Wanted

if TYPE_CHECKING:
    from collections.abc import Callable

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)
keys = st.sampled_from(["text", "te", "texts", "tëxt", "a", "", 'te"xt', "te\\xt"])
records = st.builds(
    lambda record, ascii_only, spaced: json.dumps(
        record, ensure_ascii=ascii_only, separators=(", ", " : ") if spaced else (",", ":")
    ).encode("utf-8", "surrogatepass"),
    st.dictionaries(keys, st.text(max_size=12) | values, max_size=4),
    st.booleans(),
    st.booleans(),
)
json_like = st.text(st.sampled_from('{}[]":,\\ utex/bn01-.e\t\r\u00e4\U0001f600'), max_size=30).map(
    str.encode
)
lines = st.lists(
    records | json_like | st.binary(max_size=20).map(lambda line: line.replace(b"\n", b"")), max_size=8
)


@pytest.fixture(scope="module", autouse=True)
def _built(skip_or_fail: Callable[[str], None]) -> None:
    if find_spec("stoker.prepare.sources._jsonl") is None:
        skip_or_fail("the C extractor was not built: install a C compiler, then `make venv`")


def documents(extract: Callable[[memoryview, str], Any], block: bytes) -> dict[int, str | None]:
    """By the offset of its line: the text, or None for a line that has none."""
    texts, places, odd = extract(memoryview(block), "text")
    found: dict[int, str | None] = dict(zip(places.tolist(), texts.strings, strict=True))
    for start in odd:
        line = block[start:].split(b"\n", 1)[0]
        try:
            found[start] = Wanted(field="text").text(parse(line))
        except (ValueError, NoText):
            found[start] = None
    return found


@pytest.mark.long
@settings(max_examples=250)
@given(lines, st.booleans())
@example([b'{"text": "a", "text": "b"}'], True)
@example([b'{"text": "\\ud83d\\ude00 \\u00e4 \\n\\"\\\\\\/"}'], True)
@example([b'{"text": "\\ud83d"}', b'{"text": "\\udc00x"}'], True)
@example([b'{"nested": {"text": "inner"}, "text": "outer"}'], True)
@example([b'{"nested": {"text": "inner"}}'], True)
@example([b'{"te\\u0078t": "escaped key"}'], True)
@example([b'{"text": "x"} trailing', b'{"text": "x"}{"text": "y"}'], True)
@example(
    [b'{"text": "x",}', b'{"text": "x"', b'{"text" "x"}', b'{text: "x"}', b'{"a": 01, "text": "x"}'], True
)
@example([b'{"text": "tab\there"}', b'{"text": "\x00"}', b'{"text": "\x7f"}'], True)
@example([b'\xef\xbb\xbf{"text": "bom"}', b'{"text": "\xed\xa0\x80"}', b'{"text": "\xc0\xaf"}'], True)
@example([b'{"a": tru, "text": "x"}', b'{"a": NaN, "text": "x"}', b'{"a": 1e, "text": "x"}'], True)
@example([b'{"a": [1, 2, "text": "x"]}', b'{"a": [}, "text": "x"}', b'{"a": "\\q", "text": "x"}'], True)
def test_both_give_the_same_documents(content: list[bytes], final: bool) -> None:
    block = b"\n".join(content) + (b"\n" if final else b"")
    assert documents(extract_native, block) == documents(extract_python, block)


@given(st.lists(st.text(max_size=30), max_size=10))
def test_the_text_of_every_plain_record_comes_back(texts: list[str]) -> None:
    block = b"".join(json.dumps({"id": 1, "text": text}).encode() + b"\n" for text in texts)
    assert list(documents(extract_native, block).values()) == texts
