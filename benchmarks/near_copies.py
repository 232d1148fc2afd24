"""Which planted copies does each tool drop, and what does it drop that is no copy?

Question: recall and precision of near-duplicate removal at similarity 0.8, by kind of change, beside
datatrove, rensa and text-dedup at their usual settings; a wrong drop is one of a true similarity under 0.8.
Method: originals drawn from this machine's manual pages and translations (found_texts.py), none alike; one
edited copy of each for each kind of change, one kind at a time. The true similarity is the Jaccard index of
runs of five folded words, computed here. Of a pair at 0.8 or over one must go; any other drop is wrong.
Command: python benchmarks/near_copies.py [--originals 300]   (extra bench; about two minutes)
Writes benchmarks/results/near_copies.json: no times, so any machine may be busy.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from found_texts import manuals
from kept_runs import keep
from stoker.prepare.curate.words import folded_words

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "examples"))
import corpus as example  # noqa: E402 - the examples folder is no package

SIMILARITY = 0.8
WORDS = (
    "coal",
    "steam",
    "boiler",
    "valve",
    "smoke",
    "tender",
    "piston",
    "gauge",
    "whistle",
    "track",
    "signal",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--originals", type=int, default=300)
    parser.add_argument("--results", type=Path, default=HERE / "results" / "near_copies.json")
    options = parser.parse_args()
    originals = distinct(options.originals)
    report: dict[str, Any] = {"originals": len(originals), "similarity": SIMILARITY, "kinds": {}}
    for kind, change in CHANGES.items():
        copies = [change(text, random.Random(seed)) for seed, text in enumerate(originals)]
        true = [jaccard(one, other) for one, other in zip(originals, copies, strict=True)]
        report["kinds"][kind] = {
            "copies at 0.8 and over": sum(value >= SIMILARITY for value in true),
            **{name: scored(tool(originals + copies), true) for name, tool in TOOLS.items()},
        }
        print(kind, json.dumps(report["kinds"][kind]), flush=True)
    report["all kinds"] = {name: summed(list(report["kinds"].values()), name) for name in TOOLS}
    report["versions"] = {name: version(name) for name in ("datatrove", "rensa", "text-dedup")}
    keep(options.results, report)
    print(json.dumps(report["all kinds"], indent=1))


def distinct(count: int) -> list[str]:
    """Pieces of manual pages of 200 to 500 words, of which no two share a third of their runs of words."""
    chooser, kept, seen = random.Random(5), [], set()
    for text in (
        page for language in ("en", "de", "fr", "es", "ru", "ko", "it") for page in manuals(language)
    ):
        pieces = text.split()
        for at in range(0, len(pieces) - 500, 500):
            size = chooser.randint(200, 500)
            piece = "\n\n".join(
                " ".join(pieces[at + start : at + start + 40]) for start in range(0, size, 40)
            )
            runs = shingles(piece)
            if len(runs & seen) * 3 < len(runs):
                seen |= runs
                kept.append(piece)
    chooser.shuffle(kept)
    return kept[:count]


def shingles(text: str) -> set[tuple[str, ...]]:
    words = folded_words(text)
    return {tuple(words[at : at + 5]) for at in range(max(1, len(words) - 4))}


def jaccard(one: str, other: str) -> float:
    first, second = shingles(one), shingles(other)
    return len(first & second) / len(first | second)


def edited(share: float) -> Callable[[str, random.Random], str]:
    def change(text: str, chooser: random.Random) -> str:
        pieces = re.split(r"(\s+)", text)
        words = range(0, len(pieces), 2)
        for at in chooser.sample(words, max(1, round(len(words) * share))):
            pieces[at] = chooser.choice(WORDS) + str(chooser.randrange(1000))
        return "".join(pieces)

    return change


def moved(text: str, chooser: random.Random) -> str:
    parts = text.split("\n\n")
    chooser.shuffle(parts)
    return "\n\n".join(parts)


CHANGES: dict[str, Callable[[str, random.Random], str]] = {
    **{f"{share:.0%} of words": edited(share) for share in (0.01, 0.02, 0.05, 0.1, 0.2)},
    "case": lambda text, _: text.upper(),
    "white space": lambda text, _: text.replace(" ", "  \t").replace("\n\n", "\r\n \r\n"),
    "punctuation": lambda text, _: re.sub(r"[.,;:!?]", "", text).replace("\n\n", " !\n\n"),
    "paragraphs moved": moved,
}


# --- tools: texts in, the numbers of those that are dropped out ------------------------------------------


def stoker(texts: list[str]) -> set[int]:
    """By the command; documents carry no number, so what stays is told by its tokens' text."""
    from tokenizers import Tokenizer

    from stoker.formats.megatron import read_index

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        _, tokenizer = example.make(folder, megabytes=1)
        (folder / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        command = [sys.executable, "-m", "stoker.cli", "prepare", str(folder / "in.jsonl"), "--no-shuffle"]
        command += ["--tokenizer", str(tokenizer), "--out", str(folder / "out"), "--no-dedup"]
        subprocess.run([*command, "--near-dedup", str(SIMILARITY)], check=True, capture_output=True)
        engine = Tokenizer.from_file(str(tokenizer))
        wanted: dict[bytes, list[int]] = {}
        for number, encoding in enumerate(engine.encode_batch(texts)):
            wanted.setdefault(np.array(encoding.ids, np.int64).tobytes(), []).append(number)
        stays: set[int] = set()
        for index in sorted((folder / "out").glob("*.idx")):
            with index.open("rb") as file:
                found = read_index(file, name=index.name)
            tokens = np.fromfile(index.with_suffix(".bin"), found.dtype).astype(np.int64)
            for part in np.split(tokens, np.cumsum(found.lengths)[:-1]):
                stays.add(wanted[part[:-1].tobytes()].pop(0))
    return set(range(len(texts))) - stays


def datatrove(texts: list[str]) -> set[int]:
    from datatrove.data import Document
    from datatrove.pipeline.dedup.minhash import (
        MinhashConfig,
        MinhashDedupBuckets,
        MinhashDedupCluster,
        MinhashDedupFilter,
        MinhashDedupSignature,
    )
    from datatrove.utils.hashing import HashConfig

    config = MinhashConfig(hash_config=HashConfig(hash_fc="sha1"))  # xxhash 4 refuses its str
    documents = [Document(text=text, id=str(number)) for number, text in enumerate(texts)]
    with tempfile.TemporaryDirectory() as scratch:
        MinhashDedupSignature(f"{scratch}/s", config=config).run(iter(documents))
        for bucket in range(config.num_buckets):
            stage = MinhashDedupBuckets(f"{scratch}/s", f"{scratch}/b", config=config)
            stage.run(None, rank=bucket, world_size=config.num_buckets)
        MinhashDedupCluster(f"{scratch}/b", f"{scratch}/r", config=config).run(None)
        kept = {int(one.id) for one in MinhashDedupFilter(f"{scratch}/r").run(iter(documents))}
    return set(range(len(texts))) - kept


def rensa(texts: list[str]) -> set[int]:
    from rensa import RMinHash, RMinHashLSH

    index, sketches, dropped = RMinHashLSH(threshold=SIMILARITY, num_perm=128, num_bands=16), {}, set()
    for number, text in enumerate(texts):
        words = text.lower().split()
        sketch = RMinHash(num_perm=128, seed=42)
        sketch.update([" ".join(words[at : at + 5]) for at in range(max(1, len(words) - 4))])
        if any(sketches[one].jaccard(sketch) >= SIMILARITY for one in index.query(sketch)):
            dropped.add(number)
        else:
            index.insert(number, sketch)
            sketches[number] = sketch
    return dropped


def text_dedup(texts: list[str]) -> set[int]:
    """Its own MinHash function with its defaults (64-bit, sha1, runs of five, 250 permutations); what
    shares a band with an earlier document goes, as its main loop has it."""
    from text_dedup.minhash import embed_func, optimal_param
    from text_dedup.utils.hashfunc import sha1_hash

    prime, most, random_numbers = (
        np.uint64((1 << 61) - 1),
        np.uint32((1 << 32) - 1),
        np.random.RandomState(42),
    )
    bands, rows = optimal_param(SIMILARITY, 250, false_positive_weight=0.5, false_negative_weight=0.5)
    drawn = [random_numbers.randint(low, prime, size=(250,), dtype=np.uint64) for low in (1, 0)]
    tables: list[dict[bytes, int]] = [{} for _ in range(bands)]
    dropped = set()
    for number, text in enumerate(texts):
        found = embed_func(
            text, number, num_perm=250, ngram_size=5, min_length=5,
            permutations=tuple(drawn), dtype=np.uint64,
            hashranges=[(at * rows, (at + 1) * rows) for at in range(bands)],
            max_hash=most, modulo_prime=prime,
            hash_func=lambda data: sha1_hash(data, d=32),
        )  # fmt: skip
        firsts = [
            table.setdefault(key, number) for table, key in zip(tables, found["__signatures__"], strict=True)
        ]
        if min(firsts) < number:
            dropped.add(number)
    return dropped


def scored(dropped: set[int], true: list[float]) -> dict[str, int]:
    """`dropped` are numbers among originals and then copies; a family is gone by one if either is."""
    count, found = len(true), [number % len(true) for number in dropped]
    families = set(found)
    return {
        "found": sum(true[number] >= SIMILARITY for number in families),
        "wrong": sum(true[number] < SIMILARITY for number in families) + len(found) - len(families),
        "dropped": len(found),
        "missed": sum(true[number] >= SIMILARITY and number not in families for number in range(count)),
    }


def summed(kinds: Iterable[dict[str, Any]], name: str) -> dict[str, float]:
    total = {key: sum(kind[name][key] for kind in kinds) for key in ("found", "wrong", "dropped", "missed")}
    recall = total["found"] / (total["found"] + total["missed"])
    precision = 1 - total["wrong"] / max(1, total["dropped"])
    return {**total, "recall": round(recall, 4), "precision": round(precision, 4)}


TOOLS: dict[str, Callable[[list[str]], set[int]]] = {
    "stoker": stoker, "datatrove": datatrove, "rensa": rensa, "text-dedup": text_dedup,
}  # fmt: skip


if __name__ == "__main__":
    main()
