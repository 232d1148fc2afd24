"""Fills the tables of README.md and docs from benchmarks/results: no number there is typed by hand.

    python benchmarks/tables.py           rewrite the files
    python benchmarks/tables.py --check   exit 1 if one is out of date

A table stands between `<!-- table: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections import Counter
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


def load() -> str:
    """Loaders of tokens, as they come in one process and with what they have in the background."""
    report = json.loads((RESULTS / "load_tokens.json").read_text())
    rows = ["| [8, 2048] batches, warm, 2 cores | Mtok/s | first batch | PSS |", "|---|---|---|---|"]
    for name, facts in report["results"].items():
        rate, first, held = (facts[key]["median"] for key in ("mtok_s", "first_batch_ms", "pss_mb"))
        label = f"**{name}**" if name.startswith("stoker") else name
        rows.append(f"| {label} | {rate:,.0f} | {first:,.0f} ms | {held:,.0f} MB |")
    slow = report["cold, slow disk"]
    cold = (
        f"\nA first epoch past the page cache (O_DIRECT), verified: {_cold(slow)}, of a disk that is kept at "
        f"{slow['gb_s']} GB/s. As the disk is, after the first GB: {_cold_unhindered(report['cold'])}.\n"
    )
    return "\n".join(rows) + "\n" + cold


def _cold(report: dict) -> str:
    """Shares of the disk, for each size of batches."""
    said = [
        f"in batches of {name} {facts['after the first GB']['ratio']:.2f} after the first GB and "
        f"{facts['with construction']['ratio']:.2f} with construction"
        for name, facts in report["stoker"].items()
    ]
    return ", ".join(said)


def _cold_unhindered(report: dict) -> str:
    bare, looked = (report[name]["median"] for name in ("direct_gb_s", "direct_looked_at_gb_s"))
    rates = [facts["after the first GB"]["gb_s"] for facts in report["stoker"].values()]
    said = " and ".join(f"{rate:.1f}" for rate in rates)
    return (
        f"{said} GB/s, beside {looked:.1f} of bare reads whose bytes are looked at and {bare:.1f} of reads "
        "whose bytes are not"
    )


def gpu() -> str:
    """Feeding a card, as shares of what the machine can do."""
    report = json.loads((RESULTS / "gpu_feed.json").read_text())
    paths, training = report["paths"], report["training"]
    waits = {name: training[name]["wait_share"] for name in ("stoker", "tutorial")}
    tried, shares = paths["page_cache_to_gpu"], paths["page_cache_share_of_pinned"]
    cpu = paths["page_cache_cpu_s_gb"]
    verifying = max(found["verifying_gb_s"] for found in tried) / paths["pinned_copy_gb_s"]
    rows = [
        f"| one {report['machine']['gpu']} | |",
        "|---|---|",
        f"| page cache to GPU, of the pinned copy ceiling: blocks verified before, read by 14 threads | "
        f"{shares['pread']:.2f}, {cpu['pread']:.2f} CPU seconds a GB |",
        f'| the same with `reader="mmap"`: the card takes them by itself | '
        f"{shares['mmap']:.2f}, {cpu['mmap']:.2f} CPU seconds a GB |",
        f"| the same, the first pass, which verifies | {verifying:.2f} |",
        f"| disk to GPU, of the O_DIRECT ceiling: blocks verified before | {paths['disk']['share']:.2f} |",
        f"| the same, the first pass, which verifies | {paths['disk']['share_verifying']:.2f} |",
        f"| a GPT step fed by stoker waits for data | {waits['stoker']:.2%} of the time |",
        f"| the same step fed by the tutorial pipeline | {waits['tutorial']:.0%} of the time |",
    ]
    return "\n".join(rows) + "\n"


def plan_model() -> str:
    """Scenes before a throttled store: seconds and idle share, measured and simulated."""
    report = json.loads((RESULTS / "plan_model.json").read_text())
    rows = [
        f"| a store of {report['store_bytes_s'] / 1e6:.0f} MB/s | seconds, measured | simulated | "
        "idle, measured | simulated |",
        "|---|---|---|---|---|",
    ]
    for name, row in report["scenes"].items():
        rows.append(
            f"| {name} | {row['measured_s']:.1f} | {row['simulated_s']:.1f} ({row['seconds_error']:+.0%}) | "
            f"{row['measured_idle']:.0%} | {row['simulated_idle']:.0%} |"
        )
    large = report["ten_thousand_nodes"]["seconds"]
    return "\n".join(rows) + f"\n\n10,000 nodes under four policies, four epochs, took {large:.0f} s.\n"


def checkpoint() -> str:
    """Ways to save, in seconds; memory as a share of the state."""
    report = json.loads((RESULTS / "checkpoint.json").read_text())
    size = report["median"]["stoker"]["state_bytes"] / 2**30
    columns = "stall | durable | lost meanwhile | memory | cold load"
    rows = [f"| {size:.2f} GiB, AdamW, 2 cores; seconds | {columns} |", "|---|---|---|---|---|---|"]
    ways = {name: facts for name, facts in report["median"].items() if "stall_s" in facts}
    for name, facts in ways.items():
        label = f"**{name}**, verified" if name.startswith("stoker") else name
        times = [f"{facts[key]:.2f}" for key in ("stall_s", "durable_s", "lost_s")]
        rows.append(
            f"| {label} | {' | '.join(times)} | {facts['memory']:.2f} of the state | {facts['load_s']:.2f} |"
        )
    disk = report["median"]["ceiling"]["seconds"]
    rows.append(f"| O_DIRECT writes of the same bytes, synced | | {disk:.2f} | | | |")
    return "\n".join(rows) + "\n"


def gpu_checkpoint() -> str:
    """A save beside training on a card, as far as it was measured."""
    report = json.loads((RESULTS / "gpu_checkpoint.json").read_text())
    copy, away, ours = report["snapshot"], report["suspend"], report["overlap"]
    normal = (report["normal_step_s"] + report["normal_again_step_s"]) / 2
    rows = [
        f"| one {report['machine']['gpu']}, {copy['state_bytes'] / 1e9:.1f} GB of state | |",
        "|---|---|",
        f"| stall of a save, `overlap=True` | {ours['stall_s'] * 1e3:,.0f} ms |",
        f"| stall of a save without | {report['blocking']['stall_s'] * 1e3:,.0f} ms |",
    ]
    if "dcp_pinned" in report:
        theirs = report["dcp_pinned"]
        rows.append(f"| stall of dcp.async_save, {theirs['stager']} | {theirs['stall_s'] * 1e3:,.0f} ms |")
    share = copy["bytes_per_s"] / report["ceiling_bytes_per_s"]
    rows += [
        f"| mean step while a save is written, beside none | {ours['mean_step_s'] / normal - 1:+.1%} |",
        f"| copy to pinned memory, of its ceiling | {share:.2f} |",
        f"| verified restore, cold | {report['restore']['bytes_per_s'] / 1e9:.1f} GB/s |",
        f"| a process with {away['gigabytes']:.0f} GB suspended; resumed, with equal losses | "
        f"{away['suspend_s']:.1f} s; {away['resume_s']:.1f} s |",
    ]
    return "\n".join(rows) + "\n"


def watch() -> str:
    """Faults re-enacted on a card, and what was found."""
    report = json.loads((RESULTS / "gpu_watch.json").read_text())
    rows = [
        f"| injected on one {report['machine']['gpu']} | found first | cause | beside it |",
        "|---|---|---|---|",
    ]
    for name, verdict in report["verdicts"].items():
        beside = ", ".join(verdict["others"]) or "nothing"
        rows.append(f"| {name} | {verdict['found']} | {verdict['cause'] or ''} | {beside} |")
    alone, watched = (statistics.median(report["cost"][f"{how}_ms"]) for how in ("alone", "watched"))
    foretold, measured = (report["price"][f"{name}_speedup"] for name in ("foretold", "measured"))
    said = (
        f"A healthy step took {alone:.2f} ms alone, {watched:.2f} ms watched. Without its waits the starved "
        f"job was foretold to be {foretold:.2f} times as fast; with cached batches it was {measured:.2f} "
        "times.\n"
    )
    return "\n".join(rows) + "\n\n" + said


def watch_cost() -> str:
    """What a step pays for being watched, and beside others where they were measured in turns."""
    found = json.loads((RESULTS / "hook_cost.json").read_text())
    rows = [f"| {name} | {us:.1f} µs |" for name, us in found["hooks_us"].items()]
    rows += [
        f"| all hooks, in the loop's thread | {found['loop_us']:.1f} µs |",
        f"| the thread that reads their marks | {found['reader_us']:.1f} µs |",
        f"| **sum** | **{found['sum_us']:.1f} µs**, {found['sum_us'] / found['step_us']:.2%} of the step |",
    ]
    head = [f"| of a step of {found['step_us'] / 1e3:.1f} ms, {found['cores']} cores | |", "|---|---|"]
    return "\n".join([*head, *rows]) + "\n" + _beside_peers()


def _beside_peers() -> str:
    report = json.loads((RESULTS / "watch_overhead.json").read_text())
    if "steps_a_block" not in report:
        return ""  # of an earlier method, which could not tell them apart
    names = {"null": "nothing (the null control)", "stoker": "`stoker watch`", "traceml": "traceml-ai"}
    head = [f"| whole steps of {report['plain_step_ms']:.1f} ms, in turns | wall | CPU |", "|---|---|---|"]
    rows = [
        f"| {names.get(mode, mode)} | {wall['us']:.0f} ± {wall['error']:.0f} µs | "
        f"{report['cpu'][mode]['us']:.0f} ± {report['cpu'][mode]['error']:.0f} µs |"
        for mode, wall in report["wall"].items()
    ]
    return "\n" + "\n".join([*head, *rows]) + "\n"


def scenarios() -> str:
    """Real faults in real jobs: what each watcher made of them, in sum."""
    report = json.loads((RESULTS / "scenarios.json").read_text())
    names = {"stoker": "`stoker watch`", "traceml": f"traceml-ai {report['versions']['traceml-ai']}"}
    rows = [
        f"| {report['runs']} of {report['suite']} scenarios, {report['healthy']} healthy | precision | "
        "recall | false alarms on healthy | no verdict | nothing missed, nothing wrong |",
        "|---|---|---|---|---|---|",
    ]
    for who, label in names.items():
        got = report[who]
        counts = " | ".join(str(got[key]) for key in ("false_alarms", "no_verdict", "right_runs"))
        rows.append(f"| {label} | {got['precision']:.3f} | {got['recall']:.3f} | {counts} |")
    causes, runs = report["causes"], report["scenarios"]
    said = (
        f"Cause of a starved loader right: stoker {causes['right']} of {causes['of']}; traceml-ai has none."
    )
    crowded = sum(row["stoker"].get("others_cores", 0) > 0.3 for row in runs.values())
    quiet = f"In {crowded} of stoker's runs others kept more than 0.3 of the 2 cores busy."
    return "\n".join([*rows, "", said, _unchanged(runs), quiet]) + "\n"


def _unchanged(rows: dict) -> str:
    """What traceml-ai says of scripts without its two lines."""
    found = [row["traceml_unchanged"] for row in rows.values() if "traceml_unchanged" in row]
    silent = sum(not one["kinds"] for one in found)
    return f"Of {len(found)} scripts without its two lines traceml-ai gave no verdict on {silent}."


def confusion() -> str:
    """Kind by kind: found, and what was said in its place."""
    rows = json.loads((RESULTS / "scenarios.json").read_text())["scenarios"].values()
    kinds = list(dict.fromkeys(kind for row in rows for kind in row["injected"]))
    lines = [
        "| injected | runs | stoker found | and said | traceml-ai found | and said |",
        "|---|---|---|---|---|---|",
    ]
    for kind in kinds:
        runs = [row for row in rows if kind in row["injected"]]
        cells = [cell for who in ("stoker", "traceml") for cell in _confused(runs, kind, who)]
        lines.append(f"| {kind} | {len(runs)} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _confused(runs: list[dict], kind: str, who: str) -> tuple[str, str]:
    said = Counter(
        other for row in runs for other in row[who]["kinds"] or ["no verdict"] if other not in row["injected"]
    )
    found = sum(kind in row[who]["kinds"] for row in runs)
    return str(found), ", ".join(f"{other} {count}" for other, count in said.items())


def scenario_runs() -> str:
    """Every scenario, with what each watcher said in its own words."""
    report = json.loads((RESULTS / "scenarios.json").read_text())
    lines = ["| scenario | injected | stoker | traceml-ai | right |", "|---|---|---|---|---|"]
    for name, row in report["scenarios"].items():
        ours, theirs = row["stoker"], row["traceml"]
        right = [
            label
            for label, got in (("stoker", ours), ("traceml-ai", theirs))
            if sorted(got["kinds"]) == sorted(row["injected"])
        ]
        injected = ", ".join(row["injected"]) + (f" ({' or '.join(row['causes'])})" if row["causes"] else "")
        words = theirs.get("verdict", "no summary").lower().replace("_", " ")
        lines.append(f"| {name} | {injected} | {_said(ours)} | {words} | {_both(right)} |")
    return "\n".join(lines) + "\n"


def _said(ours: dict) -> str:
    kinds = list(ours["kinds"])
    if kinds and ours.get("cause"):
        kinds[0] += f" ({ours['cause']})"
    return ", ".join(kinds) or "no verdict"


def _both(right: list[str]) -> str:
    return "both" if len(right) == 2 else "".join(right) or "neither"


def summary() -> str:
    """One line for each stage, beside its best peer."""
    prepared, loaded, fed, saved, seen = (
        json.loads((RESULTS / f"{name}.json").read_text())
        for name in ("prepare", "load_tokens", "gpu_feed", "gpu_checkpoint", "gpu_watch")
    )
    paths = fed["paths"]
    waits = {name: fed["training"][name]["wait_share"] for name in ("stoker", "tutorial")}
    size = saved["snapshot"]["state_bytes"] / 1e9
    stalls = [saved[name]["stall_s"] * 1e3 for name in ("overlap", "dcp_pinned")]
    rows = [
        ("prepare, 2 cores", f"{prepared['ratios']['default over the better peer']:.0f} times the better of "
         "megatron-core and datatrove"),
        ("load, 2 cores", f"{loaded['ratios']['inline / litdata']:.1f} times litdata, "
         f"{loaded['ratios']['inline / DataLoader+memmap']:.1f} times DataLoader; with workers "
         f"{loaded['ratios']['threads / best peer with workers']:.0f} times the best peer"),
        ("feed, H200", f"a GPT step waits {waits['stoker']:.2%} of the time for data; the tutorial pipeline "
         f"{waits['tutorial']:.0%}"),
        ("disk to GPU, H200", f"{paths['disk']['share']:.2f} of bare O_DIRECT reads; page cache to GPU "
         f"{paths['page_cache_share_of_pinned']['pread']:.2f} of pinned copies, "
         f"{paths['page_cache_share_of_pinned']['mmap']:.2f} with `reader=\"mmap\"`"),
        ("checkpoint, H200", f"stalls {stalls[0]:.0f} ms for {size:.0f} GB; dcp.async_save "
         f"{stalls[1]:.0f} ms"),
        ("watch, H200", f"{seen['right']} of {seen['of']} injected faults named, nothing else beside them"),
    ]  # fmt: skip
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {said} |" for name, said in rows)]) + "\n"


TABLES: dict[str, Callable[[], str]] = {
    "prepare": prepare,
    "stage": stage,
    "load": load,
    "gpu": gpu,
    "plan_model": plan_model,
    "checkpoint": checkpoint,
    "gpu_checkpoint": gpu_checkpoint,
    "watch": watch,
    "watch_cost": watch_cost,
    "scenarios": scenarios,
    "confusion": confusion,
    "scenario_runs": scenario_runs,
    "summary": summary,
}


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
