"""Last words: the line of a program's output that says why it ended."""

from __future__ import annotations

import re
from pathlib import Path

from stoker.redact import redact_text

_LOOKED_AT = 200  # lines: a launcher writes a report of its own after the program's last word
_TEXT = 300
_REASON = re.compile(r"^\s*([\w.]*(Error|Exception|Interrupt|Killed)\b\s*:|.*can't open file|.*No such file)")
_LAUNCHER = re.compile(r"ChildFailedError|\berror_file\b|torch/distributed|^[WEI]\d{4} ")


def last_words(path: Path) -> str:
    """The last exception, else the last line with a word in it, without secrets; empty where there is none.
    What torchrun says of a child is no word of the program."""
    try:
        lines = path.read_text("utf-8", "replace").splitlines()[-_LOOKED_AT:]
    except OSError:
        return ""
    wordy = [line.strip() for line in lines if any(one.isalnum() for one in line)]
    reasons = [line for line in wordy if _REASON.match(line) and not _LAUNCHER.search(line)]
    return redact_text((reasons or wordy or [""])[-1])[:_TEXT]
