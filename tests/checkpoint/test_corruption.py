"""A thousand ways to damage a checkpoint: every one is noticed, and none is loaded."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
import torch

import stoker
from stoker.checkpoint.saved.tiers import Tiers
from stoker.errors import StokerError
from stoker.world import World

CHUNK = 4096
CASES = 1000


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints of the same shapes and other values; read it, do not change it."""
    root = tmp_path_factory.mktemp("good") / "run"
    generator = torch.Generator().manual_seed(0)
    with stoker.Checkpointer(root, chunk_bytes=CHUNK, world=World()) as checkpointer:
        for step in (1, 2):
            state = {f"w{at}": torch.randn(700 + at, generator=generator) for at in range(9)}
            checkpointer.save(step, state=state, note=f"step {step}")
    return root


def flip(path: Path, other: Path, chance: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def hole(path: Path, other: Path, chance: random.Random) -> None:
    data = bytearray(path.read_bytes())
    start = chance.randrange(len(data))
    while not any(data[start : start + 64]):
        start = chance.randrange(len(data))
    data[start : start + 64] = bytes(len(data[start : start + 64]))
    path.write_bytes(data)


def truncate(path: Path, other: Path, chance: random.Random) -> None:
    with path.open("r+b") as file:
        file.truncate(
            chance.randrange(path.stat().st_size - 1)
        )  # a manifest without its last newline is whole


def lengthen(path: Path, other: Path, chance: random.Random) -> None:
    with path.open("ab") as file:
        file.write(chance.randbytes(1 + chance.randrange(64)))


def lose(path: Path, other: Path, chance: random.Random) -> None:
    path.unlink()


def take_the_others(path: Path, other: Path, chance: random.Random) -> None:
    """Mixed generations, a swapped file or a stale manifest, by which file it is."""
    shutil.copy(other / path.name, path)


def swap_chunks(path: Path, other: Path, chance: random.Random) -> None:
    path = path.with_name("part-00000.bin")
    data = path.read_bytes()
    one, two = chance.sample(range(len(data) // CHUNK), 2)
    chunks = [data[at : at + CHUNK] for at in range(0, len(data), CHUNK)]
    chunks[one], chunks[two] = chunks[two], chunks[one]
    path.write_bytes(b"".join(chunks))


WAYS = [flip, flip, flip, hole, truncate, lengthen, lose, take_the_others, swap_chunks]
FILES = ["part-00000.bin", "part-00000.bin", "part-00000.json", "checkpoint.json"]


@pytest.mark.long
def test_every_damage_is_noticed(run_folder: Path, tmp_path: Path) -> None:
    chance = random.Random(1)
    older, newer = sorted(run_folder.iterdir())
    root = tmp_path / "run"
    shutil.copytree(run_folder, root)
    unnoticed = []
    for case in range(CASES):
        way, file = chance.choice(WAYS), chance.choice(FILES)
        way(root / newer.name / file, older, chance)
        if not faults(root, newer.name):
            unnoticed.append((case, way.__name__, file))
        for name in {file, "part-00000.bin"}:
            shutil.copy(newer / name, root / newer.name / name)
    assert unnoticed == []
    assert faults(root, newer.name) == []


def faults(root: Path, name: str) -> list[str]:
    checkpoint = Tiers(root=root).checkpoint(name)
    try:
        checkpoint.check()
        return checkpoint.verify()
    except StokerError as error:
        return [error.message]


def test_a_whole_checkpoint_under_another_name_is_foreign(run_folder: Path, tmp_path: Path) -> None:
    older, newer = sorted(run_folder.iterdir())
    shutil.copytree(older, tmp_path / newer.name)
    assert faults(tmp_path, newer.name) == [f"{newer.name} holds the manifest of {older.name}"]


def test_the_latest_is_the_newest_that_is_whole(run_folder: Path, tmp_path: Path) -> None:
    root = shutil.copytree(run_folder, tmp_path / "run")
    older, newer = sorted(path.name for path in root.iterdir())
    assert Tiers(root=root).latest(skipped=[]).name == newer
    (root / newer / "part-00000.bin").unlink()
    (root / "999999-step-000000009-notours1").mkdir()
    (root / "999999-step-000000009-0a0a0a0a").mkdir()
    skipped: list[str] = []
    tiers = Tiers(root=root)
    assert [one.name for one in tiers.whole(tiers.names(), skipped=skipped)] == [older]
    assert [said.partition(":")[0] for said in skipped] == ["999999-step-000000009-0a0a0a0a", newer]
