"""The code blocks of README and guides as a test can run them.

A fence of `sh`, `console` or `python` is run, unless the line before it says why it cannot be:

    <!-- not run: needs a Kubernetes cluster -->

A page is written for a cluster and a test runs in a folder. The same few substitutions are made in all
blocks: folders of nodes and shares lie under the test's own, stores are a local server, eight ranks are two,
rows are shorter and steps fewer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = (
    ROOT / "README.md",
    *sorted((ROOT / "docs" / "start").glob("*.md")),
    *sorted((ROOT / "docs" / "guides").glob("*.md")),
)
RUN = ("sh", "console", "python")
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_WHY_NOT = re.compile(r"<!-- not run: ([^\n]+) -->\n\Z")
_OF_NODES = re.compile(r"(?<![\w./:])/(nvme|lustre|shared|scratch|etc/prometheus)\b")

# what is small here and large there; the hub is not at hand
SMALLER = {
    "--nproc-per-node 8": "--nproc-per-node 2",
    "processes=8": "processes=2",
    "seq_len=2048": "seq_len=64",
    "--seq-len 2048": "--seq-len 64",
    "every=500": "every=4",
    "10_000": "40",
    "--tokenizer gpt2": "--tokenizer tokenizer.json",
}


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block, and where it stands."""

    page: Path
    line: int
    language: str
    text: str
    why_not: str = ""

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    def script(self, folder: Path, *, also: Mapping[str, str]) -> str:
        """What to run: commands of a console without its output, with paths and sizes of the test."""
        text = commands(self.text) if self.language == "console" else self.text
        for there, here in {**SMALLER, **also}.items():
            text = text.replace(there, here)
        return _OF_NODES.sub(rf"{folder}/\1", text)


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text("utf-8")
    for fence in _FENCE.finditer(text):
        why_not = _WHY_NOT.search(text[: fence.start()])
        yield Block(
            page=page,
            line=text[: fence.start()].count("\n") + 1,
            language=fence[1],
            text=fence[2],
            why_not=why_not[1] if why_not else "",
        )


def all_blocks() -> list[Block]:
    return [block for page in PAGES for block in blocks(page)]


def commands(text: str) -> str:
    """The lines after a `$`, and those that a backslash continues."""
    taken, goes_on = [], False
    for line in text.splitlines():
        if goes_on or line.startswith("$ "):
            taken.append(line if goes_on else line[2:])
            goes_on = line.endswith("\\")
    return "\n".join(taken) + "\n"
