"""What another user can lay into a shared cache: mutated records, links, FIFOs, forged leases and parts.

Each mutation is made as that user, by the kernel's own rules, so that it shows what members of a group can do
and nothing more.
"""

from __future__ import annotations

import json
import os
import random
import struct
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import xxhash

from stoker.stage.disk.records import record_bytes
from stoker.stage.leases.owner import Owner
from stoker.stage.plan import Unit, key_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

VICTIM, ATTACKER, GROUP = 20_001, 20_002, 20_003

PATHS = (
    "../outside/home", "..", ".", "", "/etc", "a/../../outside", ".stoker/units", ".stoker", "a//b", "a/./b",
    "local\0x", "local/evil", "x" * 300, "\ud800", "/", "~", "local/./..", "....//outside",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, -1, 1 << 80, 0.5, float("nan"), "", [], {}, [[]], "9" * 30, "\x1b[2J", "../../outside/secret",
)  # fmt: skip


@contextmanager
def acting_as(user: int) -> Iterator[None]:
    """This process, all of its threads, as a user of the group; root again afterwards."""
    groups = os.getgroups()
    os.setgroups([GROUP])
    os.setegid(GROUP)
    os.seteuid(user)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(groups)


class Attacker:
    """Lays one thing after the other into a cache folder; `aim` is outside of it."""

    def __init__(self, folder: Path, aim: Path, units: Sequence[Unit], *, seed: int) -> None:
        self.folder, self.books, self.aim, self.units = folder, folder / ".stoker", aim, units
        self.luck = random.Random(seed)
        self.done: dict[str, int] = {}

    def act(self) -> None:
        """One mutation; what the kernel forbids has failed, which is fine."""
        moves: tuple[Callable[[], None], ...] = (
            self.forged_record, self.forged_record, self.forged_record, self.odd_entry, self.odd_entry,
            self.wrong_file, self.linked_folder, self.forged_part, self.forged_lease, self.forged_pins,
            self.swapped, self.forged_want,
        )  # fmt: skip
        move = self.luck.choice(moves)
        with acting_as(ATTACKER), suppress(OSError, ValueError):
            move()
            self.done[move.__name__] = self.done.get(move.__name__, 0) + 1

    def forged_record(self) -> None:
        unit, luck = self.luck.choice(self.units), self.luck
        plain = json.loads(record_bytes(unit))
        kind = luck.randrange(6)
        if kind == 0:
            plain["folder"] = luck.choice(PATHS)
        elif kind == 1:
            luck.choice(plain["files"])["name"] = luck.choice(PATHS)
        elif kind == 2:
            field = luck.choice(["bytes", "digest", "version", "url", "extra"])
            luck.choice(plain["files"])[field] = luck.choice(VALUES)
        elif kind == 3:
            plain = luck.choice(VALUES)
        elif kind == 4:
            plain["files"] = plain["files"] * luck.choice([0, 2, 3000])
        data = json.dumps(plain).encode()
        if kind == 5:
            data = bytearray(data)
            for _ in range(luck.randrange(1, 9)):
                data[luck.randrange(len(data))] = luck.randrange(256)
        key = unit.key
        with suppress(TypeError, KeyError, IndexError, ValueError):
            if luck.random() < 0.7:  # under the key that such a record would have
                key = key_of(plain["folder"], [file["name"] for file in plain["files"]])
        suffix = luck.choice([".json", ".json", ".json", ".going"])
        self._write(self.books / "units" / f"{key}{suffix}", bytes(data))

    def odd_entry(self) -> None:
        """A link, a FIFO, a folder or something huge where a book should be."""
        unit, luck = self.luck.choice(self.units), self.luck
        place = luck.choice([
            self.books / "units" / f"{unit.key}.json", self.books / "units" / f"{unit.key}.going",
            self.books / "leases" / unit.key, self.books / "pins" / f"{luck.randrange(99)}-0",
            self.books / "pins" / f"{luck.randrange(99)}-0.lease", self.books / "parts" / unit.key,
            self.books / "parts" / f"{unit.key}~left-0", self.books / "wants" / f"{unit.key}~0",
            self.folder / unit.folder / luck.choice(unit.files).name,
        ])  # fmt: skip
        self._clear(place)
        kind = luck.randrange(4)
        if kind == 0:
            place.symlink_to(
                luck.choice(
                    [
                        self.aim / "home",
                        self.aim / "secret",
                        self.aim,
                        "/".join([".."] * 3 + ["outside", "home"]),
                    ]
                )
            )
        elif kind == 1:
            os.mkfifo(place, 0o666)
        elif kind == 2:
            place.mkdir()
            (place / "map").symlink_to(self.aim / "secret")
        else:
            with place.open("wb") as file:
                file.truncate(1 << 25)

    def wrong_file(self) -> None:
        """Other bytes of the right size under the right name, with a record that says all is well."""
        unit = self.luck.choice(self.units)
        for file in unit.files:
            path = self.folder / unit.folder / file.name
            path.parent.mkdir(parents=True, exist_ok=True)
            self._write(path, bytes(file.bytes))
        self._write(self.books / "units" / f"{unit.key}.json", record_bytes(unit))

    def linked_folder(self) -> None:
        """A record that is right in form, about a folder that is a link to somewhere else."""
        name = f"evil-{self.luck.randrange(50)}"
        (self.folder / "local" / name).symlink_to(self.aim / "home")
        unit = self.luck.choice(self.units)
        plain = json.loads(record_bytes(unit))
        plain["folder"], plain["files"] = f"local/{name}", [{**plain["files"][0], "name": "file", "bytes": 5}]
        self._write(
            self.books / "units" / f"{key_of(plain['folder'], ['file'])}.json", json.dumps(plain).encode()
        )

    def forged_part(self) -> None:
        """What a dead fetcher left: its map is right in form and vouches for other bytes."""
        unit = self.luck.choice(self.units)
        part = self.books / "parts" / f"{unit.key}~left-{self.luck.randrange(1 << 30):x}"
        part.mkdir()
        entries = b""
        for number, file in enumerate(unit.files):
            kind = self.luck.randrange(3)
            if kind == 0:
                (part / str(number)).symlink_to(self.aim / "secret")
            elif kind == 1:
                os.mkfifo(part / str(number))
            else:
                (part / str(number)).write_bytes(bytes(file.bytes))
            for at in range(0, file.bytes, 1 << 20):
                size = min(1 << 20, file.bytes - at)
                entries += struct.pack("<QQ", size, xxhash.xxh3_64_intdigest(bytes(size)))
        (part / "map").write_bytes(record_bytes(unit) + b"\n" + entries)

    def forged_lease(self) -> None:
        """The lease of a process that is not here; its fields may be anything."""
        token = f"{self.luck.randrange(1 << 62):016x}"
        owner = json.loads(Owner.this_process(token=token, epoch=1, purpose="", ttl_s=0.1).to_json())
        owner["host"] = "elsewhere"
        owner[self.luck.choice(list(owner))] = self.luck.choice(VALUES)
        owner["ttl_s"] = self.luck.choice([0.1, -1, "x", float("inf"), 1e300])
        names = [unit.key for unit in self.units] + ["..room"]
        lease = self.books / "leases" / self.luck.choice(names)
        lease.mkdir()
        lease.chmod(0o2770)
        (lease / f"seat-{self.luck.choice(['1', '9' * 12, '0', 'x'])}-{token}").touch()
        self._write(lease / f"{token}.json", json.dumps(owner).encode())

    def forged_want(self) -> None:
        said = self.luck.choice(
            [b"0 9", b"5 5", b"-1 4", b"0 99999999999", b"9" * 5000, b"\xff\0", b"7 8\n0 1"]
        )
        name = f"{self.luck.choice(self.units).key}~{self.luck.randrange(9)}"
        self._write(self.books / "wants" / name, said)

    def forged_pins(self) -> None:
        data = b"".join(
            self.luck.choice([b"+", b"-", b"", b"\xff"]) + bytes(self.luck.choices(range(256), k=9))
            for _ in range(9)
        )
        self._write(self.books / "pins" / f"{self.luck.randrange(99)}-1", data)

    def swapped(self) -> None:
        """A folder of the attacker's own, taken away and replaced by a link."""
        for name in os.listdir(self.folder / "local"):
            path = self.folder / "local" / name
            with suppress(OSError):
                os.rename(path, path.with_name(f"was-{self.luck.randrange(1 << 30)}"))
                path.symlink_to(self.aim / "home")
                return

    def _write(self, path: Path, data: bytes) -> None:
        self._clear(path)
        path.write_bytes(data)

    def _clear(self, path: Path) -> None:
        with suppress(OSError):
            os.unlink(path)
