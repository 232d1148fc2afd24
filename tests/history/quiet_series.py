"""Series in which nothing changes, of every kind that measurements come in."""

from __future__ import annotations

import numpy as np

SCALE, NOISE = 100.0, 0.02


def made(family: str, count: int, seed: int) -> np.ndarray:
    """One series of a family."""
    draw = np.random.default_rng([FAMILIES.index(family), seed])
    return _MADE[family](draw, count)


def _normal(draw: np.random.Generator, count: int) -> np.ndarray:
    return SCALE * (1 + NOISE * draw.standard_normal(count))


def _tails(draw: np.random.Generator, count: int) -> np.ndarray:
    return SCALE * (1 + NOISE * draw.standard_t(2, count))


def _spikes(draw: np.random.Generator, count: int) -> np.ndarray:
    """One night in ten is disturbed."""
    return _normal(draw, count) * np.where(draw.random(count) < 0.1, 0.7, 1.0)


def _alike(draw: np.random.Generator, count: int, phi: float = 0.5) -> np.ndarray:
    """Neighbours resemble each other (AR(1)), around one level."""
    steps, level = draw.standard_normal(count + 100), np.zeros(count + 100)
    for at in range(1, len(level)):
        level[at] = phi * level[at - 1] + steps[at]
    return SCALE * (1 + NOISE * np.sqrt(1 - phi**2) * level[100:])


def _coarse(draw: np.random.Generator, count: int) -> np.ndarray:
    """Read from a clock with few digits."""
    return np.round(SCALE + 0.4 * draw.standard_normal(count))


def _two_modes(draw: np.random.Generator, count: int) -> np.ndarray:
    """Sometimes the other NUMA node."""
    return _normal(draw, count) * np.where(draw.random(count) < 0.3, 0.9, 1.0)


def _still(draw: np.random.Generator, count: int) -> np.ndarray:
    return np.full(count, 5.0)


def _skewed(draw: np.random.Generator, count: int) -> np.ndarray:
    return SCALE * np.exp(0.3 * draw.standard_normal(count))


_MADE = {
    "normal": _normal,
    "heavy tails": _tails,
    "spikes": _spikes,
    "autocorrelated": _alike,
    "quantised": _coarse,
    "two modes": _two_modes,
    "constant": _still,
    "skewed": _skewed,
}
FAMILIES = list(_MADE)
