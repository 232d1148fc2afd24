"""The main job on embedded defaults: raw text to shards, the tutorial way and stoker's way.

    make demo        (or: python examples/demo.py [--megabytes 40] [--folder demo-out])

Nothing is downloaded: the corpus is the text of this Python installation, the tokenizer is trained on it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import corpus

TUTORIAL_MEGABYTES = 10  # the tutorial way gets a part of the corpus: at its rate all of it takes minutes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=40)
    parser.add_argument("--folder", type=Path, default=Path("demo-out"))
    options = parser.parse_args()
    print(f"making a corpus of {options.megabytes:g} MB and training a tokenizer on it ...", flush=True)
    source, tokenizer = corpus.make(options.folder, megabytes=options.megabytes)
    part, _ = corpus.make(options.folder, megabytes=min(TUTORIAL_MEGABYTES, options.megabytes))
    print("preparing the tutorial way: encode a line at a time, webdataset's TarWriter ...", flush=True)
    rows = [("tutorial, WebDataset tar", *tutorial(part, tokenizer, fresh(options.folder / "tutorial")))]
    for name, flags in (("WebDataset tar", ("--format", "webdataset")), ("Megatron .bin/.idx", ())):
        print(f"preparing with stoker: {name} ...", flush=True)
        out = fresh(options.folder / f"stoker-{name.split()[0].lower()}")
        rows.append((f"stoker, {name}", *stoker(source, tokenizer, out, flags)))
    show(rows)
    print(f"\nthe dataset is in {out}; check it with: stoker prepare verify {out}")


def tutorial(source: Path, tokenizer: Path, out: Path) -> tuple[float, float, float]:
    """What guides show: one encode per line, one TarWriter sample per document."""
    import webdataset
    from tokenizers import Tokenizer

    out.mkdir()
    encoder = Tokenizer.from_file(str(tokenizer))
    started = time.perf_counter()
    with (
        source.open(encoding="utf-8") as file,
        webdataset.ShardWriter(str(out / "shard-%05d.tar"), maxcount=10_000, verbose=0) as writer,
    ):
        for number, line in enumerate(file):
            text = json.loads(line)["text"]
            ids = encoder.encode(text).ids
            writer.write({"__key__": f"{number:08d}", "token_ids.json": ids, "text.txt": text})
    return measured(source, out, time.perf_counter() - started)


def stoker(source: Path, tokenizer: Path, out: Path, flags: tuple[str, ...]) -> tuple[float, float, float]:
    """The command a user would type; the time is the whole process, its start included."""
    command = [sys.executable, "-m", "stoker.cli", "prepare", source, "--tokenizer", tokenizer, "--out", out]
    started = time.perf_counter()
    subprocess.run([*map(str, command), *flags], check=True)
    return measured(source, out, time.perf_counter() - started)


def measured(source: Path, out: Path, seconds: float) -> tuple[float, float, float]:
    size = sum(path.stat().st_size for path in out.iterdir() if path.name != "tokenizer.json")
    return source.stat().st_size / 1e6, seconds, size / 1e6


def show(rows: list[tuple[str, float, float, float]]) -> None:
    base = rows[0][1] / rows[0][2]
    print(f"\n{'':28}{'input':>9}{'time':>9}{'rate':>12}{'output':>10}{'ratio':>8}")
    for name, megabytes, seconds, size in rows:
        rate = megabytes / seconds
        print(
            f"{name:28}{megabytes:6.0f} MB{seconds:7.1f} s{rate:7.1f} MB/s{size:7.0f} MB{rate / base:7.1f}x"
        )


def fresh(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    return folder


if __name__ == "__main__":
    main()
