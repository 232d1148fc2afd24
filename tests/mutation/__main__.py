"""Are wrong changes noticed? Small ones are put into a room, one at a time, and its quick tests run: `make
mutate`.

    python tests/mutation [ROOM ...] [--sample 30] [--seed 0] [--jobs 2]

cosmic-ray makes the changes (a comparison turned, a number off by one, a sum that is a difference) and
`return_none.py` one more. What a room's sample holds is drawn by the seed. A copy of the tree is changed,
never the tree. The test process is forked from one that has the heavy packages loaded; tests that run the
changed line (as coverage saw it once) come first, and where it ran in the body of tests alone, no others do.
A change that no test notices is printed; those that change nothing are in `equivalent.json`, with the reason.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from mutants import Mutant, draw
from rooms import ROOMS, Room
from trials import Copy, preload, reach_of, survives

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
ENOUGH = 0.85


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rooms", nargs="*", choices=[[], *ROOMS], help="all, unless told")
    parser.add_argument("--sample", type=int, default=30, help="changes for each room")
    parser.add_argument("--seed", type=int, default=0, help="which changes are drawn")
    parser.add_argument("--jobs", type=int, default=2, help="how many are tried at once")
    parser.add_argument(
        "--minutes", type=float, default=60, help="of a room; what is not tried by then is not"
    )
    given = parser.parse_args()
    preload()
    equivalent = {tuple(one[:3]) for one in json.loads((HERE / "equivalent.json").read_text("utf-8"))}
    noticed = tried = 0
    for name in given.rooms or ROOMS:
        room = ROOMS[name]
        drawn = draw(ROOT, room.modules(ROOT), given.sample, seed=f"{given.seed} {name}")
        drawn = [one for one in drawn if one.key not in equivalent]
        found = try_all(room, drawn, jobs=given.jobs, limit_s=60 * given.minutes)
        noticed, tried = noticed + sum(found), tried + len(found)
        print(f"{name}: {sum(found)} of {len(found)} noticed", flush=True)
    print(f"{noticed} of {tried} noticed: {noticed / max(tried, 1):.1%}")
    return 0 if noticed >= ENOUGH * tried else 1


def try_all(room: Room, drawn: list[Mutant], *, jobs: int, limit_s: float) -> list[bool]:
    """Of each change that was tried, whether it was noticed; what was not is printed as it is found."""
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        copies = [Copy.of(ROOT, Path(folder) / str(number)) for number in range(jobs)]
        reach = reach_of(room, copies[0])
        deadline = time.monotonic() + limit_s

        def in_turn(number: int) -> list[bool]:
            noticed = []
            for one in drawn[number::jobs]:
                if time.monotonic() > deadline:
                    break
                noticed.append(not survives(room, copies[number], one, reach))
                if not noticed[-1]:
                    print(f"  {one}", flush=True)
            return noticed

        with ThreadPoolExecutor(jobs) as pool:
            return [one for share in pool.map(in_turn, range(jobs)) for one in share]


if __name__ == "__main__":
    sys.exit(main())
