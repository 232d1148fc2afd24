"""The modules that are changed, and the quick tests that should notice: those of the same folder.

Left out is what only opens, starts or draws something: its tests are integration tests.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Room:
    """Folders of `src/stoker`, which of their modules, and where their tests are."""

    name: str
    pure: dict[str, str]  # a folder, and its modules: "*", or words
    tests: tuple[str, ...]

    def modules(self, root: Path) -> list[str]:
        found = []
        for folder, names in self.pure.items():
            every = sorted(path.stem for path in (root / "src/stoker" / folder).glob("[a-z]*.py"))
            chosen = every if names == "*" else names.split()
            assert set(chosen) <= set(every), sorted(set(chosen) - set(every))
            found += [f"src/stoker/{folder}/{name}.py" for name in chosen]
        return found


_ALL = (
    Room(name="ordering", pure={"load/ordering": "*"}, tests=("tests/load/ordering",)),
    Room(name="diagnose", pure={"diagnose": "*"}, tests=("tests/diagnose",)),
    Room(
        name="saved",
        pure={"checkpoint/saved": "cover keep values survey tiers retention layout"},
        tests=("tests/checkpoint",),
    ),
    Room(
        name="snapshot",
        pure={"checkpoint/snapshot": "aliases claims digest kept plan state tensors witness"},
        tests=("tests/checkpoint",),
    ),
    Room(name="stage", pure={"stage": "plan foresight preload"}, tests=("tests/stage/test_*.py",)),
    Room(
        name="plan",
        pure={"plan": "arithmetic caching documents fluid job measured saving scene sharing strides text"},
        tests=("tests/plan",),
    ),
    Room(
        name="prepare",
        pure={"prepare": "check copies finish job neardup plan spill tokens"},
        tests=("tests/prepare/test_*.py",),
    ),
    Room(
        name="load",
        pure={
            "load": "build ending ledger mesh needs options past place recall skip state",
            "load/assembly": "*",
        },
        tests=("tests/load/test_*.py", "tests/load/assembly"),
    ),
    Room(name="leases", pure={"stage/leases": "owner seat lease"}, tests=("tests/stage/leases",)),
    Room(name="doctor", pure={"doctor": "*"}, tests=("tests/doctor",)),
    Room(
        name="runs",
        pure={"watch/runs": "batches ceiling clocks columns flat gather kineto profiled traceevents"},
        tests=("tests/watch/runs",),
    ),
)

ROOMS = {room.name: room for room in _ALL}
