"""The loader as its users see it."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import pickle
import re
import signal
import threading

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_datasets import make_tars, make_tokens, write_dataset, write_files

from recorded_spans import read_spans, recording
from stoker.errors import BadManifestError, BadShardError, StorageError, UsageError
from stoker.formats import megatron
from stoker.load import assemblers
from stoker.load.assembly.rows import Buffers
from stoker.load.loader import Loader
from stoker.load.ordering.blend import dealing_of
from stoker.load.ordering.cut import Cut
from stoker.load.past import Past
from stoker.load.reading.files import Folder
from stoker.world import World

WORKERS = ["inline", "thread"]


def rank(number, size):
    return World(rank=number, size=size, local_rank=number, local_size=size)


def first_tokens(batches):
    return [batch["input_ids"][:, 0].tolist() for batch in batches]


def flat(batches):
    return [row for batch in batches for row in batch]


def load(folder, **options):
    return Loader(
        folder, **{"batch_size": 4, "seq_len": 32, "output": "numpy", "chunk_bytes": 2048, **options}
    )


def epoch_of(folder, **options):
    with load(folder, **options) as loader:
        return first_tokens(loader)


def all_windows(folder, seq_len=32):
    """The first token of every window, shard by shard, from the files themselves."""
    firsts = []
    for path in sorted(folder.glob("*.bin")):
        ids = np.fromfile(path, np.uint16)
        firsts += ids[: (len(ids) - 1) // seq_len * seq_len : seq_len].tolist()
    return firsts


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("shuffle", ["full", "blocks", "off"])
def test_an_epoch_holds_every_window_once(corpus, workers, shuffle):
    batches = epoch_of(corpus, workers=workers, shuffle=shuffle, tail="pad", batch_size=1)
    assert sorted(flat(batches)) == sorted(all_windows(corpus))


def test_shuffle_off_is_the_order_on_disk(corpus):
    assert flat(epoch_of(corpus, shuffle="off", batch_size=1)) == all_windows(corpus)


@pytest.mark.parametrize("workers", WORKERS)
def test_rows_are_windows_of_the_stream_and_labels_the_next_token(corpus, workers):
    with load(corpus, workers=workers) as loader:
        for batch in loader:
            assert batch["input_ids"].shape == batch["labels"].shape == (4, 32)
            assert (np.diff(batch["input_ids"], axis=1) % 60000 == 1).all()
            assert (batch["labels"] == (batch["input_ids"] + 1) % 60000).all()


def test_input_ids_and_labels_share_memory(corpus):
    with load(corpus) as loader:
        batch = next(iter(loader))
        assert np.shares_memory(batch["input_ids"], batch["labels"])


@pytest.mark.parametrize("workers", WORKERS)
def test_kept_batches_keep_their_content(workers, corpus):
    with load(corpus, workers=workers) as loader:
        kept = list(loader)
    assert first_tokens(kept) == epoch_of(corpus, workers="inline")


def test_batches_that_are_gathered_when_asked_for_are_the_same(corpus, monkeypatch):
    """A few at a time, in loops that are left and taken up again anywhere."""
    whole = epoch_of(corpus, workers="thread")
    monkeypatch.setattr(assemblers, "_AT_ONCE_BYTES", 3 * 4 * 33 * 8)
    found = []
    with load(corpus, workers="inline") as loader:
        for length in itertools.cycle([1, 5, 2, 9]):
            found += (some := list(itertools.islice(loader, length)))
            if len(some) < length:
                break
    assert first_tokens(found) == whole


def test_labels_can_be_the_inputs_for_models_that_shift(corpus):
    with load(corpus, labels="same") as loader:
        batch = next(iter(loader))
    assert (batch["labels"] == batch["input_ids"]).all()


def test_threads_and_inline_give_the_same_batches(corpus):
    assert epoch_of(corpus, workers="thread") == epoch_of(corpus, workers="inline")


@pytest.mark.parametrize("reader", ["pread", "mmap", "direct"])
def test_every_reader_gives_the_same_batches(corpus, reader, skip_or_fail):
    try:
        found = epoch_of(corpus, reader=reader)
    except StorageError as error:
        skip_or_fail(str(error))
    assert found == epoch_of(corpus)


def test_epochs_advance_by_themselves_and_differ(corpus):
    with load(corpus) as loader:
        first, second = first_tokens(loader), first_tokens(loader)
        assert len(first) == len(second) == len(loader)
        assert first != second
        assert loader.epoch == 2


@pytest.mark.long
def test_chunks_too_large_for_the_budget_are_read_sample_by_sample(tmp_path):
    folder = make_tokens(tmp_path / "big", [[5000] * 400])
    options = {"chunk_bytes": 1 << 20, "seq_len": 512}
    with pytest.warns(RuntimeWarning, match=r"give memory=\d+ << 20") as told:
        small = load(folder, memory=1 << 20, **options)
    enough = int(re.search(r"memory=(\d+) <<", str(told[0].message))[1]) << 20
    with small, load(folder, memory=enough, **options) as large:
        assert small.report().read_alone
        assert not large.report().read_alone
        assert first_tokens(small) == first_tokens(large)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:. ranks cannot share")
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    first=st.tuples(st.integers(1, 5), st.integers(1, 4)),
    then=st.tuples(st.integers(1, 5), st.integers(1, 4)),
    steps=st.integers(0, 30),
    packing=st.sampled_from(["concat", "pad", "buckets", "best-fit"]),
    workers=st.sampled_from(WORKERS),
)
def test_a_job_resumes_exactly_on_another_world_size(small_corpus, first, then, steps, packing, workers):
    """What all ranks got before and after is every sample once, whatever the worlds were. Packed and sorted
    rows are one sequence for all; others are shared out by lanes, which may have been cut anew."""
    common = {"packing": packing, "lanes": 12, "seed": 3}
    state, before = run_job(small_corpus, first, steps, None, {**common, "workers": workers})
    _, after = run_job(small_corpus, then, 10**9, state, {**common, "workers": "inline"})
    whole = reference(small_corpus, packing, common, Cut.for_world(first[0], 1, lanes=12))
    together = before + after
    if packing in ("buckets", "best-fit"):
        assert together == whole[: len(together)]
    else:
        assert len(set(together)) == len(together)
        assert set(together) <= set(whole)
    last = then if state["epoch"] == 0 else first  # whose batches had to end the epoch
    assert len(whole) - len(together) < last[0] * last[1]


_references = {}


def reference(corpus, packing, common, cut):
    if (packing, cut) not in _references:
        past = Past(cut=cut, dealing=dealing_of((1.0,)))
        options = {**common, "workers": "inline", "past": past}
        _, _references[packing, cut] = run_job(corpus, (1, 1), 10**9, None, options)
    return _references[packing, cut]


@pytest.mark.parametrize("batches", [24, 8])
def test_worlds_that_share_the_lanes_out_see_the_same_global_batches(corpus, batches):
    def global_batches(world):
        _, rows = run_job(corpus, (world, batches // world), 10**9, None, {"workers": "inline"})
        return [frozenset(rows[at : at + batches]) for at in range(0, len(rows), batches)]

    alone = global_batches(1)
    assert len(alone) > 3
    assert all(global_batches(world) == alone for world in (2, 4, 8))


@pytest.mark.parametrize(("before", "after"), [(4, 5), (4, 7), (4, 16), (2, 3)])
def test_ranks_of_another_number_go_on_in_lanes_of_their_own(tmp_path, before, after):
    corpus = make_tokens(tmp_path / "corpus", [[3000] * 60])
    options = {"batch_size": 1, "workers": "inline", "seq_len": 32, "chunk_bytes": 1 << 10}
    with load(corpus, world=rank(0, before), **options) as loader:
        batches = iter(loader)
        for _ in range(100):
            next(batches)
        state = loader.state_dict()
    read = given = 0
    for number in range(after):
        with load(corpus, world=rank(number, after), **options) as loader:
            loader.load_state_dict(state)
            given += sum(1 for _ in loader)
            report = loader.report()
            read += report.samples_read
            assert report.read_factor == 1
    assert given <= read <= 1.3 * given


def test_lanes_that_ranks_cannot_share_out_are_warned_of(corpus):
    with pytest.warns(RuntimeWarning, match="5 ranks cannot share 12 lanes out"):
        loader = load(corpus, lanes=12, world=rank(0, 5))
    with loader:
        assert loader.report().read_factor > 1.3


def test_a_state_of_the_old_order_is_refused_with_a_clear_word(corpus):
    with load(corpus) as loader:
        state = {**loader.state_dict(), "version": 2}
        with pytest.raises(UsageError, match="shuffled less"):
            loader.load_state_dict(state)


def run_job(corpus, shape, steps, state, options):
    """Rows of the global sequence that a job of several ranks sees, within its first epoch."""
    world, batch = shape
    per_rank, states = [], []
    for number in range(world):
        with load(corpus, batch_size=batch, world=rank(number, world), **options) as loader:
            if state:
                loader.load_state_dict(state)
            start_epoch, batches = loader.epoch, []
            if steps and start_epoch == 0:
                for taken in loader:
                    if is_in_the_second_epoch(loader):  # less than a batch was left of the first
                        break
                    batches.append([row.tobytes() for row in taken["input_ids"][:, :8].astype(np.int64)])
                    if len(batches) == steps:
                        break
            per_rank.append(batches)
            states.append(loader.state_dict())
    assert all(one == states[0] for one in states)
    assert len({len(batches) for batches in per_rank}) == 1
    rows = []
    for step in zip(*per_rank, strict=True):
        rows += [row for turn in zip(*step, strict=True) for row in turn]
    return states[0], rows


def is_in_the_second_epoch(loader):
    state = loader.state_dict()
    return (state["epoch"], state["position"], state["row"]) > (1, 0, 0)


def test_a_state_resumes_across_epochs(corpus):
    with load(corpus) as loader:
        list(loader)
        it = iter(loader)
        second = [next(it) for _ in range(3)]
        state = loader.state_dict()
        rest = first_tokens(it)
    assert second
    with load(corpus, workers="inline") as again:
        again.load_state_dict(state)
        assert first_tokens(again) == rest


def test_a_loop_left_early_goes_on_where_it_was(corpus):
    with load(corpus) as loader:
        parts = []
        for batch in loader:
            parts.append(batch)
            if len(parts) == 5:
                break
        parts += list(loader)
    assert first_tokens(parts) == epoch_of(corpus)


def test_with_shuffle_off_every_loop_starts_over(corpus):
    with load(corpus, shuffle="off") as loader:
        assert first_tokens([next(iter(loader))]) == first_tokens([next(iter(loader))])
        assert len(first_tokens(loader)) == len(loader)


def test_a_loop_left_after_its_last_batch_is_followed_by_a_whole_epoch(corpus):
    with load(corpus) as loader:
        for number, _ in enumerate(loader, start=1):
            if number == len(loader):
                break
        assert len(list(loader)) == len(loader)


def test_a_state_of_another_order_is_refused(corpus):
    with load(corpus) as one, load(corpus, seed=9) as other, pytest.raises(UsageError, match="seed 0"):
        other.load_state_dict(one.state_dict())


def test_a_pickled_loader_goes_on_where_it_was(corpus):
    with load(corpus) as loader:
        it = iter(loader)
        next(it), next(it)
        with pickle.loads(pickle.dumps(loader)) as other:
            assert first_tokens(other) == first_tokens(it)


def test_lanes_come_back_with_the_state(corpus):
    with load(corpus, lanes=7) as one, load(corpus) as other:
        it = iter(one)
        next(it)
        next(iter(other))
        other.load_state_dict(one.state_dict())
        assert first_tokens(other) == first_tokens(it)


@pytest.mark.parametrize("tail", ["drop", "pad"])
@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_uneven_shards_give_every_rank_as_many_batches(corpus, world, tail):
    counts = []
    for number in range(world):
        with load(corpus, world=rank(number, world), tail=tail) as loader:
            counts.append(len(list(loader)))
            assert counts[-1] == len(loader)
    assert len(set(counts)) == 1


def test_padding_is_marked(corpus):
    with load(corpus, tail="pad", batch_size=7) as loader:
        real = np.concatenate([batch["real"] for batch in loader])
    assert real.sum() == len(all_windows(corpus))
    assert not real.all()


def test_too_few_samples_for_a_batch_are_said(tmp_path):
    folder = make_tokens(tmp_path / "tiny", [[100]])
    with load(folder, batch_size=64) as loader, pytest.raises(UsageError, match="3 samples"):
        next(iter(loader))


def test_too_few_packed_rows_for_a_batch_are_said(tmp_path):
    folder = make_tokens(tmp_path / "tiny", [[9]])
    with load(folder, packing="best-fit", batch_size=4) as loader, pytest.raises(UsageError, match="4 rows"):
        next(iter(loader))


def test_shards_shorter_than_a_window_are_passed_over(tmp_path):
    folder = make_tokens(tmp_path / "gaps", [[10], [70], [5], [3], [200], [33], [32]])
    found = epoch_of(folder, batch_size=1, chunk_bytes=1 << 20)
    assert sorted(flat(found)) == sorted(all_windows(folder))


@pytest.mark.parametrize("workers", WORKERS)
def test_a_loader_with_a_batch_ready_is_not_behind(corpus, workers):
    with load(corpus, workers=workers) as loader:
        assert not loader.is_behind  # nobody has asked for a batch yet
        next(iter(loader))
        while loader.is_behind:  # its thread makes the next ones
            pass


def test_several_epochs_on_disk_take_turns(tmp_path):
    folder = make_tokens(tmp_path / "epochs", [[300, 500], [400]], epochs=2)
    with load(folder, batch_size=1) as loader:
        first, second, third = (sorted(flat(first_tokens(loader))) for _ in range(3))
    assert max(first) < 1200 <= min(second)
    assert first == third


def test_a_blend_draws_by_weight(tmp_path):
    one = make_tokens(tmp_path / "one", [[4000]])
    other = make_tokens(tmp_path / "other", [[3000]], dtype="int32")
    ids = np.fromfile(other / "e0-0000.bin", np.int32)
    (ids + 50000).astype(np.int32).tofile(tmp_path / "shifted.bin")
    with Loader([one, other], weights=[3, 1], batch_size=8, seq_len=16, output="numpy") as loader:
        tokens = np.concatenate([b["input_ids"][:, 0] for _ in range(3) for b in loader])
    assert len(tokens) > 1000


@pytest.mark.parametrize("packing", ["concat", "pad"])
@pytest.mark.parametrize("dtypes", [("uint16", "int32"), ("int32", "uint16")])
def test_a_blend_of_two_token_types_keeps_every_id(tmp_path, packing, dtypes):
    folders = [make_tokens(tmp_path / dtype, [[33] * 40], dtype=dtype) for dtype in dtypes]
    wide = tmp_path / "int32"
    shift_ids(wide, by=100_000)
    with load([str(folder) for folder in folders], packing=packing, shuffle="off", dtype=None) as loader:
        batches = list(loader)
    rows = np.concatenate([batch["input_ids"] for batch in batches])
    assert (np.diff(rows, axis=1) == 1).all()
    assert {bool(row[0] >= 100_000) for row in rows} == {True, False}


def shift_ids(folder, *, by):
    """The same dataset with other ids."""
    ids = np.fromfile(folder / "e0-0000.bin", np.int32) + by
    index = megatron.index_bytes(np.array([33] * 40), dtype=np.dtype("int32"))
    files = {".bin": ids.tobytes(), ".idx": index}
    write_dataset(
        folder, [write_files(folder, "e0-0000", files, 40, len(ids))], format="megatron", dtype="int32"
    )


def test_bad_options_are_named(corpus):
    for options, name in (
        ({"packing": "tight"}, "packing"),
        ({"batch_size": 0}, "batch_size"),
        ({"reader": "psychic"}, "reader"),
        ({"on_corrupt": "hope"}, "on_corrupt"),
        ({"seq_len": 0}, "seq_len"),
        ({"seq_len": 32.0}, "seq_len"),
        ({"processes": 0}, "processes"),
        ({"readers": -1}, "readers"),
        ({"memory": "256MB"}, "memory"),
        ({"dtype": "word"}, "dtype"),
        ({"weights": [1, 2]}, "weights"),
        ({"seq_len": 10**6}, "seq_len"),
    ):
        with pytest.raises(UsageError) as error:
            load(corpus, **options)
        assert name in str(error.value)


def test_a_folder_without_a_manifest_is_said(tmp_path):
    with pytest.raises(BadManifestError):
        load(tmp_path)


def test_a_remote_dataset_needs_staging():
    with pytest.raises(UsageError, match="not on this machine"):
        load("s3://bucket/corpus")


def test_anything_that_knows_local_paths_can_hold_the_files(corpus):
    asked = []

    class Cache:
        def local_path(self, name):
            asked.append(name)
            return corpus / name

    with Loader(Cache(), batch_size=4, seq_len=32, output="numpy", chunk_bytes=2048) as loader:
        assert first_tokens(loader) == epoch_of(corpus)
    assert {name for name in asked if name.endswith(".bin")}
    with Loader(str(corpus), files=Folder(corpus), batch_size=4, seq_len=32, output="numpy") as loader:
        assert next(iter(loader))["input_ids"].shape == (4, 32)


# --- damage -------------------------------------------------------------------------------------------


def flip(path, offset):
    data = bytearray(path.read_bytes())
    data[offset] ^= 0xFF
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("workers", WORKERS)
def test_a_flipped_byte_raises_and_names_shard_offset_and_cure(corpus, workers):
    flip(corpus / "e0-0003.bin", 5000)
    with load(corpus, workers=workers) as loader, pytest.raises(BadShardError) as error:
        list(loader)
    assert "e0-0003.bin" in error.value.message
    assert "4,096" in error.value.message
    assert "stage" in error.value.hint


def test_damage_that_was_met_before_is_not_skipped_unasked(corpus):
    flip(corpus / "e0-0003.bin", 5000)
    with load(corpus) as loader:
        for _ in range(2):
            with pytest.raises(BadShardError, match=r"e0-0003\.bin"):
                list(loader)
        assert loader.report().damaged_blocks == 1


@pytest.mark.parametrize("packing", ["concat", "pad", "best-fit"])
def test_a_flipped_byte_can_be_skipped_and_is_counted(corpus, packing):
    untouched = sorted(flat(epoch_of(corpus, batch_size=1)))
    flip(corpus / "e0-0003.bin", 5000)
    with load(corpus, on_corrupt="skip", packing=packing) as loader:
        batches = list(loader)
        report = loader.report()
    assert report.damaged_blocks == 1
    assert report.skipped_samples > 0
    assert "e0-0003.bin" in report.damage[0]
    if packing == "concat":
        assert set(flat(first_tokens(batches))) <= set(untouched)
        for batch in batches:
            assert (np.diff(batch["input_ids"], axis=1) == 1).all()


def test_a_shard_cut_short_is_named(corpus):
    path = corpus / "e0-0003.bin"
    path.write_bytes(path.read_bytes()[:7000])
    with load(corpus) as loader, pytest.raises(BadShardError, match=r"e0-0003\.bin ends before"):
        list(loader)


def test_a_missing_shard_is_named(corpus):
    (corpus / "e0-0003.bin").unlink()
    with load(corpus) as loader, pytest.raises(StorageError, match=r"e0-0003\.bin"):
        list(loader)


def test_a_missing_shard_can_be_skipped(corpus):
    (corpus / "e0-0003.bin").unlink()
    with load(corpus, on_corrupt="skip") as loader:
        assert len(list(loader)) == len(loader)
        assert loader.report().skipped_samples > 50


LENGTHS = [[300] * 40, [77] * 100]


@pytest.mark.parametrize("packing", ["concat", "pad"])
def test_compressed_shards_give_the_same_batches(tmp_path, packing):
    plain = make_tokens(tmp_path / "plain", LENGTHS)
    packed = make_tokens(tmp_path / "packed", LENGTHS, zstd=True)
    found, wanted = (sorted(flat(epoch_of(one, packing=packing, batch_size=1))) for one in (packed, plain))
    assert found == wanted


def test_damage_in_a_compressed_shard_is_found_and_can_be_skipped(tmp_path):
    folder = make_tokens(tmp_path / "packed", LENGTHS, zstd=True)
    flip(folder / "e0-0000.bin.zst", 5000)
    with load(folder) as loader, pytest.raises(BadShardError, match="e0-0000"):
        list(loader)
    with load(folder, on_corrupt="skip") as loader:
        for batch in loader:
            assert (np.diff(batch["input_ids"], axis=1) == 1).all()
        assert loader.report().skipped_samples > 0


# --- tars ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", WORKERS)
def test_tar_samples_come_once_each_through_the_transform(tmp_path, workers):
    folder = make_tars(tmp_path / "tars", [40, 3, 57])

    def number(sample):
        assert len(sample["data.bin"]) == int(sample["id.txt"]) % 700
        return {"number": int(sample["id.txt"]), "key": sample["__key__"]}

    with Loader(folder, batch_size=5, transform=number, chunk_bytes=8192, workers=workers) as loader:
        batches = list(loader)
    numbers = [n for batch in batches for n in batch["number"].tolist()]
    assert sorted(numbers) == list(range(100))
    assert numbers != sorted(numbers)
    assert batches[0]["key"][0] == f"s{numbers[0]:06d}"


def test_an_error_in_a_transform_reaches_the_loop(tmp_path):
    folder = make_tars(tmp_path / "tars", [10])

    def fail(sample):
        raise ValueError("no")

    with Loader(folder, batch_size=5, transform=fail) as loader, pytest.raises(ValueError, match="no"):
        list(loader)


def test_pairs_become_a_pair_of_batches(tmp_path):
    folder = make_tars(tmp_path / "tars", [10])

    def pair(sample):
        return np.zeros((2, 3)), int(sample["id.txt"])

    with Loader(folder, batch_size=5, transform=pair) as loader:
        batches = list(loader)
    assert [pixels.shape for pixels, _ in batches] == [(5, 2, 3)] * 2
    assert sorted(n for _, numbers in batches for n in numbers.tolist()) == list(range(10))


def test_samples_of_one_batch_with_different_keys_are_named(tmp_path):
    folder = make_tars(tmp_path / "tars", [10])

    def some(sample):
        return sample if int(sample["id.txt"]) % 2 else {"__key__": sample["__key__"]}

    said = r"'s00000\d' and 's00000\d' .* data\.bin, id\.txt"
    with Loader(folder, batch_size=10, transform=some) as loader, pytest.raises(UsageError, match=said):
        next(iter(loader))


@pytest.mark.parametrize("workers", WORKERS)
def test_a_loop_after_an_error_meets_it_again(tmp_path, workers):
    folder = make_tars(tmp_path / "tars", [10])

    def fail(sample):
        raise ValueError("no")

    with Loader(folder, batch_size=5, transform=fail, workers=workers) as loader:
        for _ in range(3):
            with pytest.raises(ValueError, match="no"):
                list(loader)


def test_a_loop_that_another_took_the_position_from_is_told(corpus):
    with load(corpus) as loader:
        one, other = iter(loader), iter(loader)
        next(one), next(other)
        with pytest.raises(UsageError, match="another loop"):
            next(one)


def test_a_forked_child_is_told_instead_of_hanging(corpus):
    with load(corpus, batch_size=1) as loader:
        next(iter(loader))
        assert _in_a_forked_child(lambda: list(loader)).startswith("UsageError: this loader was")
        assert _in_a_forked_child(loader.close) == "fine"
        assert len(list(loader)) == len(loader) - 1


def test_a_child_forked_from_a_loop_without_threads_is_told(corpus):
    with load(corpus, batch_size=1, workers="inline") as loader:
        batches = iter(loader)
        assert len([next(batches) for _ in range(20)]) == 20  # in the middle of a group
        assert _in_a_forked_child(lambda: next(iter(loader))).startswith("UsageError: this loader was")


def test_a_loader_made_before_a_fork_works_in_the_child(corpus):
    with load(corpus, workers="inline") as loader:
        whole = [batch["input_ids"].tolist() for batch in load(corpus, workers="inline")]

        def read():
            assert [batch["input_ids"].tolist() for batch in loader] == whole

        assert _in_a_forked_child(read) == "fine"


def _in_a_forked_child(work):
    """How it went there."""
    ours, theirs = multiprocessing.Pipe()
    child = os.fork()
    if not child:
        try:
            work()
            theirs.send("fine")
        except BaseException as error:
            theirs.send(f"{type(error).__name__}: {error}")
        os._exit(0)
    theirs.close()
    try:
        return ours.recv() if ours.poll(20) else "hangs"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        ours.close()


# --- threads and memory -------------------------------------------------------------------------------


def test_a_buffer_that_is_left_over_for_long_is_given_back():
    buffers, shape, dtype = Buffers(), (4, 8), np.dtype("int64")
    held = [buffers.take(shape, dtype) for _ in range(5)]
    kept = {id(array) for array in held}
    del held
    for _ in range(300):
        first, second = buffers.take(shape, dtype), buffers.take(shape, dtype)
        assert {id(first.base), id(second.base)} <= kept  # none is made anew meanwhile
        del first, second
    assert len(buffers) == 2


@pytest.mark.long
def test_a_forgotten_loader_ends_its_threads(corpus):
    loader = load(corpus)
    next(iter(loader))
    assert any("stoker" in thread.name for thread in threading.enumerate())
    del loader
    gc.collect()
    for thread in threading.enumerate():
        if "stoker" in thread.name:
            thread.join(timeout=5)
            assert not thread.is_alive()


def test_closing_twice_is_fine_and_a_closed_loader_can_start_again(corpus):
    loader = load(corpus)
    next(iter(loader))
    loader.close()
    loader.close()


def test_tensors_share_the_memory_of_the_batch(corpus):
    import torch

    with load(corpus, output="torch") as loader:
        batch = next(iter(loader))
    assert batch["input_ids"].dtype == torch.int64
    assert batch["labels"].data_ptr() == batch["input_ids"].data_ptr() + 8


def test_what_was_chosen_is_visible(corpus):
    with load(corpus) as loader:
        list(loader)
        report = loader.report()
    assert report.batches == len(loader)
    assert report.choices[0].reason == "to begin with"


def test_a_chunk_is_counted_when_it_is_read_not_when_it_is_still_there(corpus):
    with load(corpus, workers="inline", chunk_bytes=1 << 20, shuffle="off") as loader:
        list(loader)
        read = loader.report().samples_read
        list(loader)
    assert 0 < read == loader.report().samples_read


@pytest.mark.parametrize("shuffle", ["off", "full"])
def test_a_chunk_that_ends_early_counts_for_what_it_holds(tmp_path, shuffle):
    folder = make_tokens(tmp_path, [[32 * 100 + 1]])  # 100 samples, in chunks of 32
    with load(folder, workers="inline", lanes=1, shuffle=shuffle, window=4) as loader:
        list(loader)
        assert loader.report().samples_read == 100


@pytest.mark.long
@pytest.mark.parametrize("device", ["", "cpu"])
def test_a_group_of_more_chunks_than_there_is_room_for_makes_room(tmp_path, device):
    """Chunks of one sample: every row of a batch is in another. Reads asked for before the cache grew must
    not land in the memory of the larger one."""
    folder = make_tokens(tmp_path / "many", [[9000] * 3])
    options = {"batch_size": 40, "chunk_bytes": 64, "lanes": 2, "readers": 4, "output": "torch"}
    for seed in range(5):
        with load(folder, device=device, seed=seed, **options) as loader:
            for batch in loader:
                assert ((batch["labels"] - batch["input_ids"]) == 1).all()
                assert (batch["input_ids"].diff(dim=1) == 1).all()


def test_options_that_a_dataloader_has_are_told_where_they_are_here(corpus):
    with pytest.raises(UsageError, match=r"no option 'num_workers'\n.*processes=N"):
        Loader(corpus, batch_size=2, seq_len=8, num_workers=4)
    with pytest.raises(UsageError, match="did you mean batch_size"):
        Loader(corpus, batchsize=2, seq_len=8)


def test_a_run_is_told_how_many_tokens_were_handed_out(corpus, tmp_path):
    with recording(tmp_path / "run"), Loader(corpus, batch_size=4, seq_len=32) as loader:
        shapes = [batch["input_ids"].shape for batch in loader]
    told = [span.bytes for span in read_spans(tmp_path / "run") if span.what == "load.tokens"]
    assert told == [rows * columns for rows, columns in shapes]
