"""Real jobs: several ranks under torchrun, kill -9 in the middle, and a long run that must stay flat."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent.parent / "load"))

from small_datasets import make_tokens  # noqa: E402 - the path to it is set just above
from warm_launch import warm  # noqa: E402

from stoker.load.loader import Loader  # noqa: E402

pytestmark = pytest.mark.integration

OPTIONS = {"batch_size": 3, "seq_len": 32, "chunk_bytes": 2048, "seed": 5}


@pytest.fixture
def corpus(tmp_path):
    rng = np.random.default_rng(3)
    return make_tokens(tmp_path / "corpus", [rng.integers(1, 300, n).tolist() for n in (100, 7, 1, 300, 40)])


RANK_SCRIPT = """
    import json, os, sys
    import torch, torch.distributed as dist
    import stoker

    if __name__ == "__main__":
        folder, out, state, steps = sys.argv[1:5]
        dist.init_process_group("gloo")
        loader = stoker.Loader(folder, **json.loads(sys.argv[5]))
        if state != "-":
            loader.load_state_dict(json.load(open(state)))
        rows = []
        for batch in loader:
            # a collective per batch: ranks with another number of batches would hang here
            seen = [torch.zeros_like(batch["input_ids"]) for _ in range(dist.get_world_size())]
            dist.all_gather(seen, batch["input_ids"].contiguous())
            rows.append([[int(one[row, 0]) for one in seen] for row in range(len(batch["input_ids"]))])
            if len(rows) == int(steps):
                break
        if dist.get_rank() == 0:
            json.dump({"rows": rows, "state": loader.state_dict(), "length": len(loader)}, open(out, "w"))
        loader.close()
        dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def warm_ranks(stoker_environ):
    with warm("stoker.load.loader", "torch.distributed", environ=stoker_environ(OMP_NUM_THREADS="1")) as it:
        yield it


def torchrun(ranks, script, *arguments, log):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*map(str, (*command, script, *arguments))], check=True, timeout=120, env=environment)


def rows_of(launch, ranks, folder, tmp_path, *, state="-", steps=10**9):
    script, out = tmp_path / "rank.py", tmp_path / f"out-{ranks}-{steps}.json"
    script.write_text(textwrap.dedent(RANK_SCRIPT))
    launch(ranks, script, folder, out, state, steps, json.dumps(OPTIONS), log=tmp_path / "log")
    found = json.loads(out.read_text())
    return [row for batch in found["rows"] for turn in batch for row in turn], found


def one_rank(folder):
    with Loader(folder, **{**OPTIONS, "batch_size": 1, "output": "numpy", "workers": "inline"}) as loader:
        return [int(batch["input_ids"][0, 0]) for batch in loader]


def global_batches(rows, *, of):
    """Every so many rows as a set: which rank has which of them is a matter of its lanes."""
    return [sorted(rows[at : at + of]) for at in range(0, len(rows), of)]


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_under_torchrun_share_uneven_shards_without_hanging(corpus, tmp_path, ranks):
    rows, found = rows_of(torchrun, ranks, corpus, tmp_path)
    assert global_batches(rows, of=ranks) == global_batches(one_rank(corpus)[: len(rows)], of=ranks)
    assert len(found["rows"]) == found["length"]


def test_a_job_of_four_ranks_goes_on_with_two(warm_ranks, corpus, tmp_path):
    first, found = rows_of(warm_ranks.run, 4, corpus, tmp_path, steps=7)
    (tmp_path / "state.json").write_text(json.dumps(found["state"]))
    rest, _ = rows_of(warm_ranks.run, 2, corpus, tmp_path, state=tmp_path / "state.json")
    together = first + rest
    assert global_batches(together, of=4) == global_batches(one_rank(corpus)[: len(together)], of=4)


@pytest.mark.parametrize(("before", "after"), [(4, 5), pytest.param(4, 7, marks=pytest.mark.slow)])
def test_a_job_goes_on_with_ranks_that_divide_nothing_and_gets_every_window_once(
    warm_ranks, corpus, tmp_path, before, after
):
    first, found = rows_of(warm_ranks.run, before, corpus, tmp_path, steps=7)
    (tmp_path / "state.json").write_text(json.dumps(found["state"]))
    rest, _ = rows_of(warm_ranks.run, after, corpus, tmp_path, state=tmp_path / "state.json")
    left_out = Counter(one_rank(corpus)) - Counter(first + rest)
    assert left_out.total() == len(one_rank(corpus)) - len(first + rest)  # none came twice
    assert left_out.total() < after * OPTIONS["batch_size"]


KILLED_SCRIPT = """
    import json, os, sys
    import stoker

    if __name__ == "__main__":
        folder, state, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
        loader = stoker.Loader(folder, **options)
        if os.path.exists(state):
            loader.load_state_dict(json.load(open(state)))
        for batch in loader:
            saved = loader.state_dict()
            rows = batch["input_ids"][:, 0].tolist()
            print(json.dumps([saved["epoch"], saved["position"], rows]), flush=True)
            json.dump(saved, open(state + ".new", "w"))
            os.replace(state + ".new", state)
"""


def test_a_job_killed_with_9_goes_on_exactly_where_its_checkpoint_was(corpus, tmp_path):
    script, state = tmp_path / "job.py", tmp_path / "state.json"
    script.write_text(textwrap.dedent(KILLED_SCRIPT))
    seen = {}
    for batches in (5, 9, None):
        command = [sys.executable, script, corpus, state, json.dumps(OPTIONS)]
        with subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, text=True) as job:
            # to the end: between our reading a line and its death the job may have said and saved more
            for number, line in enumerate(job.stdout, start=1):
                if not line.endswith("\n"):
                    break
                epoch, position, rows = json.loads(line)
                # a batch after the last checkpoint of a killed job comes again, and must be the same
                assert seen.setdefault((epoch, position), rows) == rows
                if number == batches:
                    os.kill(job.pid, signal.SIGKILL)
    with Loader(corpus, **{**OPTIONS, "output": "numpy", "workers": "inline"}) as loader:
        whole = [batch["input_ids"][:, 0].tolist() for batch in loader]
    assert [seen[at] for at in sorted(seen)] == whole


def test_a_long_run_stays_flat_in_memory_threads_and_files(tmp_path):
    """An hour of a job of 100 steps a second: 360,000 batches."""
    folder = make_tokens(tmp_path / "corpus", [[50_000] * 20, [777] * 900])
    options = {"batch_size": 2, "seq_len": 256, "chunk_bytes": 16 << 10, "output": "numpy", "readers": 2}
    with Loader(folder, **options) as loader:
        run(loader, 40_000)
        before = facts()
        run(loader, 320_000)
        after = facts()
    assert after["threads"] <= before["threads"] + 1
    assert after["files"] <= before["files"]
    assert after["memory"] <= before["memory"] + (8 << 20)


def run(loader, batches):
    done = 0
    while done < batches:
        for _ in loader:
            done += 1


def facts():
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
    files = len(os.listdir("/proc/self/fd"))
    return {"memory": resident, "threads": threading.active_count(), "files": files}
