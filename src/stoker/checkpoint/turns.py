"""Whose turn it is to write, upload or read, as `storm.py` has it, told over the board."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

from stoker.checkpoint.board import Board
from stoker.checkpoint.saved.writer import Pace


class Turns:
    """This rank's place in one kind of crowd: it begins once the ranks before it are done."""

    def __init__(
        self,
        board: Board,
        *,
        rank: int,
        after: Iterable[int],
        what: str,
        timeout_s: float,
        bytes_per_s: float,
    ) -> None:
        self._board, self._rank, self._after = board, rank, tuple(after)
        self._what, self._timeout_s = what, timeout_s
        self.pace = Pace(bytes_per_s, moved=lambda: board.moved(what))
        self._offers = 0

    @contextmanager
    def turn(self, number: int) -> Iterator[None]:
        """Wait for this rank's turn, and hand it on. Waiting is no death: as long as one moves, all wait."""
        try:
            for rank in self._after:
                self._board.read(
                    self._key(number, rank), timeout_s=self._timeout_s, of=rank, moving=self._what
                )
            yield
        finally:
            self.done(number)

    @contextmanager
    def offered(self) -> Iterator[Callable[[], AbstractContextManager[None]]]:
        """The next turn, for who may or may not use it; at the end it is handed on in any case."""
        self._offers += 1
        number = self._offers
        try:
            yield lambda: self.turn(number)
        finally:
            self.done(number)

    def done(self, number: int) -> None:
        """Hand the turn on, also one that was not used."""
        self._board.post(self._key(number, self._rank), b"")

    def notes(self, number: int, size: int) -> list[str]:
        return [self._key(number, rank) for rank in range(size)]

    def _key(self, number: int, rank: int) -> str:
        return f"{self._what}/done/{number}/{rank}"
