"""Card and panel: the same words with and without a terminal, and a terminal that is given back as it was."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from io import StringIO
from typing import TextIO

import pytest
from made_runs import HEALTHY, flat, until

from stoker.recording import Recording
from stoker.report.card import card_text, show_card
from stoker.report.live import Live
from stoker.report.panel import HEIGHT, Lines, Screen, panel_for
from stoker.report.summary import Summary, summarise

ESCAPE = re.compile(r"\x1b(?:\[[0-9;]*[A-Za-z]|[78])")


@contextmanager
def terminal(*, rows: int, columns: int) -> Iterator[tuple[TextIO, Callable[[], str]]]:
    """A terminal of a size: the side programs write to, and what has come out on the other since."""
    shown, inner = pty.openpty()
    fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    try:
        with os.fdopen(inner, "w") as file:
            yield file, lambda: _shown(file, shown)
    finally:
        os.close(shown)


def _shown(file: TextIO, shown: int) -> str:
    file.write("\0")  # what comes before it has all come
    file.flush()
    text = b""
    while not text.endswith(b"\0"):
        text += os.read(shown, 1 << 16)
    return text[:-1].decode()


def test_a_card_in_a_pipe_has_no_control_characters(summary: Summary) -> None:
    file = StringIO()
    show_card(summary, file)
    assert file.getvalue() == card_text(summary)
    assert all(character.isprintable() or character == "\n" for character in file.getvalue())
    assert max(map(len, file.getvalue().splitlines())) <= 100


def test_a_card_says_verdict_price_states_and_what_to_change(summary: Summary) -> None:
    text = card_text(summary)
    assert text.startswith("data starvation · cpu\nThe GPU waits for data")
    for said in ("61% of the time", "1 h 22 min of GPU time lost", "$3.43", "2.6× as fast", "93% sure"):
        assert said in text
    assert text.index("what to change") < text.index("evidence") < text.index("not seen") < text.index("also")
    assert re.search(r"data +26% +18.5 s +█", text)


def test_a_healthy_card_has_a_pace_and_no_price() -> None:
    text = card_text(summarise(flat("fed"), [HEALTHY], price=2.5))
    assert "195 steps · 61.6 ms a step · 266k tokens/s" in text
    assert "lost" not in text


def test_a_run_of_which_nothing_is_known_has_a_card(recording: Recording) -> None:
    assert "too little was seen" in card_text(summarise(replace(recording, ranks=(), gpus=()), []))


@pytest.mark.parametrize(("columns", "width"), [(101, 101), (0, 100)])
def test_a_card_on_a_terminal_says_the_same(summary: Summary, columns: int, width: int) -> None:
    with terminal(rows=60, columns=columns) as (file, shown):
        show_card(summary, file)
        plain = ESCAPE.sub("", shown()).replace("\r\n", "\n")
    assert [line.rstrip() for line in plain.splitlines()] == card_text(summary, width=width).splitlines()


def test_the_panel_takes_the_last_lines_and_leaves_the_cursor_alone(summary: Summary) -> None:
    with terminal(rows=40, columns=120) as (file, shown):
        screen = panel_for(file)
        assert isinstance(screen, Screen)
        screen.show(summary)
        first = shown()
        assert f"\x1b[1;{40 - HEIGHT}r" in first  # only what lies above the panel scrolls
        screen.show(summary)
        again = shown()
        assert again.startswith("\x1b7")
        assert again.endswith("\x1b8")
        rows = [int(row) for row in re.findall(r"\x1b\[(\d+);1H", again)]
        assert rows == list(range(40 - HEIGHT + 1, 41))
        for piece in re.split(r"\x1b\[\d+;1H", again):
            assert len(ESCAPE.sub("", piece)) < 120
        screen.close()
        assert "\x1b[r" in shown()


def test_the_panel_shows_pace_states_cards_and_the_finding(summary: Summary) -> None:
    with terminal(rows=40, columns=140) as (file, shown):
        screen = Screen(file)
        screen.show(summary)
        plain = ESCAPE.sub("", shown())
        screen.close()
    for said in ("300 steps · 171 ms a step", "data 29%", "4 GPUs", "of 140 GiB", "data starvation · cpu"):
        assert said in plain


def test_a_terminal_that_changes_its_size_is_divided_anew(summary: Summary) -> None:
    with terminal(rows=40, columns=120) as (file, shown):
        screen = Screen(file)
        screen.show(summary)
        fcntl.ioctl(file, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 90, 0, 0))
        shown()
        screen.show(summary)
        assert f"\x1b[1;{30 - HEIGHT}r" in shown()
        screen.close()


def test_a_terminal_that_is_gone_disturbs_nobody(summary: Summary) -> None:
    with terminal(rows=40, columns=120) as (file, shown):
        screen = Screen(file)
        screen.show(summary)
        shown()
        gone = os.open(os.devnull, os.O_WRONLY)
        os.dup2(gone, file.fileno())
        os.close(gone)
        with Live(lambda: summary, surface=screen) as live:
            while live.trouble is None:
                time.sleep(0.005)
    assert isinstance(live.trouble, OSError)


def test_a_small_terminal_is_left_to_the_program(summary: Summary) -> None:
    with terminal(rows=10, columns=80) as (file, shown):
        screen = Screen(file)
        screen.show(summary)
        screen.close()
        assert shown() == ""


def test_a_log_gets_a_line_when_the_finding_changes_and_every_minute(recording: Recording) -> None:
    file = StringIO()
    lines = panel_for(file)
    assert isinstance(lines, Lines)
    for t, findings in ((1, [HEALTHY]), (16, []), (17, []), (18, [HEALTHY]), (19, [HEALTHY]), (69, [])):
        lines.show(summarise(until(recording, t), findings))
    said = file.getvalue().splitlines()
    assert [line.split(" · ")[0] for line in said] == ["stoker: 16 s", "stoker: 18 s", "stoker: 1 min 09 s"]
    assert "\x1b" not in file.getvalue()


@pytest.mark.parametrize("width", [40, 80, 200])
def test_no_line_of_a_card_is_wider_than_asked(summary: Summary, width: int) -> None:
    assert max(map(len, card_text(summary, width=width).splitlines())) <= width
