"""Where the cards' samples come from: NVML, a dcgm exporter's address, or a saved `nvidia-smi dmon` log."""

from __future__ import annotations

from typing import Any

from stoker.observe.sampler import Cards

Facts = dict[str, Any]  # index, name, power_limit_w, memory_bytes, driver


def open_cards(source: str) -> tuple[Cards | None, list[Facts], list[str]]:
    """The cards, what they are, and what cannot be seen of them."""
    if source == "none":
        return None, [], []
    return None, [], []
