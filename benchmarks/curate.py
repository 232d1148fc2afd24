"""How fast is curation beside datatrove with the same steps on, and near-dedup beside rensa and datatrove?

Question: MB of text a second through the Gopher, C4 and FineWeb rules, and through near-duplicate removal.
Method: made documents of several languages and kinds (the generator of the tests). Rules: each contender
judges all documents in one process, rounds interleaved; verdicts are compared. Near copies: a fifth of the
documents are planted copies; stoker prepares JSONL to shards with and without --near-dedup (the difference is
what it costs), rensa sketches and queries the same texts in Python, alone and with what stoker does (ids by
tokenizers, one .bin file), datatrove runs its signature stage alone; each is a process of its own.
Medians and the spread are written; the files are warm in the page cache.
Command: python benchmarks/curate.py [--documents 20000] [--rounds 3]
Writes benchmarks/results/curate.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from kept_runs import keep

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests" / "prepare" / "curate"))
sys.path.insert(0, str(HERE.parent / "examples"))
import corpus as made  # noqa: E402 - the examples folder is no package
from made_documents import documents  # noqa: E402
from test_near_copies import edited  # noqa: E402
from test_rules_as_published import OURS, datatrove_verdicts  # noqa: E402

SIMILARITY = 0.8
RENSA = """
import json, sys
from rensa import RMinHash, RMinHashLSH
texts = [json.loads(line)["text"] for line in open(sys.argv[1])]
lsh, dropped, sketches = RMinHashLSH(threshold=0.8, num_perm=128, num_bands=16), 0, {}
for number, text in enumerate(texts):
    words = text.lower().split()
    sketch = RMinHash(num_perm=128, seed=42)
    sketch.update([" ".join(words[at : at + 5]) for at in range(max(1, len(words) - 4))])
    found = [one for one in lsh.query(sketch) if sketches[one].jaccard(sketch) >= 0.8]
    dropped += bool(found)
    if not found:
        lsh.insert(number, sketch)
        sketches[number] = sketch
print(dropped)
"""
RENSA_SHARDS = (
    RENSA.replace(
        "    dropped += bool(found)", "    dropped += bool(found)\n    kept += [text] * (not found)"
    ).replace("{}\nfor number", "{}\nkept = []\nfor number")
    + """
import numpy
from tokenizers import Tokenizer
encoder = Tokenizer.from_file(sys.argv[2])
with open(sys.argv[3], "wb") as file:
    for at in range(0, len(kept), 1024):
        for one in encoder.encode_batch_fast(kept[at : at + 1024], add_special_tokens=False):
            file.write(numpy.array(one.ids, "<u2").tobytes())
"""
)
DATATROVE = """
import json, sys
from datatrove.data import Document
from datatrove.pipeline.dedup.minhash import MinhashConfig, MinhashDedupSignature
from datatrove.utils.hashing import HashConfig
config = MinhashConfig(hash_config=HashConfig(hash_fc="sha1"))  # xxhash 4 refuses its str
stage = MinhashDedupSignature(output_folder=sys.argv[2], config=config)
texts = (json.loads(line)["text"] for line in open(sys.argv[1]))
stage.run((Document(text=text, id=str(number)) for number, text in enumerate(texts)))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--documents", type=int, default=20_000)
    parser.add_argument("--copied", type=int, default=20_000, help="documents of the search for near copies")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--results", type=Path, default=HERE / "results" / "curate.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="stoker-bench-") as scratch:
        report = measure(Path(scratch), options)
    keep(options.results, report)
    print(json.dumps(report["medians"], indent=1))


def measure(scratch: Path, options: argparse.Namespace) -> dict:
    texts = documents(options.documents)
    many = documents(options.copied)
    planted = [edited(text, 0.01, seed) for seed, text in enumerate(many[: len(many) // 5])]
    path = scratch / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in [*many, *planted]))
    _, tokenizer = made.make(scratch, megabytes=5)
    seconds: dict[str, list[float]] = {}
    agreement: dict[str, float] = {}
    dropped: dict[str, int] = {}
    for _ in range(options.rounds):
        ours, theirs = rules(texts, seconds)
        agreement = {step: _same(ours[step], theirs[step]) for step in ours}
        dropped = near(path, tokenizer, scratch, seconds)
    size = sum(len(text.encode()) for text in texts) / 1e6
    return {
        "documents": options.documents,
        "megabytes": round(size, 1),
        "near_documents": len(many) + len(planted),
        "near_megabytes": round(path.stat().st_size / 1e6, 1),
        "dropped": dropped,
        "seconds": seconds,
        "medians": {name: statistics.median(runs) for name, runs in seconds.items()},
        "agreement": agreement,
        "machine": {"platform": platform.platform(), "cores": os.cpu_count()},
        "versions": {name: version(name) for name in ("datatrove", "rensa", "spacy", "numpy")},
    }


def rules(texts: list[str], seconds: dict[str, list[float]]) -> tuple[dict, dict]:
    ours = timed(seconds, "rules, stoker", lambda: {k: [f(t) for t in texts] for k, f in OURS.items()})
    theirs = timed(seconds, "rules, datatrove", lambda: datatrove_verdicts(texts))
    return ours, theirs


def near(path: Path, tokenizer: Path, scratch: Path, seconds: dict[str, list[float]]) -> dict[str, int]:
    """How many documents stoker and rensa dropped."""
    turn = len(seconds.get("near, stoker end to end", []))
    command = [sys.executable, "-m", "stoker.cli", "prepare", str(path), "--tokenizer", str(tokenizer)]
    bare = [*command, "--out", str(scratch / f"bare{turn}")]
    command += ["--out", str(scratch / f"out{turn}"), "--near-dedup", str(SIMILARITY)]
    timed(seconds, "near, stoker end to end", lambda: run(command))
    timed(seconds, "near, stoker without the search", lambda: run(bare))
    rensa = [sys.executable, "-c", RENSA, str(path)]
    timed(seconds, "near, rensa sketch and query", lambda: run(rensa))
    shards = [sys.executable, "-c", RENSA_SHARDS, str(path), str(tokenizer), str(scratch / "rensa.bin")]
    said = timed(seconds, "near, rensa end to end", lambda: run(shards))
    sketches = [sys.executable, "-c", DATATROVE, str(path), str(scratch / f"signatures{turn}")]
    timed(seconds, "near, datatrove signatures alone", lambda: run(sketches))
    found = json.loads((scratch / f"out{turn}" / "statistics.json").read_text())["dropped"]
    return {"stoker": sum(found.values()), "rensa": int(said["said"])}


def timed(seconds: dict[str, list[float]], name: str, work: Callable[[], dict]) -> dict:
    started = time.perf_counter()
    made = work()
    seconds.setdefault(name, []).append(round(time.perf_counter() - started, 3))
    return made


def run(command: list[str]) -> dict:
    ran = subprocess.run(command, check=True, capture_output=True, text=True)
    return {"said": ran.stdout.strip()}


def _same(ours: list[str], theirs: list[str]) -> float:
    return sum(a == b for a, b in zip(ours, theirs, strict=True)) / len(ours)


if __name__ == "__main__":
    main()
