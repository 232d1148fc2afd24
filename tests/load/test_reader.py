"""What of a file has yet to be verified."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stoker.load.reading.files import Folder
from stoker.load.reading.reader import ShardReader

BLOCK, BLOCKS = 8, 12


@given(
    trusted=st.lists(st.integers(0, BLOCKS - 1)),
    ends=st.lists(st.integers(0, BLOCK * BLOCKS), min_size=2, max_size=2, unique=True).map(sorted),
)
def test_every_doubted_block_is_read_to_verify_it_and_none_at_the_ends_in_vain(trusted, ends):
    reader = ShardReader(
        Folder(Path()),
        sizes={"s": BLOCK * BLOCKS},
        digests={"s": np.zeros(BLOCKS, np.uint64)},
        block_bytes=BLOCK,
    )
    for block in trusted:
        reader.trust("s", block * BLOCK, (block + 1) * BLOCK)
    start, stop = ends
    parts = reader.stretches("s", start, stop)
    assert [byte for begin, end, _ in parts for byte in range(begin, end)] == list(range(start, stop))
    doubted = [at // BLOCK for begin, end, is_good in parts if not is_good for at in range(begin, end)]
    assert {at // BLOCK for at in range(start, stop)} - set(trusted) <= set(doubted)
    assert not {*doubted[:1], *doubted[-1:]} & set(trusted)
