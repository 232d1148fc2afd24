"""`Loader`: batches from local shards, in an order that any world size can resume.

    for batch in stoker.Loader("corpus", batch_size=8, seq_len=2048):
        ...

A loop over it is one epoch; the next loop is the next epoch. A loop that was left early goes on where it
was (with shuffle="off", which is for evaluation, it starts over). `state_dict` is the position of the
whole job, the same on every rank.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from types import TracebackType
from typing import Any, Protocol

from stoker.errors import UsageError, check_options
from stoker.load.build import Engine, make_engine
from stoker.load.needs import files_in_order
from stoker.load.options import OF_DATALOADERS, LoaderOptions
from stoker.load.parts import make_parts
from stoker.load.pipeline import Background, Group, Inline, Readers
from stoker.load.report import LoaderReport, emit_tokens
from stoker.load.rows import Batch, check_process
from stoker.load.tune import Limits, Setting, Tuner
from stoker.load.workers import Processes, Recipe
from stoker.ordering.order import Cut
from stoker.ordering.plan import Cursor
from stoker.reading.dataset import Dataset, Source, open_dataset
from stoker.reading.files import Files
from stoker.spans import is_recording
from stoker.world import usable_cores

STATE_VERSION = 2

_MOST_READERS = 16  # page-cache reads reached 64 GB/s with 16 threads on the H200 machine


_NO_GROUP = Group(batches=(), after=())


class Pipeline(Protocol):
    """Hands over groups; the consumer calls both from one thread."""

    @property
    def is_behind(self) -> bool: ...
    def next(self) -> Group: ...
    def close(self) -> None: ...


class Loader:
    """Batches of one rank. Iterate, `close` (or use as a context manager)."""

    def __init__(
        self,
        dataset: Source | Sequence[Source],
        *,
        files: Files | None = None,
        weights: Sequence[float] = (),
        **options: Any,  # the fields of LoaderOptions
    ) -> None:
        check_options(options, LoaderOptions.__slots__, of="a loader", elsewhere=OF_DATALOADERS)
        self.options = LoaderOptions(**options)
        sources: list[Any] = list(dataset) if isinstance(dataset, (list, tuple)) else [dataset]
        self._sources, self._files = sources, files
        self._datasets = [self._open(source, files) for source in sources]
        self._weights = tuple(map(float, weights)) or (1.0,) * len(sources)
        world = self.options.world
        self._cut = self.options.cut or Cut.for_world(world.size, world.nodes, lanes=self.options.lanes)
        self._begin, self._resumed = Cursor(), False
        self._delivered = self._skipped = self._loops = 0
        self._finish = _finisher(self.options.output)
        self._pipeline: Pipeline | None = None
        self._pid = 0  # of the process that it was first started in
        self._close_pipeline: weakref.finalize[Any, Any] | None = None
        self._group, self._given = _NO_GROUP, 0
        self._build()

    def __iter__(self) -> Iterator[Batch]:
        if self.options.shuffle == "off" and not self._resumed:
            self._go_to(Cursor(epoch=self.epoch))
        self._resumed = False
        self._loops = loop = self._loops + 1
        some, ends = False, 0
        while True:
            group = self._group
            for batch in group.batches[self._given :]:
                self._given += 1
                some = True
                if is_recording():
                    emit_tokens(batch)
                yield batch
                if self._group is not group or self._loops != loop:  # it went elsewhere meanwhile
                    self._check_loop(loop)
                    break
            self._next_group()
            if not self._group.batches:  # an epoch ended: this one, unless it was handed out before
                ends += 1
                if some:
                    return
                self._check_enough(ends)

    def __len__(self) -> int:
        """Batches in an epoch, on every rank."""
        batches = self._parts.planner.batches(Cursor(epoch=self.epoch))
        if batches is None:
            raise TypeError(
                "with best-fit packing the number of batches is known only at the end of an epoch"
            )
        return batches

    @property
    def batch_size(self) -> int:
        return self.options.batch_size

    @property
    def dataset(self) -> object:
        """None that torch knows: who asks wants to skip batches, and would read all of them for it."""
        raise AttributeError(
            "a stoker loader has no torch dataset; it resumes with load_state_dict, not by skipping batches: "
            "TrainingArguments(ignore_data_skip=True), see examples/hf_trainer"
        )

    @property
    def makes_on_device(self) -> bool:
        """Whether batches are gathered on the device already."""
        return self._engine.on_device

    @property
    def epoch(self) -> int:
        return self._cursor().epoch

    def state_dict(self) -> dict[str, Any]:
        """Where the whole job is, after the batches handed out so far; the same on every rank."""
        cursor = self._cursor()
        return {
            "version": STATE_VERSION,
            "epoch": cursor.epoch,
            "position": cursor.position,
            "row": cursor.row,
            "order": self._order_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved position, on any world size. The order is the one it was saved with."""
        if state.get("version") != STATE_VERSION:
            raise UsageError(
                f"a loader state of version {state.get('version')!r} cannot be read here",
                hint=f"this stoker reads version {STATE_VERSION}",
            )
        self._check_order(state["order"])
        self._go_to(Cursor(epoch=state["epoch"], position=state["position"], row=state["row"]))
        self._resumed = True
        if state["order"]["cut"] != asdict(self._cut):
            self._cut = Cut(**state["order"]["cut"])
            self._readers.shutdown()
            self._engine.close()
            self._close_dropped.detach()
            self._build()

    @property
    def is_behind(self) -> bool:
        """Whether no batch is ready to be handed out: what else uses disk and network should yield."""
        return self._pipeline is not None and self._pipeline.is_behind

    def report(self) -> LoaderReport:
        """What was read, skipped and chosen so far."""
        damage = [dataset.reader.damage for dataset in self._datasets]
        return LoaderReport(
            batches=self._delivered + self._given,
            samples_read=self._engine.store.cache.samples_read,
            skipped_samples=self._skipped,
            damaged_blocks=sum(one.blocks for one in damage),
            damage=tuple(name for one in damage for name in one.named),
            healed=tuple(name for one in damage for name in one.healed),
            chunk_bytes_held=self._engine.store.bytes,
            read_alone=self._parts.alone,
            reader=self._engine.reader(),
            choices=tuple(self._tuner.history()),
        )

    def files_in_order(self, dataset: int = 0) -> list[str]:
        """The files of a dataset that this node's ranks read, in the order in which they will."""
        return files_in_order(self._parts, self._datasets[dataset], self._cursor(), self.options.world)

    def items(
        self, cursor: Cursor, *, begin: int, first: int, step: int, on_sample: Callable[[str], None]
    ) -> Iterator[tuple[int, Group]]:
        """Every step-th group of the stream from `cursor` on, whose first group has the number `begin`:
        what a worker process makes."""
        self._engine.assembler.on_sample = on_sample
        return self._engine.maker.some_groups(cursor, begin=begin, first=first, step=step)

    def close(self) -> None:
        """End the threads and close the files; safe twice."""
        self._stop()
        _close_parts(self._readers, self._datasets, self._engine.close)

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        """Into another process, as it stands here."""
        return _reopen, (self._sources, self._files, self._weights, self.options, self.state_dict())

    def _open(self, source: Source, files: Files | None) -> Dataset:
        # cuFile reads what has been verified; the first, verifying read is an ordinary one. On the way to a
        # device a memory map is of no use.
        ordinary = ("cufile", "mmap") if self.options.device else ("cufile",)
        engine = "pread" if self.options.reader in ordinary else self.options.reader
        return open_dataset(source, files=files, engine=engine, on_corrupt=self.options.on_corrupt)

    def _build(self) -> None:
        options = self.options
        self._parts = make_parts(self._datasets, options, weights=self._weights, cut=self._cut)
        groups = (options.memory // 4) // (self._parts.batch_bytes * self._parts.group)
        limits = Limits(depth=max(2, min(16, groups)), readers=options.readers or _most_readers())
        first = Setting(depth=2, readers=options.readers or min(2, limits.readers))
        self._tuner = Tuner(first, limits)
        self._readers = Readers()
        threads = None if options.workers == "inline" else self._readers
        self._engine = make_engine(
            self._parts, options, threads=threads, most_readers=limits.readers, finish=self._finish
        )
        self._close_dropped = weakref.finalize(
            self, _close_parts, self._readers, self._datasets, self._engine.close
        )

    def _cursor(self) -> Cursor:
        """Where the job is after the batches handed out so far."""
        return self._group.after[self._given - 1] if self._given else self._begin

    def _go_to(self, cursor: Cursor) -> None:
        self._stop()
        self._begin = cursor

    def _next_group(self) -> None:
        if self._pipeline is None:
            self._start()
        assert self._pipeline is not None
        check_process(self._pid)
        try:
            group = self._pipeline.next()
        except BaseException:
            self._stop()  # what makes the batches has ended: the next loop tries again from here
            raise
        self._engine.accept(group.batches, group.ready)
        self._skipped += group.skipped
        self._begin = self._cursor()
        self._hold(group)

    def _hold(self, group: Group) -> None:
        """Batches to hand out from now on."""
        self._delivered += self._given
        self._group, self._given = group, 0

    def _check_loop(self, loop: int) -> None:
        """A loader has one position: of two loops at once, each would miss what the other got."""
        if loop != self._loops:
            raise UsageError(
                "another loop over this loader has begun, and took over its position",
                hint="make a loader for each loop",
            )

    def _check_enough(self, ends: int) -> None:
        """How many batches packed rows make is seen only when a whole epoch, between two ends, has none."""
        if ends > 1 or self._parts.planner.batches(Cursor(epoch=self.epoch)) == 0:
            samples = self._samples_in_an_epoch()
            wanted = self.options.batch_size * self.options.world.size
            pad = ", or tail='pad'" if samples and self.options.packing != "best-fit" else ""
            raise UsageError(
                f"the dataset has {samples:,} samples, a global batch takes {wanted:,} rows of them",
                hint=f"use more data, a smaller batch_size, a shorter seq_len{pad}",
            )

    def _samples_in_an_epoch(self) -> int:
        layouts = self._parts.layouts
        here = layouts if len(self._datasets) > 1 else [layouts[self.epoch % len(layouts)]]
        return sum(layout.samples for layout in here)

    def _start(self) -> None:
        self._pid = self._pid or os.getpid()
        check_process(self._pid)  # a forked child has neither the threads nor the chunks
        if self.options.workers == "inline":
            self._pipeline = Inline(self._engine.maker, self._begin)
        elif self.options.workers == "process":
            self._pipeline = Processes(self._recipe(), finish=self._finish)
            self._close_pipeline = weakref.finalize(self, _close_here, self._pipeline, self._pid)
        else:
            self._pipeline = Background(
                self._engine.maker,
                self._begin,
                resize=_resizer(self._readers, self._engine),
                tuner=self._tuner,
                ahead=self._parts.ahead,
            )
            self._close_pipeline = weakref.finalize(self, _close_here, self._pipeline, self._pid)

    def _recipe(self) -> Recipe:
        return Recipe(
            sources=self._sources,
            files=self._files,
            weights=self._weights,
            options=replace(self.options, cut=self._cut),
            cursor=self._begin,
            begin=0,
            first=0,
            workers=self.options.processes,
        )

    def _stop(self) -> None:
        self._begin = self._cursor()
        self._hold(_NO_GROUP)
        if self._pipeline:
            _close_here(self._pipeline, self._pid)
            self._pipeline = None
        if self._close_pipeline:
            self._close_pipeline.detach()

    def _order_state(self) -> dict[str, Any]:
        options = self.options
        return {
            "datasets": [dataset.fingerprint() for dataset in self._datasets],
            "weights": list(self._weights),
            "seed": options.seed,
            "shuffle": options.shuffle,
            "packing": options.packing,
            "seq_len": options.seq_len,
            "chunk_bytes": options.chunk_bytes,
            "window": options.window,
            "cut": asdict(self._cut),
        }

    def _check_order(self, saved: dict[str, Any]) -> None:
        mine = self._order_state()
        differing = [name for name in mine if name != "cut" and mine[name] != saved.get(name)]
        if differing:
            shown = ", ".join(f"{name} {saved.get(name)!r} (here {mine[name]!r})" for name in differing)
            raise UsageError(
                f"the saved position belongs to another order: {shown}",
                hint="make the loader with the same dataset and options, or start without the saved state",
            )


def _reopen(
    sources: list[Source],
    files: Files | None,
    weights: tuple[float, ...],
    options: LoaderOptions,
    state: dict[str, Any],
) -> Loader:
    given = {name: getattr(options, name) for name in options.__dataclass_fields__}
    loader = Loader(sources, files=files, weights=weights, **given)
    loader.load_state_dict(state)
    return loader


def _most_readers() -> int:
    return min(_MOST_READERS, usable_cores())


def _resizer(readers: Readers, engine: Engine) -> Callable[[int], None]:
    """Knows nothing of the loader, which would live as long as its thread."""

    def resize(threads: int) -> None:
        readers.resize(threads)
        engine.read_with(threads)

    return resize


def _finisher(output: str) -> Callable[[Batch], Batch]:
    if output == "numpy":
        return lambda batch: batch
    from stoker.load.device import as_tensors  # the one home of torch

    return as_tensors


def _close_here(pipeline: Pipeline, pid: int) -> None:
    """Not in a forked child: a lock may have been held in the parent, whose threads and workers they are."""
    if os.getpid() == pid:
        pipeline.close()


def _close_parts(readers: Readers, datasets: Sequence[Dataset], close_engine: Callable[[], None]) -> None:
    readers.shutdown()
    close_engine()
    for dataset in datasets:
        with suppress(OSError):
            dataset.reader.close()
