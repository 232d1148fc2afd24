"""Job specification: what is known of a job to be sized, in one flat record.

A key of the YAML file, a flag of `stoker plan` and a field of `Job` are one thing with one name. Whatever
is left out is unknown, and a plan says what it then cannot tell.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import Field, asdict, dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from stoker.errors import UsageError
from stoker.formats.sizes import parse_size
from stoker.plan.documents import read_document

_UNITS = {"": 1.0, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_TIME = re.compile(r"^(\d+(?:\.\d+)?(?:e-?\d+)?)\s*(ms|s|min|h|d|)$")
# a small b is a bit, as networks are sold: taken for a byte it would be eight times as fast
_BITS = re.compile(r"[KMGTPkmgtp][iI]?b$")
_SOMETHING = re.compile(r"[0.]*[1-9]")
_LEADING_ZERO = re.compile(r"0+[0-9]")
_NUMBER_UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
_NUMBER = re.compile(r"^(\d+(?:\.\d+)?(?:e[+-]?\d+)?)\s*([KMBT]?)$", re.IGNORECASE)

# beyond these no job is: products of a few of them are still numbers that machines can have
_MOST = {"count": 1e9, "bytes": 1e18, "rate": 1e15, "seconds": 1e12, "number": 1e24}
_MOST_OF_A_NODE = {"gpus_per_node": 1024, "workers": 1024, "prefetch": 1024}
_LEAST = 1e-12  # of what is not nothing

_NEEDED = (  # what others are divided by
    "nodes", "gpus_per_node", "workers", "prefetch", "thread_rate", "read_block", "gpu_flops",
    "snapshot_rate",
)  # fmt: skip


def _known(kind: str, default: Any, help: str) -> Any:
    """A field with what a reader of --help and a parser of YAML need to know of it."""
    return field(default=default, metadata={"kind": kind, "help": help})


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A training job, its data and the machines it runs on. 0 is unknown, except where a default stands."""

    name: str = _known("text", "training", "what the job is called")
    nodes: int = _known("count", 1, "nodes of the job")
    gpus_per_node: int = _known("count", 8, "GPUs of a node, one rank each")

    step: float = _known("seconds", 0.0, "seconds of a step when nothing waits: measured, or from parameters")
    batch: int = _known("count", 0, "samples of a step on one GPU")
    sample: int = _known("bytes", 0, "bytes of a sample as it is stored")
    decoded: int = _known("bytes", 0, "bytes of a sample as it stands in a batch; else as stored")
    read_rate: float = _known("rate", 0.0, "bytes a second one GPU reads, where that is known instead")
    parameters: float = _known("number", 0.0, "parameters of the model")
    tokens: int = _known("count", 0, "tokens of a sample")
    gpu_flops: float = _known("number", 989e12, "peak of a GPU in FLOP/s; an H100's in bf16 unless said")
    mfu: float = _known("number", 0.4, "share of the peak that training reaches, for a step from parameters")

    dataset: int = _known("bytes", 0, "bytes of the dataset")
    epochs: float = _known("number", 1.0, "times the dataset is read")
    store_rate: float = _known("rate", 0.0, "bytes a second the shared store gives to the whole job")
    store_latency: float = _known("seconds", 0.01, "seconds to the first byte of a request")
    node_rate: float = _known("rate", 0.0, "bytes a second of a node's network")
    target_rate: float = _known("rate", 0.0, "bytes a second of one storage target (Lustre OST)")

    nvme: int = _known("bytes", 0, "bytes of a node's NVMe for the cache")
    nvme_rate: float = _known("rate", 2.5e9, "bytes a second of a node's NVMe, read or written")
    memory: int = _known("bytes", 0, "memory limit of a node's pod or job step; else what it should be")
    cores: int = _known("count", 0, "cores of a node; else what is needed")

    loader: str = _known(
        "text", "thread", "what makes batches: thread, as stoker does, or process, as DataLoader does"
    )
    workers: int = _known("count", 4, "worker processes of a rank, with loader: process")
    prefetch: int = _known("count", 2, "batches each worker holds ready, with loader: process")
    thread_rate: float = _known("rate", 300e6, "bytes a second one loader thread or worker makes ready")
    read_block: int = _known("bytes", 4 << 20, "bytes of a read request")
    rank_memory: int = _known("bytes", 6 << 30, "memory of a rank without loader and checkpoint")
    shm: int = _known("bytes", 0, "size of /dev/shm, where it is fixed already")

    checkpoint: int = _known("bytes", 0, "bytes of a checkpoint; else from parameters")
    state_bytes: float = _known("number", 14.0, "checkpoint bytes a parameter: bf16 weights, fp32 Adam")
    snapshot_rate: float = _known("rate", 20e9, "bytes a second one GPU copies to pinned memory")
    mtbf: float = _known("seconds", 0.0, "seconds between failures of the job; else from its GPUs")
    restart: float = _known("seconds", 300.0, "seconds from a failure to the next step")
    gpu_hour: float = _known("number", 0.0, "price of a GPU-hour")

    def __post_init__(self) -> None:
        for name in _NEEDED:
            if not getattr(self, name):
                raise UsageError(f"{name}: 0 cannot work", hint=f"{name} is {_help(name)}: give more")
        if not self.name.isprintable() or not 0 < len(self.name) <= 200:
            raise UsageError(
                f"name: {self.name[:200]!r} is none", hint="use a word or two that can be printed"
            )
        if self.loader not in ("thread", "process"):
            raise UsageError(f"loader: {self.loader!r} is unknown", hint="use thread or process")
        if not 0 < self.mfu <= 1:
            raise UsageError(f"mfu: {self.mfu} is no share", hint="0.4 is usual, 1 is the peak")
        if self.gpu_read_rate > _MOST["rate"]:
            raise UsageError(
                f"step, batch and sample make {self.gpu_read_rate:g} bytes a second of a GPU",
                hint="no GPU reads so fast: check them, sizes as 3.1MB and times as 500ms",
            )
        if self.memory and self.shm >= self.memory:
            raise UsageError(
                f"shm: {self.shm:,} bytes are not inside memory: {self.memory:,}",
                hint="what is in /dev/shm counts against the memory limit: raise memory or lower shm",
            )

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def step_s(self) -> float:
        """Given, or 6 FLOP a parameter and token at the share of the peak that training reaches."""
        if self.step or not (self.parameters and self.tokens and self.batch):
            return self.step
        return 6 * self.parameters * self.tokens * self.batch / (self.gpu_flops * self.mfu)

    @property
    def gpu_read_rate(self) -> float:
        """Bytes a second one GPU must read; 0 where that cannot be told."""
        return self.read_rate or self.step_read_rate

    @property
    def step_read_rate(self) -> float:
        """The same by step, batch and sample alone."""
        return self.batch * self.sample / self.step_s if self.step_s else 0.0

    @property
    def checkpoint_bytes(self) -> float:
        return self.checkpoint or self.parameters * self.state_bytes

    def as_plain(self) -> dict[str, Any]:
        return asdict(self)


FIELDS: dict[str, Field[Any]] = {one.name: one for one in fields(Job)}


def read_job(path: Path | None = None, *, unless_said: Mapping[str, Any] | None = None, **given: Any) -> Job:
    """A job from a file and from single values, which count more; every value is checked."""
    said = read_document(path) if path else {}
    if isinstance(said.get("job"), dict):
        said = said["job"]  # a plan that was written as JSON holds the job it was made from
    return make_job(
        {**(unless_said or {}), **said, **{name: value for name, value in given.items() if value is not None}}
    )


def make_job(values: Mapping[str, Any]) -> Job:
    """A job from words: sizes as 3.1MB, times as 500ms, counts as 8B."""
    unknown = [str(name) for name in values if name not in FIELDS]
    if unknown:
        near = get_close_matches(unknown[0], FIELDS, n=1)
        hint = f"is {near[0]} meant?" if near else f"a job has {', '.join(FIELDS)}"
        raise UsageError(f"{unknown[0]} is nothing a job has", hint=hint)
    return Job(**{name: _parse(name, value) for name, value in values.items()})


def _parse(name: str, value: Any) -> Any:
    kind = FIELDS[name].metadata["kind"]
    if isinstance(value, bool) or value is None:
        raise UsageError(f"{name}: {value!r} is no value", hint=_help(name))
    if kind == "text":
        return str(value)
    text = str(value).strip()
    if _LEADING_ZERO.match(text):  # eight to YAML 1.1 and C, ten to YAML 1.2 and people
        raise UsageError(f"{name}: {value!r} begins with a zero", hint=f"write {text.lstrip('0') or 0}")
    try:
        number = _PARSERS[kind](text)
    except (UsageError, ValueError, OverflowError):
        raise UsageError(f"{name}: {value!r} is no {_SAID[kind]}", hint=_help(name)) from None
    most = _MOST_OF_A_NODE.get(name, _MOST[kind])
    nothing = number == 0 and not _SOMETHING.match(text)  # 1e-400 is nothing to a float, and was not meant
    if not (nothing or _LEAST <= number <= most):
        raise UsageError(f"{name}: {value!r} is not between {_LEAST:g} and {most:g}", hint=_help(name))
    return number


def _seconds(text: str) -> float:
    found = _TIME.match(text)
    if not found:
        raise ValueError(text)
    return float(found[1]) * _UNITS[found[2]]


def _number(text: str) -> float:
    found = _NUMBER.match(text)
    if not found:
        raise ValueError(text)
    return float(found[1]) * _NUMBER_UNITS[found[2].upper()]


def _count(text: str) -> int:
    number = _number(text)
    if number != int(number):
        raise ValueError(text)
    return int(number)


def _bytes(text: str) -> int:
    return int(float(text)) if re.match(r"^\d+(\.\d+)?(e\+?\d+)?$", text) else parse_size(text)


def _rate(text: str) -> float:
    size = text.removesuffix("/s").strip()
    if _BITS.search(size):
        raise ValueError(text)
    return float(_bytes(size))


_PARSERS: dict[str, Any] = {
    "count": _count,
    "bytes": _bytes,
    "rate": _rate,
    "seconds": _seconds,
    "number": _number,
}
_SAID = {
    "count": "count (8, 16K)",
    "bytes": "size (3.1MB, 2TiB)",
    "rate": "rate in bytes (200MB/s)",
    "seconds": "time (500ms, 2h)",
    "number": "number (0.4, 8B)",
}


def _help(name: str) -> str:
    return str(FIELDS[name].metadata["help"])
