"""What is said of every scenario: `python tests/scenarios/table.py` rewrites a table of diagnosis.md.

Takes some eight minutes on two quiet cores, and root for the cgroups and the mount.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from scenarios import SCENARIOS, Scenario, watched
from stoker.diagnose.rules import judge

PAGE = Path(__file__).parents[2] / "docs" / "concepts" / "diagnosis.md"
SOURCE = Path(__file__).parents[2] / "src"


def main() -> None:
    rows = ["| scenario | what is wrong | said, with cause | lost | right |", "|---|---|---|---|---|"]
    right = 0
    for scenario in SCENARIOS:
        row, good = _row(scenario)
        print(row, flush=True)
        rows.append(row)
        right += good
    rows.append(f"\n{right} of {len(SCENARIOS)} right, kind for kind and no other beside it.\n")
    begin, end = "<!-- scenarios -->\n", "<!-- end of scenarios -->"
    head, _, rest = PAGE.read_text("utf-8").partition(begin)
    PAGE.write_text(head + begin + "\n".join(rows) + end + rest.partition(end)[2], "utf-8")


def _row(scenario: Scenario) -> tuple[str, bool]:
    environ = {**os.environ, "PYTHONPATH": str(SOURCE)}
    with tempfile.TemporaryDirectory() as folder:
        found = judge(watched(scenario, Path(folder), environ=environ)).findings
    said = [f"{one.kind} ({one.cause})" if one.cause else one.kind for one in found]
    good = sorted(one.kind for one in found) == sorted(scenario.kinds)
    wrong = ", ".join(scenario.kinds) + (f" ({' or '.join(scenario.causes)})" if scenario.causes else "")
    lost = f"{100 * found[0].share:.0f}%" if found else ""
    cells = (scenario.name, wrong, ", ".join(said) or "no verdict", lost, "yes" if good else "no")
    return f"| {' | '.join(cells)} |", good


if __name__ == "__main__":
    main()
