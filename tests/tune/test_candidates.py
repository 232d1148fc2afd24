"""What is tried, by the verdict of a first window and the limits of the machine."""

from __future__ import annotations

from typing import Any

import pytest

from stoker.findings import Finding
from stoker.tune.candidates import Setting, Stage, most_workers, next_stages, not_tried
from stoker.tune.seen import Limits, Seen

SITE = {"file": "train.py", "line": 3, "function": "main", "text": "DataLoader(", "through": []}


def starving(cause: str = "cpu") -> Finding:
    return Finding(kind="data_starvation", summary="the GPU waits", cause=cause)


def seen(**given: Any) -> Seen:
    usual: dict[str, Any] = {
        "findings": (starving(),),
        "wait": 0.5,
        "site": SITE,
        "settings": {"num_workers": 0},
        "limits": Limits(cores=16),
        "card": True,
        "threads": 16,
    }
    return Seen(**{**usual, **given})


def planned(what: Seen, *, numerics: bool = False, best: Setting | None = None) -> dict[str, Stage]:
    stages = [stage_of(best or {}) for stage_of in next_stages(what, numerics=numerics)]
    return {stage.name: stage for stage in stages if stage}


@pytest.mark.parametrize(
    ("workers", "wait", "counts"),
    [
        (0, 0.5, [2, 16, 8]),  # the loop makes its batches in half of the time: one worker is just enough
        (2, 0.75, [9, 16, 8]),
        (2, 0.9, [16, 8, 4]),  # 22 would be, and cores are 16
        (4, 0.2, [6, 16, 8]),
        (16, 0.5, [8, 4]),
        (0, 1.0, [16, 8, 4]),
    ],
)
def test_a_starving_loop_gets_workers_by_its_wait_and_its_cores(
    workers: int, wait: float, counts: list[int]
) -> None:
    what = seen(settings={"num_workers": workers}, wait=wait)
    assert [one["num_workers"] for one in planned(what)["workers"].settings] == counts


@pytest.mark.parametrize("kind", ["launch_bound", "healthy", "checkpoint_stall"])
def test_workers_are_not_tried_where_the_verdict_is_another(kind: str) -> None:
    what = seen(findings=(Finding(kind=kind, summary="it"),), wait=0.01)
    assert planned(what) == {}


def test_a_loop_that_makes_its_own_batches_has_nothing_to_set() -> None:
    what = seen(findings=(starving("own_loop"),), wait=0.0, site={}, settings={})
    assert planned(what) == {}
    assert "makes its batches itself" in not_tried(what)[0]


def test_an_iterable_dataset_keeps_its_workers() -> None:
    """Each worker would give all samples once more."""
    what = seen(iterable=True)
    assert "workers" not in planned(what)
    assert "IterableDataset" in not_tried(what)[0]


@pytest.mark.parametrize(
    ("limits", "most"),
    [
        (Limits(cores=16, shm_bytes=100 << 20), 2),  # 80 MiB for three batches of 10 MiB each
        (Limits(cores=16, memory_bytes=480 << 20), 4),
        (Limits(cores=2), 2),
        (Limits(cores=16, shm_bytes=1 << 20), 0),
    ],
)
def test_workers_stay_within_cores_memory_and_shm(limits: Limits, most: int) -> None:
    assert most_workers(seen(limits=limits, batch_bytes=10 << 20)) == most


def test_blocked_workers_may_be_more_than_there_are_cores() -> None:
    assert most_workers(seen(findings=(starving("storage"),), limits=Limits(cores=2))) == 4


def test_short_epochs_keep_their_workers() -> None:
    what = seen(epoch=10, step_s=0.1, settings={"num_workers": 16})
    assert all(one["persistent_workers"] for one in planned(what)["workers"].settings)
    assert planned(what)["persistent"].settings == ({"persistent_workers": True},)


def test_workers_of_short_epochs_are_kept_even_where_no_batch_is_late() -> None:
    what = seen(findings=(), wait=0.0, epoch=10, step_s=0.1, settings={"num_workers": 2})
    assert set(planned(what)) == {"persistent"}


def test_what_changes_results_is_tried_only_where_that_is_allowed() -> None:
    what = seen(findings=(Finding(kind="precision", summary="fp32"),), wait=0.0, optimizing=0.3)
    assert planned(what) == {}
    assert set(planned(what, numerics=True)) == {"tf32", "fused optimizer", "model"}


def test_copies_and_the_allocator_are_for_cards() -> None:
    findings = (Finding(kind="h2d_copy", summary="c"), Finding(kind="memory_pressure", summary="m"))
    assert set(planned(seen(findings=findings, wait=0.0))) == {"copies", "allocator"}
    assert planned(seen(findings=findings, wait=0.0, card=False)) == {}


def test_idle_cores_compute_where_there_is_no_card() -> None:
    what = seen(findings=(), wait=0.0, card=False, threads=1)
    assert planned(what)["threads"].settings == ({"torch_threads": 16},)
