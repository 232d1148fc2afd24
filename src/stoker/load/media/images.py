"""Images of samples: their members decoded into the arrays of a batch, by the threads that run a transform.

An image that cannot be decoded is the user's policy: an error that names it, another sample in its place, or
a black one. It is counted and named in the report either way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stoker.errors import BadShardError, UsageError
from stoker.load.assembly.rows import Buffers
from stoker.load.assembly.transform import Transform, Transforms
from stoker.load.media.boxes import DRAWN, crop_of, keys_of, uniforms
from stoker.load.media.decode import Decoder, DrawCrop, Engine, Pixels, Undecodable, choose_engine
from stoker.load.media.image import Image
from stoker.load.media.mixing import BOX, OTHER, WEIGHT, mix_columns
from stoker.load.ordering.plan import Task
from stoker.mixing import Keys, key_of

SUFFIXES = (
    "jpg", "jpeg", "jpe", "jfif", "png", "webp", "gif", "bmp", "tif", "tiff", "ppm", "pgm", "pbm", "avif",
    "jp2",
)  # fmt: skip
LABEL, IS_OK = "cls", "image_ok"
MIXED = (WEIGHT, BOX, OTHER)
_NAMED = 8  # images that could not be decoded, in the report

Sample = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageReport:
    """What became of the images of this process; of worker processes only they know."""

    engine: str
    why: str
    decoded: int
    by_library: int  # of those: PNG, WebP, and JPEGs that the C engine does not take
    corrupt: int
    named: tuple[str, ...]  # some of the corrupt ones, and what is wrong with them


@dataclass(kw_only=True, slots=True)
class _Job:
    """One sample to be decoded, into rows of a batch."""

    sample: Sample
    named: str
    draws: list[DrawCrop]
    outs: list[Pixels | None]
    wrong: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoded:
    """The samples of a task with their images; where nothing changed them, these are the columns."""

    samples: list[Any]
    columns: dict[str, Any] = field(default_factory=dict)
    good: Any = None  # which rows are what the order asked for


class Images:
    """Makes the image columns of a loader. Called by the thread that assembles; `close` is safe twice."""

    def __init__(
        self,
        columns: dict[str, Image],
        *,
        seed: int,
        on_corrupt: str,
        threads: int,
        transform: Transform | None,
        engine: Engine | None = None,
    ) -> None:
        first = next(iter(columns.values()))
        self._columns, self._seed, self._transform = columns, seed, transform
        self._policy = first.on_corrupt or on_corrupt
        self._member, self._mixes = first.member, first.mixes
        self._engine = engine or choose_engine(first.engine)
        self._decoder = Decoder(self._engine, max_pixels=first.max_pixels)
        self._threads = Transforms(self._run, threads=threads)
        self._buffers = {name: Buffers() for name in columns}
        self._decoded = self._by_library = self._corrupt = 0
        self._named: list[str] = []
        self._counting = threading.Lock()

    @property
    def names(self) -> Collection[str]:
        return self._columns.keys()

    @property
    def takes_columns(self) -> bool:
        """Nobody asked for single samples, and all images are of one size."""
        return self._transform is None and all(one.crop != "whole" for one in self._columns.values())

    def report(self) -> ImageReport:
        return ImageReport(
            engine=self._engine.name,
            why=self._engine.why,
            decoded=self._decoded,
            by_library=self._by_library,
            corrupt=self._corrupt,
            named=tuple(self._named),
        )

    def of(
        self,
        task: Task,
        samples: Sequence[Sample],
        *,
        good: Any,
        named: Callable[[int], str],
        on_sample: Callable[[str], None],
    ) -> Decoded:
        """The samples of a task with their images, and with the user's transform. Rows that are not `good`
        are left as they are, and more may be no good afterwards."""
        rooms, draws = self._rooms(len(samples)), self._draws(task)
        jobs = [
            _Job(
                sample=sample,
                named=named(row),
                draws=[draw(row) for draw in draws],
                outs=[None if room is None else room[row] for room in rooms.values()],
            )
            for row, sample in enumerate(samples)
        ]
        wanted = np.flatnonzero(good).tolist()
        made = self._threads.of(
            [jobs[row] for row in wanted], named=lambda at: jobs[wanted[at]].named, on_sample=on_sample
        )
        found: list[Any] = list(samples)
        for row, one in zip(wanted, made, strict=True):
            found[row] = one
        is_whole = np.array([not job.wrong for job in jobs], bool)
        self._count(jobs)
        if self._policy != "replace":
            good = good & is_whole
        columns = {name: room for name, room in rooms.items() if room is not None}
        columns.update(mix_columns(self._columns, self._keys(task, len(self._columns))))
        if self._policy == "replace":
            columns[IS_OK] = is_whole
        return Decoded(samples=found, columns=columns, good=good)

    def close(self) -> None:
        self._threads.close()

    def _rooms(self, rows: int) -> dict[str, Any]:
        """Where images go; none for those of their own sizes."""
        return {
            name: None
            if one.crop == "whole"
            else self._buffers[name].take((rows, one.size, one.size, 3), np.dtype(np.uint8))
            for name, one in self._columns.items()
        }

    def _draws(self, task: Task) -> list[Callable[[int], DrawCrop]]:
        """What a row's crop of each column is drawn from: the seed, the epoch, the sample, nothing else."""

        def of(image: Image, numbers: list[list[float]]) -> Callable[[int], DrawCrop]:
            return lambda row: (
                lambda width, height, turn: crop_of(image, width, height, numbers[row], turn=turn)
            )

        return [
            of(image, uniforms(self._keys(task, which), DRAWN).tolist())
            for which, image in enumerate(self._columns.values())
        ]

    def _keys(self, task: Task, which: int) -> Keys:
        draw = task.draw
        epochs = draw.laps if len(draw.laps) else np.full(len(draw), task.epoch, np.int64)
        return keys_of(
            seed=key_of(self._seed),
            epochs=epochs,
            datasets=draw.dataset,
            samples=draw.sample,
            what=which,
        )

    def _run(self, job: _Job) -> Any:
        """One sample, in a thread of the pool."""
        images = self._images_in(job.sample)
        sample = {name: _kept(name, content, images) for name, content in job.sample.items()}
        try:
            sample.update(self._decode(sample, job))
        except Undecodable as error:
            job.wrong = f"{job.named}: {error}"
            if self._policy == "raise":
                raise BadShardError(
                    f"the image of {job.named} cannot be decoded: {error}",
                    hint='mend or leave out the sample, or give on_corrupt="skip": another stands in for it, '
                    "counted and named in the report",
                ) from None
            if self._policy == "skip":
                return sample
            rest = {name: one for name, one in sample.items() if name not in images}
            sample = {**rest, **self._black(job)}
        if LABEL in sample:
            sample[LABEL] = _label(sample[LABEL], job.named)
        return self._transform(sample) if self._transform else sample

    def _decode(self, sample: Sample, job: _Job) -> dict[str, Pixels]:
        data = sample.pop(self._suffix(sample))
        taken = sample.keys() & {*self._columns, *(MIXED if self._mixes else ()), IS_OK}
        if taken:
            raise UsageError(
                f"{job.named} has a member {', '.join(sorted(taken))}, and batches a column of that name",
                hint="give images other names: image={'pixels': stoker.Image(...)}",
            )
        if len(data) == 0:
            raise Undecodable("its member is empty")
        found, by_library = self._decoder.crops(data, job.draws, job.outs)
        with self._counting:
            self._decoded += 1
            self._by_library += by_library
        return dict(zip(self._columns, found, strict=True))

    def _suffix(self, sample: Sample) -> str:
        if self._member:
            if self._member not in sample:
                raise Undecodable(f"it has no member {self._member}")
            return self._member
        found = self._images_in(sample)
        if len(found) != 1:
            which = f"{', '.join(found)} all are" if found else "none is"
            raise Undecodable(
                f"of its members ({', '.join(sample.keys() - {'__key__'})}) {which} an image: "
                "say which: Image(member=...)"
            )
        return found[0]

    def _images_in(self, sample: Sample) -> list[str]:
        """The members that are to be decoded: one, in a sample as it should be."""
        if self._member:
            return [self._member] if self._member in sample else []
        return [name for name in sample if name.lower() in SUFFIXES]

    def _black(self, job: _Job) -> dict[str, Pixels]:
        found = {}
        for (name, image), out in zip(self._columns.items(), job.outs, strict=True):
            room = np.empty((image.size, image.size, 3), np.uint8) if out is None else out
            room[:] = 0
            found[name] = room
        return found

    def _count(self, jobs: Sequence[_Job]) -> None:
        for job in jobs:
            if job.wrong:
                self._corrupt += 1
                if len(self._named) < _NAMED and job.wrong not in self._named:
                    self._named.append(job.wrong)


def _kept(name: str, content: Any, images: Collection[str]) -> Any:
    """A member's bytes, copied out of its chunk; an image is decoded where it lies."""
    return content.tobytes() if isinstance(content, np.ndarray) and name not in images else content


def _label(value: Any, named: str) -> int:
    """A class, as it is written in a member."""
    try:
        return int(bytes(value))
    except ValueError:
        raise BadShardError(
            f"the label of {named} is {bytes(value)[:40]!r}, no whole number",
            hint="a member `cls` holds the number of a class in ASCII; call another thing otherwise",
        ) from None


def check_left_alone(name: str, image: Image, found: Any) -> None:
    """What a transform or a collate made instead is theirs; what was asked for of pixels cannot be done."""
    if image.number == "uint8":
        return
    shape = f"{found.dtype} of {tuple(found.shape)}" if hasattr(found, "shape") else type(found).__name__
    raise UsageError(
        f"normalize=, dtype= and mixing have nothing to work on: {name!r} is {shape} after `transform` "
        "or `collate`, not bytes of [rows, height, width, 3]",
        hint="let them leave the pixels as they are, or leave those options out",
    )


def check_label(found: Any, kind: type) -> None:
    """Mixed images have two labels each."""
    if not isinstance(found, kind):
        raise UsageError(
            f"mixed images need a label each, and batches have no numbers in {LABEL!r}",
            hint="use samples with a member `cls`, or leave mixup and cutmix out",
        )
