"""Plans of drawn commands, and datasets of one small corpus: kept, and compared.

    PYTHONPATH=tests python tests/prepare/kept_datasets.py

writes `kept/` anew. A plan whose digest changes is begun anew by whoever goes on with a newer version, and a
dataset whose bytes change is another one by the same command: both want a line in CHANGELOG.
"""

from __future__ import annotations

import json
import random
import re
import tempfile
from pathlib import Path
from typing import Any

from kept_values import keep, plain
from stoker.errors import StokerError
from stoker.manifest import TokenizerRecord
from stoker.prepare.check import adopt, verify_dataset
from stoker.prepare.curate.recipe import Ask, Curation
from stoker.prepare.launch.worker import load_entry, run_task
from stoker.prepare.plan import Options, make_plan
from stoker.prepare.portions import Share
from stoker.prepare.run import prepare
from stoker.prepare.sources.documents import Source

KEPT = Path(__file__).parent / "kept"


class _Inline:
    """Runs the tasks of a stage one after another, and hears nothing of it."""

    def run(self, ledger: Any, stage: str, numbers: Any, on_done: Any) -> None:
        entry = load_entry("stoker.prepare.tasks:run_task")
        for number in numbers:
            run_task(entry, ledger, stage, number)
            on_done(number)

    def planned(self, plan: Any, folder: Path) -> None: ...
    def stage(self, name: str, *, total: int, done: int) -> None: ...
    def advance(self, name: str, number: int) -> None: ...
    def note(self, text: str) -> None: ...


def prepare_inline(*sources: Path, **given: Any) -> Any:
    plainly = {name: str(one) if isinstance(one, Path) else one for name, one in given.items()}
    return prepare(Options(sources=tuple(map(str, sources)), **plainly), _Inline(), watcher=_Inline())


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts), "utf-8")
    return path


PLANS = 40
RECORD = TokenizerRecord(
    name="t", digest="00", vocabulary=70_000, eod=0, engine="huggingface", engine_version="1"
)
_MIB = 1 << 20


def planned(seed: int) -> dict[str, Any]:
    """What a drawn command is cut into."""
    draw = random.Random(seed)
    sources = [
        Source(
            url=f"/data/{number}.jsonl",
            kind="jsonl",
            bytes=(size := int(10 ** draw.uniform(4, 11))),
            units=draw.choice([1, 7, size]),
            weight=draw.choice([1.0, 1.0, 0.3, 2.5]),
            max_tokens=draw.choice([0, 0, 0, 5000]),
            origin=draw.choice(["a", "b"]),
        )
        for number in range(draw.randint(1, 4))
    ]
    options = {
        "shuffle": draw.random() < 0.7,
        "dedup": draw.random() < 0.6,
        "near_dedup": draw.choice([0.0, 0.0, 0.5, 0.8, 0.95]),
        "holdout": draw.choice([(), (), (("validation", 0.1), ("test", 0.05))]),
        "epochs": draw.choice([1, 1, 3, 0]),
        "shard_bytes": draw.choice([1 << 19, 1 << 20, 64 * _MIB, 512 * _MIB]),
        "seed": draw.choice([0, 5]),
        "zstd": draw.random() < 0.3,
    }
    try:
        given = Options(sources=("a",), out="/out", **options)
        plan = make_plan(given, sources, draw.choice([RECORD, None]), "huggingface")
    except StokerError as error:
        return {"refused": error.message, "hint": error.hint}
    tasks = plan.stages["write"]
    sizes = [(10**5, 4 * 10**5), (5 * 10**8, 2 * 10**9), (10**10, 4 * 10**10)]
    return plain(
        {
            "digest": plan.digest,
            "stages": plan.stages,
            "straight": plan.straight,
            "steps": plan.steps,
            "splits": [len(plan.splits), [plain(split) for split in plan.splits[:2]]],
            "parts": plan.parts,
            "masked": plan.masked,
            "tasks": [plan.part_of_task(number) for number in {0, tasks - 1, max(0, tasks - 2)}],
            "match": plan.match_parts,
            "cells": [plan.cells(tokens=tokens, text_bytes=text) for tokens, text in sizes],
            "times": plan.most_times,
            "bytes": plan.bytes,
            "pieces": [plan.piece_bytes(piece) for piece in plan.splits[0][:3]],
            "dtype": plan.dtype.name,
            "ordering": plan.ordering,
            "marks": plan.marks,
            "sketch": plan.sketch,
            "exact": plan.exact_match,
        }
    )


# --- datasets -------------------------------------------------------------------------------------


def corpus(seed: int = 0) -> list[str]:
    """Documents of drawn words: some twice, some nearly, some empty."""
    draw = random.Random(seed)
    words = [f"w{number}" for number in range(900)]
    texts = [" ".join(draw.choices(words, k=draw.randint(1, 60))) for _ in range(160)]
    near = [f"{text} and more" for text in texts[:20] if len(text) > 150]
    return [
        *texts,
        *texts[5:15],
        *near,
        "",
        "Ünïcode — 日本",
        *(text.upper() for text in texts[30:34]),
        *texts[5:9],
    ]


COMMANDS: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "of three epochs": {"epochs": 3, "seed": 4},
    "with copies": {"dedup": False},
    "in its order": {"shuffle": False},
    "in one pass": {"shuffle": False, "dedup": False},
    "without near copies": {"near_dedup": 0.7},
    "the longest of near copies": {"near_dedup": 0.7, "curation": Curation(keep="longest"), "shuffle": False},
    "folded": {"curation": Curation(fold=True)},
    "held out": {"holdout": (("validation", 0.2), ("test", 0.1))},
    "compressed": {"zstd": True, "epochs": 2},
    "as tars": {"format": "webdataset"},
    "marked": {"bos": "a", "eod": "none"},
    "of long documents": {
        "curation": Curation(steps=(Ask(step="lengths", options={"min_chars": 40, "max_chars": 200}),))
    },
    "weighed": {"weigh": 2.5},
    "capped": {"cap": 900},
}


def tokenizer(folder: Path) -> Path:
    """Of bytes, without a merge: the same whichever version of tokenizers made it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(
        models.BPE({letter: number for number, letter in enumerate(["<|endoftext|>", *letters])}, [])
    )
    made.add_special_tokens(["<|endoftext|>"])
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def dataset(name: str) -> dict[str, Any]:
    """What a command makes of the corpus: its shards by their digests, and what it counted."""
    given = dict(COMMANDS[name])
    with tempfile.TemporaryDirectory() as where:
        folder = Path(where)
        first = write_jsonl(folder / "first.jsonl", corpus())
        second = write_jsonl(folder / "second.jsonl", corpus(1)[:60])
        if weight := given.pop("weigh", 0):
            given["shares"] = (Share(path=str(second), weight=weight),)
        if cap := given.pop("cap", 0):
            given["shares"] = (Share(path=str(second), max_tokens=cap),)
        made = prepare_inline(first, second, out=folder / "out", tokenizer=tokenizer(folder), **given)
        found = {
            part: _shards(folder / "out" / part)
            for part in ("", *(name for name, _ in given.get("holdout", ())))
        }
        counts = made.statistics.to_plain()
        counts.pop("examples", None)
        text = json.dumps([found, counts], ensure_ascii=False).replace(where, "")
        verified = [verify_dataset(str(folder / "out" / part)) for part in found]
        return {**dict(zip(("parts", "counts"), json.loads(text), strict=True)), "faults": verified}


_PACKED = (".zst", ".npz")  # whose bytes depend on the libraries that packed them


def _portable(record: Any) -> Any:
    """A manifest without what other libraries pack otherwise."""
    for shard in record["shards"]:
        for file in shard["files"]:
            if file["name"].endswith(_PACKED):
                file["bytes"] = file["xxh3"] = "packed"
                record["blocks_xxh3"] = "packed"
                record.get("counts", {}).pop("bytes", None)
    return record


def _shards(folder: Path) -> Any:
    manifest = json.loads((folder / "manifest.json").read_text())
    body = manifest.get("manifest", manifest)
    for name in ("plan", "made_by", "tokenizer"):
        body.pop(name, None)
    return _portable(body)


def adopted() -> dict[str, Any]:
    """Pairs and tars without their manifest, taken over; and what is said of damaged ones."""
    found: dict[str, Any] = {}
    for name in ("as it comes", "compressed", "as tars"):
        with tempfile.TemporaryDirectory() as where:
            folder = Path(where)
            source = write_jsonl(folder / "first.jsonl", corpus())
            prepare_inline(source, out=folder / "out", tokenizer=tokenizer(folder), **COMMANDS[name])
            out = folder / "out"
            whole = {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}
            told = []
            for file in sorted(whole):
                for damage in (
                    whole[file][:-1],
                    b"\xff" + whole[file][1:],
                    whole[file][:-9] + b"\0" * 9,
                    None,
                ):
                    (out / file).write_bytes(damage) if damage is not None else (out / file).unlink()
                    try:
                        told.append([file, verify_dataset(str(out))])
                    except StokerError as error:
                        told.append([file, error.message])
                    (out / file).write_bytes(whole[file])
            for file in whole:
                if file.startswith(("manifest", "blocks", "statistics")) or file.endswith(".npz"):
                    (out / file).unlink()
            manifest = adopt(str(out))
            record = plain(manifest)
            record.pop("made_by")
            again = verify_dataset(str(out))
            told = [[file, _plainly(faults, packed=file.endswith(_PACKED))] for file, faults in told]
            record = _portable(record)
            text = (
                json.dumps([told, record, again], ensure_ascii=False)
                .replace(str(out), "OUT")
                .replace(where, "")
            )
            found[name] = json.loads(text)
    return found


def _plainly(faults: Any, *, packed: bool) -> Any:
    """Without Python's own words, which differ from one version to the next, and sizes of what is packed."""
    some = [faults] if isinstance(faults, str) else faults
    told = [re.sub(r"(cannot be read|cannot be used): .*", r"\1", one) for one in some]
    return [re.sub(r"\b[0-9a-f,]{2,}\b", "#", one) for one in told] if packed else told


def rows() -> dict[str, Any]:
    return {**{name: dataset(name) for name in COMMANDS}, "adopted": adopted()}


def main() -> None:
    keep(KEPT / "plans.json", {str(seed): planned(seed) for seed in range(PLANS)})
    keep(KEPT / "datasets.json", rows())


if __name__ == "__main__":
    main()
