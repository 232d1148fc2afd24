"""Card state checks: MIG, worn memory, the NVSwitch fabric, and a torch that fits the driver."""

from __future__ import annotations

from collections.abc import Iterator

from stoker.doctor.check import Check, Seen, about, cards, fail, known, ok, over_gpus, warn
from stoker.doctor.need import Need
from stoker.formats.sizes import counted
from stoker.machine.snapshot import Gpu, Snapshot

_MOST_RETIRED = 60  # pages, from where on NVIDIA takes a card back
_MANY_ROWS = 8  # a bank has that many spare rows


def instances(snapshot: Snapshot, need: Need) -> Iterator[Seen]:
    found = {gpu.index: known(gpu.mig) for gpu in cards(snapshot)}
    cut = [index for index, mode in found.items() if mode]
    if cut:
        tell = fail if need.gpus is not None else warn  # a process sees one slice, and takes it for a card
        yield tell(
            f"GPU {', '.join(map(str, cut))}: MIG is on",
            *(f"nvidia-smi -i {index} -mig 0  # when nobody uses it" for index in cut),
        )
    elif found:
        yield ok("MIG is off" if any(mode is False for mode in found.values()) else "no MIG on these cards")


def rows(gpu: Gpu) -> Seen:
    """Ampere and later replace rows of memory, the cards before retire pages."""
    if gpu.remap_failed is True:
        return fail("a bad row of memory could not be replaced", "drain the node and have the card replaced")
    if gpu.retire_pending is True:
        return fail(
            "a bad page of memory waits to be retired", f"nvidia-smi -i {gpu.index} -r  # drain first"
        )
    if isinstance(gpu.pages_retired, int) and gpu.pages_retired:
        tell = fail if gpu.pages_retired >= _MOST_RETIRED else ok
        return tell(f"{counted(gpu.pages_retired, 'page')} retired", *_replacement(tell is fail))
    replaced = known(gpu.rows_remapped)
    if replaced > _MANY_ROWS:
        return warn(f"{replaced} rows replaced for uncorrected errors", *_replacement(True))
    return ok(f"{counted(replaced, 'row')} replaced for uncorrected errors")


def fabric(gpu: Gpu) -> Seen:
    state = known(gpu.fabric)
    if state is None:
        return ok("no NVSwitch under it")
    if state == "Completed":
        return ok("joined to the NVSwitch fabric")
    return fail(
        f"fabric: {state}",
        "systemctl enable --now nvidia-fabricmanager  # of the driver's own version; on the host",
    )


def torch_build(snapshot: Snapshot, need: Need) -> Iterator[Seen]:
    """Within one major version an older driver runs newer CUDA; across major versions it does not."""
    stack = snapshot.gpu_stack
    if not cards(snapshot) or known(stack.torch) is None:
        return
    built, runs = known(stack.torch_cuda), known(stack.cuda)
    read = f"torch {known(stack.torch)}, CUDA {built or 'none'}; the driver runs up to CUDA {runs}"
    if built is None:
        yield fail(
            f"{read}: a build for the CPU", "install a torch built for CUDA; pytorch.org says the line"
        )
    elif _major(built) > _major(runs):
        yield fail(read, f"install a torch built for CUDA {_major(runs)}.x, or a driver for CUDA {built}")
    else:
        yield ok(read)


def _replacement(wanted: bool) -> tuple[str, ...]:
    return ("nvidia-smi -q -d ECC,PAGE_RETIREMENT,ROW_REMAPPER  # have the card replaced",) if wanted else ()


def _major(version: str) -> int:
    head = version.partition(".")[0]
    return int(head) if head.isdigit() else 0


CHECKS = about(
    "GPU",
    Check(
        "MIG",
        instances,
        "A card that is cut into instances is seen as its first slice alone, and slices cannot reach each "
        "other with NCCL.",
    ),
    Check(
        "memory rows",
        over_gpus(rows),
        "A card replaces memory that fails, as long as it has spare rows; one that has run out gives wrong "
        "values or ends the job.",
    ),
    Check(
        "NVSwitch fabric",
        over_gpus(fabric),
        "Until the fabric manager has joined a card, CUDA does not start on it (error 802), whatever "
        "nvidia-smi shows.",
    ),
    Check(
        "torch build",
        torch_build,
        "torch brings its own CUDA; with a driver too old for it, or a build for the CPU, it runs on the CPU "
        "or not at all.",
    ),
)
