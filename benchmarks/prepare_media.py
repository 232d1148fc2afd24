"""How fast does a folder of photographs become tars, beside webdataset's ShardWriter and litdata's optimize?

Question: photographs a second from a folder of class folders to shards, whole processes.
Method: made JPEGs of some 100 KB. webdataset: the usual loop, one process, a shuffled list, bytes copied as
they are, nothing checked. litdata: optimize() with two workers, bytes as they are, no shuffle. stoker: two
workers, shuffled, equal copies dropped, digests and manifest written, every image decoded; and with `--check
header`, which looks at headers alone. Rounds are interleaved; files are warm in the page cache; outputs are
synced. The load of the machine before is kept: where it is not near 0, others shared it.
Command: python benchmarks/prepare_media.py [--photos 2000] [--rounds 3]
Writes benchmarks/results/prepare_media.json.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
from PIL import Image

from kept_runs import keep

RESULTS = Path(__file__).parent / "results" / "prepare_media.json"
WEBDATASET = """
import pathlib, random, sys, webdataset
files = sorted(pathlib.Path(sys.argv[1]).glob("*/*.jpg"))
classes = sorted({file.parent.name for file in files})
random.Random(0).shuffle(files)
pathlib.Path(sys.argv[2]).mkdir()
with webdataset.ShardWriter(f"{sys.argv[2]}/shard-%05d.tar", maxsize=512 << 20, verbose=0) as sink:
    for number, file in enumerate(files):
        label = classes.index(file.parent.name)
        sink.write({"__key__": f"{number:08d}", "jpg": file.read_bytes(), "cls": label})
"""
LITDATA = """
import pathlib, sys, litdata
def read(path):
    return {"jpg": open(path, "rb").read(), "cls": int(pathlib.Path(path).parent.name[1:])}
if __name__ == "__main__":
    files = sorted(map(str, pathlib.Path(sys.argv[1]).glob("*/*.jpg")))
    litdata.optimize(fn=read, inputs=files, output_dir=sys.argv[2], chunk_bytes="512MB", num_workers=2)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--photos", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        photos = make_photos(Path(folder) / "photos", given.photos)
        seconds: dict[str, list[float]] = {}
        for _ in range(given.rounds):
            for name, command in contenders(Path(folder)).items():
                out = Path(folder) / "out"
                shutil.rmtree(out, ignore_errors=True)
                seconds.setdefault(name, []).append(timed(placed(command, photos, out), Path(folder)))
    size = sum(sizes) / len(sizes)
    rates = {name: round(given.photos / statistics.median(some), 1) for name, some in seconds.items()}
    report = {"photos": given.photos, "mean_bytes": round(size), "seconds": seconds, "photos_per_s": rates}
    report["versions"] = {name: found(name) for name in ("stoker", "webdataset", "litdata", "pillow")}
    report |= {"cores": os.cpu_count(), "load_before": round(load, 1)}
    keep(RESULTS, report)
    print(rates)


sizes: list[int] = []


def make_photos(root: Path, count: int) -> Path:
    """JPEGs of some 100 KB: noise made smooth, as large as a web image."""
    for number in range(count):
        folder = root / f"c{number % 10}"
        folder.mkdir(parents=True, exist_ok=True)
        noise = np.random.default_rng(number).integers(0, 255, (150, 200, 3), dtype=np.uint8)
        path = folder / f"{number}.jpg"
        Image.fromarray(noise).resize((640, 480), Image.Resampling.BILINEAR).save(path, quality=90)
        sizes.append(path.stat().st_size)
    return root


def contenders(folder: Path) -> dict[str, list[str]]:
    for name, program in (("wds.py", WEBDATASET), ("lit.py", LITDATA)):
        (folder / name).write_text(program)
    stoker = (
        "from stoker.cli import main; main(['prepare', *sys.argv[3:], sys.argv[1], '--out', sys.argv[2]])"
    )
    ours = [sys.executable, "-c", f"import sys; {stoker}"]
    commands = {
        "stoker": ours,
        "stoker --check header": [*ours, "--check", "header"],
        "webdataset ShardWriter": [sys.executable, str(folder / "wds.py")],
    }
    if found("litdata"):
        commands["litdata optimize"] = [sys.executable, str(folder / "lit.py")]
    return commands


def placed(command: list[str], photos: Path, out: Path) -> list[str]:
    """The command with what it reads and writes behind its program."""
    program = 3 if command[1] == "-c" else 2
    return [*command[:program], str(photos), str(out), *command[program:]]


def timed(command: list[str], folder: Path) -> float:
    started = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    if done.returncode:
        sys.exit(done.stderr)
    os.sync()
    return round(time.monotonic() - started, 3)


def found(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


if __name__ == "__main__":
    main()
