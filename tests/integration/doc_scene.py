"""What the pages take for given: data, a tokenizer, a corpus, a training script, a model and checkpoints."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from doc_blocks import ROOT, Block, blocks

sys.path.insert(0, str(ROOT / "tests" / "load"))

from PIL import Image
from small_datasets import make_tars

SOURCE = ROOT / "src"

STOKER = """#!/bin/sh
# 1 is a finding of these two, not a failure
PYTHONPATH="{source}:$PYTHONPATH" "{python}" -m stoker.cli "$@" && exit
code=$?
case "$code $1" in "1 diagnose" | "1 doctor") exit 0 ;; esac
exit $code
"""

TRAIN = """
import sys, torch
from torch.utils.data import DataLoader, TensorDataset
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch, in DataLoader(TensorDataset(torch.randn(640, 64)), batch_size=8):
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""

# Names that pages use without making them. `train` is a step, whose loss is written down with its number.
GIVEN = """
import os, signal, sys
from pathlib import Path
import torch
import stoker

torch.manual_seed(0)

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(2000, 8), torch.nn.Linear(8, 2000)

    def forward(self, ids, labels):
        return torch.nn.functional.cross_entropy(self.head(self.embed(ids)).flatten(0, 1), labels.flatten())

model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
losses, end_at = [], int(os.environ.get("END_AT", 0))
how = getattr(signal, os.environ.get("END_BY", "SIGKILL"))

def train(ids, labels):
    loss = model(ids, labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
    if len(losses) == end_at:
        os.kill(os.getpid(), how)

class Noted(stoker.Checkpointer):
    def step(self, step, /, **objects):
        with open("steps", "a") as file:
            print(step, repr(losses[-1]) if losses else "", file=file)
        return super().step(step, **objects)

stoker.Checkpointer = Noted

def decode(sample):
    return {"n": int(sample["id.txt"])}
"""

# And where a page goes on with the saver that it made further up.
SAVER = """
step, saver = 3, stoker.Checkpointer("nvme/run1")
"""


# What takes a command to make: a corpus, a watched run, a run with two checkpoints, weights of others.
MADE = (
    "stoker prepare data --tokenizer tokenizer.json --out corpus",
    "stoker prepare photos --out imageset",
    "stoker watch --out run -- python train.py",
    """python -c "$GIVEN
with stoker.Checkpointer('nvme/run1', every=1) as saver:
    for step in (1, 2):
        saver.step(step, model=model, optimizer=optimizer)
os.makedirs('models/llama')
torch.save(model.state_dict(), 'models/llama/pytorch_model.bin')
torch.save({'app': {'model': model.state_dict()}}, 'ckpt.pt')"
    rm steps""",
)


_USES_GIVEN = re.compile(r"\b(model|optimizer|train|decode|torch|Checkpointer)\b|stoker\.feed")


class Scene:
    """A folder as the pages assume it; every block gets its own copy."""

    def __init__(self, folder: Path, *, texts: list[str], tokenizer: Path, write_jsonl: Any) -> None:
        self._folder = folder
        for name in ("data", "logs", "books", "shared/raw", "etc/prometheus", "bin", "2026", "web", "code"):
            (folder / name).mkdir(parents=True)
        write_jsonl(folder / "data" / "a.jsonl", texts[:30])  # some 15 batches an epoch
        _compress(folder / "data" / "a.jsonl", folder / "logs" / "b.jsonl.zst")
        shutil.copy(folder / "logs" / "b.jsonl.zst", folder / "2026")
        (folder / "books" / "c.txt").write_text(texts[0])
        for name in ("web", "code"):
            write_jsonl(folder / name / "a.jsonl", [f"Page {number} of the {name}." for number in range(999)])
        shutil.copy(tokenizer, folder / "tokenizer.json")
        (folder / "train.py").write_text(TRAIN)
        (folder / "mycode.py").write_text("def scrub(text):\n    return text.replace('e', 'x')\n")
        (folder / "job.yaml").write_text(_block("plan.md", "yaml").text)
        (folder / "plan.json").write_text(_block("doctor.md", "json").text)
        script = folder / "bin" / "stoker"
        script.write_text(STOKER.format(source=SOURCE, python=sys.executable))
        script.chmod(0o755)
        (folder / "examples").symlink_to(ROOT / "examples")
        for number, name in enumerate(("cat", "dog")):
            (folder / "photos" / name).mkdir(parents=True)
            Image.new("RGB", (64, 48), (0, 90 * number, 0)).save(folder / "photos" / name / "1.jpg")
        (np.arange(20_000, dtype=np.uint16) % 2000).tofile(folder / "train.bin")
        make_tars(folder / "images", [40, 30])
        for command in MADE:
            done = run(["bash", "-euo", "pipefail", "-c", command], folder, {"GIVEN": GIVEN})
            assert done.returncode == 0, done.stderr[-3000:]

    @property
    def corpus(self) -> Path:
        return self._folder / "corpus"

    def copy_for(self, block: Block, folder: Path) -> Path:
        """The scene without what the block itself makes."""
        shutil.copytree(self._folder, folder, symlinks=True)
        for name in ("corpus", "run", "imageset"):
            if f"--out {name}" in block.text:
                shutil.rmtree(folder / name)
        if "prepare index images" in block.text:
            (folder / "images" / "manifest.json").unlink()
        if "Checkpointer" in block.text or "dcp" in block.text:
            shutil.rmtree(folder / "nvme")
        return folder

    def fill_stores(self, root: Path, block: Block) -> None:
        """The buckets of the pages."""
        wanted = {"bucket/web": "data", "raw/2026": "2026", "bucket/model": "books"}
        wanted |= {"bucket/corpus": "corpus", "corpora/web": None, "bucket/run1": None}
        for name, source in wanted.items():
            shutil.rmtree(root / name, ignore_errors=True)
            if source and f"--out s3://{name}" not in block.text:
                shutil.copytree(self._folder / source, root / name)
            else:
                (root / name).parent.mkdir(exist_ok=True)


def run_block(block: Block, folder: Path, environ: dict[str, str], *, timeout: float = 120) -> None:
    """Run it as a person would; what it prints is shown when it fails."""
    named = {
        "AWS_ACCESS_KEY_ID=...": f"AWS_ACCESS_KEY_ID={environ['AWS_ACCESS_KEY_ID']}",
        "AWS_SECRET_ACCESS_KEY=...": f"AWS_SECRET_ACCESS_KEY={environ['AWS_SECRET_ACCESS_KEY']}",
        "AWS_REGION=eu-central-1": f"AWS_REGION={environ['AWS_REGION']}",
        "https://store.example": environ["AWS_ENDPOINT_URL"],
    }
    script = block.script(folder, also=named)
    if block.language == "python":
        given = GIVEN if _USES_GIVEN.search(script) else ""
        if "saver." in script and "saver = " not in script:
            given += SAVER
        command = [sys.executable, "-c", given + script]
    else:
        command = ["bash", "-euo", "pipefail", "-c", script]
    done = run(command, folder, environ, timeout=timeout)
    assert done.returncode == 0, f"{block.name}: exit {done.returncode}\n{script}\n{done.stderr[-3000:]}"


def run(
    command: list[str], folder: Path, environ: dict[str, str], *, timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
    surroundings = {**os.environ, **environ, "PATH": path, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command,
        cwd=folder,
        env=surroundings,
        capture_output=True,
        text=True,
        timeout=timeout,
        stdin=subprocess.DEVNULL,
    )


def _block(page: str, language: str) -> Block:
    return next(one for one in blocks(ROOT / "docs" / "guides" / page) if one.language == language)


def _compress(source: Path, target: Path) -> None:
    from stoker.formats.zstd import SeekableWriter

    with target.open("wb") as file:
        writer = SeekableWriter(file, frame_bytes=1 << 20)
        writer.write(source.read_bytes())
        writer.close()
