"""Settings reach a program from outside, and a trial leaves what lay there alone: real programs."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stoker.tune.trial import Bench, Span
from stoker.watch.command import Options, watch
from stoker.watch.inside.guard import is_passing
from stoker.watch.inside.knobs import Knobs, queued
from stoker.watch.runs import read_recording

pytestmark = pytest.mark.integration

LOADERS = """
import json, sys, torch
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(64, 4))
train = DataLoader(data, batch_size=8, num_workers=0)
val = DataLoader(data, batch_size=8)
for (rows,) in train:
    loss = model(rows).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(json.dumps({
    "train": [train.num_workers, train.persistent_workers, train.prefetch_factor],
    "val": val.num_workers,
    "threads": torch.get_num_threads(),
    "fused": optimizer.defaults["fused"],
    "variable": __import__("os").environ.get("OMP_WAIT_POLICY"),
}))
"""


def watched(folder: Path, program: str, told: dict[str, Any]) -> tuple[int, str]:
    """Run it under the settings; its exit code and its last line."""
    (folder / "train.py").write_text(program)
    (folder / "knobs.json").write_text(json.dumps(told))
    options = Options(
        folder=folder / "run", apply=folder / "knobs.json", output=folder / "out.log", gpu="none"
    )
    code = watch([sys.executable, str(folder / "train.py")], options)
    return code, (folder / "out.log").read_text().strip().splitlines()[-1]


def test_the_loader_of_one_line_is_set_and_no_other(tmp_path: Path) -> None:
    line = "train = DataLoader(data, batch_size=8, num_workers=0)"
    knobs = {
        "num_workers": 1,
        "persistent_workers": True,
        "prefetch_factor": 4,
        "torch_threads": 1,
        "fused_optimizer": True,
        "OMP_WAIT_POLICY": "passive",
    }
    site = {"file": "elsewhere/train.py", "text": line}
    code, said = watched(tmp_path, LOADERS, {"knobs": knobs, "site": site, "trial": 1.0})
    assert code == 0, said
    assert json.loads(said) == {
        "train": [1, True, 4], "val": 0, "threads": 1, "fused": True, "variable": "passive"
    }  # fmt: skip
    facts = read_recording(tmp_path / "run").facts
    built = facts["loaders"][facts["loader"]["number"]]
    assert (built["text"], built["line"], built["through"]) == (line, 8, [])
    assert len(facts["losses"]) == 5


def test_a_program_applies_the_settings_itself(
    tmp_path: Path, stoker_environ: Callable[..., dict[str, str]]
) -> None:
    (tmp_path / "tuned.json").write_text(json.dumps({"knobs": {"num_workers": 2, "torch_threads": 1}}))
    program = f"import stoker; stoker.apply({str(tmp_path / 'tuned.json')!r})\n"
    program += "import torch; from torch.utils.data import DataLoader\n"
    program += "print(DataLoader([1], 1).num_workers, torch.get_num_threads())"
    done = subprocess.run(
        [sys.executable, "-c", program], env=stoker_environ(), capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == ["2", "1"], done.stderr


OVERWRITES = """
import os, sys, torch
from torch.utils.data import DataLoader
tried = {
    "torch.save": lambda: torch.save({}, "best.pt"),
    "open": lambda: open("best.pt", "w"),
    "replace": lambda: (open("new.pt", "w").close(), os.replace("new.pt", "best.pt")),
    "remove": lambda: os.remove("best.pt"),
    "rmtree": lambda: __import__("shutil").rmtree("old"),
}
refused = []
for name, call in tried.items():
    try:
        call()
    except PermissionError as error:
        refused.append(name)
torch.save({}, "mine.pt"); torch.save({}, "mine.pt")
open("log.txt", "a").write("appended")
os.makedirs(".cache", exist_ok=True); open(".cache/x", "w"); open(".cache/x", "w")
print(*refused)
"""


def test_a_trial_neither_overwrites_nor_deletes_what_lay_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old").mkdir()
    for name in ("best.pt", "log.txt", "old/epoch.pt"):
        (tmp_path / name).write_text("weeks of work")
    began = max(os.stat("best.pt").st_ctime, os.stat("old/epoch.pt").st_ctime) + 1e-6
    while time.time() <= began + 0.02:  # files of the trial are younger, by the clock of files
        time.sleep(0.005)
    code, said = watched(tmp_path, OVERWRITES, {"knobs": {}, "trial": began})
    assert (code, said) == (0, "torch.save open replace remove rmtree")
    assert (tmp_path / "best.pt").read_text() == (tmp_path / "old/epoch.pt").read_text() == "weeks of work"


@pytest.mark.parametrize(
    ("name", "passing"),
    [
        ("/home/me/run/best.pt", False),
        ("/home/me/.cache/huggingface/x", True),
        ("/home/me/run/__pycache__/a.pyc", True),
        ("/dev/null", True),
        ("/tmp/torchinductor_me/x.so", True),
        ("/home/me/data.lock", True),
    ],
)
def test_caches_and_devices_are_nobody_s_work(name: str, passing: bool) -> None:
    assert is_passing(name) is passing


def test_a_file_that_is_none_of_tune_s_is_refused(tmp_path: Path) -> None:
    from stoker.errors import BadInputError

    for text in ("", "[1]", '{"a": 1}', "{"):
        (tmp_path / "x.json").write_text(text)
        with pytest.raises(BadInputError) as refused:
            Knobs.read(tmp_path / "x.json")
        assert refused.value.hint


# Two workers make ten batches a second, and while the program starts they have made sixteen that lie ready.
AHEAD = """
import time, torch
from torch.utils.data import DataLoader, Dataset
class Slow(Dataset):
    def __len__(self): return 400
    def __getitem__(self, number):
        time.sleep(0.2)
        return torch.ones(2)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for number, rows in enumerate(DataLoader(Slow(), batch_size=1, num_workers=2, prefetch_factor=8)):
    if number < 2:
        time.sleep(1.0)
    model(rows).mean().backward(); optimizer.step(); optimizer.zero_grad()
"""


def test_a_trial_measures_what_workers_make_and_not_what_lay_ready(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(AHEAD)
    bench = Bench(command=[sys.executable, str(tmp_path / "train.py")], folder=tmp_path / "trials")
    span = Span(settle=5, last=13, empty_at=4)
    told = bench.run({}, span, lost_s=math.inf, usual_s=1.0, start_s=2.0)
    assert (
        told.seconds >= 0.55
    )  # eight batches of two workers; seven of them cannot come sooner than in 0.6 s
    flattered = bench.run({}, replace(span, empty_at=0), lost_s=math.inf, usual_s=1.0, start_s=2.0)
    assert flattered.seconds < math.inf


@pytest.mark.parametrize(
    ("left", "workers", "trains", "ready"),
    [(100, 4, True, 8), (15, 4, True, 0), (100, 0, True, 0), (100, 4, False, 0)],
)
def test_queues_are_emptied_only_where_an_epoch_has_enough_left(left, workers, trains, ready) -> None:
    torch = pytest.importorskip("torch")
    made = SimpleNamespace(
        _num_workers=workers,
        _prefetch_factor=2 if workers else None,
        _num_yielded=5,
        _index_sampler=range(left + 5),
    )
    with torch.set_grad_enabled(trains):
        assert queued(made) == ready
    endless = SimpleNamespace(_num_workers=4, _prefetch_factor=2, _num_yielded=5, _index_sampler=iter(()))
    assert queued(endless) == 0
