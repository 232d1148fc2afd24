"""Machine snapshot, taken: all of it in well under two seconds, without root and without a GPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from stoker.machine.cards import read_cards
from stoker.machine.cgroup import read_cgroup
from stoker.machine.files import Files
from stoker.machine.host import read_cpu, read_limits, read_memory, read_nics
from stoker.machine.places import hub_folder, read_disks, read_place
from stoker.machine.plain import Record, unread
from stoker.machine.snapshot import Cgroup, Cpu, Limits, Memory, Snapshot
from stoker.machine.stores import read_lustre, read_raids
from stoker.machine.surroundings import read_environ, read_log, read_surroundings


def read_machine(
    *, data: Path | None = None, cache: Path | None = None, environ: Mapping[str, str] = os.environ
) -> Snapshot:
    """This machine now. `cache` is where staged files are to lie, `data` where they come from."""
    files = Files()
    gpus, gpu_stack = read_cards(files, environ)
    places = [
        read_place(
            files, "cache", cache or Path(environ.get("STOKER_CACHE") or environ.get("TMPDIR") or "/tmp")
        ),
        read_place(files, "hub", hub_folder(environ, home=Path(environ.get("HOME") or "/"))),
        read_place(files, "root", Path("/")),
    ]
    if cache is not None:
        places[0] = replace(places[0], given=True)
    if data is not None:
        places.insert(0, replace(read_place(files, "data", data), given=True))
    return Snapshot(
        memory=_whole(Memory, lambda: read_memory(files)),
        limits=_whole(Limits, lambda: read_limits(files)),
        cgroup=_whole(Cgroup, lambda: read_cgroup(files)),
        cpu=_whole(Cpu, lambda: read_cpu(files)),
        disks=read_disks(files),
        raids=read_raids(files),
        places=tuple(places),
        lustre=read_lustre(files),
        nics=read_nics(files),
        gpus=gpus,
        gpu_stack=gpu_stack,
        surroundings=read_surroundings(files, environ),
        environ=read_environ(environ),
        log=read_log(),
    )


def _whole(kind: type[Record], read: Callable[[], Record]) -> Record:
    """A sandbox may answer in a shape that no kernel has: then that part is unknown, and the rest is told."""
    try:
        return read()
    except (OSError, ValueError, LookupError) as error:
        return unread(kind, f"{type(error).__name__}: {error}")
