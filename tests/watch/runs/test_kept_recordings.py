"""Recordings of every format are read as they were (`kept_recordings.py` draws them)."""

from __future__ import annotations

import json

import pytest
from kept_recordings import FLAT, FOLDERS, KEPT, TRACES, flat, folder, odd, trace, what_ifs

from kept_values import alike, kept

RECORDINGS = kept(KEPT / "recordings.json")
DRAWN = [("flat", flat, FLAT), ("folder", folder, FOLDERS), ("trace", trace, TRACES)]


@pytest.mark.parametrize(
    ("kind", "read", "seed"), [(k, read, seed) for k, read, n in DRAWN for seed in range(n)]
)
def test_what_was_drawn_is_read_as_it_was(kind, read, seed) -> None:
    found, was = json.loads(json.dumps(read(seed))), RECORDINGS[f"{kind} {seed}"]
    assert found.keys() == was.keys()
    for part, one in was.items():
        assert alike(one, found[part]), f"{part}: {found[part]}\nwas {one}"


def test_ceilings_and_fits_of_drawn_steps_are_what_they_were() -> None:
    assert alike(RECORDINGS["what ifs"], json.loads(json.dumps(what_ifs())))


def test_what_is_hardly_a_recording_is_answered_as_it_was() -> None:
    for found, was in zip(odd(), RECORDINGS["odd"], strict=True):
        assert alike(was, found), f"{found}\nwas {was}"
