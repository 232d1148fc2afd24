"""A JSON feed: every run with its figures, as plain JSON for a dashboard of one's own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stoker.history.figures import Entry
from stoker.storage import new_file


def entry_facts(entry: Entry) -> dict[str, Any]:
    """One entry as JSON gives it: what is not known is null."""
    return asdict(entry)


def write_feed(entries: Sequence[Entry], path: Path) -> None:
    with new_file(path) as file:
        file.write(
            json.dumps({"version": 1, "entries": [entry_facts(one) for one in entries]}, indent=1).encode()
        )
