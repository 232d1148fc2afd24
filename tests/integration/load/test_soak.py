"""An hour of training, compressed in time: what a loader holds does not grow. Readers are given: tuned ones
follow how busy the machine is.

A step of half a second makes 7,200 batches an hour. They are taken as fast as they come, over many epochs,
with a checkpoint of the position now and then, and memory, threads and files are counted on the way. (Windows
of tokens are soaked in test_ranks.)
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "load"))

from small_datasets import make_tars, make_tokens

pytestmark = pytest.mark.integration

SOAK = """
import gc, json, os, sys
from pathlib import Path
import stoker

def held():
    gc.collect()
    fields = dict(line.split(":", 1) for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    private = sum(int(fields[name].split()[0]) for name in ("Private_Clean", "Private_Dirty"))
    threads, files = (len(os.listdir(f"/proc/self/{what}")) for what in ("task", "fd"))
    return {"kib": private, "threads": threads, "files": files}

seen, batches = [], 0
with stoker.Loader(sys.argv[1], **json.loads(sys.argv[2])) as loader:
    while batches < 7200:
        for batch in loader:
            batches += 1
            if batches % 500 == 0:
                loader.state_dict()
            if batches % 600 == 0:
                seen.append(held())
print(json.dumps(seen))
"""


def test_an_hour_of_packed_documents_holds_no_more_than_its_beginning(tmp_path):
    folder = make_tokens(tmp_path / "corpus", [[37, 400, 5] * 300, [900] * 90, [33] * 500])
    check_flat(soak(folder, batch_size=4, seq_len=256, chunk_bytes=4096, packing="best-fit", readers=2))


def test_an_hour_of_samples_through_processes_holds_no_more_than_its_beginning(tmp_path):
    folder = make_tars(tmp_path / "tars", [300, 200, 100])
    check_flat(soak(folder, batch_size=2, workers="process", processes=2, readers=2))


def soak(folder: Path, **options) -> list[dict[str, int]]:
    command = [sys.executable, "-c", SOAK, str(folder), json.dumps(options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, int]] = json.loads(done.stdout)
    return found


def check_flat(seen: list[dict[str, int]]) -> None:
    """The second half hour holds no more than the first, in which the loader found how deep to queue."""
    first, second = seen[:6], seen[6:]
    assert len(second) == 6
    for name, tolerance in {"threads": 0, "files": 0, "kib": 4096}.items():
        most = max(one[name] for one in first)
        assert max(one[name] for one in second) <= most + tolerance, seen
