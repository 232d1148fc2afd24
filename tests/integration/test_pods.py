"""`stoker prepare --on pods`: processes that know only their number and a folder make one dataset."""

from __future__ import annotations

import os
import subprocess
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest
from clusters import FILES, MARKED_TASK, Bench, make_bench, wait_until, write_corpus

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.integration

PODS = 2


@pytest.fixture
def bench(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, tokenizer_path: Path) -> Bench:
    corpus = write_corpus(tmp_path_factory.mktemp("corpus"))
    return make_bench(tmp_path, corpus=corpus, tokenizer=tokenizer_path)


def start(bench: Bench, stack: ExitStack, number: int, *options: str) -> subprocess.Popen[bytes]:
    """A pod as its Indexed Job starts it."""
    pod = {"JOB_COMPLETION_INDEX": str(number), "STOKER_NODES": str(PODS)}
    return stack.enter_context(
        bench.started_run(
            "out", "--on", "pods", "--workers", "1", *options, environment={**os.environ, **pod}
        )
    )


def test_pods_make_the_dataset_that_one_process_makes_though_one_was_killed_and_started_again(
    bench: Bench,
) -> None:
    bench.flag.touch()
    options = ("--filter", "trouble:block")
    with ExitStack() as stack:
        first = start(bench, stack, 0, *options)
        second = start(bench, stack, MARKED_TASK % PODS, *options)
        wait_until(bench.started.exists, "the marked task runs")
        second.kill()
        wait_until(lambda: bench.done("out") >= FILES // 2, "the first has done its part")
        bench.flag.unlink()
        again = start(bench, stack, MARKED_TASK % PODS, *options)
        assert (again.wait(60), first.wait(60)) == (0, 0)
    assert bench.dataset("out") == bench.made_here(*options)
    assert not list((bench.folder / "out").glob(".*")), "scratch was left behind"
