"""Members of samples decoded: images, sounds and videos, by the threads that run a transform.

What cannot be decoded is the user's policy: an error that names it, another sample in its place, or a black
or silent one. It is counted and named in the report either way.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stoker.errors import BadShardError, UsageError
from stoker.load.assembly.transform import Transform, Transforms
from stoker.load.media.decode import Undecodable
from stoker.load.media.images import LABEL, label_of
from stoker.load.media.kinds import Filling, Kind, Sample
from stoker.load.ordering.plan import Task


@dataclass(kw_only=True, slots=True)
class _Job:
    """One sample to be decoded, into a row of a task."""

    row: int
    sample: Sample
    named: str
    fillings: Sequence[Filling]  # one for each kind
    wrong: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoded:
    """The samples of a task with their media; where nothing changed them, these are the columns."""

    samples: list[Any]
    columns: dict[str, Any] = field(default_factory=dict)
    good: Any = None  # which rows are what the order asked for


class Members:
    """Makes the media columns of a loader. Called by the thread that assembles; `close` is safe twice."""

    def __init__(self, kinds: Sequence[Kind], *, threads: int, transform: Transform | None) -> None:
        self._kinds, self._transform = kinds, transform
        self._threads = Transforms(self._run, threads=threads)

    @property
    def names(self) -> Collection[str]:
        return {name for kind in self._kinds for name in kind.columns}

    @property
    def takes_columns(self) -> bool:
        """Nobody asked for single samples, and all media are of one size."""
        return self._transform is None and all(kind.is_even for kind in self._kinds)

    def of(
        self,
        task: Task,
        samples: Iterable[Sample],
        *,
        good: Any,
        named: Callable[[int], str],
        on_sample: Callable[[str], None],
    ) -> Decoded:
        """The samples of a task with their media, and with the user's transform. Rows that are not `good`
        once their sample is there are left as they are, and more may be no good afterwards."""
        fillings = [kind.begin(task) for kind in self._kinds]
        found: list[Any] = []
        jobs: list[_Job] = []

        def coming() -> Iterator[_Job]:
            for row, sample in enumerate(samples):
                found.append(sample)
                if good[row]:
                    jobs.append(_Job(row=row, sample=sample, named=named(row), fillings=fillings))
                    yield jobs[-1]

        made = self._threads.of_coming(coming(), named=lambda at: jobs[at].named, on_sample=on_sample)
        for job, one in zip(jobs, made, strict=True):
            found[job.row] = one
        for kind, filling in zip(self._kinds, fillings, strict=True):
            refused = filling.finish()
            for job in jobs if refused else ():
                if job.row in refused:
                    _refuse(kind, job, refused[job.row])
        columns = {name: column for filling in fillings for name, column in filling.columns.items()}
        for kind in self._kinds:
            is_whole = np.ones(len(good), bool)
            for job in jobs:
                if kind.what in job.wrong:
                    is_whole[job.row] = False
                    kind.count(job.wrong[kind.what])
            if kind.policy == "replace":
                columns[f"{kind.what}_ok"] = is_whole
            else:
                good = good & is_whole
        return Decoded(samples=found, columns=columns, good=good)

    def batched(self, batch: Any) -> Any:
        """A batch of collated samples, with media of unlike lengths filled up."""
        if not isinstance(batch, dict):
            return batch
        found = dict(batch)
        for kind in self._kinds:
            found.update(kind.evened(found))
        return found

    def close(self) -> None:
        self._threads.close()

    def _run(self, job: _Job) -> Any:
        """One sample, in a thread of the pool."""
        meant = [_meant(kind, job.sample) for kind in self._kinds]
        decoded = {name for names in meant for name in names}
        sample = {name: _kept(content) for name, content in job.sample.items() if name not in decoded}
        for kind, filling, names in zip(self._kinds, job.fillings, meant, strict=True):
            _check_names(kind, sample, job.named)
            try:
                sample.update(filling.decode(job.row, _data_of(kind, names, job.sample)))
            except Undecodable as error:
                _refuse(kind, job, str(error))
                if kind.policy == "skip":
                    return sample
                sample.update(filling.blank(job.row))
        if LABEL in sample:
            sample[LABEL] = label_of(sample[LABEL], job.named)
        return self._transform(sample) if self._transform else sample


def _refuse(kind: Kind, job: _Job, wrong: str) -> None:
    """Note what is wrong, or raise it."""
    job.wrong[kind.what] = f"{job.named}: {wrong}"
    if kind.policy == "raise":
        raise BadShardError(
            f"the {kind.what} of {job.named} cannot be decoded: {wrong}",
            hint='mend or leave out the sample, or give on_corrupt="skip": another stands in for it, counted '
            "and named in the report",
        ) from None


def _meant(kind: Kind, sample: Sample) -> list[str]:
    """The members that are to be decoded: one, in a sample as it should be."""
    if kind.member:
        return [kind.member] if kind.member in sample else []
    for suffixes in kind.suffixes:
        if found := [name for name in sample if name.lower() in suffixes]:
            return found
    return []


def _data_of(kind: Kind, names: list[str], sample: Sample) -> Any:
    if kind.member and not names:
        raise Undecodable(f"it has no member {kind.member}")
    if len(names) != 1:
        which = f"{', '.join(names)} all are" if names else "none is"
        a = "an" if kind.what[0] in "aeiou" else "a"
        raise Undecodable(
            f"of its members ({', '.join(sample.keys() - {'__key__'})}) {which} {a} {kind.what}: "
            f"say which: {kind.what.capitalize()}(member=...)"
        )
    data = sample[names[0]]
    if len(data) == 0:
        raise Undecodable("its member is empty")
    return data


def _check_names(kind: Kind, sample: Sample, named: str) -> None:
    if taken := sample.keys() & set(kind.taken):
        raise UsageError(
            f"{named} has a member {', '.join(sorted(taken))}, and batches a column of that name",
            hint="give images other names: image={'pixels': stoker.Image(...)}"
            if kind.what == "image"
            else "call the member otherwise when the dataset is prepared",
        )


def _kept(content: Any) -> Any:
    """A member's bytes, copied out of its chunk; what is decoded is where it lies."""
    return content.tobytes() if isinstance(content, np.ndarray) else content
