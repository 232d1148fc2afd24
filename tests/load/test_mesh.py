"""Meshes: the same batch inside tensor and pipeline groups, parts of it over context, shares over data."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pytest

from stoker import Image, Loader, World
from stoker.errors import UsageError
from stoker.load.mesh import roles_of, spot_at

OPTIONS = {"batch_size": 2, "seq_len": 32, "output": "numpy", "dtype": None}


@dataclass(frozen=True)
class Mesh:
    """What a loader asks of a torch DeviceMesh, at one of its coordinates."""

    mesh_dim_names: tuple[str, ...] | None
    mesh: Any
    coordinate: tuple[int, ...] | None

    def get_coordinate(self):
        return None if self.coordinate is None else list(self.coordinate)


def batches_of(corpus, names, shape, *, state=None, steps=4, **options):
    """Of each coordinate of a mesh: its batches, and the state after them."""
    ranks, found, states = np.arange(np.prod(shape)).reshape(shape), {}, []
    for coordinate in product(*map(range, shape)):
        spot = spot_at(roles_of(names, {}), ranks, coordinate, World())
        with Loader(corpus, mesh=spot, **{**OPTIONS, **options}) as loader:
            if state:
                loader.load_state_dict(state)
            found[coordinate] = [batch for _, batch in zip(range(steps), loader, strict=False)]
            states.append(loader.state_dict())
    assert all(one == states[0] for one in states)
    return found, states[0]


def rows(batches):
    return np.concatenate([batch["input_ids"] for batch in batches])


@pytest.mark.parametrize("packing", ["concat", "pad", "buckets", "best-fit"])
def test_ranks_of_a_mesh_get_what_their_dimensions_are_for(corpus, packing):
    found, _ = batches_of(corpus, ("dp", "cp", "tp"), (2, 2, 2), packing=packing)
    for dp, cp in product(range(2), range(2)):
        one, two = found[dp, cp, 0], found[dp, cp, 1]
        assert all((a["input_ids"] == b["input_ids"]).all() for a, b in zip(one, two, strict=True))
    whole = {}
    for dp in range(2):
        alone, _ = batches_of(corpus, ("dp",), (2,), packing=packing)
        parts = [found[dp, cp, 0] for cp in range(2)]
        for batch, low, high in zip(alone[dp,], *parts, strict=True):
            for name in ("input_ids", "labels"):
                assert (np.concatenate([low[name], high[name]], axis=1) == batch[name]).all()
            width = batch["input_ids"].shape[1]
            if packing in ("concat", "pad"):
                assert (high["position_ids"] == np.arange(width // 2, width)).all()
        whole[dp] = rows(alone[dp,])
    if packing == "concat":
        assert not set(whole[0][:, 0].tolist()) & set(whole[1][:, 0].tolist())


def test_head_and_tail_go_to_the_same_rank(corpus):
    found, _ = batches_of(corpus, ("cp",), (4,), mesh_layout="head-tail")
    (alone,), _ = batches_of(corpus, ("dp",), (1,))[0].values(), None
    for cp in range(4):
        for batch, mine in zip(alone, found[cp,], strict=True):
            columns = [*range(cp * 4, cp * 4 + 4), *range((7 - cp) * 4, (7 - cp) * 4 + 4)]
            assert (mine["input_ids"] == batch["input_ids"][:, columns]).all()
            assert (mine["labels"] == batch["labels"][:, columns]).all()
            assert (mine["position_ids"] == columns).all()


def test_a_resume_with_another_mesh_goes_on_exactly(corpus):
    before, state = batches_of(corpus, ("dp", "tp"), (4, 2), steps=3)
    after, _ = batches_of(corpus, ("dp", "pp"), (2, 2), state=state, steps=1 << 30)
    seen = [
        row[0] for mesh in (before, after) for at in mesh if at[1] == 0 for row in rows(mesh[at]).tolist()
    ]
    assert len(set(seen)) == len(seen)
    with Loader(corpus, **OPTIONS) as loader:
        assert len(seen) >= len(loader) * 2 - 8


def test_data_ranks_of_a_node_stay_together():
    ranks = np.arange(16).reshape(4, 2, 2)
    around = World(rank=13, size=16, local_rank=5, local_size=8, node=1, nodes=2)
    spot = spot_at(roles_of(("dp", "cp", "tp"), {}), ranks, (3, 0, 1), around)
    assert (spot.world.rank, spot.world.size, spot.world.node, spot.world.nodes) == (3, 4, 1, 2)
    across = spot_at(roles_of(("tp", "dp"), {}), np.arange(16).reshape(2, 8), (1, 5), around)
    assert (across.world.rank, across.world.nodes) == (5, 1)  # every batch is read on both nodes


@pytest.mark.parametrize(
    ("mesh", "options", "said"),
    [
        (Mesh(("dp",), np.arange(2), (0,)), {}, "not of 1"),
        (Mesh(None, np.arange(1), (0,)), {}, "have no names"),
        (Mesh(("dp",), np.arange(1), None), {}, "not in the mesh"),
        (Mesh(("who",), np.arange(1), (0,)), {}, "'who' of the mesh is for"),
        (Mesh(("dp",), np.arange(1), (0,)), {"mesh_dims": {"tp": "same"}}, "mesh_dims has tp"),
        (Mesh(("dp",), np.arange(1), (0,)), {"mesh_dims": {"dp": "odd"}}, "mesh_dims has dp: 'odd'"),
        (Mesh(("dp",), np.arange(1), (0,)), {"world": World()}, "both say"),
        (7, {}, "is no mesh"),
    ],
)
def test_a_mesh_that_cannot_be_is_refused(corpus, mesh, options, said):
    with pytest.raises(UsageError, match=said):
        Loader(corpus, mesh=mesh, **OPTIONS, **options)


def test_rows_that_cannot_be_cut_are_refused(corpus):
    spot = spot_at(["sequence"], np.arange(3), (0,), World())
    with pytest.raises(UsageError, match="cannot be cut into 3 pieces"):
        Loader(corpus, mesh=spot, **OPTIONS)
    with pytest.raises(UsageError, match="cannot be cut"):
        Loader(np.arange(10), batch_size=2, mesh=spot)
    with pytest.raises(UsageError, match="cannot be cut"):
        Loader(corpus, mesh=spot_at(["sequence"], np.arange(2), (0,), World()), image=Image(), **OPTIONS)


def test_worker_processes_and_copies_keep_their_spot(corpus):
    import pickle

    spot = spot_at(["data", "sequence"], np.arange(4).reshape(2, 2), (1, 1), World())
    with Loader(corpus, mesh=spot, **OPTIONS) as loader:
        with Loader(corpus, mesh=spot, workers="process", processes=1, **OPTIONS) as workers:
            one, two = next(iter(loader)), next(iter(workers))
            assert one["input_ids"].shape == (2, 16)
            assert (one["input_ids"] == two["input_ids"]).all()
        following = next(iter(loader))
        loader.load_state_dict(loader.state_dict())
        copied = pickle.loads(pickle.dumps(loader))
    with copied:
        assert next(iter(copied))["input_ids"].shape == following["input_ids"].shape
