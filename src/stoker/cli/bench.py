"""`stoker bench`: what this machine gives, stage by stage, and what limits it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from stoker.cli.groups import Group
from stoker.cli.measuring import say, seconds_option, shown, size_option
from stoker.cli.values import choice, existing, given_path, size
from stoker.errors import UsageError
from stoker.storage import is_local, local_path

if TYPE_CHECKING:
    from stoker.bench.figures import Bench


@click.group(cls=Group)
def command() -> None:
    """Measure storage, cards, loaders, collectives, checkpoints.

    Every figure comes with what limits it, and goes to the history (`stoker history`). Else nothing is
    written but to the folder that is named, in files that are gone afterwards, also after Ctrl-C. Exit
    code 1: something that could pass did not.
    """


@command.command()
@click.argument("place", metavar="DIR|FILE|URL", type=existing)
@size_option("1GiB", "Bytes of the file that is written to a folder.")
@seconds_option(0.4, "Seconds of each trial.")
@choice(
    "--engine",
    among=("all", "pread", "mmap", "io_uring", "cufile"),
    help="Measure one engine only, as set below.",
)
@choice("--cache", among=("direct", "cold", "warm"), help="Past the page cache, through it, or out of it.")
@click.option(
    "--block", type=size, default="1MiB", show_default=True, metavar="BYTES", help="Bytes of a call."
)
@click.option("--threads", type=click.IntRange(1, 1024), default=1, show_default=True, help="Threads.")
@click.option(
    "--depth",
    type=click.IntRange(1, 1024),
    default=1,
    show_default=True,
    help="Calls in flight of a thread: io_uring's.",
)
@click.option("--random", "is_random", is_flag=True, help="Blocks in a drawn order.")
@click.option("--write", "writes", is_flag=True, help="Write instead of read.")
@click.option("--gpu", is_flag=True, help="And on to a card: through the host, and by cuFile.")
@click.option("--device", metavar="DEVICE", help="Of --gpu.  [default: cuda:0]")
@shown
def path(
    place: str, size: int, seconds: float, engine: str, gpu: bool, device: str | None, **setting: Any
) -> Bench:
    """Storage to host, by engine and block; with --gpu to a card.

    A folder gets a file without a name; a FILE and a URL are only read. Without --engine a table of usual
    trials; with it one trial of the block, threads and order that are given, as fio would run it.
    """
    if (device or engine == "cufile") and not gpu:
        raise UsageError(f"{'--device' if device else 'cuFile'} is of a card", hint="add --gpu")
    if gpu and (not is_local(place) or setting["writes"] or engine in ("mmap", "io_uring")):
        raise UsageError(
            "only what is read from a disk, by pread or cuFile, is brought on to a card",
            hint="leave --gpu out",
        )
    if not is_local(place):
        from stoker.bench.objects import bench_objects

        return bench_objects(place, seconds=max(seconds, 0.1), said=say)
    from stoker.bench.path import bench_path

    _check_setting(engine, setting)
    trials, ways = None, None
    if engine != "all":
        trials = [_trial("pread" if engine == "cufile" else engine, seconds, **setting)]
        ways = _ways(engine, trials[0])
    card = (device or "cuda:0") if gpu else ""
    return bench_path(
        local_path(place), size=size, seconds=seconds, trials=trials, card=card, ways=ways, said=say
    )


def _check_setting(engine: str, setting: dict[str, Any]) -> None:
    """A setting that would not be heeded is told: whoever gave it reads the figure as if it had been."""
    given = click.get_current_context().get_parameter_source
    names = {"is_random": "--random", "writes": "--write"}
    told = [names.get(name, f"--{name}") for name in setting if given(name) is ParameterSource.COMMANDLINE]
    if engine == "all" and told:
        raise UsageError(
            f"{told[0]} is of one trial, and the usual table sets its own", hint="add --engine pread"
        )
    if engine != "io_uring" and setting["depth"] > 1:
        raise UsageError(
            f"{engine} has one call on its way in each thread",
            hint="--threads, or --depth with --engine io_uring",
        )


def _ways(engine: str, trial: Any) -> Any:
    """On to the card in the same blocks by as many threads, beside copies of such blocks alone."""
    from stoker.bench.card.onward import Onward

    how = "cufile" if engine == "cufile" else "direct" if trial.cache == "direct" else "warm"
    return [Onward(how=one, work=trial.work) for one in ("copy", how)]


def _trial(
    engine: str,
    seconds: float,
    *,
    cache: str,
    block: int,
    threads: int,
    depth: int,
    is_random: bool,
    writes: bool,
) -> Any:  # a Trial, whose module is not for --help
    from stoker.bench.drive import Workload
    from stoker.bench.path import Trial

    if block % 4096 or not 4096 <= block <= 1 << 30:
        raise click.BadParameter(f"blocks of {block} bytes are no whole pages of 4096, up to 1 GiB")
    work = Workload(
        engine="sync" if engine == "pread" else engine,
        block=block,
        threads=threads,
        depth=depth,
        writes=writes,
        random=is_random,
        repeats=cache != "cold",
        seconds=seconds,
    )
    return Trial(work=work, cache="warm" if engine == "mmap" else cache)


@command.command()
@click.option(
    "--sizes",
    metavar="SIZES",
    help="Bytes of a copy: a list with commas, or LEAST-MOST.  [default: 4KiB,64KiB,1MiB,32MiB,256MiB]",
)
@click.option("--device", default="cuda", show_default=True, help="Every card, one (cuda:1), or cpu.")
@seconds_option(0.1, "Seconds of each size and direction.")
@shown
def copy(sizes: str | None, device: str, seconds: float) -> Bench:
    """Host and card: pageable and pinned copies.

    To the card, from it and both at once, by size; from the memory of each NUMA node, and from card to
    card, where there are several.
    """
    from stoker.bench.card.copy import USUAL_SIZES, bench_copy
    from stoker.bench.collective import parse_sizes

    wanted = parse_sizes(sizes) if sizes else USUAL_SIZES
    return bench_copy(device=device, sizes=wanted, seconds=seconds, said=say)


@command.command()
@click.argument("what", metavar="DATASET | -- COMMAND", nargs=-1, required=True)
@click.option("--batch-size", type=click.IntRange(1), help="Samples of a batch, of a DATASET.  [default: 8]")
@click.option("--seq-len", type=click.IntRange(1), help="Tokens of a sample, of a DATASET.  [default: 2048]")
@seconds_option(3.0, "Seconds of each way to load.")
@click.option("--batches", type=click.IntRange(0), default=0, help="Stop after so many batches.")
@click.option(
    "--step",
    "step_s",
    type=click.FloatRange(0),
    default=0.0,
    metavar="SECONDS",
    help="What a training step takes: do batches come in time? Of a COMMAND it is measured.",
)
@choice("--workers", among=("all", "thread", "inline", "process"), help="Who makes batches, of a DATASET.")
@shown
def loader(
    what: tuple[str, ...],
    batch_size: int | None,
    seq_len: int | None,
    seconds: float,
    batches: int,
    step_s: float,
    workers: str,
) -> Bench:
    """Batches as fast as they come, without a GPU.

    \b
    stoker bench loader corpus --batch-size 8
    stoker bench loader -- python train.py

    Of a DATASET those of stoker's loader; of a COMMAND those of the program's own DataLoader, without a
    change to it: with no workers, as many as it has, and more. The program is run for a few seconds each
    time, as in a trial of `stoker tune`.
    """
    if _is_command(what):
        from stoker.bench.own_loader import bench_own_loader

        if batch_size or seq_len or workers != "all":
            raise UsageError(
                "--batch-size, --seq-len and --workers are of a dataset", hint="a program has its own"
            )
        return bench_own_loader(what, seconds=seconds, most_batches=batches, step_s=step_s, said=say)
    from stoker.bench.loader import bench_loader
    from stoker.manifest import read_manifest

    dataset = existing(what[0])
    is_tokens = read_manifest(dataset).format == "megatron"
    options = {"batch_size": batch_size or 8, **({"seq_len": seq_len or 2048} if is_tokens else {})}
    ways = ("thread", "inline") if workers == "all" else (workers,)
    return bench_loader(
        dataset, options=options, ways=ways, seconds=seconds, most_batches=batches, step_s=step_s, said=say
    )


def _is_command(what: tuple[str, ...]) -> bool:
    """A dataset is one folder or URL; a program is more than one word, or one that is a file to run."""
    alone = len(what) == 1
    return not alone or (is_local(what[0]) and local_path(what[0]).is_file())


@command.command()
@seconds_option(5.0, "Seconds of each window.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@shown
def scaling(command: tuple[str, ...], seconds: float) -> Bench:
    """COMMAND on 1 to N ranks of this node, and what scaling costs.

    \b
    stoker bench scaling -- torchrun --nproc-per-node 4 train.py

    The number that the launcher is given is the most; 1, 2, 4 … are run before it, each twice, for a few
    seconds, as in a trial of `stoker tune`.
    """
    from stoker.bench.scaling import bench_scaling

    return bench_scaling(command, seconds=seconds, said=say)


@command.command()
@click.argument("folder", type=given_path(exists=True, file_okay=False))
@size_option("1GiB", "Bytes of the state that is saved.")
@click.option("--saves", type=click.IntRange(1, 100), default=3, show_default=True, help="Saves to measure.")
@shown
def checkpoint(folder: Path, size: int, saves: int) -> Bench:
    """Saves in FOLDER: stall, until durable, restore."""
    from stoker.bench.checkpoint import bench_checkpoint

    return bench_checkpoint(folder, size=size, saves=saves, said=say)


@command.command()
@click.option(
    "--ranks",
    type=click.IntRange(1, 64),
    help="Ranks to start, where no launcher has.  [default: one a card, else 2]",
)
@click.option(
    "--sizes",
    default="8B-64MiB",
    show_default=True,
    metavar="LEAST-MOST",
    help="Bytes of the messages, or a list with commas.",
)
@click.option(
    "--only",
    multiple=True,
    metavar="OPERATION",
    help="all_reduce, all_gather, reduce_scatter, broadcast or all_to_all; may be repeated.",
)
@choice("--backend", among=("auto", "nccl", "gloo"), help="NCCL where there are cards, else gloo.")
@seconds_option(0.2, "Seconds of each operation and size.")
@shown
def collective(
    ranks: int | None, sizes: str, only: tuple[str, ...], backend: str, seconds: float
) -> Bench | None:
    """Collectives, by nccl-tests' definitions.

    Among the ranks that torchrun, srun or mpirun started, or alone among ranks on this machine.
    """
    from stoker.bench.collective import OPERATIONS, bench_here, bench_started, parse_sizes
    from stoker.world import World

    if unknown := set(only) - set(OPERATIONS):
        raise click.BadParameter(f"there is no operation {min(unknown)}; there are {', '.join(OPERATIONS)}")
    operations, wanted = only or OPERATIONS, parse_sizes(sizes)
    chosen = "" if backend == "auto" else backend
    if World.from_environ().size > 1:
        return bench_started(operations=operations, sizes=wanted, seconds=seconds, backend=chosen)
    return bench_here(ranks or 0, operations=operations, sizes=wanted, seconds=seconds, backend=chosen)


@command.command()
@click.argument("folder", type=given_path(exists=True, file_okay=False))
@click.option(
    "--profile", default="resnet50-h100", show_default=True, help="A workload of MLPerf Storage and its card."
)
@click.option(
    "--cards",
    type=click.IntRange(1, 1024),
    default=None,
    help="Try so many; else the most that pass are found.",
)
@click.option(
    "--most", type=click.IntRange(1, 1024), default=64, show_default=True, help="Cards to try at most."
)
@size_option("2GiB", "Bytes of samples that are written to the folder.")
@seconds_option(5.0, "Seconds of each number of cards.")
@shown
def accelerators(
    folder: Path, profile: str, cards: int | None, most: int, size: int, seconds: float
) -> Bench:
    """How many cards FOLDER's disk feeds (MLPerf Storage).

    Cards are emulated: each takes a batch of real reads and sleeps for as long as a real one computes.
    """
    from stoker.bench.accelerators import bench_accelerators

    return bench_accelerators(
        folder, profile, cards=cards or 0, most=most, size=size, seconds=seconds, said=say
    )
