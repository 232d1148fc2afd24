"""`stoker watch`: start a command with hooks in its Python processes, sample beside it, say how it ended."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stoker.errors import StokerError, UsageError
from stoker.machine.cgroup import read_cgroup
from stoker.machine.files import Files
from stoker.redact import redact_args, redact_text
from stoker.watch.claims import Claim, Turns
from stoker.watch.ending import Ending, ending
from stoker.watch.exits import Exit, Exits
from stoker.watch.gauges.cards import open_cards
from stoker.watch.inject import injected, not_attachable
from stoker.watch.inside.knobs import VARIABLE as APPLY
from stoker.watch.inside.knobs import Knobs
from stoker.watch.inside.look import VARIABLE as LOOK
from stoker.watch.inside.whatif import VARIABLE as WHAT_IF
from stoker.watch.runs.alive import own_mark
from stoker.watch.runs.files import (
    VERSION,
    Clock,
    Events,
    node_name,
    process_key,
    read_meta,
    write_meta,
)
from stoker.watch.sampler import Sampler, trainers
from stoker.watch.window import Window
from stoker.world import World, job_name

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
    look: str = ""  # deep looks: "once", or every so many steps
    apply: Path | None = None  # settings that `stoker tune` wrote
    output: Path | None = None  # where the command's output goes; None: where ours does
    environ: Mapping[str, str] = field(default_factory=dict)  # variables beside our own

    def __post_init__(self) -> None:
        if not 0 < self.hz <= 100:
            raise UsageError(f"{self.hz} samples a second", hint="give --hz between 0.1 and 100")


class Node:
    """This watcher's meta file."""

    def __init__(self, options: Options, *, argv: Sequence[str], title: str) -> None:
        self.name = node_name()
        self._folder, self._clock = options.folder, Clock.here()
        self._path = options.folder / f"node-{self.name}-{os.getpid()}.json"
        self.claim = Claim(options.folder / f".sampler-{self.name}")
        self._facts: dict[str, Any] = {
            "version": VERSION,
            "title": title,
            "argv": redact_args(argv),
            "node": self.name,
            "pid": os.getpid(),
            "mark": own_mark(),
            "began": time.monotonic() + self._clock.offset_s,
            "clock": self._clock.as_dict(),
            "hz": options.hz,
            **_limits("self", pid=0),
            "samples": self.claim.take(),
            "missing": [],
            "gpus": [],
            "launch": _place(),
            "job": job_name(),
        }

    def begin(self) -> None:
        """The first time, that it cannot be written is the user's to know."""
        write_meta(self._path, self._facts)

    def tell(self, **facts: Any) -> None:
        self._facts |= facts
        with suppress(OSError):  # the folder is gone or full by now: the program goes on, and ends as it ends
            write_meta(self._path, self._facts)

    def limited_as(self, pid: int) -> None:
        """What the trainer may use, which need not be what we may."""
        self.tell(**_limits(str(pid), pid=pid))

    def end(self, how: str, ending: Ending | None = None) -> None:
        """On the clock the run began by: the time of day may have been set meanwhile."""
        told = {"ending": ending.as_dict()} if ending and ending.kind else {}
        self.tell(ended=how, ended_at=time.monotonic() + self._clock.offset_s, **told)

    def withdraw(self) -> None:
        """As if it had never begun: whoever comes next samples the machine."""
        self.claim.release()
        with suppress(OSError):
            self._path.unlink()

    def miss(self, *lines: str) -> None:
        """Say what cannot be seen."""
        self.tell(missing=[*self._facts["missing"], *map(redact_text, filter(None, lines))])


def watch(command: Sequence[str], options: Options, *, window: Window | None = None) -> int:
    """Run the command to its end or the window's; gives its exit code, 128 + N where signal N killed it."""
    asked = _asked(options)
    node = begin_run(options, argv=command, title=name_of(command))
    node.miss(not_attachable(command))
    kills, signals = _oom_kills(), list[tuple[float, int]]()

    def ours() -> list[int]:
        return trainers(options.folder, node.name)

    try:
        with (
            injected(command, options.folder, {**os.environ, **asked}) as environ,
            _signals() as came,
            sampling(options, node, ours),
            Exits(ours, lambda one: _note(one, options.folder, node.name)) as exits,
        ):
            # Last of all: whatever fails once it runs leaves it without anybody who waits for it.
            pid = _spawn(command, environ, options.output)
            status = _wait(pid, came, window, signals)
            if window:
                window.close()
    except StokerError:
        node.withdraw()  # it was never started
        raise
    ended = ending(
        status,
        folder=options.folder,
        pid=pid,
        oom_kills=_oom_kills() - kills,
        exits=exits.seen,
        signals=signals,
    )
    if window and window.over:
        node.end("ended when its window was over")
    else:
        node.end(ended.line, ended)
    return status if status >= 0 else 128 - status


def _asked(options: Options) -> dict[str, str]:
    """What the hooks are told by the environment, and the program."""
    asked = {**options.environ, **({WHAT_IF: options.what_if} if options.what_if else {})}
    if options.look:  # Kineto tells the terminal of every window unless it is told not to
        asked |= {LOOK: options.look, "KINETO_LOG_LEVEL": os.environ.get("KINETO_LOG_LEVEL", "99")}
    if options.apply is not None:
        asked |= {**Knobs.read(options.apply).environ, APPLY: str(options.apply.absolute())}
    return asked


def _note(one: Exit, folder: Path, node: str) -> None:
    """A trainer's exit, among its own events: nobody else writes there any more."""
    if not one.worker:
        with suppress(OSError):
            names = [path.stem for path in folder.glob(f"proc-{process_key(node, one.pid)}*.json")]
            key = max(names, key=len, default=f"proc-{process_key(node, one.pid)}").removeprefix("proc-")
            Events(folder / f"events-{key}.jsonl").say("exit", "", code=one.status)


def name_of(command: Sequence[str]) -> str:
    """What a run is called: the script, where an interpreter or a launcher runs one, else the program."""
    scripts = (Path(argument).name for argument in command if argument.endswith((".py", ".sh")))
    return next(scripts, Path(command[0]).name)


def begin_run(options: Options, *, argv: Sequence[str], title: str) -> Node:
    """Make the run folder, or join the run another node has begun in it."""
    folder = options.folder
    try:
        make_private(folder)
        if any(_is_over(read_meta(path)) for path in folder.glob("node-*.json")):
            raise UsageError(f"{folder} holds a finished run", hint="give another folder with --out")
        node = Node(options, argv=argv, title=title)
        node.begin()
    except OSError as error:
        raise UsageError(
            f"the run cannot be written to {folder}: {error.strerror}", hint="give another folder with --out"
        ) from error
    return node


def make_private(folder: Path) -> None:
    """The run folder, for its owner alone; one that stands already keeps the mode somebody gave it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        if not folder.is_dir():
            raise


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
    """Sample the machine while the block runs, whenever no other watcher of this machine does."""
    with Turns(node.claim, lambda: _sampler(options, node, pids)):
        yield


def _sampler(options: Options, node: Node, pids: Callable[[], list[int]]) -> Sampler:
    """The machine's sampler is ours: the first of its watchers, or the next when that has ended."""
    cards, facts, missing = open_cards(options.gpu)
    node.tell(gpus=facts, samples=True)
    node.miss(*missing)
    return Sampler(
        options.folder,
        node=node.name,
        hz=options.hz,
        cards=cards,
        pids=pids,
        on_missing=node.miss,
        on_trainer=node.limited_as,
    )


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


def _spawn(command: Sequence[str], environ: Mapping[str, str], output: Path | None) -> int:
    """Start it with our input, output and process group, and with signals as a shell would give them."""
    try:
        return os.posix_spawnp(
            command[0],
            list(command),
            environ,
            file_actions=_into(output) if output else (),
            setsigdef=(signal.SIGPIPE, signal.SIGXFSZ),
        )
    except (OSError, ValueError) as error:  # ValueError: an empty word, or one with a NUL in it
        why = getattr(error, "strerror", None) or error
        name = command[0] or "what has no name"
        raise UsageError(f"cannot start {name}: {why}", hint="check the command") from error


def _into(output: Path) -> list[tuple[Any, ...]]:
    """Nothing to read, and both streams into one file: of a program that nobody looks at."""
    opened = (os.POSIX_SPAWN_OPEN, 1, str(output), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    return [(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0), opened, (os.POSIX_SPAWN_DUP2, 1, 2)]


def _wait(pid: int, came: int, window: Window | None, signals: list[tuple[float, int]]) -> int:
    """Pass signals on until the child has ended, and note them; gives its exit code, or minus the signal's
    number."""
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        ready, _, _ = select.select([came], [], [], window.look(pid) if window else None)
        for number in os.read(came, 64) if ready else b"":
            if window:
                window.passed_on(number)
            if number != signal.SIGCHLD:
                signals.append((time.monotonic(), number))
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


def _limits(process: str, *, pid: int) -> dict[str, Any]:
    """Cores and quota of a process; of ourselves, pid is 0."""
    quota = read_cgroup(Files(), process=process).cpu_limit_cores
    return {
        "cpus": len(os.sched_getaffinity(pid)),
        "quota_cores": quota if isinstance(quota, float) else None,
    }


def _oom_kills() -> int:
    kills = read_cgroup(Files()).oom_kills
    return kills if isinstance(kills, int) else 0
