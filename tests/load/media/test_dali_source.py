"""DALI's pipelines get members in the computed order, and a job of theirs goes on to the sample."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import pytest
from pictures import small_pictures

from stoker import World
from stoker.errors import BadShardError, UsageError
from stoker.integrations import dali

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_pictures(tmp_path_factory.mktemp("dali"), 24)


def epoch_of(source: dali.Source) -> Iterator[list[int]]:
    while True:
        try:
            _, labels = source()
        except StopIteration:
            return
        yield [int(label[0]) for label in labels]


def test_a_batch_is_what_external_source_takes(pictures: Path) -> None:
    with dali.source(pictures, batch_size=4) as source:
        jpegs, labels = source()
        assert len(source) == 6
    assert [jpeg.dtype for jpeg in jpegs] == [np.uint8] * 4
    assert all(bytes(jpeg[:2]) == b"\xff\xd8" for jpeg in jpegs)
    assert [(label.dtype, label.shape) for label in labels] == [(np.int64, (1,))] * 4


def test_an_epoch_ends_and_the_next_begins(pictures: Path) -> None:
    with dali.source(pictures, batch_size=4) as source:
        first, second = [list(epoch_of(source)) for _ in range(2)]
    assert sorted(chain(*first)) == sorted(chain(*second)) == list(range(24))
    assert first != second


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_job_goes_on_after_the_batches_that_were_used(pictures: Path, ranks: int) -> None:
    with dali.source(pictures, batch_size=4, world=World(), lanes=2) as source:
        batches = list(epoch_of(source))
        state = source.state_dict(used=2)  # the pipeline had asked for all of them
    rest = []
    for rank in range(ranks):
        with dali.source(pictures, batch_size=4, world=World(rank=rank, size=ranks), lanes=2) as source:
            source.load_state_dict(state)
            assert source.state_dict(used=0) == state
            rest += chain(*epoch_of(source))
    assert sorted(rest) == sorted(chain(*batches[2:]))


def test_batches_that_were_never_given_are_refused(pictures: Path) -> None:
    with dali.source(pictures, batch_size=4) as source:
        source()
        with pytest.raises(UsageError, match="used=2"):
            source.state_dict(used=2)


def test_a_member_that_is_not_there_says_what_is(pictures: Path) -> None:
    source = dali.source(pictures, batch_size=4, members=("png",))
    with source, pytest.raises(BadShardError, match="no member png"):
        source()


def test_options_that_the_pipeline_has_are_refused(pictures: Path) -> None:
    with pytest.raises(UsageError, match="takes no image="):
        dali.source(pictures, batch_size=4, image=None)
