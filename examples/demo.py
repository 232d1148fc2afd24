"""The main job on embedded defaults: raw text to shards, through a cache, to a training loop that is watched;
the tutorial way and stoker's.

    make demo        (or: python examples/demo.py [--megabytes 40] [--folder demo-out])

Nothing is downloaded: the corpus is the text of this Python installation, the tokenizer is trained on it, and
the S3 server that the shards are staged from runs here (without rclone and obstore: from the folder itself).
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
import local_s3
from tiny_gpt import Steps

VOCABULARY = 8192  # small, so that two CPU cores can train on it
TUTORIAL_MEGABYTES = 10  # the tutorial way gets a part of the corpus: at its rate all of it takes minutes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=40)
    parser.add_argument("--folder", type=Path, default=Path("demo-out"))
    parser.add_argument("--steps", type=int, default=40, help="training steps of each run")
    options = parser.parse_args()
    print(f"making a corpus of {options.megabytes:g} MB and training a tokenizer on it ...", flush=True)
    source, tokenizer = corpus.make(options.folder, megabytes=options.megabytes, vocabulary=VOCABULARY)
    few = min(TUTORIAL_MEGABYTES, options.megabytes)
    part, _ = corpus.make(options.folder, megabytes=few, vocabulary=VOCABULARY)
    print("preparing the tutorial way: encode a line at a time, webdataset's TarWriter ...", flush=True)
    usual = fresh(options.folder / "tutorial")
    rows = [("tutorial, WebDataset tar", *tutorial(part, tokenizer, usual))]
    for name, flags in (("WebDataset tar", ("--format", "webdataset")), ("Megatron .bin/.idx", ())):
        print(f"preparing with stoker: {name} ...", flush=True)
        out = fresh(options.folder / f"stoker-{name.split()[0].lower()}")
        rows.append((f"stoker, {name}", *stoker(source, tokenizer, out, flags)))
    show(rows)
    with local_s3.serving(out.absolute()) as url:
        stage(url, cache := fresh(options.folder / "cache"))
        show_steps(train_both(usual, url, cache, folder=options.folder, steps=options.steps))
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


def stage(url: str, cache: Path) -> None:
    """What an init container would do; `stoker.feed` would do it as it goes."""
    print(f"\nstaging {url} ...", flush=True)
    command = [sys.executable, "-m", "stoker.cli", "stage", url, "--cache", str(cache)]
    subprocess.run(command, check=True)


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


def train_both(usual: Path, url: str, cache: Path, *, folder: Path, steps: int) -> dict[str, Steps]:
    """The same tiny GPT, fed both ways, on the GPU where there is one; watched, with a verdict on each."""
    ways = {"webdataset, 2 workers": ("tutorial", str(usual)), "stoker.feed": ("stoker", url)}
    runs = {}
    for name, (way, data) in ways.items():
        print(f"\ntraining a tiny GPT for {steps} steps, fed by {name}, watched by stoker ...", flush=True)
        out, run = folder / f"steps-{way}.json", fresh(folder / f"run-{way}")
        script = [str(Path(__file__).with_name("tiny_gpt.py")), way, data, "--cache", str(cache)]
        more = ["--vocabulary", str(VOCABULARY), "--steps", str(steps), "--out", str(out)]
        watch = [sys.executable, "-m", "stoker.cli", "watch", "--hz", "10", "--out", str(run), "--"]
        subprocess.run([*watch, sys.executable, *script, *more], check=True)
        runs[name] = Steps(**json.loads(out.read_text()))
    return runs


def show_steps(runs: dict[str, Steps]) -> None:
    print(f"\n{'per step':28}{'data wait':>12}{'copy':>10}{'compute':>11}{'tokens':>9}{'tokens/s':>11}")
    for name, seen in runs.items():
        each = [1e3 * value / seen.steps for value in (seen.wait_s, seen.copy_s, seen.compute_s)]
        print(
            f"{name:28}{each[0]:9.2f} ms{each[1]:7.2f} ms{each[2]:8.2f} ms"
            f"{seen.tokens / seen.steps:9.0f}{seen.tokens / seen.seconds:11,.0f}"
        )


def fresh(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    return folder


if __name__ == "__main__":
    main()
