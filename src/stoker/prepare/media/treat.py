"""Sample treatment: every image of a sample through the darkroom, its caption tokenised, all counted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from stoker.errors import BadInputError, require
from stoker.prepare.curate.statistics import Statistics
from stoker.prepare.media.images import BadImageError, Darkroom, Made, Thumb, UnwantedImageError
from stoker.prepare.media.sources.kinds import kind_of, suffix_of
from stoker.prepare.media.sources.samples import HELD_BYTES, MOST_SAMPLE_BYTES, Content, Read, Sample, Stretch
from stoker.prepare.media.sources.tars import MOST_SUFFIX_BYTES
from stoker.prepare.media.spill import Facts
from stoker.prepare.plan import Plan
from stoker.prepare.sources.documents import BadRecord, Texts
from stoker.prepare.tokens import Engine, Tokenizer, open_engine

STEP = "media"  # by which the funnel counts what filters drop
_BATCH = 256  # captions per round of the tokenizer: its fixed costs are a millisecond


@dataclass(frozen=True, kw_only=True, slots=True)
class Treated:
    """A sample as it is kept."""

    sample: Sample
    facts: Facts
    thumb: Thumb | None = None
    tokens: int = 0


class Treatment:
    """What a plan asks of samples. Costly to open; serves many splits."""

    def __init__(self, plan: Plan, tokenizer: Tokenizer | None) -> None:
        assert plan.media
        self._plan, self._near = plan, plan.media.near_bits >= 0
        self._darkroom = Darkroom(plan.media.options, thumbs=self._near)
        self._captions = _Captions(plan, tokenizer) if tokenizer else None

    def treated(self, source: int, read: Iterator[Read], statistics: Statistics) -> Iterator[Treated]:
        """Samples that stay, in their order; what goes is counted under its reason."""
        kept = (one for one in (self._one(source, one, statistics) for one in read) if one)
        return self._captions.beside_all(kept) if self._captions else kept

    def _one(self, source: int, read: Read, statistics: Statistics) -> Treated | None:
        origin = self._plan.sources[source].origin or self._plan.sources[source].url
        if isinstance(read, BadRecord):
            self._note_bad(read, statistics)
            return None
        size = read.bytes
        statistics.documents_in += 1
        statistics.bytes_in += size
        statistics.sources["documents_in", origin] += 1
        statistics.sources["bytes_in", origin] += size
        try:
            _check_sample(read)
            return self._made(source, read, statistics)
        except UnwantedImageError as error:
            statistics.drop(error.reason, size)
            statistics.funnel[STEP, error.reason, origin] += 1
            statistics.drop_example(STEP, error.reason, where=read.where, text=error.detail)
        except BadImageError as error:
            bad = BadRecord(where=read.where, reason=error.reason, detail=error.detail)
            self._note_bad(bad, statistics)
            if self._plan.on_error == "keep" and error.reason in _KEEPABLE:
                return Treated(sample=read, facts=_facts(source, read, []))
        return None

    def _note_bad(self, record: BadRecord, statistics: Statistics) -> None:
        sentence = f"{record.where}: {record.reason}: {record.detail}"
        if self._plan.on_error == "stop":
            raise BadInputError(sentence, hint=_HINT)
        statistics.note_bad(record.reason, sentence, documents=record.documents)

    def _made(self, source: int, sample: Sample, statistics: Statistics) -> Treated:
        images = [name for name, _ in sample.members if kind_of(name) == "image"]
        made: list[Made] = []
        members: list[tuple[str, Content]] = []
        for name, content in sample.members:
            if kind_of(name) != "image":
                members.append((name, content))
                continue
            if isinstance(content, Stretch):
                raise BadImageError("too_long", f"an image of {len(content):,} bytes")
            one = self._darkroom.make(content, among=len(images))
            made.append(one)
            members.append((_renamed(name, one.suffix), one.data))
        for change in {change for one in made for change in one.changes}:
            statistics.media["changed", change] += 1
        names = [name for name, _ in members]
        if len(set(names)) < len(names):
            raise BadImageError("member_twice", f"two members would be called {max(names, key=names.count)}")
        thumb = made[0].thumb if made else None
        return Treated(
            sample=replace(sample, members=members), facts=_facts(source, sample, made), thumb=thumb
        )


_HINT = (
    "mend or remove it, leave such samples out (and counted) with --on-error skip, or keep them as they are "
    "with --on-error keep"
)
_KEEPABLE = ("damaged", "not_an_image", "too_many_pixels", "too_long")


class _Captions:
    """Token ids of captions, as a member beside them."""

    def __init__(self, plan: Plan, tokenizer: Tokenizer) -> None:
        assert plan.tokenizer
        self._engine: Engine = open_engine(plan.tokenizer.engine, tokenizer)
        self._marks, self._dtype = plan.marks, plan.dtype
        self._orjson = require("orjson", extra="media")

    def beside_all(self, kept: Iterator[Treated]) -> Iterator[Treated]:
        """In batches that memory holds."""
        held: list[Treated] = []
        size = 0
        for one in kept:
            held.append(one)
            size += _held_bytes(one.sample)
            if len(held) >= _BATCH or size > HELD_BYTES:
                yield from self._beside(held)
                held, size = [], 0
        if held:
            yield from self._beside(held)

    def _beside(self, held: Sequence[Treated]) -> list[Treated]:
        captions = [_caption(one.sample) for one in held]
        ids, offsets = self._engine.encode(Texts.of([text or "" for text in captions]))
        made = []
        for number, one in enumerate(held):
            if captions[number] is None:
                made.append(one)
                continue
            own = ids[offsets[number] : offsets[number + 1]].astype(self._dtype)
            marked = np.concatenate(
                [np.array(self._marks.before, self._dtype), own, np.array(self._marks.after, self._dtype)]
            )
            data = self._orjson.dumps(marked, option=self._orjson.OPT_SERIALIZE_NUMPY)
            others = [member for member in one.sample.members if member[0] != "token_ids.json"]
            sample = replace(one.sample, members=[*others, ("token_ids.json", data)])
            made.append(replace(one, sample=sample, tokens=len(marked)))
        return made


def _caption(sample: Sample) -> str | None:
    """The text of a sample."""
    members = dict(sample.members)
    for name in ("txt", "text.txt", "caption"):
        content = members.get(name)
        if isinstance(content, bytes):
            return content.removeprefix(b"\xef\xbb\xbf").decode(errors="replace")
    return None


def _facts(source: int, sample: Sample, made: Sequence[Made]) -> Facts:
    names = [name for name, _ in sample.members if kind_of(name)]
    formats = [one.suffix for one in made] + [suffix_of(f"a.{name}") for name in names[len(made) :]]
    width, height = (made[0].width, made[0].height) if made else (0, 0)
    return Facts(formats=tuple(formats), width=width, height=height, label=sample.label, source=source)


def _renamed(name: str, suffix: str) -> str:
    """The member's name, unless what it holds is of another kind than it says."""
    front, dot, last = name.rpartition(".")
    return name if suffix_of(f"a.{last}") == suffix else f"{front}{dot}{suffix}"


def _check_sample(sample: Sample) -> None:
    if sample.bytes > MOST_SAMPLE_BYTES:
        raise BadImageError("too_long", f"{sample.bytes:,} bytes in one sample; the limit is 4 GiB")
    for name, _ in sample.members:
        if not name.isascii() or not name.isprintable() or len(name) > MOST_SUFFIX_BYTES or "/" in name:
            raise BadImageError("bad_name", f"a member's suffix {name[:80]!r} fits no tar header")
        if name.startswith(".") or name.endswith(".") or ".." in name:
            raise BadImageError("bad_name", f"a member's suffix {name!r} has an empty part")


def _held_bytes(sample: Sample) -> int:
    return sum(len(content) for _, content in sample.members if isinstance(content, bytes))
