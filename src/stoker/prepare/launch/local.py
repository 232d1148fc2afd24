"""Process pool: worker processes on this machine.

Workers are spawned, never forked: object-store clients and tokenizer thread pools do not survive a
fork. A worker that dies (kill -9, out of memory) is named, replaced, and its task tried again.
"""

from __future__ import annotations

import multiprocessing
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from types import FrameType

from stoker.errors import TaskError
from stoker.prepare.launch.ledger import Ledger
from stoker.prepare.launch.worker import load_entry, run_task

_TRIES = 3  # a task that kills its worker three times over will do it a fourth time

_CTRL_C = (signal.SIGINT,)
_LEAVE_S = 5.0  # for native code to come back; then what a worker was writing stays behind


class LocalPool:
    """A fixed number of worker processes that outlive a stage; close() ends them."""

    def __init__(self, workers: int, *, entry: str, preload: Sequence[str] = ()) -> None:
        self._spawn = multiprocessing.get_context("spawn")
        self._entry, self._preload = entry, tuple(preload)
        self._workers: dict[Connection, SpawnProcess] = {}
        for _ in range(workers):
            self._start()

    def run(self, ledger: Ledger, stage: str, numbers: Sequence[int], on_done: Callable[[int], None]) -> None:
        """Run the tasks; each that ends, well or not, is passed to `on_done`. After a failure no more are
        begun: whoever sits before the terminal wants to know now, and what is done stays done."""
        ledger.forget_failures(stage, numbers)
        queue, tries = deque(numbers), dict.fromkeys(numbers, 0)
        busy: dict[Connection, int] = {}
        idle = list(self._workers)
        while queue or busy:
            while queue and idle:
                connection, number = idle.pop(), queue.popleft()
                tries[number] += 1
                busy[connection] = number
                with suppress(BrokenPipeError):  # it died while idle: wait() below reports it
                    connection.send((ledger.folder, ledger.plan, stage, number))
            for ready in wait(list(busy)):
                assert isinstance(ready, Connection)
                connection = ready
                number = busy.pop(connection)
                ended = self._ended(connection)
                if ended:
                    idle.append(connection)
                    if ended == "failed":
                        queue.clear()
                else:
                    reason = self._bury(connection)
                    idle.append(self._start())
                    if tries[number] < _TRIES:
                        queue.append(number)
                        continue
                    died = f"its worker died {_TRIES} times ({reason})"
                    ledger.fail(stage, number, TaskError(died, hint="is there enough memory?"))
                on_done(number)

    def close(self) -> None:
        """End the workers; those in the middle of a task drop it, their markers unwritten."""
        for connection, process in self._workers.items():
            connection.close()
            process.terminate()
        deadline = time.monotonic() + _LEAVE_S
        for process in self._workers.values():
            process.join(max(0.0, deadline - time.monotonic()))
            if process.exitcode is None:
                process.kill()
                process.join()
        self._workers.clear()

    def __enter__(self) -> LocalPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> Connection:
        ours, theirs = self._spawn.Pipe()
        process = self._spawn.Process(target=_serve, args=(theirs, self._entry, self._preload), daemon=True)
        with _held_back_ctrl_c():
            process.start()
        theirs.close()
        self._workers[ours] = process
        return ours

    def _ended(self, connection: Connection) -> str:
        """How the worker's task ended, or nothing if the worker is dead."""
        try:
            return str(connection.recv())
        except (EOFError, ConnectionResetError):
            return ""

    def _bury(self, connection: Connection) -> str:
        process = self._workers.pop(connection)
        connection.close()
        process.join()
        code = process.exitcode or 0
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"


@contextmanager
def _held_back_ctrl_c() -> Iterator[None]:
    """A worker is born with Ctrl-C blocked, and the driver heeds it only once a worker is whole: each would
    print tracebacks otherwise. To block it is not enough here, where another thread may get it."""
    resource_tracker.ensure_running()  # which unblocks what is blocked when it has to be started
    held: list[tuple[int, FrameType | None]] = []
    heeding = signal.getsignal(signal.SIGINT)
    is_ours = threading.current_thread() is threading.main_thread() and heeding is not None
    if is_ours:
        signal.signal(signal.SIGINT, lambda *came: held.append(came))
    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, _CTRL_C)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        if is_ours:
            signal.signal(signal.SIGINT, heeding)
        if held and callable(heeding):
            heeding(*held[0])


def _serve(connection: Connection, entry_name: str, preload: tuple[str, ...]) -> None:
    """The worker's life: a task at a time until the driver closes the pipe or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the driver's to handle
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _CTRL_C)
    entry = load_entry(entry_name)
    for package in preload:  # slow imports, made while the driver still plans
        with suppress(ImportError):
            import_module(package)
    # not before: there is nothing to clean up yet, and what a handler raises while something is imported may
    # come up in a callback of the importer's, where Python prints a traceback and goes on
    signal.signal(signal.SIGTERM, _leave)
    with suppress(EOFError, ConnectionResetError, BrokenPipeError):
        while True:
            folder, plan, stage, number = connection.recv()
            failure = run_task(entry, Ledger(folder=folder, plan=plan), stage, number)
            connection.send("failed" if failure else "done")
    # the driver closes the pipe and then sends this: a worker that is ending already would print a traceback
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _leave(number: int, frame: FrameType | None) -> None:
    """Drop the task, and on the way out what it has half written, which may be as large as a shard."""
    signal.signal(number, signal.SIG_IGN)  # once is enough, and the second would disturb the cleaning up
    raise SystemExit(128 + number)
