"""nvidia-smi dmon: cards through its log, being written beside the job, or saved. One line of each card is
taken for each sample, in order, so a log of one line a second goes with one sample a second.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stoker.errors import UnreadableError

Readings = dict[str, float]

# dmon's heading, our column, and what to multiply by.
_COLUMNS = {
    "pwr": ("power_w", 1.0),
    "gtemp": ("temp_c", 1.0),
    "temp": ("temp_c", 1.0),
    "sm": ("util", 1.0),
    "mem": ("mem_util", 1.0),
    "mclk": ("mem_mhz", 1.0),
    "pclk": ("sm_mhz", 1.0),
    "fb": ("fb_used", float(1 << 20)),
    "rxpci": ("pcie_rx_mib", 1.0),
    "txpci": ("pcie_tx_mib", 1.0),
    "smutil": ("sm_util", 1.0),
    "gract": ("graphics_util", 1.0),
    "smact": ("sm_util", 1.0),
    "smocc": ("sm_occupancy", 1.0),
    "tensor": ("any_tensor_util", 1.0),
    "dram": ("dram_bw_util", 1.0),
    "fp64": ("fp64_util", 1.0),
    "fp32": ("fp32_util", 1.0),
    "fp16": ("fp16_util", 1.0),
}


class Dmon:
    """One log."""

    def __init__(self, path: Path) -> None:
        self._file = path.open(encoding="utf-8", errors="replace")
        self._headings: list[str] = []
        self._waiting: list[tuple[int, Readings]] = []
        self._rest = ""
        self._take()
        if not self._headings:
            self.close()
            raise UnreadableError(
                f"{path} is no log of nvidia-smi dmon", hint="nvidia-smi dmon -s pucm -f LOG"
            )

    def facts(self) -> list[dict[str, Any]]:
        indices = sorted({index for index, _ in self._waiting})
        return [
            {"index": index, "name": "", "power_limit_w": None, "memory_bytes": None} for index in indices
        ]

    def read(self, t: float) -> dict[int, Readings]:
        self._take()
        found: dict[int, Readings] = {}
        while self._waiting and self._waiting[0][0] not in found:
            index, readings = self._waiting.pop(0)
            found[index] = readings
        return found

    def close(self) -> None:
        self._file.close()

    def _take(self) -> None:
        """Every whole line that has come since."""
        *lines, self._rest = (self._rest + self._file.read()).split("\n")
        for line in lines:
            words = line.lstrip("#").split()
            if line.startswith("#"):
                if "gpu" in words:  # the next heading line holds units
                    self._headings = [word.lower() for word in words]
            elif self._headings and len(words) == len(self._headings):
                self._waiting.append(_row(dict(zip(self._headings, words, strict=True))))


def _row(fields: dict[str, str]) -> tuple[int, Readings]:
    """A dash stands for what the card does not tell."""
    known = {name: fields[name] for name in _COLUMNS if fields.get(name, "-") != "-"}
    return int(fields["gpu"]), {_COLUMNS[n][0]: float(v) * _COLUMNS[n][1] for n, v in known.items()}
