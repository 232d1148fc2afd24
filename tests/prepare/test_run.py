"""Preparing end to end: every document comes out once, with the right ids, in the promised order."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from curations import curation_of
from stoker.errors import BadInputError, TaskError, UsageError
from stoker.manifest import read_manifest
from stoker.prepare import encode as encode_module
from stoker.prepare import tasks
from stoker.prepare.check import verify_dataset
from stoker.prepare.writer import write_shard

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    Make = Callable[..., Any]
    Encode = Callable[[str], list[int]]
    Read = Callable[..., list[list[int]]]
    Snapshot = Callable[[Path], dict[str, bytes]]

Ids = list[list[int]]

KEEP = {"shuffle": False, "dedup": False}


def bag(documents: Ids) -> Counter[tuple[int, ...]]:
    return Counter(map(tuple, documents))


# --- ids ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [KEEP, {"shuffle": False}, {"dedup": False}, {}], ids=["bare", "dedup", "shuffle", "default"]
)
def test_every_document_has_the_reference_ids_and_its_end(
    options: dict[str, Any],
    make: Make,
    corpus: Path,
    texts: list[str],
    encode: Encode,
    read_tokens: Read,
    tmp_path: Path,
) -> None:
    make(corpus, **options)
    assert bag(read_tokens(tmp_path / "out")) == bag([encode(text) for text in texts])


def test_without_an_end_token_documents_are_the_bare_ids(
    make: Make, corpus: Path, texts: list[str], encode: Encode, read_tokens: Read, tmp_path: Path
) -> None:
    make(corpus, eod="none", **KEEP)
    assert read_tokens(tmp_path / "out") == [encode(text)[:-1] for text in texts]


@pytest.mark.parametrize("options", [KEEP, {"shuffle": False}, {}], ids=["bare", "dedup", "default"])
def test_a_last_document_without_tokens_is_a_document(
    options: dict[str, Any], make: Make, write_jsonl: Any, tmp_path: Path
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["coal", "more coal", ""])
    made = make(path, eod="none", curation=curation_of(min_chars=0), **options)
    assert (made.manifest.samples, verify_dataset(str(tmp_path / "out"))) == (3, [])


def test_a_first_token_stands_before_every_document(
    make: Make, corpus: Path, texts: list[str], encode: Encode, read_tokens: Read, tmp_path: Path
) -> None:
    make(corpus, bos="<|endoftext|>", eod="none", **KEEP)
    assert read_tokens(tmp_path / "out") == [[encode("")[0], *encode(text)[:-1]] for text in texts]


# --- order ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dedup", [False, True])
def test_without_a_shuffle_the_order_of_the_sources_is_kept(
    dedup: bool, make: Make, corpus: Path, texts: list[str], encode: Encode, read_tokens: Read, tmp_path: Path
) -> None:
    make(corpus, shuffle=False, dedup=dedup)
    assert read_tokens(tmp_path / "out") == [encode(text) for text in texts]


@pytest.mark.parametrize("dedup", [False, True])
def test_without_a_shuffle_the_shard_equals_megatrons_own(
    dedup: bool, make: Make, corpus: Path, texts: list[str], encode: Encode, megatron: Any, tmp_path: Path
) -> None:
    make(corpus, shuffle=False, dedup=dedup)
    builder = megatron.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.uint16)
    for text in texts:
        ids = encode(text)
        builder.add_document(ids, [len(ids)])
    builder.finalize(str(tmp_path / "theirs.idx"))
    ours = [(tmp_path / "out" / f"shard-00000.{suffix}").read_bytes() for suffix in ("bin", "idx")]
    assert ours == [(tmp_path / f"theirs.{suffix}").read_bytes() for suffix in ("bin", "idx")]


def test_megatron_loads_a_shuffled_dataset(
    make: Make, corpus: Path, megatron: Any, read_tokens: Read, tmp_path: Path
) -> None:
    make(corpus)
    dataset = megatron.IndexedDataset(str(tmp_path / "out" / "shard-00000"))
    assert [dataset[n].tolist() for n in range(len(dataset))] == read_tokens(tmp_path / "out")


def test_a_shuffle_moves_documents_far(
    make: Make, corpus: Path, texts: list[str], encode: Encode, read_tokens: Read, tmp_path: Path
) -> None:
    make(corpus)
    before = {tuple(encode(text)): number for number, text in enumerate(texts)}
    after = [before[tuple(ids)] for ids in read_tokens(tmp_path / "out")]
    assert abs(np.corrcoef(after, np.arange(len(after)))[0, 1]) < 0.3


def test_the_same_seed_gives_the_same_order_however_the_documents_are_filed(
    make: Make, texts: list[str], write_jsonl: Any, read_tokens: Read, corpus: Path, tmp_path: Path
) -> None:
    third = len(texts) // 3
    write_jsonl(tmp_path / "x.jsonl", texts[third:][::-1])
    write_jsonl(tmp_path / "y.jsonl", texts[:third])
    make(corpus, out=tmp_path / "one", seed=5)
    make(tmp_path / "x.jsonl", tmp_path / "y.jsonl", out=tmp_path / "other", seed=5)
    assert read_tokens(tmp_path / "one") == read_tokens(tmp_path / "other")


def test_another_seed_gives_another_order(
    make: Make, corpus: Path, read_tokens: Read, tmp_path: Path
) -> None:
    make(corpus, out=tmp_path / "one", seed=1)
    make(corpus, out=tmp_path / "other", seed=2)
    assert read_tokens(tmp_path / "one") != read_tokens(tmp_path / "other")


@pytest.mark.parametrize("dedup", [False, True])
def test_every_epoch_is_a_permutation_of_the_documents(
    dedup: bool, make: Make, corpus: Path, texts: list[str], encode: Encode, read_tokens: Read, tmp_path: Path
) -> None:
    make(corpus, epochs=3, dedup=dedup)
    wanted = bag([encode(text) for text in texts])
    assert [bag(read_tokens(tmp_path / "out", epoch=epoch)) for epoch in range(3)] == [wanted] * 3


def test_epochs_differ_from_each_other(make: Make, corpus: Path, read_tokens: Read, tmp_path: Path) -> None:
    make(corpus, epochs=3)
    orders = {str(read_tokens(tmp_path / "out", epoch=epoch)) for epoch in range(3)}
    assert len(orders) == 3


def test_the_first_of_many_epochs_is_the_only_one_of_one(
    make: Make, corpus: Path, read_tokens: Read, tmp_path: Path
) -> None:
    make(corpus, out=tmp_path / "one")
    make(corpus, out=tmp_path / "three", epochs=3)
    assert read_tokens(tmp_path / "one") == read_tokens(tmp_path / "three")


# --- tasks ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def orders() -> dict[str, Callable[[Sequence[int]], Sequence[int]]]:
    return {
        "forward": lambda numbers: numbers,
        "backward": lambda numbers: numbers[::-1],
        "twice": lambda numbers: [*numbers, *numbers],
    }


@pytest.mark.parametrize("order", ["backward", "twice"])
def test_tasks_may_run_in_any_order_and_more_than_once(
    order: str,
    orders: Any,
    inline: Any,
    make: Make,
    large_corpus: Path,
    large_dataset: Path,
    snapshot: Snapshot,
    tmp_path: Path,
) -> None:
    make(large_corpus, shard_bytes=1 << 20, launcher=inline(orders[order]))
    assert snapshot(tmp_path / "out") == snapshot(large_dataset)


@pytest.mark.long
def test_a_large_corpus_has_several_tasks_of_every_stage(inline: Any, make: Make, large_corpus: Path) -> None:
    launcher = inline()
    make(large_corpus, shard_bytes=1 << 20, near_dedup=0.8, launcher=launcher)
    counts = Counter(stage for stage, _ in launcher.ran)
    assert min(counts[stage] for stage in ("map", "match", "write")) >= 3


@pytest.mark.integration
def test_any_number_of_worker_processes_gives_the_same_bytes(
    run_stoker: Any,
    make: Make,
    large_corpus: Path,
    large_dataset: Path,
    tokenizer_path: Path,
    snapshot: Snapshot,
    tmp_path: Path,
) -> None:
    for workers in (1, 3):
        out = tmp_path / f"workers-{workers}"
        arguments = [
            "--tokenizer",
            tokenizer_path,
            "--out",
            out,
            "--shard-size",
            "1MiB",
            "--workers",
            workers,
        ]
        assert run_stoker("prepare", large_corpus, *arguments).rc == 0
        assert snapshot(out) == snapshot(large_dataset)


def test_shards_reach_about_the_asked_size(large_dataset: Path) -> None:
    sizes = [shard.files[0].bytes for shard in read_manifest(large_dataset).shards]
    assert len(sizes) > 3
    assert max(sizes) < 1.5 * (1 << 20)


def test_without_shuffle_and_dedup_shards_are_counted_by_their_tokens_alone(
    make: Make, texts: list[str], write_jsonl: Any, tmp_path: Path
) -> None:
    for name in "ab":  # blocks of their own, of 1.5 MB of text, which are less than 1 MiB of tokens
        text = "\n".join(texts)[: 1_500_000 // 200] * 200
        write_jsonl(tmp_path / f"{name}.jsonl", [name + text])
    made = make(tmp_path / "a.jsonl", tmp_path / "b.jsonl", shard_bytes=1 << 20, **KEEP)
    assert len(made.manifest.shards) == 1


def test_shards_are_in_order_also_where_their_numbers_grow_longer(
    make: Make,
    texts: list[str],
    write_jsonl: Any,
    encode: Encode,
    read_tokens: Read,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def named(folder: Path, name: str, *rest: Any, **given: Any) -> Any:
        number = len(list(folder.glob("*.bin")))
        return write_shard(folder, f"shard-{number + 8}", *rest, **given)

    monkeypatch.setattr(tasks, "write_shard", named)
    monkeypatch.setattr(tasks, "_up_to", lambda limit, first, groups: iter([first]))
    monkeypatch.setattr(encode_module, "BLOCK_BYTES", 4)
    paths = [
        write_jsonl(tmp_path / f"{name}.jsonl", [text]) for name, text in zip("abcd", texts, strict=False)
    ]
    make(*paths, **KEEP)
    assert read_tokens(tmp_path / "out") == [encode(text) for text in texts[:4]]


def test_a_finished_dataset_holds_no_scratch(make: Make, corpus: Path, tmp_path: Path) -> None:
    make(corpus)
    names = {
        "blocks.xxh3",
        "manifest.json",
        "shard-00000.bin",
        "shard-00000.idx",
        "statistics.json",
        "tokenizer.json",
    }
    assert {path.name for path in (tmp_path / "out").iterdir()} == names


def test_scratch_goes_to_the_work_folder(make: Make, corpus: Path, inline: Any, tmp_path: Path) -> None:
    seen: list[bool] = []

    def look(numbers: Sequence[int]) -> Sequence[int]:
        seen.append(any(path.name.startswith(".") for path in (tmp_path / "out").glob(".*")))
        return numbers

    make(corpus, work=tmp_path / "work", launcher=inline(look))
    assert not any(seen)


# --- again ----------------------------------------------------------------------------------------


def test_a_finished_dataset_is_not_made_again(make: Make, corpus: Path, inline: Any) -> None:
    make(corpus)
    launcher = inline()
    make(corpus, launcher=launcher)
    assert launcher.ran == []


def test_asking_for_a_finished_dataset_again_changes_nothing(
    make: Make, corpus: Path, tmp_path: Path
) -> None:
    make(corpus)
    before = sorted(path.name for path in (tmp_path / "out").iterdir())
    make(corpus)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == before


def test_a_dataset_made_inside_its_source_folder_is_no_source(
    make: Make, corpus: Path, inline: Any, tmp_path: Path
) -> None:
    source, out = tmp_path / "raw", tmp_path / "raw" / "prepared"
    shutil.copytree(corpus.parent, source)
    with pytest.raises(TaskError):
        make(source, out=out, launcher=Fails(inline(), "write", 0))
    again = inline()
    made = make(source, out=out, launcher=again)
    assert again.ran == [("write", 0)]
    assert make(source, out=out).manifest.shards == made.manifest.shards


def test_a_run_goes_on_in_an_output_folder_that_was_moved(
    make: Make, corpus: Path, inline: Any, tmp_path: Path
) -> None:
    with pytest.raises(TaskError):
        make(corpus, out=tmp_path / "old", launcher=Fails(inline(), "write", 0))
    (tmp_path / "old").rename(tmp_path / "new")
    again = inline()
    make(corpus, out=tmp_path / "new", launcher=again)
    assert again.ran == [("write", 0)]
    assert verify_dataset(str(tmp_path / "new")) == []
    assert not (tmp_path / "old").exists()


def test_one_work_folder_serves_two_outputs(make: Make, corpus: Path, inline: Any, tmp_path: Path) -> None:
    with pytest.raises(TaskError):
        make(corpus, out=tmp_path / "a", work=tmp_path / "work", launcher=Fails(inline(), "write", 0))
    for name in "ba":
        make(corpus, out=tmp_path / name, work=tmp_path / "work")
        assert verify_dataset(str(tmp_path / name)) == []
    assert list((tmp_path / "work").iterdir()) == []


def test_what_a_run_with_other_options_left_behind_is_told(
    make: Make, corpus: Path, inline: Any, watcher: Any, tmp_path: Path
) -> None:
    with pytest.raises(TaskError):
        make(corpus, launcher=Fails(inline(), "write", 0))
    (left,) = (tmp_path / "out").glob(".stoker-*")
    assert watcher.notes == []
    make(corpus, seed=7)
    assert [note for note in watcher.notes if str(left) in note]


def test_a_dataset_is_never_overwritten_by_another(make: Make, corpus: Path) -> None:
    make(corpus, seed=1)
    with pytest.raises(UsageError, match="already holds a dataset made from other sources or options"):
        make(corpus, seed=2)


class Fails:
    """A launcher that gives up on one task."""

    def __init__(self, inner: Any, stage: str, number: int) -> None:
        self._inner, self._skip = inner, (stage, number)

    def run(self, ledger: Any, stage: str, numbers: Any, on_done: Any) -> None:
        left = [number for number in numbers if (stage, number) != self._skip]
        self._inner.run(ledger, stage, left, on_done)


@pytest.mark.parametrize("stage", ["map", "write"])
def test_after_a_failure_only_what_is_missing_runs(
    stage: str, make: Make, large_corpus: Path, inline: Any
) -> None:
    with pytest.raises(TaskError, match=f"1 of .* {stage} tasks? not done"):
        make(large_corpus, shard_bytes=1 << 20, launcher=Fails(inline(), stage, 1))
    again = inline()
    make(large_corpus, shard_bytes=1 << 20, launcher=again)
    assert [number for ran, number in again.ran if ran == stage] == [1]


def test_a_dataset_finished_after_a_failure_has_the_same_bytes(
    make: Make, large_corpus: Path, large_dataset: Path, inline: Any, snapshot: Snapshot, tmp_path: Path
) -> None:
    with pytest.raises(TaskError):
        make(large_corpus, out=tmp_path / "again", shard_bytes=1 << 20, launcher=Fails(inline(), "map", 2))
    make(large_corpus, out=tmp_path / "again", shard_bytes=1 << 20)
    assert snapshot(tmp_path / "again") == snapshot(large_dataset)


def test_no_manifest_is_written_before_every_task_is_done(
    make: Make, large_corpus: Path, inline: Any, tmp_path: Path
) -> None:
    with pytest.raises(TaskError):
        make(large_corpus, shard_bytes=1 << 20, launcher=Fails(inline(), "write", 0))
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_a_shard_that_was_cut_after_its_task_is_made_again(
    make: Make, large_corpus: Path, large_dataset: Path, inline: Any, snapshot: Snapshot, tmp_path: Path
) -> None:
    with pytest.raises(TaskError):
        make(large_corpus, shard_bytes=1 << 20, launcher=Fails(inline(), "write", 3))
    (path,) = (tmp_path / "out").rglob("shard-00001.bin")
    os.truncate(path, 1000)
    make(large_corpus, shard_bytes=1 << 20)
    assert snapshot(tmp_path / "out") == snapshot(large_dataset)


def test_killed_while_shards_are_put_in_place_a_run_finds_its_tasks_done(
    make: Make, large_corpus: Path, large_dataset: Path, inline: Any, snapshot: Snapshot, tmp_path: Path
) -> None:
    link, left = os.link, iter(range(3))

    def killed(source: Path, target: Path) -> None:
        next(left)
        link(source, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "link", killed)
        with pytest.raises(StopIteration):
            make(large_corpus, shard_bytes=1 << 20)
    assert list((tmp_path / "out").glob("shard-*"))
    again = inline()
    make(large_corpus, shard_bytes=1 << 20, launcher=again)
    assert again.ran == []
    assert snapshot(tmp_path / "out") == snapshot(large_dataset)


def test_where_there_are_no_links_shards_are_moved(
    make: Make,
    large_corpus: Path,
    large_dataset: Path,
    snapshot: Snapshot,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(source: Path, target: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    make(large_corpus, shard_bytes=1 << 20)
    assert snapshot(tmp_path / "out") == snapshot(large_dataset)


def test_a_changed_source_is_another_plan(
    make: Make, texts: list[str], write_jsonl: Any, tmp_path: Path
) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", texts[:20])
    make(path)
    write_jsonl(path, texts[:21])
    with pytest.raises(UsageError, match="other sources or options"):
        make(path)


# --- statistics and manifest ----------------------------------------------------------------------


def test_statistics_add_up(make: Make, texts: list[str], write_jsonl: Any, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [*texts, *texts[:30], "", "x"])
    found = make(path, curation=_curation(min_chars=2)).statistics
    assert found.dropped == {"duplicate": 30, "empty": 1, "too_short": 1}
    assert found.documents_in == found.documents_out + found.dropped.total()
    assert found.bytes_in == found.bytes_out + found.dropped_bytes.total()


def test_statistics_count_what_the_shards_hold(make: Make, corpus: Path) -> None:
    done = make(corpus, epochs=2)
    found = done.statistics
    assert (found.documents_out * 2, found.tokens_out * 2) == (done.manifest.samples, done.manifest.tokens)


def test_the_histogram_counts_every_document(
    make: Make, corpus: Path, texts: list[str], encode: Encode
) -> None:
    lengths = Counter(len(encode(text)).bit_length() - 1 for text in texts)
    assert make(corpus).statistics.lengths == lengths


def test_the_statistics_file_says_the_same_as_the_result(make: Make, corpus: Path, tmp_path: Path) -> None:
    done = make(corpus)
    assert json.loads((tmp_path / "out" / "statistics.json").read_text()) == done.statistics.to_plain()


def test_the_manifest_says_how_the_dataset_came_to_be(make: Make, corpus: Path, tokenizer_path: Path) -> None:
    found = make(corpus, seed=9, epochs=2).manifest
    assert found.tokenizer is not None
    assert (found.dtype, found.seed, found.epochs, found.shuffled) == ("uint16", 9, 2, True)
    assert (found.tokenizer.name, found.tokenizer.eod) == (str(tokenizer_path), 0)


def test_the_tokenizer_travels_with_the_dataset(
    make: Make, corpus: Path, tokenizer_path: Path, tmp_path: Path
) -> None:
    make(corpus)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == tokenizer_path.read_text()


def test_nothing_left_to_write_is_an_error(make: Make, write_jsonl: Any, tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="none of 2 documents is left to write"):
        make(write_jsonl(tmp_path / "x.jsonl", ["", ""]))


# --- all kinds of sources together ----------------------------------------------------------------


def test_files_of_several_kinds_become_one_dataset(
    make: Make, write_jsonl: Any, encode: Encode, read_tokens: Read, tmp_path: Path
) -> None:
    folder = tmp_path / "mixed"
    folder.mkdir()
    write_jsonl(folder / "a.jsonl", ["one", "two"])
    (folder / "b.txt").write_text("three")
    (folder / "empty.jsonl").write_text("")
    make(folder, shuffle=False)
    assert read_tokens(tmp_path / "out") == [encode("one"), encode("two"), encode("three")]


def _curation(**given: Any) -> Any:

    return curation_of(**given)
