"""Where the ranks of a job leave each other notes about saves: never the trainer's process group.

Rank 0 serves a small key-value store of its own (torch's TCPStore) and says in a file of the checkpoint
folder where. A rank that finds the file of a dead job finds nobody there, and looks again. On several
nodes without a shared folder the address is given instead.
"""

from __future__ import annotations

import json
import secrets
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from stoker.errors import CheckpointError, StokerError
from stoker.storage import new_file
from stoker.world import World

ADDRESS = ".board.json"
_POLL_S = 0.02
# What may differ between the nodes of one job: each agent of torchrun counts its own restarts (not those that
# another's failure made it do) and may be a Slurm step of its own; the first node may call itself localhost.
_OWN_TO_A_NODE = ("TORCHELASTIC_RESTART_COUNT=", "SLURM_STEP_ID=", "MASTER_ADDR=")


class Board(Protocol):
    """Notes and counts by key; a note is written once. Any thread may call."""

    def post(self, key: str, note: bytes) -> None: ...
    def look(self, key: str) -> bytes | None: ...
    def read(self, key: str, *, timeout_s: float) -> bytes: ...
    def count(self, key: str, more: int) -> int: ...
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

    def read(self, key: str, *, timeout_s: float) -> bytes:
        return self._notes[key]

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
        host, _, port = address.rpartition(":")
        if world.rank == 0:
            self._store = _serve(host or _own_host(world), int(port or 0))
            if not address:
                _publish(root, self._store, world)
        elif address:
            self._store = _connect(host, int(port), timeout_s)
        else:
            self._store = _find(root, world, timeout_s)

    def post(self, key: str, note: bytes) -> None:
        with _named(key):
            self._store.set(key, note)

    def count(self, key: str, more: int) -> int:
        with _named(key):
            return int(self._store.add(key, more))

    def look(self, key: str) -> bytes | None:
        """A note, if it is there."""
        with _named(key):
            return bytes(self._store.get(key)) if self._store.check([key]) else None

    def read(self, key: str, *, timeout_s: float) -> bytes:
        """A note, once it is there. Asked for in small steps, so that other threads get their turn."""
        deadline, poll = time.monotonic() + timeout_s, _POLL_S / 100
        while (note := self.look(key)) is None:
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"rank {self._world.rank} waited {timeout_s:.0f} s in vain for {key!r}",
                    hint="a rank has died or hangs: its log says why; raise timeout_s for slow disks",
                )
            time.sleep(poll)
            poll = min(poll * 1.5, _POLL_S)
        return note

    def forget(self, keys: Iterable[str]) -> None:
        with suppress(RuntimeError):
            for key in keys:
                self._store.delete_key(key)

    def close(self) -> None:
        """Leave; rank 0, which serves the others, leaves last."""
        with suppress(RuntimeError, AttributeError):
            left = self._store.add("left", 1)
            deadline = time.monotonic() + 10
            while self._world.rank == 0 and left < self._world.size and time.monotonic() < deadline:
                time.sleep(_POLL_S)
                left = self._store.add("left", 0)
        with suppress(AttributeError):
            del self._store


def _serve(host: str, port: int) -> Any:
    """A store that listens on this address; torch's own would listen on all of them."""
    with socket.create_server((host, port)) as listening:
        return TCPStore(
            host,
            listening.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=60),
            master_listen_fd=listening.detach(),
        )


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
    return "127.0.0.1" if world.nodes == 1 else socket.gethostname()


def _find(root: Path, world: World, timeout_s: float) -> Any:
    """Join the board that the folder names, once it is that of this job: of as many ranks and of the same
    launch, somebody answers there, knows the token, and waits for a rank of this number."""
    deadline, stranger = time.monotonic() + timeout_s, ""
    while time.monotonic() < deadline:
        try:
            found = json.loads((root / ADDRESS).read_bytes())
            stranger = _stranger(found, world)
            if not stranger and (store := _join(found, world)):
                return store
        except (OSError, ValueError, KeyError, RuntimeError):
            pass
        time.sleep(_POLL_S)
    raise CheckpointError(
        f"rank {world.rank} found no rank 0 through {root / ADDRESS} in {timeout_s:.0f} s{stranger}",
        hint="every rank must make a Checkpointer on the same folder; without a shared folder give "
        "board='HOST:PORT' of rank 0",
    )


def _stranger(found: dict[str, Any], world: World) -> str:
    """Whose board it is, if not that of this job."""
    job = found.get("job", "unknown")  # as one of an older stoker: it did not say
    return "" if job == _job(world) else f", only that of another job ({job}; this one: {_job(world)})"


def _join(found: dict[str, Any], world: World) -> Any:
    """The board at an address, if it is the one that was published and has no rank of this number yet."""
    _try_port(found["host"], found["port"])
    store = _connect(found["host"], found["port"], 5.0)
    if store.get("token").decode() == found["token"] and store.add(f"joined/{world.rank}", 1) == 1:
        return store
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
    return b"-" + json.dumps({"message": message, "hint": hint}).encode()


def checked(note: bytes) -> bytes:
    """What a note says; raises if it says that something failed."""
    if note[:1] == b"+":
        return note[1:]
    plain = json.loads(note[1:])
    raise CheckpointError(plain["message"], hint=plain["hint"])
