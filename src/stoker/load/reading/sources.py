"""What can be a dataset of numbered samples: whatever cannot is refused, with what it lacks."""

from __future__ import annotations

import sys
from typing import Any

from stoker.errors import UsageError
from stoker.load.reading.foreign import samples_in


def is_array(source: Any) -> bool:
    """numpy's or torch's, by what it has: neither is imported to ask."""
    return all(hasattr(source, name) for name in ("shape", "dtype", "ndim", "itemsize", "__getitem__"))


def check_items(source: Any) -> None:
    """Refuse what is no dataset, and say what is missing."""
    kind = "None" if source is None else f"a {type(source).__qualname__}"
    if hasattr(source, "column_names") and isinstance(source, dict):
        raise UsageError(
            f"a {type(source).__qualname__} is several datasets: {', '.join(map(str, source))}",
            hint=f"give one of them: dataset[{next(iter(source), 'train')!r}]",
        )
    if isinstance(source, (dict, set, bytes, bytearray, int, float)) or source is None:
        raise UsageError(f"{kind} is no dataset", hint=_WHAT)
    _check_numbered(source, kind)
    if missing := [name for name in ("__len__", "__getitem__") if not _has(source, name)]:
        stream = " and can only be read from its beginning" if hasattr(source, "__iter__") else ""
        raise UsageError(
            f"{kind} has no {' and no '.join(missing)}{stream}: its samples have no computed order",
            hint=_WHAT,
        )
    try:
        samples = samples_in(source)
    except TypeError as error:
        raise UsageError(f"{kind} does not know its length: {error}", hint=_WHAT) from error
    if not samples:
        raise UsageError(f"{kind} holds no samples", hint="give one that does")


def _check_numbered(source: Any, kind: str) -> None:
    """Rows are asked for by their number: not all that has brackets means that by them."""
    if is_array(source) and hasattr(source, "filled"):  # numpy.ma is slow to import
        raise UsageError("a masked array would lose its mask", hint="give source.filled(...), or columns")
    if is_array(source) and str(getattr(source, "layout", "torch.strided")) != "torch.strided":
        raise UsageError(
            f"{kind} of layout {source.layout} has no rows by number", hint="give its to_dense()"
        )
    if type(source).__module__.partition(".")[0] in ("pandas", "pyarrow", "polars"):
        raise UsageError(
            f"{kind} gives columns or labels, not rows by their number",
            hint="give datasets.Dataset.from_pandas(frame), datasets.Dataset(table), or its to_numpy()",
        )


def _has(source: Any, name: str) -> bool:
    """Torch's own Dataset has a `__getitem__` that only says that there is none."""
    torch: Any = sys.modules.get("torch.utils.data")
    inherited = getattr(torch.Dataset, name, None) if torch else None
    return hasattr(source, name) and getattr(type(source), name, True) is not inherited


_WHAT = (
    "give the folder of a prepared dataset, a raw .bin of tokens, an array, a Hugging Face dataset, or what "
    "has __len__ and __getitem__; several in a list are blended. `stoker prepare` takes anything else"
)
