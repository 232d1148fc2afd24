"""What stands in the output folder already: never harmed, and mended where files of it are gone."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

from stoker.errors import BadManifestError, StokerError, StorageError
from stoker.prepare.check import adopt
from stoker.prepare.plan import Options
from stoker.prepare.run import assist

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Make = Callable[..., Any]
    Snapshot = Callable[[Path], dict[str, bytes]]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    folder = tmp_path / "out"
    folder.mkdir()
    return folder


@pytest.mark.parametrize("content", ['{"version": 2}', '{"version": 1, "sha', "[]"])
def test_a_dataset_whose_manifest_cannot_be_read_is_not_overwritten(
    content: str, make: Make, corpus: Path, out: Path, snapshot: Snapshot
) -> None:
    (out / "manifest.json").write_text(content)
    with pytest.raises(BadManifestError):
        make(corpus)
    assert snapshot(out) == {"manifest.json": content.encode()}


def test_a_dataset_whose_manifest_cannot_be_reached_is_not_overwritten(
    make: Make, corpus: Path, out: Path
) -> None:
    (out / "manifest.json").symlink_to("manifest.json")  # ELOOP, also for the superuser
    with pytest.raises(StorageError, match="Too many levels of symbolic links"):
        make(corpus)


def test_the_manifest_of_a_later_stoker_is_not_replaced_by_an_index(
    make: Make, corpus: Path, out: Path
) -> None:
    make(corpus)
    (out / "manifest.json").write_text('{"version": 2}')
    with pytest.raises(BadManifestError, match="version 2"):
        adopt(str(out))


@pytest.mark.parametrize("harm", [os.unlink, lambda path: os.truncate(path, 10)], ids=["lost", "cut"])
def test_shards_that_are_lost_are_made_again(
    harm: Callable[[Path], None], make: Make, corpus: Path, out: Path, snapshot: Snapshot
) -> None:
    make(corpus)
    whole = snapshot(out)
    harm(out / "shard-00000.bin")
    make(corpus)
    assert snapshot(out) == whole


def test_of_two_runs_of_one_command_both_end_well(
    make: Make, corpus: Path, inline: Any, out: Path, watcher: Any
) -> None:
    class Overtaken(inline):  # type: ignore[misc]
        def run(self, ledger: Any, stage: str, *rest: Any) -> None:
            if stage == "write":
                make(corpus)
            super().run(ledger, stage, *rest)

    made = make(corpus, launcher=Overtaken())
    assert made.manifest.samples
    assert watcher.notes == [f"{out} was finished by another run of this command"]
    assert not list(out.glob(".*"))


def test_a_pod_that_comes_late_leaves_nothing_in_a_finished_dataset(
    make: Make, corpus: Path, inline: Any, out: Path, watcher: Any, tokenizer_path: Path
) -> None:
    make(corpus)
    options = Options(sources=(str(corpus),), out=str(out), tokenizer=str(tokenizer_path))
    assist(options, inline(), watcher=watcher)
    assert not list(out.glob(".*"))


def test_a_run_that_finishes_beside_another_takes_no_shard_away(
    make: Make, corpus: Path, out: Path, snapshot: Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(corpus)
    whole = snapshot(out)
    (out / "manifest.json").unlink()

    def too_late(written: Path, target: Path) -> None:
        written.unlink()  # the other run has finished, and cleans up
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(os, "link", too_late)
    with pytest.raises(StokerError):
        make(corpus)
    assert snapshot(out) == {name: data for name, data in whole.items() if name != "manifest.json"}
