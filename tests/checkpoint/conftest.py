"""A small job to save: a model, its optimizer, and a checkpointer with small chunks."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import stoker
from stoker.world import World

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Job:
    """A model that trains on random numbers: batch norm, AdamW, a schedule."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(16, 64), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 16)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 3)

    @property
    def objects(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule}

    def step(self) -> float:
        loss = self.model(torch.randn(8, 16)).pow(2).mean() + torch.rand(())
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    def state(self) -> dict[str, Any]:
        """Everything, copied."""
        found = {f"model.{name}": one.clone() for name, one in self.model.state_dict().items()}
        for at, slots in self.optimizer.state_dict()["state"].items():
            found.update({f"{at}.{name}": one.clone() for name, one in slots.items()})
        return {**found, "groups": str(self.optimizer.state_dict()["param_groups"])}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(one[key], other[key]) if isinstance(one[key], torch.Tensor) else one[key] == other[key]
        for key in one
    )


@pytest.fixture
def make_job() -> type[Job]:
    return Job


@pytest.fixture(name="same")
def same_fixture() -> Callable[..., bool]:
    return same


@pytest.fixture
def open_checkpointer(tmp_path: Path) -> Iterator[Callable[..., stoker.Checkpointer]]:
    """`open_checkpointer(any option)` on the same folder each time; closed at the end."""
    with ExitStack() as stack:

        def make(root: Path | None = None, **options: Any) -> stoker.Checkpointer:
            given = {"chunk_bytes": 4096, "world": World(), **options}
            return stack.enter_context(stoker.Checkpointer(root or tmp_path / "run", **given))

        yield make
