"""Fills the tables of README*.md and docs from benchmarks/results: no number there is typed by hand.

    python benchmarks/tables.py           rewrite the files
    python benchmarks/tables.py --check   exit 1 if one is out of date

A table stands between `<!-- table: NAME -->` and `<!-- end -->`. A figure is the median of the last runs
that were kept, with the lowest and highest of them in brackets; verdicts are those of the newest run.
"""

from __future__ import annotations

import itertools
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

from kept_runs import LAST, Spread, machine_of, newest, runs
from scenario_tables import confusion, foreign, kineto, scenario_runs, scenarios

ROOT = Path(__file__).parent.parent
_TABLE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def prepare() -> str:
    """Rates of whole processes, and what they amount to beside the better peer."""
    size = newest("prepare")["runs"]["stoker default"][0]["megabytes"]
    names = {
        "stoker default": "**stoker**: exact dedup, global shuffle",
        "stoker bare": "**stoker** with neither",
        "megatron-core": "megatron-core builder, pool of 2",
        "datatrove": "datatrove, Megatron writer, tokenizer threads",
    }
    rows = [f"| JSONL to Megatron shards, {size:.0f} MB, 2 cores | MB/s | |", "|---|---|---|"]
    for name, label in names.items():
        rate = Spread.of("prepare", lambda run, name=name: run["median_mb_per_s"][name])
        times = Spread.of(
            "prepare", lambda run, name=name: run["median_mb_per_s"][name] / run["best_peer_mb_per_s"]
        )
        rows.append(f"| {label} | {rate.said('.1f')} | {times.said('.1f')} times the better peer |")
    return "\n".join(rows) + "\n" + _over("prepare")


def prepare_media() -> str:
    """Photographs a second from a folder to tars, whole processes."""
    labels = {
        "stoker": "**stoker**: every image decoded, shuffled, digests and manifest, 2 workers",
        "stoker --check header": "**stoker** `--check header`",
        "webdataset ShardWriter": "webdataset `ShardWriter`, a loop: bytes copied, nothing checked",
        "litdata optimize": "litdata `optimize`, 2 workers: bytes copied, nothing checked",
    }
    if not runs("prepare_media"):
        return "Not measured yet: `python benchmarks/prepare_media.py`.\n"
    made = newest("prepare_media")
    size = f"{made['photos']:,} JPEGs of {made['mean_bytes'] / 1e3:.0f} KB, {made['cores']} cores"
    rows = [f"| {size} | photographs a second |", "|---|---|"]
    for name in (name for name in labels if name in made["photos_per_s"]):
        rate = Spread.of("prepare_media", lambda run, name=name: run["photos_per_s"][name])
        rows.append(f"| {labels[name]} | {rate.said('.0f')} |")
    return "\n".join(rows) + "\n" + _over("prepare_media")


def load_images() -> str:
    """Images a second from tars to batches of crops, each run's medians."""
    if not runs("load_images"):
        return _not_measured("load_images")
    made = newest("load_images")
    size = f"JPEGs of {made['mean_bytes'] / 1e3:.0f} KB to crops of 224, {made['cores']} cores"
    rows = [f"| {size} | images a second | times as fast as it is **stoker** |", "|---|---|---|"]
    for name in made["images_per_s"]:
        rate = Spread.of("load_images", lambda run, name=name: run["images_per_s"][name]["median"])
        times = Spread.of("load_images", lambda run, name=name: run["stoker_over"][name])
        label = f"**{name}**" if name == "stoker" else name
        rows.append(f"| {label} | {rate.said(',.0f')} | {times.said('.2f') if times.count else ''} |")
    return "\n".join(rows) + "\n" + _over("load_images")


def bench_path() -> str:
    """stoker's rates over fio's, turn by turn."""
    if not runs("bench_path"):
        return "Not measured yet: `python benchmarks/bench_path.py`.\n"
    rows = ["| the same engine, block and order | stoker's rate over fio's |", "|---|---|"]
    for name in newest("bench_path")["ratio"]:
        ratio = Spread.of("bench_path", lambda run, name=name: run["ratio"][name])
        rows.append(f"| {name} | {ratio.said('.2f')} |")
    return "\n".join(rows) + "\n" + _over("bench_path")


def tune() -> str:
    """Each job's newest run: what was claimed, and what a rerun with the diff gave."""
    found = {job["job"]: job for report in runs("tune") for job in report["jobs"]}
    if not found:
        return "Not measured yet: `python benchmarks/tune.py`.\n"
    rows = [
        "| job | claimed, 95% interval | a rerun gave | set | trials | seconds |",
        "|---|---|---|---|---|---|",
    ]
    for name, job in sorted(found.items()):
        knobs = ", ".join(f"`{knob}={value}`" for knob, value in job["knobs"].items())
        claimed = f"{job['claimed']:.2f}× ({job['low']:.2f}–{job['high']:.2f})" if knobs else "nothing better"
        gave = f"{job['real']:.2f}×" if knobs else "–"
        rows.append(
            f"| {name} | {claimed} | {gave} | {knobs or '–'} | {job['trials']} | {job['seconds']:.0f} |"
        )
    return "\n".join(rows) + "\n\nThe newest run of each job in `benchmarks/results/tune.json`.\n"


def history_check() -> str:
    """Alarms and finds, beside Otava's where it was there."""
    if not runs("history_check"):
        return "Not measured yet: `python benchmarks/history_check.py`.\n"
    report = newest("history_check")
    judges = list(report["found_percent"])
    rows = [
        f"| percent of {report['series']:,} series | {' | '.join(judges)} |",
        "|---" * (1 + len(judges)) + "|",
    ]
    for family in report["false_alarms_percent"][judges[0]]:
        alarms = [report["false_alarms_percent"][one][family]["in one check"] for one in judges]
        rows.append(f"| false alarms, {family} | {' | '.join(f'{one:.1f}' for one in alarms)} |")
    for case in report["found_percent"][judges[0]]:
        finds = [report["found_percent"][one][case] for one in judges]
        rows.append(
            f"| 5% in 2% noise found within six, {case} | {' | '.join(f'{one:.1f}' for one in finds)} |"
        )
    return "\n".join(rows) + "\n\nThe newest run in `benchmarks/results/history_check.json`.\n"


def accelerators() -> str:
    """Utilisation of one card, beside dlio_benchmark's."""
    if not runs("accelerators"):
        return "Not measured yet: `python benchmarks/accelerators.py`.\n"
    rows = ["| a step of | dlio_benchmark | stoker |", "|---|---|---|"]
    for name, one in newest("accelerators")["utilisation"].items():
        said = [f"{100 * statistics.median(one[who]):.0f}%" for who in ("dlio", "stoker")]
        rows.append(f"| {1000 * one['step_s']:.0f} ms, {name} | {' | '.join(said)} |")
    return (
        "\n".join(rows)
        + "\n\nMedians of turns of the newest run in `benchmarks/results/accelerators.json`.\n"
    )


def _over(name: str) -> str:
    """Which runs the figures of a table are of."""
    kept = len(runs(name))
    of = "the only run" if kept == 1 else f"the last {min(kept, LAST)} runs of {kept} kept"
    return f"\nMedians of {of} in `benchmarks/results/{name}.json`, lowest and highest in brackets.\n"


def stage() -> str:
    """Rates of whole processes to memory and to a synced disk."""
    sizes = {"sixteen": ("16 x 128 MiB", 2048), "one": ("1 x 2 GiB", 2048), "small": ("4,000 x 64 KiB", 250)}
    rows = [
        f"| MB/s, 2 cores, loopback | {' | '.join(_STAGERS.values())} |",
        "|---" * (1 + len(_STAGERS)) + "|",
    ]
    for place, where in (("memory", "to memory"), ("disk", "to disk, synced")):
        for case, (label, mib) in sizes.items():
            rates = [_stage_rate(f"{name} / {case} / {place}", mib).said(",.0f") for name in _STAGERS]
            rows.append(f"| {label} {where} | {' | '.join(rates)} |")
    return "\n".join(rows) + "\n" + _over("stage")


def _stage_rate(case: str, mib: int) -> Spread:
    return Spread.of("stage", lambda run: mib * run["scale"] * 1.048576 / run["median"][case]["wall_s"])


def stage_far() -> str:
    """Seconds of whole processes by the time to the first byte, and how often as fast as s5cmd that is."""
    if not runs("stage_far"):
        return _not_measured("stage_far")
    keys = [key for key in _keys("stage_far", "median") if key.startswith("stoker / ")]
    labels = newest("stage_far")["labels"]
    rows = ["| to memory, 2 cores | **stoker** | s5cmd | times as fast |", "|---|---|---|---|"]
    for key in keys:
        _, case, way, scheme, when = key.split(" / ")
        ours, peer, times = (_far(key, pick) for pick in ("ours", "peer", "times"))
        rows.append(
            f"| {labels[case]}, {way}, {scheme}, {when} | {ours.said('.2f', unit=' s')} | "
            f"{peer.said('.2f', unit=' s')} | {times.said('.2f')} |"
        )
    return "\n".join(rows) + "\n" + _over("stage_far")


def _keys(name: str, part: str) -> list[str]:
    """What the last runs measured, each perhaps some of it, in its order."""
    return list(dict.fromkeys(key for run in reversed(runs(name)[-2 * LAST :]) for key in run[part]))


def _far(key: str, pick: str) -> Spread:
    def figure(run: dict) -> float:
        ours, peer = (
            run["median"][name + key.removeprefix("stoker")]["wall_s"] for name in ("stoker", "s5cmd")
        )
        return {"ours": ours, "peer": peer, "times": peer / ours}[pick]

    return Spread.of("stage_far", figure)


def http_clients() -> str:
    """Seconds and CPU seconds of our own HTTP client beside those that others keep."""
    if not runs("http_clients"):
        return _not_measured("http_clients")
    cases = _keys("http_clients", "median")
    rows = ["| to memory, 2 cores | wall | CPU |", "|---|---|---|"]
    for key in cases:
        wall, cpu = (
            Spread.of("http_clients", lambda run, key=key, what=what: run["median"][key][what])
            for what in ("wall_s", "cpu_s")
        )
        rows.append(f"| {key} | {wall.said('.2f', unit=' s')} | {cpu.said('.2f', unit=' s')} |")
    return "\n".join(rows) + "\n" + _over("http_clients")


def feed_remote() -> str:
    """When training begins on a dataset in a slow store, and what an epoch of it fetches."""
    if not runs("feed_remote"):
        return _not_measured("feed_remote")
    rate = newest("feed_remote")["rate"].upper()
    columns = (
        "first batch | after so much of the bytes | bytes of an epoch | epoch | batches/s once all is here"
    )
    rows = [f"| full shuffle, {rate}B/s a connection | {columns} |", "|---|---|---|---|---|---|"]
    names = sorted(_keys("feed_remote", "loaders"), key=lambda name: not name.startswith("stoker"))
    for size, name in itertools.product(sorted({run["megabytes"] for run in runs("feed_remote")}), names):
        if not _fed(name, "epoch_warm_batches_s", size).count:  # it failed, or did not come to its end
            continue
        label = {"stoker": "**stoker**", "stoker, staged first": "**stoker**, staged first"}.get(name, name)
        first, share = (
            _fed(name, "first_first_s", size).said(".1f", unit=" s"),
            _fed(name, "first_share", size).said(".1%"),
        )
        whole = _fed(name, "epoch_share", size).said()
        epoch = _fed(name, "epoch_epoch_s", size).said(".0f", unit=" s")
        warm = _fed(name, "epoch_warm_batches_s", size).said(",.0f")
        rows.append(f"| {label}, {size:,} MB | {first} | {share} | {whole}× | {epoch} | {warm} |")
    return "\n".join(rows) + "\n" + _over("feed_remote")


def _fed(name: str, figure: str, size: int) -> Spread:
    """Of the runs over so many megabytes."""

    def pick(run: dict) -> float:
        return {run["megabytes"]: run["loaders"]}[size][name]["medians"][figure]

    return Spread.of("feed_remote", pick)


_STAGERS = {
    "stoker": "**stoker**, xxh3 verified",
    "s5cmd": "s5cmd",
    "rclone": "rclone",
    "huggingface_hub": "huggingface_hub",
}


def load() -> str:
    """Loaders of tokens: the default first, then peers, as they come and with worker processes."""
    columns = "Mtok/s | first batch | PSS | **stoker** in the same run"
    rows = [f"| [8, 2048] batches, warm, 2 cores | {columns} |", "|---|---|---|---|---|"]
    peers = [name for name in newest("load_tokens")["results"] if not name.startswith("stoker")]
    for name in (*_OURS, *peers):
        rate, first, held = (_loaded(name, key) for key in ("mtok_s", "first_batch_ms", "pss_mb"))
        times = "" if name in _OURS else _times(name).said(",.1f", unit=" times as fast")
        rows.append(
            f"| {_OURS.get(name, name)} | {rate.said(',.0f')} | {first.said(',.0f', unit=' ms')} | "
            f"{held.said(',.0f', unit=' MB')} | {times} |"
        )
    report = next(run for run in reversed(runs("load_tokens")) if "cold, slow disk" in run)
    slow = report["cold, slow disk"]
    cold = (
        "\nA first epoch past the page cache (O_DIRECT), verified, in the newest run of it: "
        f"{_cold(slow)}, of a disk that is kept at {slow['gb_s']} GB/s. As the disk is, after the first GB: "
        f"{_cold_unhindered(report['cold'])}.\n"
    )
    return "\n".join(rows) + "\n" + _over("load_tokens") + cold


def load_packings() -> str:
    """Packings and blends, by the cells of input_ids; and how many of those are tokens of documents."""
    ours = [name for name in newest("load_tokens")["results"] if _is_packing(name)]
    if not ours:
        return _not_measured("load_tokens")
    rows = ["| documents of lognormal lengths, 2 cores | Mtok/s | not padding |", "|---|---|---|"]
    for name in ours:
        rate, real = _loaded(name, "mtok_s"), _loaded(name, "real_share")
        rows.append(f"| {name.removeprefix('stoker ')} | {rate.said(',.0f')} | {real.said('.0%')} |")
    return "\n".join(rows) + "\n" + _over("load_tokens")


def _is_packing(name: str) -> bool:
    return name.startswith("stoker ") and name not in _OURS


def load_any() -> str:
    """Samples a second of datasets of one's own class."""
    if not runs("load_any"):
        return _not_measured("load_any")
    kinds = newest("load_any")["speed"]
    rows = [f"| samples/s, 2 cores | {' | '.join(kinds)} |", "|---" * (1 + len(kinds)) + "|"]
    for name in next(iter(kinds.values())):
        rates = [
            Spread.of("load_any", lambda run, k=kind, n=name: run["speed"][k][n]["samples_s"]).said(",.0f")
            for kind in kinds
        ]
        rows.append(f"| {name} | {' | '.join(rates)} |")
    return "\n".join(rows) + "\n" + _over("load_any")


def load_latency() -> str:
    """What tuning loses beside the best fixed number of readers."""
    if not runs("load_latency"):
        return _not_measured("load_latency")
    rows = ["| a read takes | best fixed readers over tuned | settled after |", "|---|---|---|"]
    for ms in newest("load_latency")["ms"]:
        over, settled = (
            Spread.of("load_latency", lambda run, ms=ms, key=key: run["ms"][ms][key])
            for key in ("best_over_tuned", "settled_s")
        )
        rows.append(f"| {ms} ms | {over.said('.2f')} | {settled.said('.1f', unit=' s')} |")
    return "\n".join(rows) + "\n" + _over("load_latency")


def load_orders() -> str:
    """The order now beside the one before it."""
    if not runs("load_orders"):
        return _not_measured("load_orders")
    said = [
        f"{Spread.of('load_orders', lambda run, way=way: run['now / before'][way]).said('.2f')} with {label}"
        for way, label in (("thread", "threads"), ("inline", '`workers="inline"`'))
    ]
    return f"Speed over that of the order before it: {', '.join(said)}.\n" + _over("load_orders")


def _not_measured(name: str) -> str:
    return f"Not measured yet: `python benchmarks/{name}.py`.\n"


_OURS = {
    "stoker threads": "**stoker**",
    "stoker inline": '**stoker**, `workers="inline"`: no thread, for debugging',
}


def _loaded(name: str, key: str) -> Spread:
    return Spread.of("load_tokens", lambda run: run["results"][name][key]["median"])


def _times(peer: str) -> Spread:
    """How often as fast the default is as a peer, in the same run."""
    return Spread.of(
        "load_tokens",
        lambda run: (
            run["results"]["stoker threads"]["mtok_s"]["median"] / run["results"][peer]["mtok_s"]["median"]
        ),
    )


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
    """Feeding a card, as shares of what the machine can do: the first pass, which verifies, comes first."""
    name = newest("gpu_feed")["machine"]["gpu"]
    rows = [f"| one {name} | first pass, which verifies | passes after it |", "|---|---|---|"]
    for reader, label in (("pread", "page cache to GPU"), ("mmap", 'the same with `reader="mmap"`')):
        later = Spread.of("gpu_feed", lambda run, way=reader: run["paths"]["page_cache_share_of_pinned"][way])
        cpu = Spread.of("gpu_feed", lambda run, way=reader: run["paths"]["page_cache_cpu_s_gb"][way])
        rows.append(
            f"| {label}, of the pinned copy ceiling | {_first_pass(reader).said()} | {later.said()}, "
            f"{cpu.said(unit=' CPU seconds a GB')} |"
        )
    first, later = (_disk(key) for key in ("share_verifying", "share"))
    rows.append(f"| disk to GPU, of the O_DIRECT ceiling | {first.said()} | {later.said()} |")
    said = (
        f"\nA GPT step fed by stoker waits for data {_waits('stoker').said('.2%')} of the time; the same "
        f"step fed by the tutorial pipeline {_waits('tutorial').said('.0%')}.\n"
    )
    return "\n".join(rows) + "\n" + said + _over("gpu_feed")


def _first_pass(reader: str) -> Spread:
    def share(run: dict) -> float:
        tried = [found for found in run["paths"]["page_cache_to_gpu"] if found["reader"] == reader]
        return max(found["verifying_gb_s"] for found in tried) / run["paths"]["pinned_copy_gb_s"]

    return Spread.of("gpu_feed", share)


def _disk(key: str) -> Spread:
    return Spread.of("gpu_feed", lambda run: run["paths"]["disk"][key])


def _waits(way: str) -> Spread:
    return Spread.of("gpu_feed", lambda run: run["training"][way]["wait_share"])


def doctor() -> str:
    """Values that doctor reads, beside what other programs say of them: the newest run of each machine."""
    verdicts = ("same", "known to differ", "DIFFERS", "doctor does not know", "no second source")
    newest_of = {machine_of(run): run["rows"] for run in runs("doctor_second_source")}
    rows = ["| machine | values | " + " | ".join(verdicts) + " |", "|" + "---|" * (len(verdicts) + 2)]
    for machine, values in newest_of.items():
        counts = [sum(row["verdict"] == verdict for row in values) for verdict in verdicts]
        rows.append(f"| {machine} | {len(values)} | " + " | ".join(map(str, counts)) + " |")
    return "\n".join(rows) + "\n"


def plan_model() -> str:
    """Scenes before a throttled store: seconds and idle share, measured and simulated."""
    report = newest("plan_model")
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
    newest_medians = {name: facts for run in runs("checkpoint") for name, facts in run["median"].items()}
    size = newest_medians["stoker"]["state_bytes"] / 2**30
    columns = "stall | durable | lost meanwhile | memory | cold load"
    rows = [f"| {size:.2f} GiB, AdamW, 2 cores; seconds | {columns} |", "|---|---|---|---|---|---|"]
    ways = [name for name, facts in newest_medians.items() if "durable_s" in facts]
    for name in sorted(ways, key=lambda name: not name.startswith("stoker")):
        if name.startswith("small "):
            continue
        label = _SAVERS.get(name, name)
        facts = [_saving(name, key).said() for key in ("stall_s", "durable_s", "lost_s", "memory", "load_s")]
        rows.append(f"| {label} | {' | '.join(facts[:3])} | {facts[3]} of the state | {facts[4]} |")
    disk = _saving("ceiling", "seconds").said()
    rows.append(f"| O_DIRECT writes of the same bytes, synced | | {disk} | | | |")
    rows += ["", "| stall alone, seconds | 20,000 small tensors | 480 MiB |", "|---|---|---|"]
    for name in ("stoker", "stoker overlap", "dcp.async_save thread", "dcp.async_save process"):
        stalls = (
            _saving(f"{case} {name}", "stall_s").said(".3f") if f"{case} {name}" in newest_medians else ""
            for case in ("many", "small")
        )
        rows.append(f"| {_SAVERS.get(name, name)} | {' | '.join(stalls)} |")
    return "\n".join(rows) + "\n" + _over("checkpoint")


_SAVERS = {"stoker": "**stoker**", "stoker overlap": "**stoker**, `overlap=True`"}


def _suspended(run: dict, key: str) -> float:
    if run["suspend"]["gigabytes"] != 10:
        raise KeyError(key)  # a short run suspends less
    return run["suspend"][key]


def _saving(way: str, key: str) -> Spread:
    return Spread.of("checkpoint", lambda run: run["median"][way][key])


def gpu_checkpoint() -> str:
    """A save beside training on a card."""
    # a run that its lease cut short has no peer in it
    report = next(run for run in reversed(runs("gpu_checkpoint")) if "dcp_pinned" in run)
    copy, peer = report["snapshot"], report["dcp_pinned"]["stager"]
    suspend, resume = (
        Spread.of("gpu_checkpoint", lambda run, key=key: _suspended(run, key))
        for key in ("suspend_s", "resume_s")
    )
    share = Spread.of(
        "gpu_checkpoint", lambda run: run["snapshot"]["bytes_per_s"] / run["ceiling_bytes_per_s"]
    )
    rate = Spread.of("gpu_checkpoint", lambda run: run["restore"]["bytes_per_s"] / 1e9)
    rows = [
        f"| one {report['machine']['gpu']}, {copy['state_bytes'] / 1e9:.1f} GB of state | |",
        "|---|---|",
        f"| stall of a save | {_stall('blocking')} |",
        f"| stall of a save, `overlap=True` | {_stall('overlap')} |",
        f"| stall of dcp.async_save, {peer} | {_stall('dcp_pinned')} |",
        f"| mean step while a save is written with `overlap=True`, beside none | {_slower().said('+.1%')} |",
        f"| copy to pinned memory, of its ceiling | {share.said()} |",
        f"| verified restore, cold | {rate.said('.1f', unit=' GB/s')} |",
        f"| a process with {report['suspend']['gigabytes']:.0f} GB suspended; resumed, with equal losses | "
        f"{suspend.said('.1f', unit=' s')}; {resume.said('.1f', unit=' s')} |",
    ]
    return "\n".join(rows) + "\n" + _over("gpu_checkpoint")


def _stall(way: str) -> str:
    return Spread.of("gpu_checkpoint", lambda run: run[way]["stall_s"] * 1e3).said(",.0f", unit=" ms")


def _slower() -> Spread:
    def share(run: dict) -> float:
        return 2 * run["overlap"]["mean_step_s"] / (run["normal_step_s"] + run["normal_again_step_s"]) - 1

    return Spread.of("gpu_checkpoint", share)


def watch() -> str:
    """Faults re-enacted on a card, and what was found."""
    report = newest("gpu_watch")
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
    found = newest("hook_cost")
    rows = [f"| {name} | {us:.1f} µs |" for name, us in found["hooks_us"].items()]
    rows += [
        f"| all hooks, in the loop's thread | {found['loop_us']:.1f} µs |",
        f"| the thread that reads their marks | {found['reader_us']:.1f} µs |",
        f"| **sum** | **{found['sum_us']:.1f} µs**, {found['sum_us'] / found['step_us']:.2%} of the step |",
    ]
    head = [f"| of a step of {found['step_us'] / 1e3:.1f} ms, {found['cores']} cores | |", "|---|---|"]
    return "\n".join([*head, *rows]) + "\n" + _beside_peers()


def _beside_peers() -> str:
    """Of the newest run with rounds enough: processes of one program differ by more than what is measured."""
    able = [
        run for run in runs("watch_overhead") if len(run.get("wall_us_by_round", {}).get("null", [])) >= 3
    ]
    if not able:
        return ""
    report = able[-1]
    names = {"null": "nothing (the null control)", "stoker": "`stoker watch`", "traceml": "traceml-ai"}
    head = [f"| whole steps of {report['plain_step_ms']:.1f} ms, in turns | wall | CPU |", "|---|---|---|"]
    rows = [
        f"| {names.get(mode, mode)} | {wall['us']:.0f} ± {wall['error']:.0f} µs | "
        f"{report['cpu'][mode]['us']:.0f} ± {report['cpu'][mode]['error']:.0f} µs |"
        for mode, wall in report["wall"].items()
    ]
    return "\n" + "\n".join([*head, *rows]) + "\n"


def summary() -> str:
    """One line for each stage, beside its best peer: what the defaults give comes first."""
    prepared = Spread.of("prepare", lambda run: run["ratios"]["default over the better peer"])
    workers = Spread.of("load_tokens", lambda run: run["ratios"]["threads / best peer with workers"])
    inline = Spread.of("load_tokens", lambda run: run["ratios"]["inline / litdata"])
    again = Spread.of("gpu_feed", lambda run: run["paths"]["page_cache_share_of_pinned"]["pread"])
    size = newest("gpu_checkpoint")["snapshot"]["state_bytes"] / 1e9
    seen, right = newest("gpu_watch"), Spread.of("gpu_watch", lambda run: run["right"])
    rows = [
        ("prepare, 2 cores", f"{prepared.said('.0f')} times the better of megatron-core and datatrove"),
        ("load, 2 cores", f"{_times('DataLoader+memmap').said('.1f')} times DataLoader, "
         f"{_times('litdata').said('.1f')} times litdata; {workers.said('.0f')} times the best peer with "
         f'workers; without a thread (`workers="inline"`) {inline.said(".1f")} times litdata'),
        ("feed, H200", f"a GPT step waits {_waits('stoker').said('.2%')} of the time for data; the tutorial "
         f"pipeline {_waits('tutorial').said('.0%')}"),
        ("disk to GPU, H200", f"the first pass, which verifies: {_disk('share_verifying').said()} of bare "
         f"O_DIRECT reads; passes after it {_disk('share').said()}"),
        ("page cache to GPU, H200", f"the first pass: {_first_pass('pread').said()} of pinned copies; passes "
         f"after it {again.said()}"),
        ("checkpoint, H200", f"stalls {_stall('blocking')} for {size:.0f} GB, dcp.async_save "
         f"{_stall('dcp_pinned')}; with `overlap=True` {_stall('overlap')}"),
        ("watch, H200", f"{right.said('.0f')} of {seen['of']} injected faults named"),
    ]  # fmt: skip
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {said} |" for name, said in rows)]) + "\n"


TABLES: dict[str, Callable[[], str]] = {
    "bench_path": bench_path,
    "load_images": load_images,
    "prepare_media": prepare_media,
    "accelerators": accelerators,
    "tune": tune,
    "history_check": history_check,
    "prepare": prepare,
    "stage": stage,
    "stage_far": stage_far,
    "http_clients": http_clients,
    "feed_remote": feed_remote,
    "load": load,
    "load_packings": load_packings,
    "load_any": load_any,
    "load_latency": load_latency,
    "load_orders": load_orders,
    "gpu": gpu,
    "doctor": doctor,
    "plan_model": plan_model,
    "checkpoint": checkpoint,
    "gpu_checkpoint": gpu_checkpoint,
    "watch": watch,
    "watch_cost": watch_cost,
    "scenarios": scenarios,
    "confusion": confusion,
    "foreign": foreign,
    "kineto": kineto,
    "scenario_runs": scenario_runs,
    "summary": summary,
}


def filled(text: str) -> str:
    return _TABLE.sub(lambda match: match[1] + TABLES[match[2]]() + match[3], text)


def main() -> int:
    stale = []
    for path in (*sorted(ROOT.glob("README*.md")), *sorted((ROOT / "docs").rglob("*.md"))):
        text = path.read_text("utf-8")
        if filled(text) != text:
            stale.append(str(path.relative_to(ROOT)))
            if "--check" not in sys.argv:
                path.write_text(filled(text), "utf-8")
    print("\n".join(stale) or "all tables are up to date")
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    raise SystemExit(main())
