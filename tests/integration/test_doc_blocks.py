"""README and guides are true: every block of Python and shell runs, and README's loop survives kill -9."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from doc_scene import GIVEN, Scene, run, run_block

from doc_blocks import PAGES, RUN, Block, all_blocks, blocks

if TYPE_CHECKING:
    from s3_server import S3Server

pytestmark = pytest.mark.integration

RUNNABLE = [block for block in all_blocks() if block.language in RUN and not block.why_not]
(LOOP,) = (block for block in blocks(PAGES[0]) if block.language == "python")


@pytest.fixture(scope="module")
def scene(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], tokenizer_path: Path, write_jsonl: Any
) -> Scene:
    return Scene(
        tmp_path_factory.mktemp("scene") / "it",
        texts=texts,
        tokenizer=tokenizer_path,
        write_jsonl=write_jsonl,
    )


# Each runs a program many times over; tests/bench and tests/tune try the commands each time.
LONG = ("stoker tune -- ", "stoker bench scaling", "stoker bench loader -- ")
EACH = [
    pytest.param(one, id=one.name, marks=[pytest.mark.slow] if any(verb in one.text for verb in LONG) else [])
    for one in RUNNABLE
]


@pytest.mark.parametrize("block", EACH)
def test_a_block_of_the_documents_runs(block: Block, scene: Scene, s3: S3Server, tmp_path: Path) -> None:
    folder = scene.copy_for(block, tmp_path / "here")
    scene.fill_stores(s3.root, block)
    run_block(block, folder, s3.environ())


# --- README's loop ---


class Loop:
    """README's loop in a folder: each run is a process, and writes down its steps with their losses."""

    def __init__(self, folder: Path, s3: S3Server) -> None:
        self._folder, self._environ = folder, s3.environ()
        self._text = GIVEN + LOOP.script(folder, also={"s3://bucket/run1": f"s3://bucket/{folder.name}"})

    def run(self, **environ: str) -> tuple[int, list[int], list[str]]:
        """How it ended, the steps it made, and their losses."""
        noted = self._folder / "steps"
        noted.unlink(missing_ok=True)
        ended = run([sys.executable, "-c", self._text], self._folder, {**self._environ, **environ})
        assert "Traceback" not in ended.stderr, ended.stderr
        lines = [line.split() for line in noted.read_text().splitlines()] if noted.exists() else []
        return ended.returncode, [int(step) for step, _ in lines], [loss for _, loss in lines]


@pytest.fixture
def loop(scene: Scene, s3: S3Server, tmp_path: Path) -> Any:
    scene.fill_stores(s3.root, LOOP)
    return lambda name: Loop(scene.copy_for(LOOP, tmp_path / name), s3)


@pytest.fixture(scope="module")
def undisturbed(scene: Scene, s3: S3Server, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The losses of a run that nobody ended."""
    scene.fill_stores(s3.root, LOOP)
    code, steps, losses = Loop(scene.copy_for(LOOP, tmp_path_factory.mktemp("loop") / "whole"), s3).run()
    assert (code, steps) == (0, list(range(1, 41)))
    return losses


def test_the_readmes_loop_goes_on_after_kill_9_as_if_nothing_had_been(
    loop: Any, undisturbed: list[str]
) -> None:
    it = loop("killed")
    code, steps, losses = it.run(END_AT="15")
    assert (code, steps, losses) == (-signal.SIGKILL, list(range(1, 15)), undisturbed[:14])
    code, again, losses = it.run()
    assert code == 0
    assert again == list(range(again[0], 41))
    assert again[0] in (9, 13)  # the save of step 12 was under way, that of step 8 was whole
    assert losses == undisturbed[again[0] - 1 :]


def test_the_readmes_loop_leaves_when_it_is_told_to_and_goes_on_from_there(
    loop: Any, undisturbed: list[str]
) -> None:
    it = loop("told")
    code, steps, losses = it.run(END_AT="10", END_BY="SIGTERM")
    assert (code, steps, losses) == (0, list(range(1, 11)), undisturbed[:10])
    code, steps, losses = it.run()
    assert (code, steps, losses) == (0, list(range(11, 41)), undisturbed[10:])


def test_the_readmes_loop_has_several_epochs(scene: Scene, undisturbed: list[str]) -> None:
    import stoker

    with stoker.Loader(scene.corpus, batch_size=8, seq_len=64) as loader:
        assert len(loader) * 1.5 < len(undisturbed)
