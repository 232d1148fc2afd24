"""How near does the computed order come to a true random permutation, and what do others' orders do?

Method: orders of 96,000 samples of 4 KiB (a corpus of 24 parts, in shards of 4,000) of several seeds and
epochs, for 1, 4 and 16 ranks, in batches of 1, 8 and 64 rows. The measures are those of
`shuffle_measures.py`; beside them what true random permutations of numpy's have. Ours with the default
chunks of 512 KiB (128 samples) and window, with a window of 8, with chunks of one sample, and in the
blocks shuffle; the fixed lanes that stoker had before, computed here; MosaicML's py1e and litdata's
FullShuffle through their own functions, and webdataset's shuffle of shards and a buffer of 1,000, on one
rank, where they can be imported. Pure computation: the same numbers on every machine. Every run is
appended to the results; a plot of it goes into the documentation.

    python benchmarks/shuffle_quality.py
"""

from __future__ import annotations

import argparse
import platform
import random
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np

from kept_runs import keep
from shuffle_measures import PARTS, all_measures, true_permutation
from shuffle_plot import draw_plot
from stoker.load.ordering.cut import Cut
from stoker.load.ordering.order import Order
from stoker.load.parts import STRETCH_BYTES

SAMPLES, SAMPLE_BYTES, SHARD = 96_000, 4096, 4_000
SEEDS, EPOCHS, TRUE = 2, 2, 20
RESULTS = Path(__file__).parent / "results" / "shuffle_quality.json"

Source = Callable[[int, int, int], np.ndarray]  # ranks, seed, epoch: samples [rank, row]


def ours(*, chunk: int = 128, window: int = 1, shuffle: str = "full", nodes: int = 1) -> Source:
    def order(ranks: int, seed: int, epoch: int) -> np.ndarray:
        made = Order(
            samples=SAMPLES,
            chunk=chunk,
            window=window,
            shuffle=shuffle,
            seed=seed,
            stretch=STRETCH_BYTES // (chunk * SAMPLE_BYTES),
            cut=Cut.for_world(ranks, min(nodes, ranks)),
        )
        rows = SAMPLES // ranks * ranks
        return np.stack([made.deal(range(rank, rows, ranks), epoch=epoch).sample for rank in range(ranks)])

    return order


def fixed_lanes(ranks: int, seed: int, epoch: int) -> np.ndarray:
    """As stoker was: lanes are parts of the corpus, in strides, each permuted in chunks and within them."""
    lanes = 24 if 24 % ranks == 0 else 48
    rng, size = np.random.default_rng([seed, epoch]), SAMPLES // lanes
    made = []
    for lane in range(lanes):
        start = lane * (7 if lanes == 24 else 29) % lanes * size
        chunks = np.array_split(np.arange(start, start + size), -(-size // 128))
        rng.shuffle(chunks)  # type: ignore[arg-type]
        made.append(np.roll(np.concatenate([rng.permutation(chunk) for chunk in chunks]), rng.integers(size)))
    return np.stack(made).T.reshape(-1, ranks).T


def mosaicml(ranks: int, seed: int, epoch: int) -> np.ndarray:
    from load_tokens import _let_mosaic_import

    _let_mosaic_import()
    from streaming.base.partition import get_partitions
    from streaming.base.shuffle import get_shuffle

    sizes = np.full(SAMPLES // SHARD, SHARD)
    shuffled = get_shuffle("py1e", sizes, 1, seed, epoch, 1 << 18)
    ids = get_partitions("relaxed", SAMPLES, 1, 1, ranks, 1, 8, 0, 1)
    return shuffled[ids.reshape(ranks, -1)]


def litdata(ranks: int, seed: int, epoch: int) -> np.ndarray:
    from litdata.streaming.shuffle import FullShuffle
    from litdata.utilities.env import _DistributedEnv

    class Chunks:
        """What its shuffle asks its cache for."""

        _reader = None

        def get_chunk_intervals(self) -> list:
            from litdata.streaming.item_loader import Interval

            firsts = range(0, SAMPLES, SHARD)
            return [Interval(first, first, first + SHARD, first + SHARD) for first in firsts]

    shuffle = FullShuffle(Chunks(), seed, True)
    chunks, intervals = shuffle.get_chunks_and_intervals_per_workers(
        _DistributedEnv(ranks, 0, 1), 1, 8, epoch
    )
    made = []
    for mine, spans in zip(chunks, intervals, strict=True):
        parts = [
            shuffle(np.arange(span[1], span[2]), len(mine), epoch, number)
            for number, span in enumerate(spans)
        ]
        made.append(np.concatenate(parts))
    rows = min(map(len, made))
    return np.stack([one[:rows] for one in made])


def webdataset(ranks: int, seed: int, epoch: int) -> np.ndarray:
    """Shards in a random order through a shuffle buffer, as `WebDataset(shardshuffle=...).shuffle(1000)`."""
    from webdataset.filters import _shuffle

    if ranks > 1:
        raise ValueError("shards are split by rank: parts are tied to ranks by what the user does")
    rng = random.Random(seed * 1000 + epoch)
    shards = list(range(0, SAMPLES, SHARD))
    rng.shuffle(shards)
    samples = (sample for shard in shards for sample in range(shard, shard + SHARD))
    return np.array(list(_shuffle(samples, 1000, 100, rng=rng)))[None]


ORDERS: dict[str, Source] = {
    "stoker (default)": ours(),
    "stoker, window 8": ours(window=8),
    "stoker, chunks of one sample": ours(chunk=1),
    "stoker, blocks": ours(shuffle="blocks"),
    "stoker on 2 nodes": ours(nodes=2),
    "fixed lanes (stoker before)": fixed_lanes,
    "MosaicML py1e": mosaicml,
    "litdata": litdata,
    "webdataset, buffer 1,000": webdataset,
}


@lru_cache(256)  # the same for all batches
def _made(source: Source, ranks: int, seed: int, epoch: int) -> np.ndarray:
    return source(ranks, seed, epoch)


def measured(source: Source, ranks: int, batch: int) -> dict[str, list[float]]:
    """Each measure, once for every seed and epoch, beside the next epoch and the next seed."""
    made = {(s, e): _made(source, ranks, s, e) for s in range(SEEDS + 1) for e in range(EPOCHS + 1)}
    found = []
    for seed in range(SEEDS):
        for epoch in range(EPOCHS):
            one = made[seed, epoch]
            found.append(all_measures(one, made[seed, epoch + 1], batch))
            found.append(all_measures(one, made[seed + 1, epoch], batch))
    return {name: [round(one[name], 5) for one in found] for name in found[0]}


def true_spread(ranks: int, batch: int) -> dict[str, list[float]]:
    rng = np.random.default_rng(ranks * 100 + batch)
    pairs = ([true_permutation(rng, SAMPLES, ranks) for _ in range(2)] for _ in range(TRUE))
    found = [all_measures(one, other, batch) for one, other in pairs]
    return {name: [round(one[name], 5) for one in found] for name in found[0]}


def runs(shapes: list[tuple[int, int]]) -> Iterator[dict]:
    for ranks, batch in shapes:
        yield {"order": "true permutation", "ranks": ranks, "batch": batch, **true_spread(ranks, batch)}
        for name, source in ORDERS.items():
            if name == "stoker on 2 nodes" and ranks == 1:
                continue
            try:
                yield {"order": name, "ranks": ranks, "batch": batch, **measured(source, ranks, batch)}
            except (ImportError, ValueError, TypeError) as error:
                print(f"left out: {name}, {ranks} ranks: {error!r}"[:150])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shapes", default="1x1,1x8,1x64,4x8,16x1,16x8", help="ranks x rows of a batch")
    parser.add_argument("--plot", type=Path, default=Path("docs/concepts/order.svg"))
    options = parser.parse_args()
    shapes = [tuple(map(int, shape.split("x"))) for shape in options.shapes.split(",")]
    rows = []
    for row in runs(shapes):
        rows.append(row)
        shown = {name: round(float(np.mean(v)), 4) for name, v in row.items() if isinstance(v, list)}
        print(f"{row['ranks']:3}x{row['batch']:<3} {row['order']:30} {shown}", flush=True)
    versions = {"numpy": np.__version__, "python": platform.python_version()}
    keep(RESULTS, {"samples": SAMPLES, "parts": PARTS, "versions": versions, "measures": rows})
    draw_plot(rows, options.plot, old=fixed_lanes, new=ours())


if __name__ == "__main__":
    main()
