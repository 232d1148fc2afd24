"""How saves ended and what they cost: the report of a checkpointer, and what its loop is still to hear."""

from __future__ import annotations

import warnings
from concurrent.futures import Future
from dataclasses import replace

from stoker.checkpoint.options import CheckpointOptions, CheckpointReport
from stoker.checkpoint.saver import Finished, Saver
from stoker.checkpoint.troubles import Troubles


class Outcomes:
    """Keeps the report, and the troubles until they are surfaced. The loop's thread calls."""

    def __init__(self, options: CheckpointOptions) -> None:
        self.report = CheckpointReport()
        self.troubles = Troubles(options)

    def skipped(self) -> None:
        self.report = replace(self.report, skipped=self.report.skipped + 1)

    def stalled(self, seconds: float) -> None:
        """For so long the loop stood still when the last save began."""
        self.report = replace(self.report, stall_s=seconds)

    def settled(self, seconds: float) -> None:
        """And for so long in an optimizer's step, for the copy."""
        self.report = replace(self.report, stall_s=self.report.stall_s + seconds)

    def ended(self, pending: Future[Finished]) -> None:
        """A save is durable or has failed."""
        error = pending.exception()
        if error is not None:
            self.troubles.add("saved", error)
            self.report = replace(self.report, failed=self.report.failed + 1)
            return
        done = pending.result()
        self.report = replace(
            self.report,
            saves=self.report.saves + 1,
            last=done.name,
            durable_s=done.durable_s,
            bytes=done.bytes,
        )
        if done.warning:
            warnings.warn(done.warning, RuntimeWarning, stacklevel=4)

    def collect(self, saver: Saver) -> None:
        """What went wrong beside saves, and how far the drain is."""
        for what, error in saver.take_troubles():
            self.troubles.add(what, error)
        drain = saver.drain
        self.report = replace(
            self.report, drained=len(drain.drained) if drain else 0, owed=drain.owed if drain else ""
        )

    def reported(self, saver: Saver | None) -> CheckpointReport:
        """The report, with the drain as it is at this moment."""
        drain = saver.drain if saver else None
        if drain is None:
            return self.report
        return replace(self.report, drained=max(len(drain.drained), self.report.drained), owed=drain.owed)
