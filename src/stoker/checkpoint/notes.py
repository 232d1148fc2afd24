"""Board messages: where ranks stand, what they claim to hold, what is dealt out to them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import xxhash

from stoker.checkpoint.options import CheckpointOptions
from stoker.checkpoint.saved.layout import Box, Path, plain_path, read_path
from stoker.checkpoint.snapshot.claims import Claim, Deal
from stoker.errors import CheckpointError

# Options that a job must have alike; limits, addresses and time limits may be a rank's own.
_ALIKE = ("every", "keep", "overlap", "when_busy", "on_failure", "chunk_bytes", "replicas")


@dataclass(frozen=True, kw_only=True)
class Standing:
    """What a rank is about to do: the ranks of a job must mean the same."""

    doing: str  # "save" or "restore"
    step: int = 0
    objects: list[str] = field(default_factory=list)
    options: dict[str, str] = field(default_factory=dict)

    @cached_property
    def digest(self) -> str:
        return digest_of(self.to_json().decode())

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), sort_keys=True).encode()

    def check(self, other: Standing, rank: int) -> None:
        """Refuse another rank that means something else."""
        if other.step != self.step:
            raise CheckpointError(
                f"rank 0 is to {self.doing} step {self.step}, rank {rank} step {other.step}",
                hint="a checkpoint must be of one step: call step() on every rank with the same numbers",
            )
        if other.objects != self.objects:
            raise CheckpointError(
                f"rank 0 is to {self.doing} {self.objects}, rank {rank} {other.objects}",
                hint="give the same names on every rank; a rank that lacks one can give an empty dictionary",
            )
        differing = [key for key in self.options if self.options[key] != other.options.get(key)]
        if differing or other.doing != self.doing:
            key = differing[0] if differing else ""
            said = f"{key}={self.options[key]} and {other.options.get(key)}" if key else other.doing
            raise CheckpointError(
                f"ranks 0 and {rank} were told differently how to {self.doing}: {said}",
                hint="make the Checkpointer, and call it, with the same options on every rank",
            )


def standing_of_save(step: int, objects: Sequence[str], options: CheckpointOptions) -> Standing:
    told = {key: repr(getattr(options, key)) for key in _ALIKE}
    return Standing(doing="save", step=step, objects=sorted(objects), options=told)


def digest_of(text: str) -> str:
    return xxhash.xxh3_64_hexdigest(text.encode())


# --- claims and deals ---------------------------------------------------------------------------------


def claims_note(claims: Sequence[Claim]) -> bytes:
    meshes = {mesh: at for at, mesh in enumerate(dict.fromkeys(claim.mesh for claim in claims))}
    rows = [
        [plain_path(one.box.path), one.box.dtype, one.box.shape, one.box.offsets, one.box.sizes,
         meshes[one.mesh], one.digest, one.alias, one.free]
        for one in claims
    ]  # fmt: skip
    return json.dumps({"meshes": list(meshes), "rows": rows}, separators=(",", ":")).encode()


def claims_from(note: bytes) -> list[Claim]:
    plain = json.loads(note)
    meshes = [tuple(mesh) for mesh in plain["meshes"]]
    return [_claim(row, meshes) for row in plain["rows"]]


def _claim(row: list[Any], meshes: Sequence[tuple[int, ...]]) -> Claim:
    path, dtype, shape, offsets, sizes, mesh, digest, alias, free = row
    box = Box(
        path=read_path(path), dtype=dtype, shape=tuple(shape), offsets=tuple(offsets), sizes=tuple(sizes)
    )
    return Claim(box=box, mesh=meshes[mesh], digest=digest, alias=alias, free=free)


@dataclass(frozen=True, kw_only=True, slots=True)
class Dealt:
    """What is dealt out to a rank; which of its claims others make too and hold alike, and which differ;
    whether those that are alike are so on all ranks."""

    deals: list[Deal]
    alike: list[int]
    apart: list[int]
    by_all: bool = False


def dealt_note(dealt: Dealt, claims: Sequence[Claim]) -> bytes:
    """The names are those of the claims, but for the objects' own, which may be marked."""
    rows = [
        [one.claim, one.row, one.rows, _first(one.path, claims[one.claim].box.path)] for one in dealt.deals
    ]
    plain = {"rows": rows, "alike": dealt.alike, "apart": dealt.apart, "by_all": dealt.by_all}
    return json.dumps(plain, separators=(",", ":")).encode()


def _first(path: Path, claimed: Path) -> str:
    return "" if path == claimed else str(path[0])


def dealt_from(note: bytes, claims: Sequence[Claim]) -> Dealt:
    plain = json.loads(note)
    deals = []
    for claim, row, rows, first in plain["rows"]:
        path = claims[claim].box.path
        deals.append(Deal(claim=claim, row=row, rows=rows, path=(first, *path[1:]) if first else path))
    return Dealt(deals=deals, alike=plain["alike"], apart=plain["apart"], by_all=plain["by_all"])
