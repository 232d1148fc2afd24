"""Search space: which settings are worth a trial, by the verdict of a first window. Pure.

A stage is a list of settings that are tried on top of the best so far. `STAGES` is the whole list, in order:
what the verdict does not point at is not tried.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from stoker.formats.sizes import counted
from stoker.tune.seen import Seen

Setting = Mapping[str, Any]  # knobs by name, plain JSON values
_WAITS = 0.1  # share of the time in the loader from which on its knobs are tried, whatever the verdict
_OPTIMIZES = 0.1
_COUNTS = 3  # of workers that are tried
_SPARE = 1.1  # times what would just be enough
_BLOCKED = ("storage", "lock", "small_reads", "unknown")  # causes for which more workers than cores help
NUMERICS = ("tf32", "channels_last", "compile", "fused_optimizer")


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """Settings of one kind, and why they are tried."""

    name: str
    why: str
    settings: tuple[Setting, ...]


def next_stages(seen: Seen, *, numerics: bool) -> list[Callable[[Setting], Stage | None]]:
    """Of each the settings depend on the best so far: it is asked for when its turn comes."""
    rules = STAGES + (NUMERIC_STAGES if numerics else ())
    return [lambda best, rule=rule: rule(seen, best) for rule in rules]  # type: ignore[misc]  # lambda's default


def is_starving(seen: Seen) -> bool:
    """Late batches of a DataLoader; of a loop that makes its own there is no loader to set."""
    found = seen.finding("data_starvation")
    return bool(seen.site) and (seen.wait >= _WAITS or (found is not None and found.cause != "own_loop"))


def not_tried(seen: Seen) -> list[str]:
    """What might have helped and was left alone, and why."""
    said: list[str] = []
    own = seen.finding("data_starvation")
    if own and own.cause == "own_loop":
        said.append("the loop makes its batches itself: there is no DataLoader to set")
    if not seen.site and not own:
        said.append("no DataLoader was seen to feed the training loop")
    if is_starving(seen) and seen.iterable:
        said.append("num_workers: the dataset is an IterableDataset, whose samples depend on the workers")
    return said


def most_workers(seen: Seen) -> int:
    """By cores, and so that batches under way fit into /dev/shm and a quarter of the free memory."""
    found = seen.finding("data_starvation")
    by_cores = seen.limits.cores * (2 if found and found.cause in _BLOCKED else 1)
    each = max(1, (int(seen.settings.get("prefetch_factor") or 2) + 1) * seen.batch_bytes)
    room = min(int(0.8 * seen.limits.shm_bytes), seen.limits.memory_bytes // 4)
    return max(0, min(by_cores, room // each))


def _workers(seen: Seen, best: Setting) -> Stage | None:
    """As many as the wait asks for, the most, half of it: three trials find what a grid would, within a few
    percent, and the first two of them where there is no time for more."""
    most = most_workers(seen)
    wanted = (min(most, _enough(seen)), most, most // 2, most // 4)
    counts = list(dict.fromkeys(count for count in wanted if count and count != seen.workers))[:_COUNTS]
    if not is_starving(seen) or seen.iterable or not counts:
        return None
    stay = {"persistent_workers": True} if seen.short_epochs else {}
    return Stage(
        name="workers",
        why=f"the loop waits {seen.wait:.0%} of the time for batches",
        settings=tuple({**best, "num_workers": count, **stay} for count in counts),
    )


def _enough(seen: Seen) -> int:
    """Workers that make batches as fast as the loop takes them, if each makes as many as now. A loop without
    workers makes them itself in the time that it waits."""
    wait = min(seen.wait, 0.98)
    return math.ceil(_SPARE * (seen.workers or wait) / (1 - wait))


def _persistent(seen: Seen, best: Setting) -> Stage | None:
    """Workers that outlive an epoch; where their number was tried, that was with it. Whatever the verdict: to
    start them is no wait for a batch, and is not seen as one."""
    has = best.get("persistent_workers") or seen.settings.get("persistent_workers")
    if not seen.short_epochs or has or not _workers_of(seen, best):
        return None
    why = f"workers start anew every {counted(seen.epoch, 'step')}"
    return Stage(name="persistent", why=why, settings=({**best, "persistent_workers": True},))


def _context(seen: Seen, best: Setting) -> Stage | None:
    """A worker that is spawned imports everything again; a forked one has it."""
    if seen.settings.get("multiprocessing_context") not in ("spawn", "forkserver") or seen.card:
        return None
    if not (is_starving(seen) and seen.short_epochs and _workers_of(seen, best)):
        return None
    why = f"workers are started by {seen.settings['multiprocessing_context']}"
    return Stage(name="context", why=why, settings=({**best, "multiprocessing_context": "fork"},))


def _prefetch(seen: Seen, best: Setting) -> Stage | None:
    """A longer queue bridges batches of unequal cost."""
    depth = int(seen.settings.get("prefetch_factor") or 2)
    if not is_starving(seen) or not _workers_of(seen, best):
        return None
    why = f"a queue of {depth} batches a worker runs dry"
    return Stage(name="prefetch", why=why, settings=({**best, "prefetch_factor": 2 * depth},))


def _threads(seen: Seen, best: Setting) -> Stage | None:
    """Where the processor computes, its threads and the workers share the cores."""
    cores, workers = seen.limits.cores, _workers_of(seen, best)
    if seen.card or not seen.threads:
        return None
    left = max(1, cores - workers) if workers else cores
    if workers and is_starving(seen) and left < seen.threads:
        why = f"{seen.threads} threads compute beside {workers} workers on {counted(cores, 'core')}"
        return Stage(name="threads", why=why, settings=({**best, "torch_threads": left},))
    if not is_starving(seen) and seen.threads < left:
        why = f"{seen.threads} of {counted(cores, 'core')} compute"
        return Stage(name="threads", why=why, settings=({**best, "torch_threads": left},))
    return None


def _copies(seen: Seen, best: Setting) -> Stage | None:
    """Pinned batches, and copies that do not wait."""
    if not (seen.card and seen.finding("h2d_copy")) or not seen.site:
        return None
    settings = ({**best, "pin_memory": True}, {**best, "pin_memory": True, "non_blocking": True})
    return Stage(name="copies", why="the loop waits for copies to the card", settings=settings)


def _allocator(seen: Seen, best: Setting) -> Stage | None:
    if not (seen.card and seen.finding("memory_pressure")):
        return None
    value = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    return Stage(name="allocator", why="the card's memory is nearly full", settings=({**best, **value},))


def _precision(seen: Seen, best: Setting) -> Stage | None:
    if not seen.finding("precision"):
        return None
    return Stage(name="tf32", why="matrices are multiplied in float32", settings=({**best, "tf32": True},))


def _fused(seen: Seen, best: Setting) -> Stage | None:
    if seen.optimizing < _OPTIMIZES:
        return None
    why = f"the optimizer takes {seen.optimizing:.0%} of the time"
    return Stage(name="fused optimizer", why=why, settings=({**best, "fused_optimizer": True},))


def _compiled(seen: Seen, best: Setting) -> Stage | None:
    """Not for a loop that waits for its batches: faster steps would only wait longer."""
    if seen.finding("data_starvation"):
        return None
    settings = ({**best, "compile": True}, {**best, "channels_last": True})
    return Stage(name="model", why="the steps themselves take the time", settings=settings)


def _workers_of(seen: Seen, best: Setting) -> int:
    return int(best.get("num_workers", seen.workers))


STAGES = (_workers, _persistent, _context, _prefetch, _threads, _copies, _allocator)
NUMERIC_STAGES = (_precision, _fused, _compiled)
