"""Verdict card: what a run ends with on a terminal, the same words without colour in a pipe."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from io import StringIO
from typing import TextIO

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from stoker.diagnose.timeline import STATES
from stoker.findings import Finding
from stoker.report.phrases import kind_of, pace_of, price_of, sentence
from stoker.report.summary import Summary
from stoker.report.units import percent, seconds, words
from stoker.symptoms import page_of

COLOURS = {
    "compute": "blue",
    "data": "red",
    "copy": "yellow",
    "collective": "magenta",
    "checkpoint": "bright_yellow",
    "evaluation": "green",
    "startup": "cyan",
    "sync": "bright_red",
    "stalled": "bright_white",
    "unattributed": "bright_black",
}
_WIDTH = 100  # where there is no terminal to ask
_BAR = 36  # characters of a whole bar


def print_card(summary: Summary, console: Console) -> None:
    """Print the verdict with its price, its proof and what to change."""
    finding = summary.verdict
    if finding is None:
        console.print(Text("Nothing to say: too little was seen of this run", style="bold"))
    else:
        _heading(console, summary, finding)
    _states(console, summary)
    _listed(console, "why the GPU was idle", idle_lines(summary))
    did = "what the GPU did" if summary.gpus else "what torch did on the host, in a deep look"
    _listed(console, did, work_lines(summary))
    if finding is not None:
        _listed(console, "what to change", finding.remedy)
        _listed(console, "evidence", finding.evidence)
        _listed(console, "more", [page] if (page := page_of(finding)) else [])
    unseen = (*(finding.missing if finding is not None else ()), *summary.missing)
    _listed(console, "not seen", [*dict.fromkeys(unseen)])
    _listed(
        console,
        "also",
        [f"{kind_of(one)}: {one.summary}\n  {price_of(summary, one)}" for one in summary.findings[1:]],
    )


def card_text(summary: Summary, *, width: int = _WIDTH) -> str:
    """The verdict card as plain text."""
    buffer = StringIO()
    print_card(summary, Console(file=buffer, width=width, no_color=True, force_terminal=False))
    return "".join(f"{line.rstrip()}\n" for line in buffer.getvalue().splitlines())


def show_card(summary: Summary, file: TextIO) -> None:
    """The verdict card, coloured on a terminal, plain elsewhere."""
    if file.isatty():
        # 0 columns: a container's terminal may not know its size
        width = os.get_terminal_size(file.fileno()).columns or _WIDTH
        print_card(summary, Console(file=file, width=width))
    else:
        print(card_text(summary), end="", file=file, flush=True)


def _heading(console: Console, summary: Summary, finding: Finding) -> None:
    healthy = finding.kind == "healthy"
    console.print(Text(kind_of(finding), style="bold green" if healthy else "bold red"))
    console.print(Text(sentence(finding.summary), style="bold"))
    console.print(Text(pace_of(summary) if healthy else price_of(summary, finding)))
    if summary.ended not in ("", "exit 0", "running"):
        console.print(Text(f"ended: {summary.ended[:200]}"))


def _states(console: Console, summary: Summary) -> None:
    for at, line in enumerate(_state_lines(summary.state_s)):
        console.print(Padding(line, (0 if at else 1, 0, 0, 2)))
    whole = sum(summary.state_s)
    if summary.judged_s < 0.98 * whole:
        judged = f"the {seconds(summary.judged_s)} without start-up and exit"
        console.print(Text(f"  of {seconds(whole)}; a finding's share is of {judged}"))


_MEANWHILE = {
    "compute": "while the host launched kernels",
    "data": "while the loop waited for data",
    "copy": "while a batch was copied",
    "collective": "while ranks exchanged",
    "checkpoint": "while it saved",
    "evaluation": "in evaluation",
    "startup": "while it started up",
    "sync": "at the end of waits for the GPU itself",
    "stalled": "while the host stood",
    "unattributed": "in the program's own code",
}


def idle_lines(summary: Summary) -> list[str]:
    """How long the cards were busy, and what the host did while they were not; together the whole time."""
    told = summary.ledger
    if told is None:
        return []
    idle = sorted(told.idle.items(), key=lambda item: -item[1])
    return [
        f"{percent(told.busy)} busy, {percent(1 - told.busy)} idle",
        *(f"{percent(share)} {_MEANWHILE[state]}" for state, share in idle if share >= 0.005),
    ]


_MOVES = {
    "collective": "collectives",
    "h2d": "copies to the GPU",
    "d2h": "copies from it",
    "copy": "copies on it",
    "memset": "fills",
}
_NAME = 60  # characters of a kernel's name: the rest is template arguments


def work_lines(summary: Summary) -> list[str]:
    """Kernels, copies and collectives in the window that a profiler saw, longest first."""
    seen = summary.worked
    if seen is None:
        return []
    what = "kernels" if summary.gpus else "operators"
    lines = [
        f"{seen.kernel_count:,} {what} in {seconds(seen.window_s)}: {percent(seen.busy)} busy, "
        f"{percent(seen.compute_s / seen.window_s if seen.window_s else 0.0)} computing"
    ]
    lines += [
        f"{percent(one.share)} {one.name[:_NAME]} ({one.count:,} ×{', tensor cores' if one.tensor else ''})"
        for one in seen.kernels[:5]
    ]
    lines += [
        f"{_MOVES[one.kind]}: {seconds(one.seconds)}, {percent(one.overlap)} of it hidden behind kernels"
        for one in seen.moved
        if one.seconds > 0.005 * seen.window_s
    ]
    if seen.launch_idle_s > 0.01 * seen.window_s:
        late = f"{seen.launch_runs} stretches that the host launched too slowly"
        lines.append(f"idle {seconds(seen.launch_idle_s)} in {late}")
    return lines


def _state_lines(state_s: Sequence[float]) -> Iterator[Text]:
    """Name, share, seconds and a bar for each state that took time."""
    total = sum(state_s) or 1.0
    for state, value in zip(STATES, state_s, strict=True):
        if value / total > 0.0005:
            bar = "█" * max(1, round(value / total * _BAR))
            numbers = f"{words(state):13}{percent(value / total):>6}  {seconds(value):>12}  "
            yield Text.assemble(numbers, (bar, COLOURS[state]))


def _listed(console: Console, title: str, items: Sequence[str]) -> None:
    if not items:
        return
    console.print()
    console.print(Text(title, style="bold"))
    for item in items:
        console.print(Padding(Text(f"- {item}"), (0, 0, 0, 2)))
