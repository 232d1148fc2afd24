"""How near does the computed order come to a uniform permutation, and what does it hold in memory?

Method: orders of 400,000 samples (2,048 tokens of 2 bytes) in 20 shards, against numpy's permutation. Per
order: distinct shards in a batch of 8, the mean gap between neighbours as a share of the corpus (a uniform
permutation has a third; more is further apart than chance), and the spread: how far apart 64 samples that
are neighbours on disk come, as a share of an epoch. Pure computation: the same numbers on every machine.

    python benchmarks/shuffle_quality.py
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from stoker.load.build import STRETCH_BYTES
from stoker.ordering.order import Order

SAMPLES, SHARDS, BATCH, SAMPLE_BYTES = 400_000, 20, 8, 4096
RESULTS = Path(__file__).parent / "results"


def quality(order: np.ndarray) -> dict[str, float]:
    batches = order[: len(order) // BATCH * BATCH].reshape(-1, BATCH) // (SAMPLES // SHARDS)
    distinct = (np.diff(np.sort(batches, axis=1), axis=1) > 0).sum(axis=1) + 1
    places = np.argsort(order)  # of each sample in the order
    spreads = [np.ptp(places[start : start + 64]) / SAMPLES for start in range(0, SAMPLES, 5_003)]
    return {
        "distinct_shards_per_batch": round(float(distinct.mean()), 3),
        "mean_gap": round(float(np.abs(np.diff(order)).mean() / SAMPLES), 4),
        "spread": round(float(np.median(spreads)), 4),
    }


def main() -> None:
    found = {"uniform": quality(np.random.default_rng(0).permutation(SAMPLES))}
    for shuffle, chunk, window in (
        ("full", 128, 1),
        ("full", 128, 8),
        ("full", 1024, 1),
        ("full", 1, 1),
        ("blocks", 128, 1),
        ("off", 128, 1),
    ):
        stretch = STRETCH_BYTES // (chunk * SAMPLE_BYTES)
        order = Order(samples=SAMPLES, chunk=chunk, window=window, stretch=stretch, shuffle=shuffle, seed=1)
        held = order.lanes * window * chunk * SAMPLE_BYTES if shuffle != "off" else chunk * SAMPLE_BYTES
        name = f"{shuffle}, chunks of {chunk * SAMPLE_BYTES >> 10} KiB, window {window}"
        found[name] = {
            **quality(order.draw(range(SAMPLES), epoch=0).sample),
            "held_mib": held / (1 << 20),
        }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "shuffle_quality.json").write_text(json.dumps(found, indent=1) + "\n")
    for name, one in found.items():
        print(f"{name:40} {one}")


if __name__ == "__main__":
    main()
