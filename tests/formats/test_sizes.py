"""Bytes as people write them and say them."""

from __future__ import annotations

import pytest

from stoker.errors import UsageError
from stoker.formats.sizes import parse_size, say_size


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
