"""Kubernetes indexed jobs: pods on one folder, each does the tasks of its number and waits for the rest.

A pod is one of a Kubernetes Indexed Job, or any process told its number in the same way. Nobody drives:
the folder's markers say what is done, and the scheduler starts a pod that died again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from stoker.prepare.launch.ledger import Ledger
from stoker.prepare.launch.local import LocalPool
from stoker.world import World

# Between looks at the markers: a tenth of the time waited so far, as SlurmArray does.
_LOOK_S = (0.2, 10.0)
# A failure that stood here before us is of an earlier try: its pod has this long to come back and try again.
# If all gave up at the sight of it, each restart would fail all pods anew until the Job has none left.
_COME_BACK_S = 600.0


class Pods:
    """Runs this pod's part of a stage in a pool of its own."""

    def __init__(self, pool: LocalPool, world: World) -> None:
        self._pool, self._world = pool, world

    def run(self, ledger: Ledger, stage: str, numbers: Sequence[int], on_done: Callable[[int], None]) -> None:
        """Run what is ours, then wait until the others have done theirs, or one has failed."""
        waiting, started = {number for number in numbers if not self._is_ours(number)}, time.monotonic()
        before = ledger.failures(stage, waiting)
        self.run_ours(ledger, stage, numbers, on_done)
        while waiting:
            if time.monotonic() - started > _COME_BACK_S:
                before = {}
            failures = ledger.failures(stage, waiting)
            failed = {number for number, failure in failures.items() if before.get(number) != failure}
            ended = ledger.finished(stage, waiting) | failed
            for number in sorted(ended):
                on_done(number)
            waiting -= ended
            if failed:
                return
            if waiting:
                time.sleep(min(max(_LOOK_S[0], (time.monotonic() - started) / 10), _LOOK_S[1]))

    def run_ours(
        self, ledger: Ledger, stage: str, numbers: Sequence[int], on_done: Callable[[int], None]
    ) -> None:
        """Run what is ours and wait for nobody."""
        ours = [number for number in numbers if self._is_ours(number)]
        ledger.forget_failures(stage, ours)
        self._pool.run(ledger, stage, ours, on_done)

    def _is_ours(self, number: int) -> bool:
        """By the task's own number: pods look at different times and see different ones missing."""
        return number % self._world.nodes == self._world.node
