"""Changed files, thousands of them: each is refused, or gives the samples that it should."""

from __future__ import annotations

import pytest
from hostile import KINDS, fuzz

SEED = 20


@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_file_is_refused_or_gives_the_right_samples(kind, tmp_path):
    cases = 60
    refused = fuzz(kind, tmp_path, cases=cases, seed=SEED)
    assert cases // 4 < refused <= cases


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_twenty_thousand_changed_files_are_refused_or_give_the_right_samples(kind, tmp_path):
    refused = fuzz(kind, tmp_path, cases=4_200, seed=SEED + 1)
    print(f"{kind}: {refused:,} of 4,200 refused, the others right")
