"""The ledger: a step leads to its documents, before and after resumes; what is named is left out."""

from __future__ import annotations

import json
import re
from collections import Counter
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from small_datasets import make_tars, make_tokens
from xxhash import xxh3_64_hexdigest

from stoker import Loader, Mixture, World
from stoker.errors import UsageError

PACKINGS = ("concat", "pad", "buckets", "best-fit")


@pytest.fixture
def corpus(tmp_path) -> Path:
    rng = np.random.default_rng(7)
    return make_tokens(tmp_path / "corpus", [rng.integers(1, 90, n).tolist() for n in (30, 18, 1, 40, 20)])


@pytest.fixture
def other(tmp_path) -> Path:
    rng = np.random.default_rng(8)
    return make_tokens(tmp_path / "other", [rng.integers(1, 90, 25).tolist()])


class Job:
    """All ranks of a job in this process, in step with each other."""

    def __init__(self, source, ranks: int, *, state=None, **options) -> None:
        options = {"batch_size": 2, "seq_len": 32, "output": "numpy", "dtype": None, **options}
        with ExitStack() as opened:
            self.loaders = [
                opened.enter_context(Loader(source, world=World(rank=rank, size=ranks), **options))
                for rank in range(ranks)
            ]
            for loader in self.loaders if state else ():
                loader.load_state_dict(json.loads(json.dumps(state)))
            self._opened = opened.pop_all()
        # each call of `samples` draws its epoch anew: in tests the same steps are asked for several times
        self.samples = cache(self.loaders[0].samples)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._opened.close()

    def run(self, steps: int = 1 << 30):
        """[(step, batches of all ranks)], to the end of an epoch at most."""
        batches = zip(*(iter(loader) for loader in self.loaders), strict=True)
        return [(self.loaders[0].step - 1, batch) for _, batch in zip(range(steps), batches, strict=False)]

    @property
    def state(self):
        return self.loaders[0].state_dict()


def tokens_of(loader: Loader, row) -> np.ndarray:
    return np.concatenate([np.empty(0, np.uint16), *(loader.read(one) for one in row.documents)])


def assert_ledger_is_right(job: Job, ran) -> None:
    for step, batches in ran:
        rows = job.samples(step)
        assert len(rows) == sum(len(batch["input_ids"]) for batch in batches)
        for row in rows:
            ids, named = batches[row.rank]["input_ids"][row.row], tokens_of(job.loaders[0], row)
            assert (ids[: len(named)] == named).all()
            assert (ids[len(named) :] == 0).all()


@pytest.mark.long
@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("blended", [False, True])
def test_the_ledger_names_what_every_rank_got_before_and_after_elastic_resumes(
    corpus, other, packing, blended
):
    source, state, ran = [corpus, other] if blended else corpus, None, []
    for ranks, steps in ((4, 3), (3, 4), (1, 5), (2, 1 << 30), (2, 2)):  # the last in the next epoch
        with Job(source, ranks, state=state, packing=packing) as job:
            ran += job.run(steps)
            state = job.state
            assert_ledger_is_right(job, ran)
    assert [step for step, _ in ran] == list(range(len(ran)))


@pytest.mark.parametrize("ranks", [1, 4, 16])
def test_poison_is_found_from_its_step(corpus, ranks):
    """A document whose ids stand nowhere else is in exactly the steps whose ledger names it."""
    with Job(corpus, ranks, batch_size=1) as job:
        ran = job.run()
        poisoned = {step for step, batches in ran for batch in batches if (batch["input_ids"] == 5000).any()}
        named = [
            row
            for step, _ in ran
            for row in job.loaders[0].samples(step)
            if 5000 in tokens_of(job.loaders[0], row)
        ]
        assert {row.step for row in named} == poisoned
        assert len(poisoned) == 1
        (document,) = [one for one in named[0].documents if 5000 in job.loaders[0].read(one)]
    with Job(corpus, 5, state=None, batch_size=1) as job:  # from its name alone: a future step of another job
        rows = [row for step in range(len(job.loaders[0])) for row in job.loaders[0].samples(step)]
        assert any(document.name in [one.name for one in row.documents] for row in rows)


def test_poison_is_found_after_an_elastic_resume(corpus):
    with Job(corpus, 4) as job:
        job.run(3)
        state = job.state
    with Job(corpus, 3, state=state) as job:
        ran = job.run()
        id_there = int(ran[5][1][2]["input_ids"][1, 7])
        (row,) = [one for one in job.loaders[0].samples(ran[5][0], rank=2) if one.row == 1]
        assert id_there in tokens_of(job.loaders[0], row)


def test_the_ledger_names_samples_of_tars_by_key(tmp_path):
    folder = make_tars(tmp_path / "tars", [30, 12])
    with Loader(folder, batch_size=4, output="numpy", world=World(rank=1, size=2)) as loader:
        for batch in loader:
            rows = loader.samples(loader.step - 1, rank=1)
            assert [row.documents[0].key for row in rows] == batch["__key__"]
            assert loader.read(rows[0].documents[0]).keys() == batch.keys() - {"__key__"}


def test_the_ledger_numbers_the_samples_of_any_dataset():
    with Loader(np.arange(100) * 3, batch_size=8, output="numpy", world=World(rank=1, size=2)) as loader:
        for batch in loader:
            rows = loader.samples(loader.step - 1, rank=1)
            assert [row.documents[0].number * 3 for row in rows] == batch.tolist()
            assert rows[0].documents[0].name == f"#{rows[0].documents[0].number}"


def test_what_the_ledger_names_of_any_dataset_can_be_read():
    samples = [{"number": number, "text": str(number)} for number in range(20)]

    class Texts:
        def __len__(self):
            return len(samples)

        def __getitem__(self, index):
            return samples[index]

    with Loader(Texts(), batch_size=4, workers="inline") as loader:
        (row, *_) = loader.samples(2)
        assert loader.read(row.documents[0]) == samples[row.documents[0].number]
    with Loader([np.arange(40), np.arange(100, 140)], batch_size=4, workers="inline") as blend:
        found = [blend.read(row.documents[0]) for row in blend.samples(0)]
        assert sorted(found) == sorted(next(iter(blend)).tolist())


def test_windows_of_a_raw_file_are_named_with_their_tokens_and_bytes(tmp_path):
    ids = np.arange(1000, dtype=np.uint32)
    ids.tofile(tmp_path / "train.bin")
    options = {"batch_size": 4, "seq_len": 32, "bin_dtype": "uint32", "output": "numpy", "workers": "inline"}
    with Loader(tmp_path / "train.bin", **options) as loader:
        batch = next(iter(loader))
        for row, tokens in zip(loader.samples(0), batch["input_ids"], strict=True):
            (one,) = row.documents
            assert one.tokens == 32
            assert loader.read(one).tolist() == tokens.tolist()
            stored = (tmp_path / "train.bin").read_bytes()[one.first_byte : one.stop_byte]
            assert np.frombuffer(stored, np.uint32).tolist() == tokens.tolist()


def test_padding_of_an_epochs_end_is_named_as_such(corpus):
    with Job(corpus, 3, tail="pad", batch_size=7) as job:
        step, batches = job.run()[-1]
        rows = job.loaders[0].samples(step)
        assert [row.real for row in rows] == [bool(one) for batch in batches for one in batch["real"]]


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_steps_and_ranks_that_never_were_are_refused_and_those_that_were_are_named(corpus, ranks):
    with Loader(corpus, batch_size=2, seq_len=32, world=World(size=ranks)) as loader:
        with pytest.raises(UsageError, match="step -1 is impossible"):
            loader.samples(-1)
        for rank in (-1, ranks, ranks + 1):
            with pytest.raises(UsageError, match=f"none is rank {rank}") as raised:
                loader.samples(0, rank=rank)
            first, last = map(int, re.findall(r"\d+", raised.value.hint))
            assert [row.rank for one in range(first, last + 1) for row in loader.samples(0, rank=one)] == [
                row.rank for row in loader.samples(0)
            ]


# --- leaving out ---


def documents(job: Job, ran) -> Counter:
    found = Counter()
    for step, _ in ran:
        for row in job.samples(step):
            found.update((one.name, one.first_token) for one in row.documents)
    return found


@pytest.mark.long
@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("worlds", [(1, 1, 1), (4, 2, 4), (4, 3, 4), (2, 5, 1)])
def test_what_is_skipped_does_not_come_and_all_else_comes_once(corpus, packing, worlds):
    with Job(corpus, worlds[0], packing=packing) as job:
        ran = job.run(3)
        state = job.state
    with Job(corpus, worlds[1], state=state, packing=packing) as job:
        poison = job.loaders[0].samples(5)[0].documents[0].name
    with Job(corpus, worlds[1], state=state, packing=packing, skip=[poison]) as job:
        assert job.loaders[0].report().left_out_samples >= 1
        ran += job.run(2)
        state = job.state
    with Job(corpus, worlds[2], state=state, packing=packing) as job:  # the state keeps it out
        more = job.run()
        assert_ledger_is_right(job, ran + more)
        seen = documents(job, ran + more)
        before = documents(job, ran[:3])
        following = documents(job, job.run())
    assert max(seen.values()) == 1
    assert poison not in {name for name, _ in seen} - {name for name, _ in before}
    assert poison not in {name for name, _ in following}
    if packing == "pad":
        rows = worlds[2] * 2  # fewer fill no batch at the end
        assert 109 - 1 - rows < len(seen) <= 109 - 1


def test_the_steps_of_an_epoch_are_fewer_by_the_samples_left_out(corpus):
    with Job(corpus, 2, packing="pad", batch_size=1) as job:
        steps = len(job.loaders[0])
        some = [row for step in (3, 5, 9) for row in job.loaders[0].samples(step)]
    with Job(corpus, 2, packing="pad", batch_size=1, skip=some) as job:
        assert len(job.loaders[0]) == steps - 3
        assert job.loaders[0].report().left_out_samples == 6
        assert len(job.run()) == steps - 3


def test_other_rows_come_at_the_step_at_which_they_would_have(corpus):
    with Job(corpus, 4) as job:
        usual = job.run()
        row = job.loaders[0].samples(6, rank=3)[0]
    with Job(corpus, 4, skip=[row.documents[0]]) as job:
        skipping = job.run()
    changed = sum(
        not (one["input_ids"][at] == two["input_ids"][at]).all()
        for (_, ones), (_, twos) in zip(usual, skipping, strict=False)
        for one, two in zip(ones, twos, strict=True)
        for at in range(2)
    )
    assert 1 <= changed <= 2 * len(usual) - len(skipping) + 10


def test_a_second_skip_in_the_same_epoch_adds_to_the_first(corpus):
    with Job(corpus, 2, packing="pad") as job:
        first = job.loaders[0].samples(4)[0].documents[0].name
    with Job(corpus, 2, packing="pad", skip=[first]) as job:
        ran = job.run(6)
        state = job.state
        second = job.loaders[0].samples(9)[1].documents[0].name
    with Job(corpus, 2, state=state, packing="pad", skip=[first, second]) as job:
        ran += job.run()
        seen = documents(job, ran)
    assert max(seen.values()) == 1
    assert not {first, second} & {name for name, _ in seen}
    assert len(seen) >= 109 - 2 - 4


def test_a_skipped_document_of_a_blend_comes_in_none_of_its_datasets_turns(corpus, other):
    with Job([corpus, other], 2, weights=[1, 3], packing="pad") as job:
        ran = job.run(4)
        state = job.state
        poison = next(
            one.name for row in job.loaders[0].samples(5) for one in row.documents if one.dataset == 1
        )
    with Job([corpus, other], 3, state=state, weights=[1, 3], packing="pad", skip=[poison]) as job:
        ran = job.run()
        seen = documents(job, ran)
        assert_ledger_is_right(job, ran)
    assert poison.startswith("1:")
    assert poison not in {name for name, _ in seen}


@pytest.mark.long
def test_worker_processes_leave_out_what_their_parent_does(corpus):
    with Loader(corpus, batch_size=2, seq_len=32, packing="pad", output="numpy") as loader:
        name = loader.samples(2)[0].documents[0].name
    options = {"batch_size": 2, "seq_len": 32, "packing": "pad", "output": "numpy", "skip": [name]}
    with (
        Loader(corpus, **options) as loader,
        Loader(corpus, workers="process", processes=2, **options) as workers,
    ):
        for one, two in zip(loader, workers, strict=True):
            assert (one["input_ids"] == two["input_ids"]).all()


@pytest.mark.parametrize(
    "name", ["nothing", "e0-0000.bin#9999", "no.bin#1", "e0-0000.bin#x", 7, "1:e0-0000.bin#1"]
)
def test_a_name_that_stands_for_nothing_is_refused(corpus, name):
    with pytest.raises(UsageError, match="skip has"):
        Loader(corpus, batch_size=2, seq_len=32, skip=[name])


# --- mixtures ---


@pytest.mark.long
def test_a_mixture_is_counted_and_may_change_at_a_resume(tmp_path):
    one = make_tokens(tmp_path / "one", [[640] * 40])
    two = make_tokens(tmp_path / "two", [[640] * 40], dtype="int32")  # told apart by their type alone
    mixture = Mixture({0: [1, 0], 100: [0, 1]}, by="steps")
    with Loader([one, two], weights=mixture, batch_size=2, seq_len=32, world=World(size=4)) as loader:
        rows = [row for step in range(100) for row in loader.samples(step)]
        counts = Counter(row.documents[0].dataset for row in rows)
        assert counts == {0: 400, 1: 400}
        assert {row.documents[0].dataset for row in loader.samples(0)} == {0}
        assert {row.documents[0].dataset for row in loader.samples(150)} == {1}
        assert loader.report().mixed_samples == (0, 0)
        next(iter(loader))
        assert loader.report().mixed_samples == (8, 0)
        state = loader.state_dict()
    with Loader([one, two], weights=[1, 1], batch_size=2, seq_len=32, world=World(size=2)) as loader:
        loader.load_state_dict(state)
        rows = [row for step in range(1, 26) for row in loader.samples(step)]
        assert Counter(row.documents[0].dataset for row in rows) == {0: 50, 1: 50}
        assert {row.documents[0].dataset for row in loader.samples(0)} == {0}  # as it was


def test_a_mixture_by_tokens_counts_rows_of_that_many(tmp_path):
    one, two = (make_tokens(tmp_path / name, [[640] * 40]) for name in ("one", "two"))
    mixture = Mixture({0: [1, 0], 320: [0, 1]}, by="tokens", between="step")
    with Loader([one, two], weights=mixture, batch_size=1, seq_len=32) as loader:
        of = [loader.samples(step)[0].documents[0].dataset for step in range(20)]
    assert of == [0] * 10 + [1] * 10
    with pytest.raises(UsageError, match="no fixed number of tokens"):
        Loader([one, two], weights=mixture, batch_size=1, seq_len=32, packing="pad")


def test_weights_and_datasets_that_do_not_match_are_refused(corpus, other):
    with pytest.raises(UsageError, match="do not make a blend"):
        Loader([corpus, other], weights=Mixture({0: [1, 2, 3]}), batch_size=1, seq_len=32)


@pytest.mark.parametrize(
    "wrong",
    [
        {"legs": []},
        {"legs": [{"step": 0}]},
        {"left_out": [{"epoch": 0, "position": 0, "row": 0, "samples": [[9, 9]]}]},
        {"left_out": [{"epoch": 0, "position": 0, "row": 0, "samples": [[0]]}]},
        {"dealt": {"position": 7, "counts": [1, 2]}},
        {"mixture": [{"begin": 5, "counts": [5, 0], "points": [[0, [1, 1]]], "samples": 1, "of": 1}]},
        {"mixture": []},
    ],
)
def test_a_course_that_no_job_took_is_refused_though_its_check_is_right(corpus, other, wrong):
    with Loader([corpus, other], batch_size=2, seq_len=32) as loader:
        state = loader.state_dict()
        past = json.dumps({**json.loads(state["past"]), **wrong})
        check = xxh3_64_hexdigest(f"[0, 0, 0] {past}".encode())
        with pytest.raises(UsageError, match="which no loader saves"):
            loader.load_state_dict({**state, "past": past, "check": check})
