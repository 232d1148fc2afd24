"""`stoker watch`: start a command with hooks in its Python processes, sample beside it, say how it ended."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.errors import StokerError, UsageError
from stoker.gauges.cards import open_cards
from stoker.gauges.cgroup import Cgroup
from stoker.inside.whatif import VARIABLE as WHAT_IF
from stoker.observe.ending import ending
from stoker.observe.inject import injected, not_attachable
from stoker.observe.sampler import Sampler, trainers
from stoker.observe.window import Window
from stoker.runs.alive import own_mark
from stoker.runs.files import VERSION, Clock, node_name, read_meta, write_meta
from stoker.world import World

_PASSED_ON = (
    signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2,
)  # fmt: skip
_FROM_TERMINAL = (signal.SIGINT, signal.SIGQUIT)


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Where a run is written and how it is sampled."""

    folder: Path
    hz: float = 1.0
    gpu: str = "nvml"
    what_if: str = ""

    def __post_init__(self) -> None:
        if not 0 < self.hz <= 100:
            raise UsageError(f"{self.hz} samples a second", hint="give --hz between 0.1 and 100")


class Node:
    """This watcher's meta file."""

    def __init__(self, options: Options, *, argv: Sequence[str], title: str) -> None:
        self.name = node_name()
        self._folder, self._clock = options.folder, Clock.here()
        self._path = options.folder / f"node-{self.name}-{os.getpid()}.json"
        cgroup = Cgroup.here()
        self._facts: dict[str, Any] = {
            "version": VERSION,
            "title": title,
            "argv": list(argv),
            "node": self.name,
            "pid": os.getpid(),
            "mark": own_mark(),
            "began": time.monotonic() + self._clock.offset_s,
            "clock": self._clock.as_dict(),
            "hz": options.hz,
            "cpus": len(os.sched_getaffinity(0)),
            "quota_cores": cgroup.quota_cores(),
            "samples": _claims_machine(options.folder, self.name),
            "missing": [],
            "gpus": [],
            "launch": _place(),
        }
        cgroup.close()

    @property
    def samples(self) -> bool:
        """Does this watcher sample the machine? One of a machine does."""
        return bool(self._facts["samples"])

    def begin(self) -> None:
        """The first time, that it cannot be written is the user's to know."""
        write_meta(self._path, self._facts)

    def tell(self, **facts: Any) -> None:
        self._facts |= facts
        with suppress(OSError):  # the folder is gone or full by now: the program goes on, and ends as it ends
            write_meta(self._path, self._facts)

    def end(self, how: str) -> None:
        """On the clock the run began by: the time of day may have been set meanwhile."""
        self.tell(ended=how, ended_at=time.monotonic() + self._clock.offset_s)

    def withdraw(self) -> None:
        """As if it had never begun: whoever comes next samples the machine."""
        with suppress(OSError):
            self._path.unlink()
            if self.samples:
                _claim(self._folder, self.name).unlink()

    def miss(self, *lines: str) -> None:
        """Say what cannot be seen."""
        self.tell(missing=[*self._facts["missing"], *filter(None, lines)])


def watch(
    command: Sequence[str],
    options: Options,
    *,
    environ: Mapping[str, str] = os.environ,
    window: Window | None = None,
) -> int:
    """Run the command to its end or the window's; gives its exit code, 128 + N where signal N killed it."""
    node = begin_run(options, argv=command, title=name_of(command))
    try:
        return _watch(node, command, options, environ, window)
    except StokerError:
        node.withdraw()  # it was never started
        raise


def _watch(
    node: Node,
    command: Sequence[str],
    options: Options,
    environ: Mapping[str, str],
    window: Window | None,
) -> int:
    node.miss(not_attachable(command))
    if options.what_if:
        environ = {**environ, WHAT_IF: options.what_if}
    kills = _oom_kills()
    with (
        injected(command, options.folder, environ) as child_environ,
        _signals() as came,
        sampling(options, node, lambda: trainers(options.folder, node.name)),
    ):
        # Last of all: whatever fails once it runs leaves it without anybody who waits for it.
        pid = _spawn(command, child_environ)
        status = _wait(pid, came, window)
        if window:
            window.close()
    ended = ending(status, folder=options.folder, pid=pid, oom_kills=_oom_kills() - kills)
    if window and window.over:
        ended = "ended when its window was over"
    node.end(ended)
    return status if status >= 0 else 128 - status


def name_of(command: Sequence[str]) -> str:
    """What a run is called: the script, where an interpreter or a launcher runs one, else the program."""
    scripts = (Path(argument).name for argument in command if argument.endswith((".py", ".sh")))
    return next(scripts, Path(command[0]).name)


def begin_run(options: Options, *, argv: Sequence[str], title: str) -> Node:
    """Make the run folder, or join the run another node has begun in it."""
    folder = options.folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(_is_over(read_meta(path)) for path in folder.glob("node-*.json")):
            raise UsageError(f"{folder} holds a finished run", hint="give another folder with --out")
        node = Node(options, argv=argv, title=title)
        node.begin()
    except OSError as error:
        raise UsageError(
            f"the run cannot be written to {folder}: {error.strerror}", hint="give another folder with --out"
        ) from error
    return node


def _is_over(meta: Mapping[str, Any]) -> bool:
    """Has the run of this watcher ended? Not where it is another task of our own launch: its part was shorter
    than ours, or we came late, and neither may keep our part from being run."""
    (launch, task), theirs = _place(), meta.get("launch") or ["", 0]
    return bool(meta.get("ended")) and not (launch and theirs[0] == launch and theirs[1] != task)


def _place() -> tuple[str, int]:
    """What tells this launch from others, and this task from its others."""
    try:
        world = World.from_environ()
    except UsageError:  # a launcher's odd variables are not ours to judge here
        return "", 0
    return world.run, world.rank


@contextmanager
def sampling(options: Options, node: Node, pids: Callable[[], list[int]]) -> Iterator[None]:
    """Sample the machine while the block runs, unless another watcher of this machine does."""
    if not node.samples:
        yield
        return
    cards, facts, missing = open_cards(options.gpu)
    node.tell(gpus=facts)
    node.miss(*missing)
    with Sampler(options.folder, node=node.name, hz=options.hz, cards=cards, pids=pids, on_missing=node.miss):
        yield


@contextmanager
def _signals() -> Iterator[int]:
    """A pipe into which the number of each signal is written. Whatever thread the kernel chooses for it: a
    library may have started some before us, so blocking signals in this one would not do."""
    came, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    wakeup = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    passed_on = [number for number in _PASSED_ON if signal.getsignal(number) is not signal.SIG_IGN]
    # Where whoever started us ignores SIGCHLD, the kernel would throw the child's exit code away.
    numbers = (*passed_on, signal.SIGCHLD)
    before = {number: signal.signal(number, lambda *_: None) for number in numbers}
    try:
        yield came
    finally:
        for number, action in before.items():
            signal.signal(number, action)
        signal.set_wakeup_fd(wakeup)
        os.close(came)
        os.close(writing)


def _spawn(command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Start it with our input, output and process group, and with signals as a shell would give them."""
    try:
        return os.posix_spawnp(command[0], list(command), environ, setsigdef=(signal.SIGPIPE, signal.SIGXFSZ))
    except OSError as error:
        raise UsageError(f"cannot start {command[0]}: {error.strerror}", hint="check the command") from error


def _wait(pid: int, came: int, window: Window | None) -> int:
    """Pass signals on until the child has ended; gives its exit code, or minus the signal's number."""
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        ready, _, _ = select.select([came], [], [], window.look(pid) if window else None)
        for number in os.read(came, 64) if ready else b"":
            if window:
                window.passed_on(number)
            if number != signal.SIGCHLD and not (number in _FROM_TERMINAL and _in_foreground()):
                with suppress(PermissionError):  # another user's by now: sudo
                    os.kill(pid, number)


def _in_foreground() -> bool:
    """Then a terminal's Ctrl-C went to the whole group, and the child has it already."""
    try:
        with open("/dev/tty", "rb") as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False


def _claims_machine(folder: Path, node: str) -> bool:
    """The first watcher of a machine samples it; `srun stoker watch` may start several."""
    try:
        os.close(os.open(_claim(folder, node), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
    except FileExistsError:
        return False
    return True


def _claim(folder: Path, node: str) -> Path:
    return folder / f".sampler-{node}"


def _oom_kills() -> int:
    cgroup = Cgroup.here()
    try:
        return cgroup.oom_kills()
    finally:
        cgroup.close()
