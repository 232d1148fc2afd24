"""Fills the tables of README.md and docs from benchmarks/results: no number there is typed by hand.

    python benchmarks/tables.py           rewrite the files
    python benchmarks/tables.py --check   exit 1 if one is out of date

A table stands between `<!-- table: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
_TABLE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def prepare() -> str:
    """Rates of whole processes, medians, and what they amount to beside the better peer."""
    report = json.loads((RESULTS / "prepare.json").read_text())
    rates, best = report["median_mb_per_s"], report["best_peer_mb_per_s"]
    size = report["runs"]["stoker default"][0]["megabytes"]
    names = {
        "datatrove": "datatrove, Megatron writer, tokenizer threads",
        "megatron-core": "megatron-core builder, pool of 2",
        "stoker default": "**stoker**: exact dedup, global shuffle",
        "stoker bare": "**stoker** with neither",
    }
    rows = [f"| {label} | {rates[name]:.1f} | {rates[name] / best:.1f}x |" for name, label in names.items()]
    head = [f"| JSONL to Megatron shards, {size:.0f} MB, 2 cores | MB/s | |", "|---|---|---|"]
    return "\n".join([*head, *rows]) + "\n"


def stage() -> str:
    """Rates of whole processes, medians, to memory and to a synced disk; CPU and memory beside them."""
    report = json.loads((RESULTS / "stage.json").read_text())
    sizes = {"sixteen": ("16 x 128 MiB", 2048), "one": ("1 x 2 GiB", 2048), "small": ("4,000 x 64 KiB", 250)}
    rows = [
        f"| MB/s, 2 cores, loopback | {' | '.join(_STAGERS.values())} |",
        "|---" * (1 + len(_STAGERS)) + "|",
    ]
    for place, where in (("memory", "to memory"), ("disk", "to disk, synced")):
        for case, (label, mib) in sizes.items():
            at = [report["median"][f"{name} / {case} / {place}"] for name in _STAGERS]
            rates = [f"{mib * report['scale'] * 1.048576 / facts['wall_s']:,.0f}" for facts in at]
            rows.append(f"| {label} {where} | {' | '.join(rates)} |")
    return "\n".join(rows) + "\n"


_STAGERS = {
    "stoker": "**stoker**, xxh3 verified",
    "s5cmd": "s5cmd",
    "rclone": "rclone",
    "huggingface_hub": "huggingface_hub",
}

TABLES: dict[str, Callable[[], str]] = {"prepare": prepare, "stage": stage}


def filled(text: str) -> str:
    return _TABLE.sub(lambda match: match[1] + TABLES[match[2]]() + match[3], text)


def main() -> int:
    stale = []
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        text = path.read_text("utf-8")
        if filled(text) != text:
            stale.append(str(path.relative_to(ROOT)))
            if "--check" not in sys.argv:
                path.write_text(filled(text), "utf-8")
    print("\n".join(stale) or "all tables are up to date")
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    raise SystemExit(main())
