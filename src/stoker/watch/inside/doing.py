"""Classification of a stack: what the user's code does outside every span, and on which line.

Who made the value is asked first (flow.py): a line whose value goes into the loss makes a batch, whatever it
calls. Then the libraries below the user's frame, then the words of the line and of its functions. A request
that waits for a server is told by who asks: of a function called `log` it is logging.
"""

from __future__ import annotations

import inspect
import linecache
import os
import re
from types import CodeType
from typing import NamedTuple

from stoker.watch.inside.flow import Flow
from stoker.watch.inside.frames import is_library

Places = tuple[tuple[CodeType, int], ...]  # code and line, outermost first


class Doing(NamedTuple):
    """What (batch, logging, metrics, saving, output, io, gc, lock, optimizer, average, compute, other), and
    on which line."""

    what: str
    line: str


_BY_LIBRARY = {
    "logging": r"/logging/|/(wandb|tensorboard|tensorboardX|mlflow|comet_ml|neptune|clearml|aim)/"
    r"|/(loguru|structlog|loggers)/|/torch/utils/tensorboard/",
    "metrics": r"/torchmetrics/|/sklearn/metrics|/evaluate/",
    "output": r"/tqdm/|/rich/|/progress/",
    "io": r"/(socket|ssl|subprocess|shutil|tempfile|fileinput)\.py$|/http/|/urllib|/requests/|/boto"
    r"|/(fsspec|s3fs)/",
    "lock": r"/(threading|queue)\.py$|/multiprocessing/(queues|connection|synchronize|managers)\.py$"
    r"|/concurrent/futures/",
}
_BY_WORD = {
    "gc": r"\bgc\.collect|empty_cache",
    "saving": r"np\.savez|(^|[^a-z])(save|checkpoint|ckpt)($|[^a-z])",
    "output": r"\bprint\(|std(out|err)\b|\btqdm|progress",
    "io": r"\bopen\(|\.(read|write|flush|recv|send|sendall|connect|getresponse)\(|fsync|urlopen|requests\."
    r"|subprocess|upload|download|np\.(save|load)\(|to_csv|(json|pickle)\.(dump|load)|copyfile|os\.(replace|rename|sync)",
    "logging": r"(^|[^a-z])(log|logs|logger|logging|wandb|writer|mlflow|track|report)($|[^a-z])"
    r"|add_scalar|log_",
    "metrics": r"metric|accuracy|norms?($|[^a-z])|(^|[^a-z])stats?($|[^a-z])|statistic|histogram"
    r"|perplexity|score",
    "average": r"(^|[^a-z])(ema|swa|polyak)($|[^a-z])|averag|soft_update|update_target",
    "batch": r"batch|tokeni[sz]|encode|collate|augment|preprocess|__getitem__|__next__|__iter__",
    "optimizer": r"optimi[sz]er|(^|[^a-z])update($|[^a-z])",
}
_LIBRARIES = {what: re.compile(pattern) for what, pattern in _BY_LIBRARY.items()}
_WORDS = {what: re.compile(pattern, re.IGNORECASE) for what, pattern in _BY_WORD.items()}
_WAITS = ("io", "lock", "saving")  # in which anybody may wait, for anything
_ASKS = ("saving", "logging", "metrics")
_MAKES_BATCHES = re.compile(r"^(__getitem__|__getitems__|__next__|__iter__|collate.*|.*_collate)$")
_GENERATOR = inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR


class Reader:
    """Knows the source files it has read; one thread."""

    def __init__(self) -> None:
        self._flows: dict[str, Flow | None] = {}
        self._known: dict[Places, Doing] = {}

    def doing(self, places: Places) -> Doing:
        """What a stack does. Asked once of each: a loop has few of them."""
        found = self._known.get(places)
        if found is None:
            if len(self._known) > 5000:
                self._known.clear()
            found = self._known[places] = self._classify(places)
        return found

    def loop_lines(self, code: CodeType, line: int) -> tuple[int, int] | None:
        """The loop that a line of this code is in, where its source can be read."""
        flow = self._flow(code.co_filename)
        return flow.loop_around(line) if flow else None

    def _classify(self, places: Places) -> Doing:
        own = [i for i, (code, _) in enumerate(places) if not is_library(code.co_filename)]
        last = own[-1] if own else len(places) - 1
        line = text_of(*places[last]) if places else "?"
        loop = next((i for i in reversed(own) if self._trains(places[i])), None)
        within = [i for i in own if loop is None or i > loop]
        inner = [places[i] for i in within]
        below = places[(last if loop is None else loop) + 1 :]
        below = tuple(place for place in below if is_library(place[0].co_filename))
        told = self._by_flow(places[loop], alone=not inner) if loop is not None else ""
        spots = inner or ([places[loop]] if loop is not None else [])
        if not told and any(_makes_batches(places, i) for i in within):
            told = "batch"
        return Doing(told or self._by_what_is_called(inner, spots, below), line)

    def _by_what_is_called(
        self, inner: list[tuple[CodeType, int]], spots: list[tuple[CodeType, int]], below: Places
    ) -> str:
        if any(self._updates(place) for place in inner[-1:]):
            return "optimizer"
        told = _by_library(below) or _by_words(spots) or _by_torch(below) or "other"
        return (_by_names(spots) or told) if told in _WAITS else told

    def _by_flow(self, place: tuple[CodeType, int], *, alone: bool) -> str:
        """By what the line of the loop itself is there for; what a function of the user's does that it calls
        is the loss only where the line is `alone`."""
        flow = self._flow(place[0].co_filename)
        if flow is None:
            return ""
        if flow.makes_batch(place[1]):
            return "batch"
        if flow.updates_weights(place[1]):
            return "optimizer"
        return "compute" if alone and flow.computes(place[1]) else ""

    def _trains(self, place: tuple[CodeType, int]) -> bool:
        flow = self._flow(place[0].co_filename)
        return flow is not None and flow.trains(place[1])

    def _updates(self, place: tuple[CodeType, int]) -> bool:
        flow = self._flow(place[0].co_filename)
        return flow is not None and flow.updates_weights(place[1])

    def _flow(self, filename: str) -> Flow | None:
        """None of a library: its files are large, and how it trains is its own business."""
        if filename not in self._flows:
            try:
                if is_library(filename):
                    raise ValueError(filename)
                self._flows[filename] = Flow("".join(linecache.getlines(filename)))
            except (SyntaxError, ValueError, RecursionError, MemoryError):
                self._flows[filename] = None
        return self._flows[filename]


def text_of(code: CodeType, line: int) -> str:
    return f"{code.co_filename}:{line} {name_of(code)}"


def name_of(code: CodeType) -> str:
    """The function somebody has named: a comprehension and a lambda are part of the one they stand in."""
    if not code.co_name.startswith("<") or code.co_name == "<module>":
        return code.co_name
    around = getattr(code, "co_qualname", code.co_name).split(".")  # since Python 3.11
    named = [part for part in around if not part.startswith("<")]
    return named[-1] if named else code.co_name


def _makes_batches(places: Places, number: int) -> bool:
    """By its name, or because it yields: but for a generator expression and what `with` enters or leaves."""
    code = places[number][0]
    if _MAKES_BATCHES.match(code.co_name):
        return True
    caller = places[number - 1][0].co_filename if number else ""
    yields = bool(code.co_flags & _GENERATOR) and not code.co_name.startswith("<")
    return yields and os.path.basename(caller) != "contextlib.py"


def _by_library(below: Places) -> str:
    """By the libraries the user's line has called, the innermost last: whoever prints may log."""
    paths = [code.co_filename.replace(os.sep, "/") for code, _ in below]
    return next((what for path in paths for what, pattern in _LIBRARIES.items() if pattern.search(path)), "")


def _by_words(inner: list[tuple[CodeType, int]]) -> str:
    """By the words of the innermost line, then by the names of functions from there outwards."""
    if not inner:
        return ""
    code, line = inner[-1]
    spoken = [linecache.getline(code.co_filename, line), *(name_of(one) for one, _ in reversed(inner))]
    return next((what for text in spoken for what, pattern in _WORDS.items() if pattern.search(text)), "")


def _by_names(inner: list[tuple[CodeType, int]]) -> str:
    """What somebody waits for is told by who asks for it."""
    names = [name_of(code) for code, _ in reversed(inner)]
    return next((what for name in names for what in _ASKS if _WORDS[what].search(name)), "")


def _by_torch(below: Places) -> str:
    return "compute" if any("/torch/" in code.co_filename.replace(os.sep, "/") for code, _ in below) else ""
