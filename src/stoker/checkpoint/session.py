"""What a checkpointer runs once it is used: the ranks' board, threads that save, the watch for signals."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from stoker.checkpoint.agree import Rounds
from stoker.checkpoint.board import Board, SoloBoard, TcpBoard
from stoker.checkpoint.leave import Leaving, Notice
from stoker.checkpoint.options import CheckpointOptions
from stoker.checkpoint.saved.tiers import Tiers
from stoker.checkpoint.saver import Saver
from stoker.checkpoint.troubles import failed
from stoker.errors import UsageError


class Session:
    """Opened together and closed together, in the process that saves. It does not know its checkpointer:
    the finalizer that holds this would keep that one alive."""

    def __init__(
        self, tiers: Tiers, options: CheckpointOptions, notice: Notice, *, busy: Callable[[], bool]
    ) -> None:
        world, timeout_s = options.world, options.timeout_s
        self._board: Board = (
            SoloBoard()
            if world.size == 1
            else TcpBoard(tiers.root, world, address=options.board, timeout_s=timeout_s)
        )
        self.saver = Saver(tiers, self._board, options, busy=busy)
        self.rounds = Rounds(self._board, world, timeout_s=timeout_s)
        self.leaving = Leaving(self._board, world, notice, grace_s=options.grace_s)
        self._pid = os.getpid()

    @property
    def is_forked(self) -> bool:
        """Whether this process is a child of the one that saves."""
        return os.getpid() != self._pid

    def close(self) -> None:
        """Finish the last save and its drain. What went wrong in them the saver still tells."""
        self.leaving.close()
        self.saver.close()
        self._board.close()

    def finish_quietly(self) -> None:
        """For a loop that ends without `close`: the last save and its drain are finished all the same, and
        the log is told of a failure, since no step is left that could raise it. Not in a forked child, which
        has neither the threads nor a connection of its own."""
        if self.is_forked:
            return
        self.leaving.close()
        self.saver.close()
        saved = self.saver.pending and self.saver.pending.exception()
        for what, cause in (*self.saver.take_troubles(), *([("saved", saved)] if saved else [])):
            warnings.warn(str(failed(what, cause)), RuntimeWarning, stacklevel=2)
        self._board.close()


@contextmanager
def alone(turn: threading.RLock) -> Iterator[None]:
    """Saves and restores go one after another: two threads at once would wait for each other for ever."""
    if not turn.acquire(blocking=False):
        raise UsageError(
            "another thread is saving or restoring with this Checkpointer",
            hint="call it from one thread, the loop's",
        )
    try:
        yield
    finally:
        turn.release()
