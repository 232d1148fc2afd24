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
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import TracebackType
from typing import Any

from stoker.errors import UsageError
from stoker.formats.sizes import counted
from stoker.load.assembly.rows import Batch, check_process
from stoker.load.build import first_setting, limits_of, make_engine, warn_of_reads
from stoker.load.ending import Pipeline, close_here, close_parts, finisher, last_touch, resizer
from stoker.load.ledger import Document, Ledger, Row, read_document, rows_of_step
from stoker.load.mesh import slicer, spot_of
from stoker.load.needs import files_in_order
from stoker.load.options import OF_DATALOADERS, LoaderOptions
from stoker.load.ordering.cut import Cut
from stoker.load.ordering.plan import Cursor
from stoker.load.parts import AnyDataset, make_parts, read_factor, resumed_cut
from stoker.load.past import Past, dealing_of
from stoker.load.place import Place
from stoker.load.prefetch.pipeline import Background, Group, Inline, Readers
from stoker.load.prefetch.tune import Tuner
from stoker.load.prefetch.workers import Processes, Recipe
from stoker.load.reading.dataset import Source, open_any
from stoker.load.reading.items import ItemsDataset
from stoker.load.report import LoaderReport, emit_tokens
from stoker.load.skip import samples_named
from stoker.load.state import check_left_out, check_position, load, order_state, save
from stoker.options import given, takes
from stoker.spans import is_recording

_NO_GROUP = Group(batches=(), after=())


class Loader:
    """Batches of one rank. Iterate, `close` (or use as a context manager)."""

    @takes(LoaderOptions, of="a loader", elsewhere=OF_DATALOADERS)
    def __init__(self, options: LoaderOptions) -> None:
        spot = None if options.mesh is None else spot_of(options.mesh, options.mesh_dims)
        self._part = slicer(spot, options) if spot else None
        self._place = Place(spot.world if spot else options.world)
        self._finish = finisher(options.output)
        self.options = replace(options, world=self._place.world, mesh=spot)
        self._datasets = [self._open(source) for source in options.sources]
        self._past = self._saved = options.past or Past()  # the course up to where it went on, or began
        self._begin, self._resumed = Cursor(), False
        self._delivered = self._skipped = self._loops = self._steps_before = 0
        self._pipeline: Pipeline | None = None
        self._pid = 0  # of the process that it was first started in
        self._close_pipeline: weakref.finalize[Any, Any] | None = None
        self._group, self._given = _NO_GROUP, 0
        self._build()

    def __iter__(self) -> Iterator[Batch]:
        return self._loop(last_touch(self._part, self.options, are_numbers=self._engine.on_device))

    def untouched(self) -> Iterator[Batch]:
        """Batches as they are made, for who makes of their images what was asked for elsewhere."""
        return self._loop(None)

    def _loop(self, touch: Callable[[Batch], Any] | None) -> Iterator[Batch]:
        if self.options.shuffle == "off" and not self._resumed:
            self._go_to(Cursor(epoch=self.epoch))
            self._past = replace(self._past, step=self.step, legs=()).with_leg(self._begin, self.options)
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
                yield touch(batch) if touch else batch
                self._check_loop(loop)
                if self._group is not group:  # it went elsewhere meanwhile
                    break
            self._next_group()
            if not self._group.batches:  # an epoch ended: this one, unless it was handed out before
                ends += 1
                if some:
                    return
                self._check_enough(ends)

    def __len__(self) -> int:
        """Batches in an epoch, on every rank."""
        if self._place.look():
            self._move()
        batches = self._parts.planner.batches(Cursor(epoch=self.epoch))
        if batches is None:
            raise TypeError("with best-fit packing batches are known only at the end of an epoch")
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
        return save(self._cursor(), self._order_state(), self._past_until(self._cursor()))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved position, on any world size. The order is the one it was saved with."""
        cursor, past = load(state, order=self._order_state())
        check_position(cursor, samples=self._samples_in_an_epoch(cursor.epoch))
        check_left_out(past, [layout.samples for layout in self._parts.layouts])
        self._go_to(cursor)
        self._resumed, self._saved = True, past
        self._steps_before = past.step - self._delivered
        if self._past_for_world() != self._past:
            self._rebuild()

    @property
    def step(self) -> int:
        """Batches of each rank since the job began, those before a resume included."""
        return self._steps_before + self._delivered + self._given

    def samples(self, step: int, *, rank: int | None = None) -> list[Row]:
        """The rows of any past or future step, of one rank or all: which documents are in them, and where
        those lie. Computed from the order, nothing is read but indexes."""
        return rows_of_step(self._ledger(), step, rank=rank)

    def read(self, document: Document) -> Any:
        """What a document of the ledger holds: ids, the members of a tar's sample, or the sample itself."""
        return read_document(self._ledger(), document)

    def settle(self) -> bool:
        """Find out, for good, which rank this is: done at the first batch, when torch.distributed has been
        initialised. True where that is another than was thought so far."""
        moved = self._place.settle()
        if moved:
            self._move()
        return moved

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
            left_out_samples=sum(len(some.samples) for some in self._past.left_out),
            damaged_blocks=sum(one.blocks for one in damage),
            damage=tuple(name for one in damage for name in one.named),
            healed=tuple(name for one in damage for name in one.healed),
            mixed_samples=self._past.mixed(self._position(self._cursor())),
            chunk_bytes_held=self._engine.store.bytes,
            read_alone=self._parts.alone,
            reader=self._engine.reader(),
            read_factor=read_factor(self._parts, self.options, self._cut, at=self._begin),
            choices=tuple(self._tuner.history()),
            waited_s=self._tuner.waited_s,
            images=self._engine.media.of_images,
            audio=self._engine.media.of_sounds,
            video=self._engine.media.of_videos,
            limit=self._tuner.limit,
        )

    def files_in_order(self, dataset: int = 0) -> list[str]:
        """The files of a dataset that this node's ranks read, in the order in which they will."""
        one = self._datasets[dataset]
        if isinstance(one, ItemsDataset):
            return []
        return files_in_order(self._parts, one, self._cursor(), self._place.world)

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
        close_parts(self._readers, self._datasets, self._engine.close)

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        """Into another process, as it stands here."""
        options = replace(self.options, world=self._place.given)  # who was not told finds out there
        return _reopen, (options, self.state_dict())

    def _open(self, source: Source) -> AnyDataset:
        # cuFile reads what has been verified; the first, verifying read is an ordinary one. On the way to a
        # device a memory map is of no use.
        ordinary = ("cufile", "mmap") if self.options.device else ("cufile",)
        engine = "pread" if self.options.reader in ordinary else self.options.reader
        return open_any(
            source,
            files=self.options.files,
            engine=engine,
            on_corrupt=self.options.on_corrupt,
            bin_dtype=self.options.bin_dtype,
        )

    def _past_for_world(self) -> Past:
        """As it was saved, cut anew where this world needs it; or as for a job that begins here."""
        if self.options.past:  # a worker goes on as its parent does
            return self.options.past
        saved, world, position = self._saved, self._place.world, 0
        cut = Cut.for_world(world.size, world.nodes, lanes=self.options.lanes)
        if saved.cut:
            cut = resumed_cut(saved.cut, self._begin, self.options, saved.left_out)
            position = self._position(self._begin)
        dealing = dealing_of(saved, self.options, position=position)
        past = replace(saved, cut=cut, dealing=dealing).with_leg(self._begin, self.options)
        if not self.options.skip:
            return past
        return past.without(samples_named(self._datasets, self.options), self._begin)

    def _past_until(self, cursor: Cursor) -> Past:
        """The course so far, for those who go on from here."""
        dealing = self._past.dealing
        if dealing and dealing.datasets > 1:
            dealing = replace(dealing, known=dealing.anchor(self._position(cursor)))
        return replace(self._past, step=self.step, dealing=dealing)

    def _position(self, cursor: Cursor) -> int:
        """Samples before a cursor, counted from the beginning of the job."""
        return cursor.epoch * self._samples_in_an_epoch(0) + cursor.position

    def _move(self) -> None:
        """To the place that is known by now."""
        self.options = replace(self.options, world=self._place.world)
        self._rebuild()

    def _rebuild(self) -> None:
        self._readers.shutdown()
        self._engine.close()
        self._close_dropped.detach()
        self._build()

    def _build(self) -> None:
        options, self._past = self.options, self._past_for_world()
        self._cut, dealing = self._past.cut or Cut(), self._past.dealing
        assert dealing is not None
        left_out = self._past.left_out
        self._parts = make_parts(self._datasets, options, cut=self._cut, dealing=dealing, left_out=left_out)
        warn_of_reads(read_factor(self._parts, options, self._cut), options, self._cut.latest.lanes)
        limits = limits_of(self._parts, options)
        self._tuner = Tuner(first_setting(options, limits), limits)
        self._readers = Readers()
        threads = None if options.workers == "inline" else self._readers
        self._engine = make_engine(
            self._parts, options, threads=threads, most_readers=limits.readers, finish=self._finish
        )
        self._close_dropped = weakref.finalize(
            self, close_parts, self._readers, self._datasets, self._engine.close
        )

    def _cursor(self) -> Cursor:
        """Where the job is after the batches handed out so far."""
        return self._group.after[self._given - 1] if self._given else self._begin

    def _go_to(self, cursor: Cursor) -> None:
        self._stop()
        self._begin = cursor

    def _next_group(self) -> None:
        is_first = not self._pid
        self.settle()
        if self._pipeline is None:
            self._start()
        if is_first:
            self._place.compare(self._order_state(), self._past)
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
        self._delivered, self._group, self._given = self._delivered + self._given, group, 0

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
            samples = self._samples_in_an_epoch(self.epoch) - self.report().left_out_samples
            wanted = self.options.batch_size * self._place.world.size
            pad = ", or tail='pad'" if samples and self.options.packing != "best-fit" else ""
            raise UsageError(
                f"the dataset has {counted(samples, 'sample')}, a global batch {counted(wanted, 'row')}",
                hint=f"use more data, a smaller batch_size, a shorter seq_len{pad}",
            )

    def _samples_in_an_epoch(self, epoch: int) -> int:
        layouts = self._parts.layouts
        here = layouts if len(self._datasets) > 1 else [layouts[epoch % len(layouts)]]
        return sum(layout.samples for layout in here)

    def _start(self) -> None:
        self._pid = self._pid or os.getpid()
        check_process(self._pid)  # a forked child has neither the threads nor the chunks
        if self.options.workers == "inline":
            self._pipeline = Inline(self._engine.maker, self._begin)
        elif self.options.workers == "process":
            self._pipeline = Processes(self._recipe(), finish=self._finish)
            self._close_pipeline = weakref.finalize(self, close_here, self._pipeline, self._pid)
        else:
            self._pipeline = Background(
                self._engine.maker,
                self._begin,
                resize=resizer(self._readers, self._engine),
                tuner=self._tuner,
                ahead=self._parts.ahead,
            )
            self._close_pipeline = weakref.finalize(self, close_here, self._pipeline, self._pid)

    def _recipe(self) -> Recipe:
        return Recipe(
            options=replace(self.options, past=self._past, mesh=None),
            cursor=self._begin,
            begin=0,
            first=0,
            workers=self.options.processes,
        )

    def _stop(self) -> None:
        self._begin = self._cursor()
        self._hold(_NO_GROUP)
        if self._pipeline:
            close_here(self._pipeline, self._pid)
            self._pipeline = None
        if self._close_pipeline:
            self._close_pipeline.detach()

    def _ledger(self) -> Ledger:
        return Ledger(self._parts, self.options, self._past)

    def _order_state(self) -> dict[str, Any]:
        fingerprints = [dataset.fingerprint() for dataset in self._datasets]
        return order_state(fingerprints, self.options)


def _reopen(options: LoaderOptions, state: dict[str, Any]) -> Loader:
    loader = Loader(**given(options, LoaderOptions))
    loader.load_state_dict(state)
    return loader
