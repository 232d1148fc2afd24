"""Leader election, single flight: one process works, the others get its result: `first_rank`.

    with stoker.first_rank("download-model") as first:
        if first:
            first.result = download()
    path = first.result  # the same everywhere

The processes meet in a folder, by a lease: no process group, no collective, no timeout. Files there:

    work.lease/         who works; kept by that process until all have its answer (see `lease`)
    TOKEN.answer        what the holder of that token found: a JSON value, or its exception. Believed only
                        if this user wrote it: an exception is a pickle, and a folder may be anybody's
    ID-RANK.done        this rank has the answer; who puts down the last one clears the folder

If the worker dies before it answered, another takes over. An answer that is older than the process that
finds it counts only if whoever gave it is alive: so a job that is started again does its work again, whatever
an earlier one left. (Of an answer from another node nobody can say how old it is, unless it came while we
waited: there its giver must be seen to live, which takes a heartbeat.)
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import pickle
import random
import secrets
import stat
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, Literal, NoReturn
from urllib.parse import quote

from stoker.errors import FirstRankError, LeaseLostError, UsageError
from stoker.redact import redact_text
from stoker.stage.disk.grounds import ids_in, read_book
from stoker.stage.leases import seat
from stoker.stage.leases.lease import TTL_S, Claim, Lease
from stoker.stage.leases.owner import Owner
from stoker.storage import named_errors, new_file
from stoker.world import World

RESULT_BYTES = 1 << 20
_ANSWER_BYTES = 64 << 20  # with an exception and its traceback
_POLL_S = (0.02, 0.5)


def first_rank(
    name: str = "work",
    *,
    per: Literal["node", "job"] = "node",
    folder: Path | str | None = None,
    run: str = "",
    ttl_s: float = TTL_S,
) -> FirstRank:
    """A block that one process per node (or per job) works in while the others wait for its result.

    `name` says what is done. As with a collective, every process of the node (or job) must come: the n-th
    block of a name in one process meets the n-th of that name in the others.

    `per="node"` meets in a folder of this user under the machine's temporary folder. `per="job"` needs a
    `folder` that all nodes share, such as the run's output folder. What another user writes there is not
    read. Whoever works is never overtaken while it lives on a node that can tell, be it stopped or in a C
    call that keeps Python's lock; of other nodes the heartbeat of a helper process tells.

    The same job is: the same `TORCHELASTIC_RUN_ID`, `MASTER_ADDR`, `MASTER_PORT` and restart count under
    torchrun, the same job, step and restart count under Slurm, the same `MASTER_ADDR` and `MASTER_PORT` where
    only torch.distributed knows the rank. `run` names it otherwise. Without a launcher
    and without `run` a process is a job of its own.

    Set `first.result` to a JSON value of at most 1 MiB; leave large things in files and hand over the path.
    An exception in the block is raised in every process.
    """
    if per not in ("node", "job"):
        raise UsageError(f"per={per!r} is unknown", hint="use 'node' or 'job'")
    if not ttl_s > 0:
        raise UsageError(f"ttl_s={ttl_s!r} lets nobody hold a lease", hint="give some seconds, as 10")
    world = World.here()
    size, rank = (world.local_size, world.local_rank) if per == "node" else (world.size, world.rank)
    if run and world.launcher == "single":
        size = 0  # others may come, and nothing says how many
    if size == 1:
        return FirstRank(name, rank=world.rank, meeting=None)
    if not (run or world.run):
        raise UsageError(
            f"nothing tells this {world.launcher} job from another", hint="name it: first_rank(..., run=...)"
        )
    if per == "job" and folder is None:
        raise UsageError(
            'first_rank(per="job") needs a folder that all nodes share', hint="first_rank(..., folder=...)"
        )
    if per == "node" and not world.knows_nodes:
        raise UsageError(
            f"{world.launcher} does not say which of its ranks are on this node (world size {world.size})",
            hint="start the job with torchrun or srun, or use per='job' with a folder",
        )
    where = Path(folder) if folder is not None else _private_folder()
    who = f"{run or world.run} node {world.node}" if per == "node" else run or world.run
    key = f"{hashlib.sha256(who.encode()).hexdigest()[:12]}-{name}"
    meeting = Meeting(where, key, size=size, rank=rank, ttl_s=ttl_s, spans_nodes=per == "job")
    return FirstRank(name, rank=world.rank, meeting=meeting)


class FirstRank:
    """True in the process that works; `result` is what that one set, in all of them."""

    def __init__(self, name: str, *, rank: int, meeting: Meeting | None) -> None:
        self.result: Any = None  # a JSON value
        self._name = name
        self._rank = rank
        self._meeting = meeting  # None if there is nobody to meet
        self._works = False

    def __bool__(self) -> bool:
        return self._works

    def __enter__(self) -> FirstRank:
        answer = self._meeting.wait() if self._meeting else None
        if answer is None:
            self._works = True
        else:
            self._accept(answer)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not self._works:
            return
        if error is None:
            error = _complaint(self.result)
            answer = self._publish(Answer.of(self.result, error=error, rank=self._rank))
            self._accept(answer)
        elif isinstance(error, Exception):
            self._publish(Answer.of(None, error=error, rank=self._rank))
        elif self._meeting:
            self._meeting.leave()  # interrupted: as if it had died

    def _publish(self, answer: Answer) -> Answer:
        return self._meeting.publish(answer) if self._meeting else answer

    def _accept(self, answer: Answer) -> None:
        if answer.report:
            answer.throw(self._name)
        self.result = answer.result


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What the process that worked has to say: its result, or its exception."""

    id: str
    result: Any  # a JSON value
    who: str
    at_s: float  # when, on which clock
    clock: str
    error: str = ""  # the exception, pickled; empty if it cannot be
    report: str = ""  # its traceback; empty if there was none
    token: str = ""  # of the lease that it was given under, so that no other answer can take its place

    @classmethod
    def of(cls, result: Any, *, error: Exception | None, rank: int) -> Answer:
        trace = traceback.format_exception(type(error), error, error.__traceback__) if error else []
        report = redact_text("".join(trace))
        return cls(
            id=secrets.token_hex(8),
            result=None if error else result,
            who=f"rank {rank}, process {os.getpid()} on {os.uname().nodename}",
            at_s=time.clock_gettime(time.CLOCK_BOOTTIME),
            clock=_me().clock,
            error=_pickled(error) if error else "",
            report=report,
        )

    def is_newer_than(self, process: Owner) -> bool:
        """Whether it is known to have been given after that process started."""
        return process.clock != "" and self.clock == process.clock and self.at_s >= process.started_s

    def throw(self, name: str) -> NoReturn:
        """Raise the exception as it was, caused by one that says whose it was."""
        whose = FirstRankError(
            f"{self.who} failed in first_rank({name!r}):\n{self.report}", hint="see the traceback above"
        )
        try:
            error = pickle.loads(base64.b64decode(self.error))
        except Exception:  # whatever a stranger's exception does when it is made again
            raise whose from None
        raise error from whose


class Meeting:
    """The folder in which the processes of a node or job meet for one block."""

    _counts: dict[tuple[int, Path], Iterator[int]] = {}  # noqa: RUF012 - blocks are counted by process

    def __init__(
        self, folder: Path, name: str, *, size: int, rank: int, ttl_s: float, spans_nodes: bool = True
    ) -> None:
        path = folder / quote(name, safe="")
        number = next(self._counts.setdefault((os.getpid(), path), count()))
        self.folder = path.with_name(f"{path.name}-{number}")
        self._size = size  # 0 if nobody knows
        self._rank = rank
        self._ttl_s = ttl_s
        self._writers: frozenset[int] = frozenset()
        self._claim = Claim(
            self.folder / "work.lease",
            ttl_s=ttl_s,
            purpose=name.partition("-")[2],
            fenced=False,  # what is done in the block is the user's
            pulse=spans_nodes or not _me().clock,  # on this node the kernel tells who lives
        )
        self._lease: Lease | None = None

    def wait(self) -> Answer | None:
        """The answer, once there is one; None if this process is the one to work."""
        old, delays = self._old(), _delays(self._ttl_s / 6)
        while (answer := self._current(old)) is None:
            if lease := self._claim.try_take():
                self._lease = lease
                heir_of = lease.previous.token if lease.previous else ""
                left = self._read(heir_of) if heir_of and heir_of not in old else None
                return self.publish(left) if left else None
            time.sleep(next(delays))
        return self._collect(answer)

    def publish(self, answer: Answer) -> Answer:
        """Give the answer to all; returns the one that counts if another process was put in our place."""
        while self._lease:
            try:
                self._lease.check()
                token = self._lease.owner.token
                with new_file(self.folder / f"{token}.answer") as file:
                    file.write(json.dumps(asdict(replace(answer, token=token))).encode())
                # Whoever takes over from here on finds the answer.
                self._lease.check()
                return self._collect(answer)
            except LeaseLostError:
                self._lease = None
                if answer.report:
                    break
                if other := self.wait():
                    return other
            except BaseException:
                self.leave()
                raise
        return answer

    def leave(self) -> None:
        """Let another process work."""
        if self._lease:
            self._lease.release()

    def _old(self) -> set[str]:
        """The tokens of answers that an earlier job may have left."""
        found = {path.stem: self._read(path.stem) for path in self.folder.glob("*.answer")}
        return {token for token, answer in found.items() if answer and not answer.is_newer_than(_me())}

    def _current(self, old: set[str]) -> Answer | None:
        """The answer of whoever holds the lease; an old one only if its giver lives."""
        seat.look_anew(self.folder)
        holder = self._claim.holder()
        answer = self._read(holder.token) if holder else None
        if holder is None or answer is None or holder != self._claim.holder():
            return None
        return answer if holder.token not in old or self._claim.is_vouched() else None

    def _read(self, token: str) -> Answer | None:
        """What the holder of this token answered; nothing that another user says for it."""
        with seat.unless_gone(), suppress(ValueError, TypeError, RecursionError):
            data, _ = read_book(
                self.folder / f"{token}.answer", most=_ANSWER_BYTES, owners=self._our_ids() | {os.geteuid()}
            )
            answer = Answer(**json.loads(data))
            return answer if answer.token == token else None
        return None

    def _our_ids(self) -> frozenset[int]:
        """The users that our own files there belong to: a server may map us to another."""
        self._writers = self._writers or ids_in(self.folder)
        return self._writers

    def _collect(self, answer: Answer) -> Answer:
        with (
            named_errors("write to", self.folder),
            suppress(FileNotFoundError),
        ):  # cleared: nobody waits for us
            (self.folder / f"{answer.id}-{self._rank}.done").touch()
            if self._size and len(list(self.folder.glob(f"{answer.id}-*.done"))) >= self._size:
                self._clear()
        return answer

    def _clear(self) -> None:
        """Everybody has the answer. The giver finds its lease gone, and stops renewing it."""
        holder = self._claim.holder()
        with seat.opened(self.folder) as folder:
            if folder is not None:
                seat.remove(
                    folder, [name for name in os.listdir(folder) if name.endswith((".answer", ".done"))]
                )
        if self._lease:
            self._lease.release()
        elif holder:
            seat.leave(self._claim.path, holder)
        seat.remove_folder(self.folder)


def _me() -> Owner:
    return Owner.this_process(token="", epoch=0, purpose="", ttl_s=0)


def _complaint(result: Any) -> UsageError | None:
    """What is wrong with a result, if anything: it must come out of JSON as it went in."""
    try:
        text = json.dumps(result)
        if json.loads(text) == result and len(text) <= RESULT_BYTES:
            return None
    except (TypeError, ValueError, RecursionError):
        pass
    kind, shown = type(result).__name__, repr(result)[:60]
    return UsageError(
        f"first_rank can hand over JSON values of at most 1 MiB, not the {kind} {shown}",
        hint="hand over text, numbers, lists, dicts with text keys; for more, the path of a file as text",
    )


def _pickled(error: Exception) -> str:
    try:
        return base64.b64encode(pickle.dumps(error)).decode()
    except Exception:  # whatever a stranger's exception does when it is pickled
        return ""


def _delays(longest_s: float) -> Iterator[float]:
    """Pauses that grow, and differ between processes that came at once."""
    delay_s = _POLL_S[0]
    while True:
        yield delay_s * random.uniform(0.5, 1.0)
        delay_s = min(delay_s * 1.5, _POLL_S[1], longest_s)


def _private_folder() -> Path:
    """A folder of this user's on this machine that nobody else can write to."""
    folder = Path(tempfile.gettempdir()) / f"stoker-{os.getuid()}"
    with named_errors("make", folder):
        folder.mkdir(mode=0o700, exist_ok=True)
        facts = folder.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid() or facts.st_mode & 0o022:
        raise UsageError(
            f"{folder} is not a folder that only you can write to",
            hint="remove it, or set TMPDIR, or pass folder=",
        )
    return folder / "first"
