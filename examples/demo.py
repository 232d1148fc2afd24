"""Why does my GPU wait? A training run as tutorials write it, watched; the cure; and what that gains.

    make demo        (or: python examples/demo.py [--megabytes 20] [--seconds 10] [--folder demo-out])

1. A tiny GPT is trained from JSON lines that a DataLoader tokenises as it goes. `stoker watch` says why it
   waits.
2. `stoker prepare` tokenises the same lines once; the shards are staged from an S3 server on this machine.
3. The same model is trained on the same text through `stoker.feed`, watched again.

Nothing is downloaded: the corpus is the text of this Python installation, the tokenizer is trained on it, and
the S3 server runs here (without rclone, nginx and obstore shards are staged from their folder).
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

import corpus
import local_s3
from tiny_gpt import VOCABULARY, Steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=20)
    parser.add_argument("--seconds", type=float, default=10, help="of training, each way")
    parser.add_argument("--folder", type=Path, default=Path("demo-out"))
    options = parser.parse_args()
    folder = options.folder.absolute()
    say(f"making a corpus of {options.megabytes:g} MB and a tokenizer from the text of this Python")
    source, tokenizer = corpus.make(folder, megabytes=options.megabytes, vocabulary=VOCABULARY)

    say("1. training as tutorials write it: a DataLoader that reads JSON lines and tokenises them as it goes")
    usual = watched(folder, "tutorial", source, "--tokenizer", tokenizer, "--seconds", options.seconds)

    say("2. the cure: tokenise once, offline; then bring the shards next to the GPU")
    stoker("prepare", source, "--tokenizer", tokenizer, "--out", out := fresh(folder / "corpus"))
    with local_s3.serving(out) as url:
        stoker("stage", url, "--cache", cache := fresh(folder / "cache"))
        say("3. the same model on the same text, fed by stoker")
        ours = watched(folder, "stoker", url, "--cache", cache, "--seconds", options.seconds)

    show({"tutorial": usual, "stoker.feed": ours})
    print("\nreports, one page each, for any browser:")
    for way in ("tutorial", "stoker"):
        print(f"  {folder / f'run-{way}' / 'report.html'}")


def say(text: str) -> None:
    print(f"\n=== {text} ...", flush=True)


def stoker(*arguments: object) -> None:
    """The command a user would type."""
    print(f"$ stoker {' '.join(map(str, arguments))}", flush=True)
    subprocess.run([sys.executable, "-m", "stoker.cli", *map(str, arguments)], check=True)


def watched(folder: Path, way: str, data: object, *more: object) -> Steps:
    """A run of tiny_gpt.py under `stoker watch`, which says its verdict at the end."""
    out = folder / f"steps-{way}.json"
    script = [sys.executable, Path(__file__).with_name("tiny_gpt.py"), way, data, *more, "--out", out]
    stoker("watch", "--hz", "10", "--out", fresh(folder / f"run-{way}"), "--", *script)
    return Steps(**json.loads(out.read_text()))


def show(runs: dict[str, Steps]) -> None:
    print(f"\n{'a step':16}{'waits for data':>16}{'computes':>12}{'tokens a second':>18}")
    for name, seen in runs.items():
        wait, compute = (1e3 * value / seen.steps for value in (seen.wait_s, seen.compute_s))
        print(f"{name:16}{wait:13.1f} ms{compute:9.1f} ms{seen.tokens / seen.seconds:18,.0f}")
    usual, ours = (seen.tokens / seen.seconds for seen in runs.values())
    print(f"\ngain: {ours / usual:.1f} times the tokens a second, same model, same text, same machine")
    computes = sorted(seen.compute_s / seen.steps for seen in runs.values())
    if computes[1] > 1.25 * computes[0]:
        print("(others use this machine: the model itself was not as fast in both runs)")


def fresh(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    return folder


if __name__ == "__main__":
    main()
