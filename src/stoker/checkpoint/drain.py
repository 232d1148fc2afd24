"""Committed checkpoints to the remote tier, in the background."""

from __future__ import annotations

import threading

from stoker.checkpoint.board import Board, checked, error_note
from stoker.checkpoint.options import CheckpointOptions
from stoker.checkpoint.tiers import Tiers, retain, retried, upload_manifest, upload_part
from stoker.checkpoint.writer import Pace
from stoker.errors import CheckpointError


class Drain:
    """Brings committed checkpoints to the remote tier, always the newest next. Rank 0 says which."""

    def __init__(self, tiers: Tiers, board: Board, options: CheckpointOptions) -> None:
        self._tiers, self._board, self._options = tiers, board, options
        self._rank, self._size = options.world.rank, options.world.size
        self._pace = Pace(options.limits.drain_bytes_per_s)
        self._changed = threading.Condition()
        self._newest, self._closing, self._leads_here = "", False, False
        self._failure: BaseException | None = None
        self.drained: list[str] = []
        self._thread = threading.Thread(target=self._run, name="stoker-drain", daemon=True)
        self._thread.start()

    def committed(self, name: str, *, leads_here: bool) -> None:
        with self._changed:
            self._newest, self._leads_here = name, leads_here
            self._changed.notify_all()

    def take_failure(self) -> BaseException | None:
        with self._changed:
            failure, self._failure = self._failure, None
            return failure

    def close(self) -> None:
        """Drain what was committed last, then end."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        number = 0
        while name := self._next(number):
            try:
                self._drain(number, name)
                self.drained.append(name)
            except BaseException as error:
                with self._changed:
                    self._failure = error
            number += 1

    def _next(self, number: int) -> str:
        """What to drain now; nothing when it is time to end."""
        key = f"drain/{number}"
        if self._rank == 0:
            with self._changed:
                self._changed.wait_for(lambda: self._newest or self._closing)
                name, self._newest = self._newest, ""
            self._board.post(key, name.encode())
            return name
        while True:  # until rank 0 says what is next, or is gone
            try:
                return self._board.read(key, timeout_s=3600.0).decode()
            except CheckpointError as error:
                if "in vain" not in error.message:
                    return ""

    def _drain(self, number: int, name: str) -> None:
        store, folder = self._tiers.remote, self._tiers.root / name
        assert store is not None
        key, timeout_s = f"drained/{number}", self._options.timeout_s
        try:
            retried(
                lambda: upload_part(folder, store, rank=self._rank, pace=self._pace, busy=self._options.busy),
                timeout_s=timeout_s,
                stop=lambda: self._closing,
            )
            self._board.post(f"{key}/{self._rank}", b"+")
        except BaseException as error:
            self._board.post(f"{key}/{self._rank}", error_note(error))
            raise
        if self._rank == 0:
            for rank in range(self._size):
                checked(self._board.read(f"{key}/{rank}", timeout_s=timeout_s))
            retried(lambda: upload_manifest(folder, store), timeout_s=timeout_s, stop=lambda: self._closing)
            self._board.post(f"{key}/all", b"+")
            old = f"drained/{number - 1}"
            ranks = (f"{old}/{rank}" for rank in range(self._size))
            self._board.forget([f"drain/{number - 1}", f"{old}/all", *ranks])
        elif self._leads_here:
            checked(self._board.read(f"{key}/all", timeout_s=2 * timeout_s))
        if self._rank == 0 or self._leads_here:
            retain(self._tiers, keep=self._options.keep)
