"""The tables of docs/concepts/diagnosis.md: what watchers said of real faults in the newest run."""

from __future__ import annotations

from collections import Counter

from kept_runs import newest, runs


def scenarios() -> str:
    """Real faults in real jobs: what each watcher made of them, in sum."""
    report = newest("scenarios")
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
    causes, each = report["causes"], report["scenarios"]
    said = (
        f"Cause of a starved loader right: stoker {causes['right']} of {causes['of']}; traceml-ai has none."
    )
    crowded = sum(row["stoker"].get("others_cores", 0) > 0.3 for row in each.values())
    quiet = f"In {crowded} of stoker's runs others kept more than 0.3 of the 2 cores busy."
    return "\n".join([*rows, "", said, _unchanged(each), quiet]) + "\n"


def _unchanged(rows: dict) -> str:
    """What traceml-ai says of scripts without its two lines."""
    found = [row["traceml_unchanged"] for row in rows.values() if "traceml_unchanged" in row]
    silent = sum(not one["kinds"] for one in found)
    return f"Of {len(found)} scripts without its two lines traceml-ai gave no verdict on {silent}."


def confusion() -> str:
    """Kind by kind: found, and what was said in its place."""
    rows = newest("scenarios")["scenarios"].values()
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
    report = newest("scenarios")
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


def foreign() -> str:
    """Other people's loops with one fault each: what was said first, and what an older version said."""
    report, later = _whole_and_later(runs("foreign_shapes"))
    older = report.get("confusion_old") or {}
    lines = [
        "| injected | runs | found first | said instead | the old one: runs | found first | said instead |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind, said in report["confusion"].items():
        cells = [cell for one in (said, older.get(kind, {})) for cell in _first_said(one, kind)]
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    rows = report["rows"].values()
    asked = [row["old"] for row in rows if "old" in row]
    said = [
        f"Verdict, line and number of steps right: {report['right']} of {report['runs']}; the verdict alone "
        f"{report['verdict_right']}; healthy programs accused: {_accused(report)}."
    ]
    if asked:
        right = sum(one["verdict"] for one in asked)
        said.append(f"The old one (commit 298450d) was asked of {len(asked)}: {right} right.")
    said += [_again(report, one) for one in later]
    return "\n".join([*lines, "", *said]) + "\n"


def _again(report: dict, later: dict) -> str:
    """Rules are mended by a run; this is what they then said of some of its cases."""
    wrong = {name for name, row in report["rows"].items() if not row["right"]} & later["rows"].keys()
    mended = sum(later["rows"][name]["right"] for name in wrong)
    return (
        f"After mends, {later['runs']} cases again: {later['right']} right, among them {mended} of "
        f"{len(wrong)} that had been wrong; healthy programs accused: {_accused(later)}."
    )


def _whole_and_later(reports: list[dict]) -> tuple[dict, list[dict]]:
    """The newest of the runs with most cases, and those after it, of some cases again."""
    most = max(one["runs"] for one in reports)
    at = max(number for number, one in enumerate(reports) if one["runs"] == most)
    return reports[at], reports[at + 1 :]


def _accused(report: dict) -> str:
    healthy = sum(row["injected"] == "healthy" for row in report["rows"].values())
    return f"{report['false_alarms']} of {healthy}"


def _first_said(counts: dict[str, int], kind: str) -> tuple[str, str, str]:
    others = ", ".join(f"{other} {count}" for other, count in counts.items() if other != kind)
    return (str(sum(counts.values())), str(counts.get(kind, 0)), others) if counts else ("–", "–", "")


def kineto() -> str:
    """Traces of torch's profiler, read by both: the same percentages, and how long it takes."""
    report = newest("kineto_peers")
    theirs = f"HolisticTraceAnalysis {report['versions']['HolisticTraceAnalysis']}"
    lines = [
        f"| trace | ranks | idle / compute / other / overlap, % | {theirs} | points apart | stoker | it |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in report["traces"].items():
        ours, hta = (_shares(row[who][0]) for who in ("stoker", "hta"))
        times = f"{row['stoker_s']:.2f} s | {row['hta_s']:.2f} s"
        lines.append(f"| {name} | {row['ranks']} | {ours} | {hta} | {row['points_apart']:.2f} | {times} |")
    return "\n".join(lines) + "\n"


def _shares(row: list[float | None]) -> str:
    return " / ".join("–" if one is None else f"{one:.4g}" for one in row)
