"""A run that `stoker watch` recorded replaces the guesses of a plan."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.integration

STEP_S, WAIT_S = 0.05, 0.3
TRAINING = f"""
import time
import torch

class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 32
    def __getitem__(self, number):
        time.sleep({WAIT_S} / 4)
        return torch.zeros(1000)

model = torch.nn.Linear(1000, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in torch.utils.data.DataLoader(Samples(), batch_size=4):
    loss = model(batch).sum()
    loss.backward()
    time.sleep({STEP_S})
    optimizer.step()
"""


def test_the_step_of_a_recorded_run_is_planned_with_and_its_wait_is_not(
    run_stoker: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(TRAINING)
    watched = run_stoker("watch", "--out", tmp_path / "run", "--", sys.executable, "train.py")
    planned = run_stoker("plan", "--measured", tmp_path / "run", "--json")
    assert planned.rc == 0, (watched.stderr, planned.stderr)
    step = json.loads(planned.stdout)["job"]["step"]
    assert STEP_S <= step < STEP_S + WAIT_S
