"""Exit status: how a run ended and what is known of the cause: an exception, a signal, the first rank to go.

Many processes end when one does. Who went first is told by the times of exits (exits.py) and of the
exceptions that processes left (inside/hooks.py); a rank that lost its peer, or was told to end, is a victim.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stoker.machine.surroundings import kernel_log
from stoker.recording import Event
from stoker.watch.exits import Exit
from stoker.watch.runs.columns import read_events
from stoker.watch.runs.files import read_meta

_SIGNALS = {"Bus error": "SIGBUS", "Killed": "SIGKILL", "Segmentation fault": "SIGSEGV", "Aborted": "SIGABRT"}
_MOST = 300
_VICTIM_S = 2.0  # a rank that lost its peer may be quicker to say so than we are to see who it was
_LOST_PEER = re.compile(
    "connection (was )?(closed|reset|refused)|closed by peer|broken pipe|EOFError|ncclRemoteError|"
    "connectionreset|timed out|timeout|socket",
    re.IGNORECASE,
)
_LAUNCHERS = ("ChildFailedError", "SignalException", "ProcessExitedException", "ProcessRaisedException")


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """`line` is the whole story in one line; `kind` is empty where a run ended as it should."""

    line: (
        str  # `exit 0`, `exit 1: loader worker killed by SIGBUS`, `killed by SIGKILL: out of memory (cgroup)`
    )
    kind: str = ""  # crashed, preempted or interrupted
    cause: str = ""  # exception, worker, signal, exit, out_of_memory, nccl
    text: str = ""  # who, and of what
    where: str = ""  # the line of the program, where an exception tells it
    chain: tuple[str, ...] = ()  # of exceptions: what this one came from
    rank: int | None = None  # who went first
    at: float | None = None  # when, on the monotonic clock

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Gone:
    """One process's end, as it was seen or as it said itself."""

    t: float
    text: str
    cause: str
    rank: int | None = None
    signal: str = ""
    victim: bool = False  # of another's end, by the look of it
    where: str = ""
    chain: tuple[str, ...] = ()


def ending(
    status: int,
    *,
    folder: Path,
    pid: int,
    oom_kills: int,
    exits: Sequence[Exit] = (),
    signals: Sequence[tuple[float, int]] = (),
) -> Ending:
    """How the command ended; `signals` are those that were passed on to it, with their times."""
    plain = f"exit {status}" if status >= 0 else f"killed by {signal_name(-status)}"
    told = _told_to_end(signals)
    if not status:
        told = told or _heeded(folder)
        return (
            Ending(line=plain, **_after_signal(told)) if told else _thread_died(folder) or Ending(line=plain)
        )
    ranks = _ranks(folder)
    excepted = _excepted(folder, ranks, exits)
    first = _first(
        [*excepted, *_exited(exits, ranks, hung=bool(_hung(folder))), *_vanished(folder, exits, ranks)]
    )
    killed = [one.pid for one in exits if one.status == -signal.SIGKILL]
    memory = out_of_memory(oom_kills, [pid, *killed])
    line = ": ".join(filter(None, [plain, memory or (_more(first, plain) if first else _hung(folder))]))
    kind = _kind(status, first, told)
    if told and kind != "crashed":
        return Ending(line=line, **_after_signal(told))
    return Ending(
        line=line,
        kind=kind,
        cause="out_of_memory" if memory else first.cause if first else _plain_cause(status, folder),
        text=memory or (first.text if first else plain),
        where=first.where if first else "",
        chain=first.chain if first else (),
        rank=first.rank if first else None,
        at=first.t if first else None,
    )


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def out_of_memory(oom_kills: int, pids: Iterable[int]) -> str:
    if oom_kills > 0:
        return "out of memory (cgroup)"
    return "out of memory (machine)" if _killed_for_memory().intersection(pids) else ""


def _thread_died(folder: Path) -> Ending | None:
    """The loop's own thread died of an exception; the process went on, and left with 0."""
    died = [one for one in _events(folder) if one.what == "exception" and one.facts.get("in_thread")]
    if not died:
        return None
    first = _gone(died[0], None, {})
    return Ending(
        line=f"exit 0: the loop's thread died of {first.text}",
        kind="crashed",
        cause="exception",
        text=f"{first.text} in the loop's thread (the process itself left with 0)",
        where=first.where,
        chain=first.chain,
        at=first.t,
    )


def _more(first: _Gone, plain: str) -> str:
    """What the first to go adds to the command's own end."""
    same = first.cause == "exit" or plain == f"killed by {first.signal}"
    return "" if first.rank is None and same else first.text


# --- told to end ----------------------------------------------------------------------------------


def _told_to_end(signals: Sequence[tuple[float, int]]) -> tuple[float, int] | None:
    ends = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    return next((one for one in signals if one[1] in ends), None)


def _heeded(folder: Path) -> tuple[float, int] | None:
    """A signal that every trainer's own handler took: they left with exit 0, but not because they were done.
    One that only some got is how a program ends its helpers."""
    keys = [path.stem.removeprefix("proc-") for path in folder.glob("proc-*.json")]
    each = [_signalled(folder / f"events-{key}.jsonl") for key in keys]
    came = [one for one in each if one is not None]
    return min(came) if came and len(came) == len(each) else None


def _signalled(path: Path) -> tuple[float, int] | None:
    events = [one for one in read_events(path, shift_s=0.0) if one.what == "signal"]
    return _told_to_end([(one.t, int(one.facts["number"])) for one in events])


def _after_signal(told: tuple[float, int]) -> dict[str, Any]:
    t, number = told
    kind = "interrupted" if number == signal.SIGINT else "preempted"
    return {"kind": kind, "cause": "signal", "text": f"{signal_name(number)} came from outside", "at": t}


def _kind(status: int, first: _Gone | None, told: tuple[float, int] | None) -> str:
    """A crash that came before the signal is one; what comes after it is how the program ends."""
    if told and (first is None or first.t >= told[0]):
        return "interrupted" if told[1] == signal.SIGINT else "preempted"
    by = first.signal if first else signal_name(-status if status < 0 else status - 128)
    return {"SIGTERM": "preempted", "SIGINT": "interrupted"}.get(by, "crashed")


# --- who went first -------------------------------------------------------------------------------


def _first(gone: list[_Gone]) -> _Gone | None:
    """The earliest; a victim only where nobody who is none went at about the same time or before."""
    if not gone:
        return None
    earliest = min(gone, key=lambda one: one.t)
    culprits = [one for one in gone if not one.victim and one.t <= earliest.t + _VICTIM_S]
    return min(culprits, key=lambda one: one.t) if culprits else earliest


def _ranks(folder: Path) -> dict[int, int]:
    """Ranks of processes; none where there is but one."""
    metas = [read_meta(path) for path in folder.glob("proc-*.json")]
    found = {int(meta["pid"]): int(meta["rank"]) for meta in metas if {"pid", "rank"} <= meta.keys()}
    return found if len(set(found.values())) > 1 else {}


def _exited(exits: Sequence[Exit], ranks: dict[int, int], *, hung: bool) -> list[_Gone]:
    """Processes that a signal ended, or that left with a code of their own. A worker is told to end by
    SIGTERM whenever its loader is done."""
    found = []
    for one in exits:
        name = signal_name(-one.status) if one.status and one.status < 0 else ""
        if not one.status or (one.worker and name in ("", "SIGTERM", "SIGINT")):
            continue
        who = "loader worker" if one.worker else _rank_text(ranks.get(one.pid))
        aborted = "nccl" if name == "SIGABRT" and hung else "signal"
        cause = "worker" if one.worker else aborted if name else "exit"
        text = f"{who} killed by {name}" if name else f"{who} left with exit {one.status}"
        victim = name in ("SIGTERM", "SIGABRT") or not name  # an exception says it better than its exit code
        rank = None if one.worker else ranks.get(one.pid)
        found.append(_Gone(t=one.t, text=text, cause=cause, rank=rank, signal=name, victim=victim))
    return found


def _rank_text(rank: int | None) -> str:
    return "a process" if rank is None else f"rank {rank}"


def _vanished(folder: Path, exits: Sequence[Exit], ranks: dict[int, int]) -> list[_Gone]:
    """Ranks whose parent was quicker to wait for them than we were to look, and who left without a word. A
    launcher whose exception tells of a signal has ended the others by it, or by SIGTERM."""
    spoke = {
        path.stem.rpartition("-")[2].partition("x")[0]
        for path in folder.glob("events-*.jsonl")
        if any(one.what in ("leaving", "exception") for one in read_events(path, shift_s=0.0))
    }
    told = _told_by_launchers(folder)
    found = []
    for one in exits:
        if one.status is None and one.pid in ranks and str(one.pid) not in spoke:
            rank = ranks[one.pid]
            name = told.get(rank, "SIGTERM") if told else "SIGKILL"
            text = f"rank {rank} killed by {name}{'' if rank in told else ', most likely'}"
            victim = bool(told) and (rank not in told or name == "SIGTERM")
            found.append(
                _Gone(t=one.t, text=text, cause="signal", rank=rank, signal=name, victim=victim),
            )
    return found


def _told_by_launchers(folder: Path) -> dict[int, str]:
    """The signal of each rank that a launcher's exception names."""
    found = [event for event in _events(folder) if event.text.startswith(_LAUNCHERS)]
    return {
        int(one.facts["rank"]): _signal_of(str(one.facts["signal"]))
        for one in found
        if isinstance(one.facts.get("rank"), int) and one.facts.get("signal")
    }


def _excepted(folder: Path, ranks: dict[int, int], exits: Sequence[Exit]) -> list[_Gone]:
    """What processes said that they died of; a launcher's own exception is about somebody else."""
    ended = {ranks[one.pid]: one.t for one in reversed(exits) if one.pid in ranks}
    found = [event for event in _events(folder) if event.what == "exception"]
    return [_gone(event, ranks.get(int(event.facts.get("pid") or 0)), ended) for event in found]


def _gone(event: Event, rank: int | None, ended: dict[int, float]) -> _Gone:
    """A launcher that knows the rank and its signal is believed, at the time that rank was seen to end."""
    facts = event.facts
    name = _signal_of(str(facts.get("signal", "")))
    launcher = event.text.startswith(_LAUNCHERS)
    rank = facts["rank"] if isinstance(facts.get("rank"), int) else rank
    knows = launcher and rank is not None and name not in ("", "SIGTERM")
    text, cause = _cause_of(event.text, name, rank)
    lost = bool(_LOST_PEER.search(event.text)) and bool(rank is not None or launcher)
    return _Gone(
        t=min(event.t, ended.get(rank, event.t) if knows and rank is not None else event.t),
        text=text,
        cause=cause,
        rank=rank,
        signal="SIGINT" if event.text.startswith("KeyboardInterrupt") else name if cause != "worker" else "",
        victim=not knows and (launcher or lost),
        where="" if launcher else str(facts.get("where", "")),
        chain=tuple(map(str, facts.get("chain", ()))),
    )


def _cause_of(text: str, name: str, rank: int | None) -> tuple[str, str]:
    if "DataLoader worker" in text and name:
        return f"loader worker killed by {name}", "worker"
    if name:
        return f"{_rank_text(rank)} killed by {name}", "signal"
    first = re.sub(r"\s+", " ", text)
    return (first if len(first) <= _MOST else first[:_MOST] + " …"), "exception"


def _signal_of(killed_by: str) -> str:
    name = _SIGNALS.get(killed_by, killed_by)
    return signal_name(int(name)) if name.isdigit() else name


def _plain_cause(status: int, folder: Path) -> str:
    if _hung(folder):
        return "nccl"
    return "signal" if status < 0 or status > 128 else "exit"


def _hung(folder: Path) -> str:
    """A collective that the job hung in, and was ended for: NCCL's watchdog aborts the process."""
    told = [event for event in _events(folder) if event.what in ("hang", "hang over")]
    hung = [event for event in told[-1:] if event.facts.get("in_collective")]
    return f"hung in {hung[-1].facts.get('collective_op') or 'a collective'}" if hung else ""


def _events(folder: Path) -> list[Event]:
    found = [event for path in folder.glob("events-*.jsonl") for event in read_events(path, shift_s=0.0)]
    return sorted(found, key=lambda event: event.t)


def _killed_for_memory() -> set[int]:
    """Processes the kernel says it killed for memory; nothing where its log may not be read."""
    with suppress(OSError):
        killed = (re.search(r"Killed process (\d+)", text) for _, text in kernel_log())
        return {int(match[1]) for match in killed if match}
    return set()
