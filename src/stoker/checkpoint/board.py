"""Rendezvous: where ranks leave each other notes about saves, never in the trainer's process group.

Rank 0 serves a small key-value store of its own (torch's TCPStore) and says in a file of the checkpoint
folder where. A rank that finds the file of a dead job finds nobody there, and looks again. On several
nodes without a shared folder the address is given instead.

Who waits for a note gives up when the rank that owes it has died (`liveness.py`), or when for `timeout_s`
nothing has moved in the whole job: slowness is no death.
"""

from __future__ import annotations

import json
import secrets
import socket
import time
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from stoker.checkpoint.liveness import Line, Watch
from stoker.errors import BadCheckpointError, CheckpointError, StokerError
from stoker.storage import new_file
from stoker.world import World

ADDRESS = ".board.json"
_POLL_S = 0.02
_TAKEN = "close the Checkpointer that was made before this one, or give each a port of its own in board="
_LOOK_AROUND_S = (
    0.2  # how often who waits asks whether the one it waits for lives, and whether anything moves
)
_MOVED_S = 1.0  # how often a rank says that it moves
_NOTE_BYTES = 4 << 20  # torch's store takes 8 MiB at a time
# What may differ between the nodes of one job: each agent of torchrun counts its own restarts (not those that
# another's failure made it do) and may be a Slurm step of its own; the first node may call itself localhost.
_OWN_TO_A_NODE = ("TORCHELASTIC_RESTART_COUNT=", "SLURM_STEP_ID=", "MASTER_ADDR=")


class Board(Protocol):
    """Notes and counts by key; a note is written once. Any thread may call."""

    def post(self, key: str, note: bytes) -> None: ...
    def look(self, key: str) -> bytes | None: ...
    def read(self, key: str, *, timeout_s: float, of: int | None = None, moving: str = "") -> bytes: ...
    def count(self, key: str, more: int) -> int: ...
    def moved(self, what: str) -> None: ...
    def check_alive(self, rank: int | None = None) -> None: ...
    def forget(self, keys: Iterable[str]) -> None: ...
    def close(self) -> None: ...


class SoloBoard:
    """The board of a job of one process."""

    def __init__(self) -> None:
        self._notes: dict[str, bytes] = {}

    def post(self, key: str, note: bytes) -> None:
        self._notes[key] = note

    def look(self, key: str) -> bytes | None:
        return self._notes.get(key)

    def read(self, key: str, *, timeout_s: float, of: int | None = None, moving: str = "") -> bytes:
        return self._notes[key]

    def moved(self, what: str) -> None:
        pass

    def check_alive(self, rank: int | None = None) -> None:
        pass

    def count(self, key: str, more: int) -> int:
        total = int(self._notes.get(key, b"0")) + more
        self._notes[key] = str(total).encode()
        return total

    def forget(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._notes.pop(key, None)

    def close(self) -> None:
        self._notes.clear()


class TcpBoard:
    """The board of a job of several ranks."""

    def __init__(self, root: Path, world: World, *, address: str = "", timeout_s: float = 600.0) -> None:
        self._world = world
        self.rank = world.rank
        self._said_at: dict[str, float] = {}
        self._gone: dict[int, bool] = {}  # of rank 0: who is, and whether it said so
        host, _, port = address.rpartition(":")
        if world.rank == 0:
            host = host or _own_host(world)
            self._store = _serve(host, int(port or 0))
            self._line: Watch | Line = Watch(host, gone=self._note_gone)
            self._store.set("line", f"{host}:{self._line.port}")
            if not address:
                _publish(root, self._store, world)
        else:
            self._store = _find(root / ADDRESS, world, timeout_s, address=address)
            self._line = Line(self._store.get("line").decode(), rank=world.rank)

    def post(self, key: str, note: bytes) -> None:
        packed = zlib.compress(note, 1) if len(note) > _NOTE_BYTES else note
        pieces = [packed[at : at + _NOTE_BYTES] for at in range(0, len(packed), _NOTE_BYTES)] or [b""]
        with _named(key):
            for number, piece in enumerate(pieces[1:], 1):
                self._store.set(f"{key}#{number}", piece)
            kind = b"z" if packed is not note else b" "
            self._store.set(key, kind + len(pieces).to_bytes(4, "big") + pieces[0])

    def count(self, key: str, more: int) -> int:
        with _named(key):
            return int(self._store.add(key, more))

    def look(self, key: str) -> bytes | None:
        """A note, if it is there."""
        with _named(key):
            if not self._store.check([key]):
                return None
            note = bytes(self._store.get(key))
            more = range(1, int.from_bytes(note[1:5], "big"))
            packed = b"".join([note[5:], *(bytes(self._store.get(f"{key}#{number}")) for number in more)])
        return zlib.decompress(packed) if note[:1] == b"z" else packed

    def read(self, key: str, *, timeout_s: float, of: int | None = None, moving: str = "") -> bytes:
        """A note, once it is there. Given up when the rank that it is `of` has died (or any, where all must
        come), or when for so long nothing of what is `moving` has moved on any rank."""
        waiting, poll = _Waiting(self, timeout_s=timeout_s, of=of, moving=moving), _POLL_S / 100
        while (note := self.look(key)) is None:
            waiting.check(key)
            time.sleep(poll)  # in small steps, so that other threads get their turn
            poll = min(poll * 1.5, _POLL_S)
        return note

    def moved(self, what: str) -> None:
        """Say that this rank gets on with something; often called, seldom said."""
        now = time.monotonic()
        if now - self._said_at.get(what, 0.0) > _MOVED_S:
            self._said_at[what] = now
            with suppress(CheckpointError):  # who cannot say it will hear so when it matters
                self.count(f"moved/{what}", 1)

    def check_alive(self, rank: int | None = None) -> None:
        """Raise if this rank has died or left; without one if any has died: what all must come to is in vain
        then, and all say the same of it."""
        if (note := self.look("died" if rank is None else f"gone/{rank}")) is not None:
            checked(note)

    def forget(self, keys: Iterable[str]) -> None:
        with suppress(RuntimeError):
            for key in keys:
                self._store.delete_key(key)
                number = 1
                while self._store.delete_key(f"{key}#{number}"):
                    number += 1

    def close(self) -> None:
        """Leave; rank 0, which serves the others, leaves last."""
        with suppress(AttributeError):
            self._line.close() if self._world.rank else None
        with suppress(RuntimeError, AttributeError):
            left = self._store.add("left", 1)
            deadline = time.monotonic() + 10
            while self._world.rank == 0 and left < self._left_to_come() and time.monotonic() < deadline:
                time.sleep(_POLL_S)
                left = self._store.add("left", 0)
        with suppress(AttributeError):
            self._line.close()
            del self._store

    def _left_to_come(self) -> int:
        """How many can still say that they leave: the dead do not."""
        return self._world.size - sum(not said for said in self._gone.values())

    def _note_gone(self, rank: int, who: str, said: bool) -> None:
        """From the thread that watches: a rank has left, or died without a word."""
        self._gone[rank] = said
        how = "has closed its Checkpointer" if said else "has died"
        error = CheckpointError(f"rank {rank} ({who}) {how}", hint="its log says why")
        with suppress(CheckpointError, AttributeError):
            self.post(f"gone/{rank}", error_note(error))
            if not said and self.look("died") is None:
                self.post("died", error_note(error))


class _Waiting:
    """Says when waiting for a note makes no sense any more."""

    def __init__(self, board: TcpBoard, *, timeout_s: float, of: int | None, moving: str) -> None:
        self._board, self._timeout_s, self._of, self._moving = board, timeout_s, of, moving
        self._deadline = time.monotonic() + timeout_s
        self._look_at, self._seen = time.monotonic() + _LOOK_AROUND_S, -1

    def check(self, key: str) -> None:
        now = time.monotonic()
        if now < self._look_at and now <= self._deadline:
            return
        self._look_at = now + _LOOK_AROUND_S
        try:
            self._board.check_alive(self._of)
        except CheckpointError:
            if self._board.look(key) is None:  # else it has said it with its last breath
                raise
        if self._moving and (moved := self._board.count(f"moved/{self._moving}", 0)) != self._seen:
            self._seen, self._deadline = moved, now + self._timeout_s
        if now > self._deadline:
            raise CheckpointError(
                f"rank {self._board.rank} waited {self._timeout_s:.0f} s in vain for {key!r}",
                hint="a rank hangs: its log says why; raise timeout_s for slow disks",
            )


def _serve(host: str, port: int) -> Any:
    """A store that listens on this address; torch's own would listen on all of them."""
    try:
        listening = socket.create_server((host, port))
    except OSError as error:
        _refuse(host, port)
        raise CheckpointError(
            f"rank 0 cannot serve a board at {host}:{port}: {error.strerror}", hint=_TAKEN
        ) from error
    with listening:
        return TCPStore(
            host,
            listening.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=60),
            master_listen_fd=listening.detach(),
        )


def _refuse(host: str, port: int) -> None:
    """Tell those who come to the board that is there that theirs cannot be."""
    with suppress(OSError, RuntimeError):
        _try_port(host, port)
        _connect(host, port, 5.0).set("taken", b"")


def _connect(host: str, port: int, timeout_s: float) -> Any:
    return TCPStore(
        host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=max(1.0, timeout_s))
    )


def _publish(root: Path, store: Any, world: World) -> None:
    token = secrets.token_hex(8)
    store.set("token", token)
    found = {"host": _own_host(world), "port": store.port, "token": token, "job": _job(world)}
    with new_file(root / ADDRESS) as file:
        file.write(json.dumps(found).encode())


def _job(world: World) -> str:
    """What tells the job of this process from others in the same folder, as every rank of it says it."""
    own = _OWN_TO_A_NODE if world.launcher == "torchrun" else ()
    run = [one for one in world.run.split() if not one.startswith(own)]
    return " ".join([f"{world.size} ranks", *run])


def _own_host(world: World) -> str:
    return socket.gethostname() if world.may_span_nodes else "127.0.0.1"


def _find(path: Path, world: World, timeout_s: float, *, address: str = "") -> Any:
    """Join the board at an address, or the one that a file names, once it is that of this job: of as many
    ranks and of the same launch, somebody answers there, knows the token, and waits for a rank of this
    number."""
    deadline, stranger = time.monotonic() + timeout_s, ""
    while time.monotonic() < deadline:
        try:
            found = _told(address) if address else json.loads(path.read_bytes())
            stranger = "" if address else _stranger(found, world)
            if not stranger and (store := _join(found, world)):
                return store
        except (OSError, ValueError, KeyError, RuntimeError):
            pass
        time.sleep(_POLL_S)
    raise CheckpointError(
        f"rank {world.rank} found no rank 0 through {address or path} in {timeout_s:.0f} s{stranger}",
        hint="every rank must make a Checkpointer on the same folder; without a shared folder give "
        "board='HOST:PORT' of rank 0",
    )


def _told(address: str) -> dict[str, Any]:
    host, _, port = address.rpartition(":")
    return {"host": host, "port": int(port)}


def _stranger(found: dict[str, Any], world: World) -> str:
    """Whose board it is, if not that of this job."""
    job = found.get("job", "unknown")  # as one of an older stoker: it did not say
    return "" if job == _job(world) else f", only that of another job ({job}; this one: {_job(world)})"


def _join(found: dict[str, Any], world: World) -> Any:
    """The board at an address, if it is the one that was published and has no rank of this number yet."""
    host, port, token = found["host"], found["port"], found.get("token")
    _try_port(host, port)
    store = _connect(host, port, 5.0)
    if token is not None and store.get("token").decode() != token:
        return None
    if store.add(f"joined/{world.rank}", 1) == 1:
        return store
    if store.check(["taken"]):
        raise CheckpointError(f"another Checkpointer's board is at {host}:{port}", hint=_TAKEN)
    return None


def _try_port(host: str, port: int) -> None:
    """A store's client retries for its whole timeout where a plain connection is refused at once."""
    socket.create_connection((host, port), timeout=5).close()


@contextmanager
def _named(key: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # torch's DistError is one
        raise CheckpointError(
            f"the board of the job cannot be reached for {key!r}: {str(error).splitlines()[0]}",
            hint="rank 0, which serves it, has ended; its log says why",
        ) from error


def error_note(error: BaseException, *, what: str = "") -> bytes:
    """A note that something failed; `what` says in front of the cause what it was."""
    message = error.message if isinstance(error, StokerError) else f"{type(error).__name__}: {error}"
    hint = error.hint if isinstance(error, StokerError) else "see the log of that rank"
    message = f"{what}: {message}" if what else message
    damaged = isinstance(error, BadCheckpointError)
    return b"-" + json.dumps({"message": message, "hint": hint, "damaged": damaged}).encode()


def checked(note: bytes) -> bytes:
    """What a note says; raises if it says that something failed."""
    if note[:1] == b"+":
        return note[1:]
    plain = json.loads(note[1:])
    kind = BadCheckpointError if plain["damaged"] else CheckpointError
    raise kind(plain["message"], hint=plain["hint"])
