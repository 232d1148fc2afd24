"""What `skip=` names: documents of the ledger, as the samples that hold them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from stoker.errors import UsageError
from stoker.load.options import LoaderOptions
from stoker.load.ordering.without import Names
from stoker.load.parts import AnyDataset, make_layouts
from stoker.load.reading.layout import Documents, TarSamples, Windows

if TYPE_CHECKING:
    from stoker.load.ledger import Document, Row

_HINT = (
    "give names as `stoker order` and `samples(step)` do: shard.bin#17, in a blend 1:shard.bin#17, else #17"
)


def names_in(skip: Iterable[str | Document | Row]) -> list[str]:
    """Names, also of documents and rows as the ledger gives them."""
    found: list[str] = []
    for one in [skip] if isinstance(skip, str) else skip:
        some: Any = one
        if hasattr(some, "documents"):
            found += [document.name for document in some.documents]
        else:
            found.append(getattr(some, "name", some))
    return list(dict.fromkeys(found))


def samples_named(datasets: Sequence[AnyDataset], options: LoaderOptions) -> Names:
    """The samples that hold these documents: all rows that a token of one is in, or is predicted in."""
    layouts, owners = make_layouts(datasets, options)
    found: set[tuple[int, int]] = set()
    for name in names_in(options.skip):
        here = [
            (number, sample)
            for number, file, inside in _places(name, layouts, blended=len(datasets) > 1)
            for sample in _samples(layouts[number], owners[number], number, file, inside, len(datasets) > 1)
        ]
        if not here:
            raise UsageError(f"skip has {name!r}, and no document is called that", hint=_HINT)
        found.update(here)
    return frozenset(found)


def _places(name: Any, layouts: Sequence[Any], *, blended: bool) -> Iterator[tuple[int, int, int]]:
    """Layout, shard (-1: none) and number that a name stands for."""
    if not isinstance(name, str) or "#" not in name:
        raise UsageError(f"skip has {name!r}, which is no name of a document", hint=_HINT)
    rest, _, inside = name.rpartition("#")
    which, colon, file = rest.partition(":") if blended else ("", ":", rest)
    if not colon or not inside.isdecimal() or (blended and not which.isdecimal()):
        raise UsageError(f"skip has {name!r}, which is no name of a document", hint=_HINT)
    for number, layout in enumerate(layouts):
        if blended and number != int(which):
            continue
        shards = [n for n, one in enumerate(layout.shards) if one.files[0].name == file]
        if shards or (not layout.shards and not file):
            yield number, shards[0] if shards else -1, int(inside)


def _samples(layout: Any, dataset: Any, number: int, shard: int, inside: int, blended: bool) -> Iterator[int]:
    if isinstance(layout, Windows):
        documents = dataset.documents(0 if blended else number)
        yield from _windows(layout, documents.bounds(shard) // layout.dtype.itemsize, shard, inside)
    elif isinstance(layout, (Documents, TarSamples)):
        if inside < layout.shards[shard].samples:
            yield int(layout.starts[shard]) + inside
    elif inside < layout.samples:
        yield inside


def _windows(layout: Windows, bounds: Any, shard: int, inside: int) -> Iterator[int]:
    """A window is seq_len tokens and the one after them, which its last token predicts."""
    if inside + 1 >= len(bounds) or bounds[inside] == bounds[inside + 1]:
        return
    first, stop, size = int(bounds[inside]), int(bounds[inside + 1]), layout.seq_len
    begin, end = layout.windows_of(shard)
    low = max(0, -(-(first - size) // size))
    yield from range(begin + low, min(end, begin + (stop - 1) // size + 1))
