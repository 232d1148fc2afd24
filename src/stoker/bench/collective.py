"""Collective benchmark: algorithm and bus bandwidth of a fabric, by the definitions of nccl-tests.

Algorithm bandwidth is bytes over time. Bus bandwidth is what each link carries, whatever the number of ranks:
an all-reduce moves 2(n-1)/n of its bytes over each, so that is its factor. The size of an all-gather is what
a rank has afterwards, that of a reduce-scatter or all-to-all what it had before.

Under torchrun, srun or mpirun the ranks are those that were started; alone, it starts some on this machine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec

from stoker.bench.figures import Bench, Figure
from stoker.errors import MissingPackageError, StokerError, UsageError, pip_line
from stoker.formats.sizes import counted, parse_size, say_binary, say_size
from stoker.machine.cards import read_cards
from stoker.machine.files import Files
from stoker.machine.plain import Unknown
from stoker.processes import undisturbed

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")
_MOST_S = 600.0
OWN_INTERFACE = "lo"  # ranks of one machine meet on it


@dataclass(frozen=True, kw_only=True, slots=True)
class Timed:
    """One operation at one size: the mean of its repetitions, of the slowest rank."""

    operation: str
    bytes: int
    seconds: float
    ranks: int

    @property
    def algorithm_bytes_s(self) -> float:
        return self.bytes / max(1e-12, self.seconds)

    @property
    def bus_bytes_s(self) -> float:
        return self.algorithm_bytes_s * bus_factor(self.operation, self.ranks)


def bus_factor(operation: str, ranks: int) -> float:
    """Of nccl-tests' PERFORMANCE.md."""
    if operation == "all_reduce":
        return 2 * (ranks - 1) / ranks
    return 1.0 if operation == "broadcast" else (ranks - 1) / ranks


def usual_sizes(least: int = 8, most: int = 64 << 20) -> list[int]:
    """Powers of eight, and the largest."""
    if not 8 <= least <= most:
        raise UsageError(f"sizes from {least} to {most} bytes cannot be", hint="8 B is the least: 8B to 1GiB")
    sizes = []
    while least < most:
        sizes.append(least)
        least *= 8
    return [*sizes, most]


def bench_here(
    ranks: int, *, operations: Sequence[str], sizes: Sequence[int], seconds: float, backend: str = ""
) -> Bench:
    """Start ranks on this machine, one a card or on the CPU, and measure among them. Of 0 ranks as many as
    there are cards, else two."""
    _needs_torch()
    cards = 0 if backend == "gloo" else visible_cards(os.environ)
    if ranks > cards > 0:
        raise UsageError(
            f"{counted(ranks, 'rank')} and {counted(cards, 'card')}: NCCL wants a card for each rank",
            hint=f"--ranks {cards}, or --backend gloo for ranks on the CPU",
        )
    ranks = ranks or cards or 2
    words = [",".join(operations), ",".join(map(str, sizes)), str(seconds), backend]
    with ExitStack() as stack:
        with undisturbed():
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="stoker-bench-"))
            started = [_started(stack, folder, rank, ranks, words) for rank in range(ranks)]
        said = [_answer(one) for one in started]
    return read_answer(said[0])


def bench_started(
    *, operations: Sequence[str], sizes: Sequence[int], seconds: float, backend: str = ""
) -> Bench | None:
    """Measure among the ranks that a launcher started, of which this is one; the first has the answer."""
    _needs_torch()
    words = [",".join(operations), ",".join(map(str, sizes)), str(seconds), backend]
    done = subprocess.run(_rank(words), stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise StokerError(f"this rank ended with {done.returncode}", hint="see what it said above")
    return read_answer(done.stdout) if done.stdout.strip() else None


def visible_cards(environ: Mapping[str, str]) -> int:
    """Cards that torch would use here, without torch: it takes seconds to load."""
    found, stack = read_cards(Files(), environ)
    if stack.torch_cuda is None:
        return 0
    on_bus = stack.on_bus if isinstance(stack.on_bus, int) else 0
    count = on_bus if isinstance(found, Unknown) else len(found)
    shown = environ.get("CUDA_VISIBLE_DEVICES")
    if shown is None:
        return count
    names = [name.strip() for name in shown.split(",")]
    until = next((at for at, name in enumerate(names) if name in ("", "-1", "NoDevFiles")), len(names))
    return min(until, count)


def _needs_torch() -> None:
    """The ranks load it, this command does not."""
    if find_spec("torch") is None:
        raise MissingPackageError("torch is not installed", hint=pip_line("torch", extra="torch"))


def _rank(words: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", f"{__package__}.collective_rank", *words]


def _started(
    stack: ExitStack, folder: str, rank: int, ranks: int, words: Sequence[str]
) -> subprocess.Popen[str]:
    own = {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(ranks),
    }
    meeting = {"STOKER_BENCH_MEETING": f"file://{folder}/meeting", "GLOO_SOCKET_IFNAME": OWN_INTERFACE}
    process = subprocess.Popen(
        _rank(words),
        env={**os.environ, "OMP_NUM_THREADS": "1", **own, **meeting},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    stack.callback(_ended, process)
    return process


def _ended(process: subprocess.Popen[str]) -> None:
    """Also on Ctrl-C, and for a rank that waits for one that is gone."""
    process.kill()
    process.communicate()


def _answer(process: subprocess.Popen[str]) -> str:
    try:
        said, complained = process.communicate(timeout=_MOST_S)
    except subprocess.TimeoutExpired:
        raise StokerError(
            f"the ranks did not end in {_MOST_S:g} s", hint="fewer or smaller sizes: --sizes, --seconds"
        ) from None
    if process.returncode:
        last = (complained.strip().splitlines() or ["no word"])[-1]
        raise StokerError(f"a rank ended with {process.returncode}: {last}", hint=_hint(last))
    return said


def _hint(last: str) -> str:
    if "NCCL wants" in last:
        return "as many --ranks as cards, or --backend gloo for ranks on the CPU"
    return "run it alone under torchrun"


def read_answer(said: str) -> Bench:
    """What rank 0 printed: times, and how it came by them."""
    answer = json.loads(said.strip().splitlines()[-1])
    timed = [Timed(**one) for one in answer["timed"]]
    return report(timed, backend=answer["backend"], transport=answer["transport"], refused=answer["refused"])


def report(timed: Sequence[Timed], *, backend: str, transport: str, refused: Sequence[str]) -> Bench:
    figures = [
        Figure(
            name=f"{one.operation} {say_binary(one.bytes)}",
            value=one.bus_bytes_s,
            unit="B/s",
            beside={"algorithm_bytes_s": one.algorithm_bytes_s, "took_s": one.seconds},
        )
        for one in timed
    ]
    if not timed:
        raise StokerError(
            f"no operation could be measured: {'; '.join(refused)}",
            hint="try fewer --ranks, or --backend gloo",
        )
    ranks = timed[0].ranks
    if ranks == 1:
        refused = [*refused, "a link: one rank has none, so its bus bandwidth is 0 by definition"]
    return Bench(
        verb="collective",
        of=f"{counted(ranks, 'rank')}, {backend} over {transport}; bus bandwidth by nccl-tests' definition",
        figures=figures,
        advice=_advice(timed),
        notes=refused,
    )


def _advice(timed: Sequence[Timed]) -> list[str]:
    """Where latency ends and bandwidth begins: messages below are better bundled."""
    reduces = [one for one in timed if one.operation == "all_reduce"]
    if len(reduces) < 2:
        return []
    best = max(one.bus_bytes_s for one in reduces)
    if not best:  # one rank
        return [f"to ask for an all-reduce costs {reduces[0].seconds * 1e6:,.0f} µs, whatever the link"]
    knee = min((one for one in reduces if one.bus_bytes_s >= best / 2), key=lambda one: one.bytes)
    return [
        f"an all-reduce reaches half of its best bandwidth at {say_binary(knee.bytes)}: smaller ones cost "
        f"some {reduces[0].seconds * 1e6:,.0f} µs whatever their size, so bundle them (DDP's bucket_cap_mb)",
        f"the best is {say_size(best)}/s of bus bandwidth",
    ]


def parse_sizes(text: str) -> list[int]:
    """`8B-1GiB`, or a list with commas."""
    if "-" in text:
        least, _, most = text.partition("-")
        return usual_sizes(parse_size(least), parse_size(most))
    return [parse_size(one) for one in text.split(",")]
