"""Device meshes: which rank reads what, by the names of a mesh's dimensions.

Data-parallel ranks read shares of their own. Ranks that differ only in dimensions that split a model (tensor,
pipeline) read the same batch: each for itself, so that nobody waits for anybody; the first of a node to read
a block brings it into the page cache, and a cache of `stoker stage` is filled once for all of them.
Context-parallel ranks read the same rows, and each gets its part of their tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from stoker.errors import UsageError
from stoker.formats.sizes import counted
from stoker.load.assembly.rows import Batch
from stoker.world import World, torch_group

if TYPE_CHECKING:
    from stoker.load.options import LoaderOptions

Role = Literal["data", "same", "sequence"]
ROLES: tuple[Role, ...] = ("data", "same", "sequence")

# What people call the dimensions of their meshes. Experts are spread over ranks that have data of their own.
KNOWN: dict[str, Role] = {
    **dict.fromkeys(
        ("dp", "ddp", "fsdp", "hsdp", "dp_replicate", "dp_shard", "replicate", "shard", "data", "ep"), "data"
    ),
    **dict.fromkeys(("dp_shard_mod_ep", "dp_shard_in_ep", "edp", "expert", "data_parallel"), "data"),
    **dict.fromkeys(("tp", "pp", "mp", "etp", "tensor", "pipeline", "model"), "same"),
    **dict.fromkeys(("tensor_parallel", "pipeline_parallel", "model_parallel"), "same"),
    **dict.fromkeys(("cp", "context", "context_parallel"), "sequence"),
}

_WIDTH = 64  # rows in buckets are padded to multiples of this


@dataclass(frozen=True, kw_only=True, slots=True)
class Spot:
    """Where a rank stands in its mesh: among those that read, and which part of the tokens it gets."""

    world: World
    part: int = 0
    parts: int = 1


def spot_of(mesh: Any, roles: Mapping[str, Role]) -> Spot:
    """The spot of this rank in a torch DeviceMesh."""
    if isinstance(mesh, Spot):
        return mesh
    names, coordinate, ranks = _read(mesh)
    found = roles_of(names, roles)
    around = World.here()
    group = torch_group()
    size = group[1] if group else around.size
    if ranks.size != size or sorted(ranks.reshape(-1).tolist()) != list(range(size)):
        raise UsageError(
            f"the mesh {dict(zip(names, ranks.shape, strict=True))} is of {counted(ranks.size, 'rank')}, "
            f"not of {size}",
            hint="give the whole mesh, not a slice of it; or world=stoker.World(rank=..., size=...)",
        )
    return spot_at(found, ranks, coordinate, around)


def roles_of(names: Sequence[str], roles: Mapping[str, Role]) -> list[Role]:
    """What each dimension is for."""
    wrong = [f"{name}: {role!r}" for name, role in roles.items() if name not in names or role not in ROLES]
    if wrong:
        raise UsageError(
            f"mesh_dims has {', '.join(wrong)}; the mesh has {', '.join(names)}",
            hint="give dimensions of the mesh, each with 'data', 'same' or 'sequence'",
        )
    known = {**KNOWN, **roles}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UsageError(
            f"what the dimension {unknown[0]!r} of the mesh is for is not known",
            hint=f"say it with mesh_dims={{{unknown[0]!r}: ...}}: 'data' for ranks that read data of their "
            "own, 'same' for those that get the same batch, 'sequence' for those that get a part of it",
        )
    return [known[name] for name in names]


def spot_at(roles: Sequence[Role], ranks: Any, coordinate: Sequence[int], around: World) -> Spot:
    """The spot at a coordinate; `ranks` are those of the job, in the shape of the mesh."""
    data, size = _number(roles, "data", ranks.shape, coordinate)
    part, parts = _number(roles, "sequence", ranks.shape, coordinate)
    nodes = _nodes(roles, ranks, size, around)
    each = size // nodes
    world = World(
        rank=data,
        size=size,
        local_rank=data % each,
        local_size=each,
        node=data // each,
        nodes=nodes,
        launcher="mesh",
        run=around.run,
    )
    return Spot(world=world, part=part, parts=parts)


def _read(mesh: Any) -> tuple[Sequence[str], Sequence[int], Any]:
    try:
        names, coordinate, ranks = mesh.mesh_dim_names, mesh.get_coordinate(), np.array(mesh.mesh.tolist())
    except AttributeError as error:
        raise UsageError(
            f"a {type(mesh).__name__} is no mesh", hint="give what torch's init_device_mesh gave"
        ) from error
    if not names:
        raise UsageError(
            "the dimensions of the mesh have no names",
            hint="init_device_mesh(..., mesh_dim_names=('dp', 'cp', 'tp'))",
        )
    if coordinate is None:
        raise UsageError("this rank is not in the mesh", hint="give a mesh of all ranks of the job")
    return names, coordinate, ranks


def _number(
    roles: Sequence[Role], role: Role, shape: Sequence[int], coordinate: Sequence[int]
) -> tuple[int, int]:
    """Which of how many a coordinate is, by the dimensions of one role."""
    number, count = 0, 1
    for one, size, at in zip(roles, shape, coordinate, strict=True):
        if one == role:
            number, count = number * size + at, count * size
    return number, count


def _nodes(roles: Sequence[Role], ranks: Any, size: int, around: World) -> int:
    """Nodes, if each reads for as many data ranks of its own, side by side; else all count as one."""
    if around.nodes == 1 or size % around.nodes or around.size != ranks.size:
        return 1
    each = size // around.nodes
    for coordinate in product(*map(range, ranks.shape)):
        data, _ = _number(roles, "data", ranks.shape, coordinate)
        if int(ranks[coordinate]) // around.local_size != data // each:
            return 1
    return around.nodes


def slicer(spot: Spot, options: LoaderOptions) -> Callable[[Batch], Batch] | None:
    """What cuts a batch to this rank's part of its tokens; None where there is one part."""
    if spot.parts == 1:
        return None
    pieces = spot.parts * (2 if options.mesh_layout == "head-tail" else 1)
    widths = [options.seq_len, _WIDTH] if options.packing == "buckets" else [options.seq_len]
    if not options.seq_len or options.decodes or any(width % pieces for width in widths):
        raise UsageError(
            f"rows of {options.seq_len} tokens (packing={options.packing!r}) cannot be cut into {pieces} "
            f"pieces for {spot.parts} context-parallel ranks",
            hint=f"use a seq_len that {pieces} divides; for samples that are no rows of tokens, "
            "mesh_dims={'cp': 'same'} and cut them yourself",
        )
    mine = [spot.part]
    if options.mesh_layout == "head-tail":
        mine = [spot.part, 2 * spot.parts - 1 - spot.part]
    return lambda batch: _slice(batch, mine, pieces)


def _slice(batch: Batch, mine: Sequence[int], pieces: int) -> Batch:
    """Columns of tokens are cut; what counts rows, or whole rows laid end to end, stays. Where a token stands
    in its row is no longer to be seen, so it is said."""
    ids = batch["input_ids"]
    width = ids.shape[1]
    cut = {
        name: _pieces(column, mine, width // pieces)
        if len(getattr(column, "shape", ())) == 2 and column.shape[1] == width
        else column
        for name, column in batch.items()
    }
    if "position_ids" not in cut:
        cut["position_ids"] = _positions(ids, mine, width // pieces)
    return cut


def _pieces(column: Any, mine: Sequence[int], size: int) -> Any:
    if len(mine) == 1:
        return column[:, mine[0] * size : (mine[0] + 1) * size]
    rows = column.shape[0]
    return column.reshape(rows, -1, size)[:, list(mine)].reshape(rows, -1)


def _positions(ids: Any, mine: Sequence[int], size: int) -> Any:
    numbers = np.concatenate([np.arange(piece * size, (piece + 1) * size) for piece in mine])
    shape = (ids.shape[0], len(numbers))
    if isinstance(ids, np.ndarray):
        return np.broadcast_to(numbers, shape)
    return ids.new_tensor(numbers.tolist()).long().expand(shape)
