"""Deduplication, checked: what ranks claim to hold is compared, and dealt out: who writes what, named how.

A claim is a box of a tensor, the ranks that share the tensor by its own account (a DTensor's mesh), and a
digest of its bytes. Ranks of one mesh hold one tensor: its boxes must cover it exactly once, and boxes that
several hold must be equal. Plain tensors and other meshes of the same name are the same tensor if they are
equal, and are saved apart, under names that say whose they are, if they are not. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from stoker.checkpoint.saved.apart import marked, unmarked
from stoker.checkpoint.saved.cover import cover_fault
from stoker.checkpoint.saved.layout import Box, Path
from stoker.errors import CheckpointError

# A tensor that many ranks hold is cut into slabs of rows of this size, so that none writes it all.
SLAB_BYTES = 32 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """A box that a rank says it holds."""

    box: Box
    mesh: tuple[int, ...] = ()  # ranks that hold this tensor together; none: this one, for itself
    digest: int = 0  # of its bytes; 0 also where it was not taken
    alias: int = -1  # the claim of this rank with the same memory
    free: bool = False  # a module's buffer: may drift apart, and the first rank's is the one to go on with


@dataclass(frozen=True, kw_only=True, slots=True)
class Deal:
    """What a rank is to write: some rows of what it claimed, under this path; or, of no rows, the name of a
    tensor whose memory is written for another."""

    claim: int
    path: Path
    row: int = 0
    rows: int = -1  # all


@dataclass(kw_only=True, slots=True)
class _Held:
    """One version of a tensor: whose it is, and which claim of theirs holds which box."""

    ranks: set[int]
    boxes: dict[Box, list[tuple[int, int]]]  # a box → (rank, claim) of those that hold it
    digest: dict[Box, int]

    def is_like(self, other: _Held) -> bool:
        return self.digest == other.digest

    def add(self, other: _Held) -> None:
        self.ranks |= other.ranks
        for box, holders in other.boxes.items():
            self.boxes[box].extend(holders)


Held = Sequence[Sequence[Claim]]  # by rank


def deal(held: Held, *, slab_bytes: int = SLAB_BYTES, trust: bool = False) -> list[list[Deal]]:
    """Who writes what, so that each box is written once, by one of those that hold it, and all write about
    as much; refuses claims that contradict each other, unless they are to be trusted."""
    versions = {path: _versions(path, some, held, trust=trust) for path, some in _by_path(held).items()}
    dealt: list[list[Deal]] = [[] for _ in held]
    load = [0] * len(held)
    units = []
    for path, some in versions.items():
        for name, version in _named(path, some, held):
            if _is_alias(version, held, versions):
                for rank, at in (one for holders in version.boxes.values() for one in holders):
                    dealt[rank].append(Deal(claim=at, path=name, rows=0))
                continue
            units += [
                unit
                for box, holders in version.boxes.items()
                for unit in _slabs(box, holders, name, slab_bytes)
            ]
    # what only one can write first, then the largest first: the small ones even out what is left
    order = sorted(range(len(units)), key=lambda at: (len(units[at][1]) > 1, -units[at][0].bytes))
    chosen: list[tuple[int, Deal]] = [(0, Deal(claim=0, path=()))] * len(units)
    for at in order:
        box, holders, name, row = units[at]
        rank, claim = min(holders, key=lambda one: load[one[0]])
        load[rank] += box.bytes
        rows = -1 if box.sizes == held[rank][claim].box.sizes else box.sizes[0]
        chosen[at] = (rank, Deal(claim=claim, path=name, row=row, rows=rows))
    for rank, one in chosen:
        dealt[rank].append(one)
    return dealt


def told_apart(held: Held, dealt: Sequence[Sequence[Deal]]) -> list[tuple[list[int], list[int]]]:
    """For each rank which of its claims another rank makes too and holds alike, and which differ."""
    makers = _makers(held)
    apart = {plain for mine in dealt for one in mine for plain, ranks in [unmarked(one.path)] if ranks}
    return [
        (
            [at for at, one in enumerate(claims) if makers[one.box.path] > 1 and one.box.path not in apart],
            [at for at, one in enumerate(claims) if one.box.path in apart],
        )
        for claims in held
    ]


def is_shared_by_all(held: Held) -> bool:
    """Whether whatever several ranks claim all of them do, each for itself: then all can watch the same."""
    makers = _makers(held)
    shared = [claim for claims in held for claim in claims if makers[claim.box.path] > 1]
    return all(makers[one.box.path] == len(held) for one in shared) and any(not one.mesh for one in shared)


def _makers(held: Held) -> dict[Path, int]:
    """How many ranks claim something of a path."""
    makers: dict[Path, int] = {}
    for claims in held:
        for path in {claim.box.path for claim in claims}:
            makers[path] = makers.get(path, 0) + 1
    return makers


def slab(claim: Claim, one: Deal) -> Box:
    """The box that a deal means, under its name in the checkpoint."""
    box = replace(claim.box, path=one.path)
    if one.rows < 0:
        return box
    offsets, sizes = (box.offsets[0] + one.row, *box.offsets[1:]), (one.rows, *box.sizes[1:])
    return replace(box, offsets=offsets, sizes=sizes)


def _by_path(held: Held) -> dict[Path, list[tuple[int, int]]]:
    """(rank, claim) of every path."""
    found: dict[Path, list[tuple[int, int]]] = {}
    for rank, claims in enumerate(held):
        for at, claim in enumerate(claims):
            found.setdefault(claim.box.path, []).append((rank, at))
    return found


def _versions(path: Path, some: Sequence[tuple[int, int]], held: Held, *, trust: bool) -> list[_Held]:
    """The different tensors of one name."""
    found: list[_Held] = []
    for version in _by_mesh(some, held):
        _check(version, held, trust=trust)
        like = next((one for one in found if one.is_like(version)), None)
        if like is None:
            found.append(version)
        else:
            like.add(version)
    return found


def _by_mesh(some: Sequence[tuple[int, int]], held: Held) -> Iterator[_Held]:
    """What the ranks of a mesh hold together; a plain tensor is a rank's own."""
    meshes: dict[tuple[int, ...], _Held] = {}
    for rank, at in some:
        claim = held[rank][at]
        ranks = claim.mesh or (rank,)
        one = meshes.setdefault(ranks, _Held(ranks=set(ranks), boxes={}, digest={}))
        one.boxes.setdefault(claim.box, []).append((rank, at))
        one.digest.setdefault(claim.box, claim.digest)
    yield from meshes.values()


def _check(version: _Held, held: Held, *, trust: bool) -> None:
    boxes = list(version.boxes)
    if fault := cover_fault(boxes):
        raise CheckpointError(
            f"{fault} (ranks {sorted(version.ranks)} say that they hold it together)",
            hint="every rank must save the same objects, made with the same mesh and placements",
        )
    for box, holders in version.boxes.items():
        first, _ = holders[0]
        strangers = [rank for rank, at in holders if held[rank][at].digest != version.digest[box]]
        if strangers and not trust:
            raise CheckpointError(
                f"ranks {first} and {strangers[0]} say that they hold {box.name} alike, and their values "
                "differ",
                hint="its replicas have drifted apart: look for a missing all-reduce; "
                "replicas='first' saves those of the first rank",
            )
        version.boxes[box] = [(rank, at) for rank, at in holders if rank not in strangers]


def _named(path: Path, versions: Sequence[_Held], held: Held) -> Iterator[tuple[Path, _Held]]:
    """Each version with its path in the checkpoint."""
    first = min(versions, key=lambda one: min(one.ranks))
    rank, at = next(iter(first.boxes.values()))[0]
    for one in versions:
        plain = len(versions) == 1 or (one is first and held[rank][at].free)
        yield (path if plain else marked(path, one.ranks)), one


def _is_alias(version: _Held, held: Held, versions: dict[Path, list[_Held]]) -> bool:
    """Whether every rank that holds this keeps it in the memory of one and the same other tensor, and they
    hold that alike too: then it need not be written again."""
    holders = [(rank, held[rank][at].alias) for some in version.boxes.values() for rank, at in some]
    if any(alias < 0 for _, alias in holders):
        return False
    paths = {held[rank][alias].box.path for rank, alias in holders}
    if len(paths) > 1:
        return False
    return any(one.ranks == version.ranks for one in versions[paths.pop()])


_Unit = tuple[Box, list[tuple[int, int]], Path, int]  # a slab, who holds it, its path, its first row


def _slabs(box: Box, holders: list[tuple[int, int]], name: Path, slab_bytes: int) -> list[_Unit]:
    """A box cut into slabs of rows, at most one for each rank that holds it."""
    count = min(len(holders), -(-box.bytes // slab_bytes), box.sizes[0] if box.sizes else 1)
    if count <= 1:
        return [(box, holders, name, 0)]
    bounds = [box.sizes[0] * at // count for at in range(count + 1)]
    return [
        (replace(box, sizes=(stop - start, *box.sizes[1:])), holders, name, start)
        for start, stop in pairwise(bounds)
    ]
