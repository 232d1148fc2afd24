"""GPU metric sources: NVML, a dcgm exporter's address, or a saved `nvidia-smi dmon` log."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from stoker.errors import MissingPackageError, UsageError

Facts = dict[str, Any]  # index, name, power_limit_w, memory_bytes, driver


class Cards(Protocol):
    """The cards of a machine. Opened by the watcher, then read and closed by the sampler's thread."""

    def read(self, t: float) -> dict[int, dict[str, float]]: ...
    def close(self) -> None: ...


def open_cards(source: str) -> tuple[Cards | None, list[Facts], list[str]]:
    """The cards, what they are, and what cannot be seen of them."""
    if source == "none":
        return None, [], ["no GPU samples: --gpu none"]
    if source == "nvml":
        return _open_nvml()
    if source.startswith(("http://", "https://")):
        from stoker.watch.gauges.dcgm import Dcgm

        exporter = Dcgm(source)
        return exporter, exporter.facts(), exporter.missing
    if Path(source).exists():
        from stoker.watch.gauges.dmon import Dmon

        log = Dmon(Path(source))
        return log, log.facts(), ["power limit and names of GPUs: a dmon log does not tell them"]
    raise UsageError(f"--gpu {source}: no such file", hint="give nvml, none, an http address or a dmon log")


def _open_nvml() -> tuple[Cards | None, list[Facts], list[str]]:
    """A machine without cards is no error: what is missing is said."""
    from stoker.machine.samples import Nvml

    try:
        nvml = Nvml()
        return nvml, nvml.facts(), nvml.missing
    except MissingPackageError as error:
        return None, [], [f"no GPU samples: {error.message} ({error.hint})"]
    except Exception as error:  # a card that is lost, a driver being updated: the program runs all the same
        return None, [], [f"no GPU samples: NVML: {error!r}"]
