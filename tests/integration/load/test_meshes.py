"""A real mesh of 2 x 2 x 2 ranks on gloo, resumed with another one."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent.parent / "load"))

from small_datasets import make_tokens  # noqa: E402 - the path to it is set just above
from warm_launch import warm  # noqa: E402

pytestmark = pytest.mark.integration

SCRIPT = """
    import json, os, sys
    import torch, torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    import stoker

    if __name__ == "__main__":
        folder, out, state, steps, shape = sys.argv[1:6]
        mesh = init_device_mesh("cpu", json.loads(shape), mesh_dim_names=("dp", "cp", "tp"))
        feeder = stoker.feed(folder, mesh=mesh, batch_size=2, seq_len=32, device="cpu", workers="inline")
        if state != "-":
            feeder.load_state_dict(json.load(open(state)))
        rows = [batch["input_ids"].tolist() for _, batch in zip(range(int(steps)), feeder)]
        note = {"at": mesh.get_coordinate(), "rows": rows, "state": feeder.state_dict()}
        json.dump(note, open(f"{out}/{dist.get_rank()}.json", "w"))
        feeder.close()
        dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def warm_ranks(stoker_environ):
    with warm("stoker.load.loader", "torch.distributed", environ=stoker_environ(OMP_NUM_THREADS="1")) as it:
        yield it


def run(warm_ranks, tmp_path, corpus, shape, *, state="-", steps):
    script, out = tmp_path / "mesh.py", tmp_path / f"out{len(list(tmp_path.iterdir()))}"
    script.write_text(textwrap.dedent(SCRIPT))
    out.mkdir()
    arguments = (corpus, out, state, steps, json.dumps(shape))
    warm_ranks.run(int(np.prod(shape)), script, *arguments, log=tmp_path / "log")
    notes = [json.loads(path.read_text()) for path in sorted(out.iterdir())]
    assert all(note["state"] == notes[0]["state"] for note in notes)
    (tmp_path / "state.json").write_text(json.dumps(notes[0]["state"]))
    return {tuple(note["at"]): np.array(note["rows"]) for note in notes}


def test_a_mesh_of_eight_ranks_resumed_with_half_the_data_ranks(warm_ranks, tmp_path):
    corpus = make_tokens(tmp_path / "corpus", [[64] * 100, [300] * 20])
    first = run(warm_ranks, tmp_path, corpus, (4, 1, 2), steps=5)
    second = run(warm_ranks, tmp_path, corpus, (2, 2, 2), state=str(tmp_path / "state.json"), steps=1 << 30)
    for mesh in (first, second):
        for dp, cp, tp in mesh:
            assert (mesh[dp, cp, tp] == mesh[dp, cp, 0]).all()  # equal inside a tensor-parallel group
    assert second[0, 0, 0].shape[2] == 16  # a part of each row
    assert (second[0, 1, 0][..., 0] == second[0, 0, 0][..., -1] + 1).all()  # ids count up in this corpus
    seen = [first[dp, 0, 0][..., 0] for dp in range(4)] + [second[dp, 0, 0][..., 0] for dp in range(2)]
    ids = np.concatenate([one.reshape(-1) for one in seen]).tolist()
    assert len(set(ids)) == len(ids)
    assert len(ids) > (6400 - 1) // 32 + (6000 - 1) // 32 - 4
