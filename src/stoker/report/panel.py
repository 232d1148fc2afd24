"""Terminal panel, live: the last lines, while the observed program keeps the rest of the screen.

The program writes to the terminal itself, unchanged, and we cannot know when. So the terminal is told to
scroll only what lies above the panel, and each refresh is one write that puts the cursor back where it was.
"""

from __future__ import annotations

import os
from contextlib import suppress
from io import StringIO
from typing import TextIO

import numpy as np
from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from stoker.diagnose.timeline import STATES
from stoker.formats.sizes import counted
from stoker.report.card import COLOURS
from stoker.report.phrases import kind_of, pace_of
from stoker.report.series import combined
from stoker.report.summary import Summary
from stoker.report.units import percent, quantity, seconds, size, words

HEIGHT = 5
LEAST_ROWS = 15  # a smaller terminal is left to the program
RECENT_S = 60.0  # the panel shows the last minute: what is going on, not what went on
LINE_EVERY_S = 60.0
LINES_FROM_S = 15.0  # what is found in the first seconds, while a run starts up, is found otherwise soon

_SAVE, _RESTORE = "\x1b7", "\x1b8"


def panel_for(file: TextIO) -> Screen | Lines:
    """A docked panel on a terminal, now and then a line elsewhere."""
    return Screen(file) if file.isatty() else Lines(file)


class Screen:
    """The panel at the bottom of a terminal; `close` gives the lines back."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._size: os.terminal_size | None = None  # for which the terminal is divided

    def show(self, summary: Summary) -> None:
        size_now = os.get_terminal_size(self._file.fileno())
        if size_now != self._size:
            self._release()
            if size_now.lines < LEAST_ROWS:
                return
            self._divide(size_now)
        top = size_now.lines - HEIGHT + 1
        lines = rendered(summary, width=size_now.columns - 1)
        drawn = "".join(f"\x1b[{top + i};1H\x1b[2K{line}" for i, line in enumerate(lines))
        self._write(f"{_SAVE}{drawn}{_RESTORE}")

    def close(self) -> None:
        """Undivide the terminal; safe twice, and where the terminal is gone."""
        with suppress(OSError):
            self._release()

    def _divide(self, size_now: os.terminal_size) -> None:
        # Scroll first, so that what stands in the last lines moves up instead of being painted over.
        room = "\n" * HEIGHT + f"\x1b[{HEIGHT}A"
        self._write(f"{room}{_SAVE}\x1b[1;{size_now.lines - HEIGHT}r{_RESTORE}")
        self._size = size_now

    def _release(self) -> None:
        if self._size is not None:
            top = self._size.lines - HEIGHT + 1
            self._write(f"{_SAVE}\x1b[r\x1b[{top};1H\x1b[J{_RESTORE}")
            self._size = None

    def _write(self, text: str) -> None:
        self._file.write(text)
        self._file.flush()


class Lines:
    """A line when the finding changes and every minute, for logs: no control characters."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._said_at, self._said = -LINE_EVERY_S, ""

    def show(self, summary: Summary) -> None:
        now = summary.dropped_s + summary.wall_s
        kind = summary.verdict.kind if summary.verdict else ""
        due = kind != self._said or now - self._said_at >= LINE_EVERY_S
        if summary.running and now >= LINES_FROM_S and due:
            self._said_at, self._said = now, kind
            print(
                f"stoker: {seconds(now)} · {pace_of(summary)} · {_finding(summary)}",
                file=self._file,
                flush=True,
            )

    def close(self) -> None: ...


# --- what the panel says --------------------------------------------------------------------------


def rendered(summary: Summary, *, width: int) -> list[str]:
    """The panel's lines, none wider than the terminal."""
    buffer = StringIO()
    console = Console(file=buffer, width=width, force_terminal=True, color_system="standard")
    share = _recent(summary)
    title = Text(f"stoker · {seconds(summary.dropped_s + summary.wall_s)} · {pace_of(summary)}")
    lines = (
        Rule(title, style="dim"),
        _bar(share, width),
        _said(share),
        Text(_gpus(summary)),
        Text(_finding(summary), style="bold" if summary.verdict else "dim"),
    )
    for line in lines:
        console.print(line, no_wrap=True, overflow="ellipsis", crop=True)
    return buffer.getvalue().splitlines()


def _recent(summary: Summary) -> list[float]:
    """Shares of the last minute by state."""
    spent = summary.over_time
    late = spent.edges[1:] > spent.edges[-1] - RECENT_S
    share = spent.share[:, late].mean(axis=1) if late.any() else np.zeros(len(STATES))
    return [float(value) for value in share]


def _bar(share: list[float], width: int) -> Text:
    edges = np.rint(np.cumsum([0.0, *share]) * width).astype(int)
    pieces = [("█" * int(edges[i + 1] - edges[i]), COLOURS[state]) for i, state in enumerate(STATES)]
    return Text.assemble(*pieces)


def _said(share: list[float]) -> Text:
    said = Text()
    for value, state in sorted(zip(share, STATES, strict=True), reverse=True):
        if value > 0.005:
            said.append("■ ", COLOURS[state]).append(f"{words(state)} {percent(value)}   ")
    return said


def _gpus(summary: Summary) -> str:
    if not summary.gpus:
        return "no GPU seen"
    parts = [counted(len(summary.gpus), "GPU")]
    for name, title in (
        ("utilization", "busy"),
        ("sm_active", "SM"),
        ("tensor_active", "tensor"),
        ("power", ""),
    ):
        series = combined([one for gpu in summary.gpus if (one := gpu.read(name)) is not None])
        parts += [f"{title} {quantity(series.last, series.unit)}".strip()] if series else []
    used = [one.last for gpu in summary.gpus if (one := gpu.read("memory_used")) is not None]
    if used:
        parts.append(f"{size(max(used))} of {size(summary.gpus[0].memory_bytes)}")
    return " · ".join(parts)


def _finding(summary: Summary) -> str:
    finding = summary.verdict
    if finding is None:
        return "nothing to say yet"
    return f"{kind_of(finding)}: {finding.summary}"
