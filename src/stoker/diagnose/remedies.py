"""Remedies: the flag and its value, the line of a manifest, the command; with the arithmetic."""

from __future__ import annotations

import math

from stoker.diagnose.features import Features
from stoker.diagnose.verdicts import known, percent
from stoker.formats.sizes import counted

_STAGE = "stoker stage URL --cache /local/nvme, and read from there: every file comes to the node once"
_PACK = "stoker prepare the files into shards: large sequential reads instead of many small ones"
_OFFLINE = "decode and tokenise offline (stoker prepare), or load with stoker.feed: threads, no pickling"


def feed(features: Features, cause: str) -> tuple[str, ...]:
    """Against a loader that is late, by its cause."""
    own_cores = "cores of its own for the job: Slurm --exclusive, Kubernetes equal CPU request and limit"
    once = "DataLoader(persistent_workers=True), or stoker.feed, whose workers live as long as it does"
    ahead = _ahead(features)
    fixed = {
        "storage": (_STAGE, ahead),
        "small_reads": (_PACK, _STAGE),
        "contention": (own_cores, _OFFLINE),
        "startup": (once, ahead),
        "lock": ("py-spy dump --pid WORKER names the line the workers sleep in", ahead),
        "unknown": ("stoker watch -- COMMAND records worker states and stacks, which name the cause", ahead),
    }
    if cause == "lock" and features.host is not None and features.host.workers < 0.5:
        return (_sleepers(features), _OFFLINE)
    if cause in ("cpu", "too_few_workers"):
        return (*_threads(features), *_workers(features), _OFFLINE)
    return (_raise_quota(features), _OFFLINE) if cause == "quota" else fixed[cause]


def _ahead(features: Features) -> str:
    """A loader without workers has no queue, and torch refuses these settings of it."""
    room = max(int(features.host.allowed) - 1, 1) if features.host and known(features.host.allowed) else 1
    first = f"num_workers={room}, " if features.fact("num_workers", "workers") == 0 else ""
    return (
        f"DataLoader({first}prefetch_factor=8, persistent_workers=True): a longer queue bridges late batches"
    )


def _threads(features: Features) -> tuple[str, ...]:
    """Workers that ask for more cores than there are, as libraries do that start a thread a core in each."""
    host = features.host
    if host is None or not host.loader_cores > host.allowed:
        return ()
    asked = f"the workers ask for {host.loader_cores:.1f} of {counted(host.allowed, 'core')}"
    return (f"one thread a worker: torch.set_num_threads(1) in worker_init_fn, OMP_NUM_THREADS=1; {asked}",)


def _sleepers(features: Features) -> str:
    """How many workers keep up where one batch after the other is waited for: that takes no cores."""
    wait = min(features.loop.share["data"], 0.95)
    need = math.ceil(1 / (1 - wait))
    pace = f"batches come at {percent(1 - wait)} of the pace"
    return f"DataLoader(num_workers={need}): {pace}, and workers wait at the same time"


def _workers(features: Features) -> tuple[str, ...]:
    """How many workers keep up, as far as the cores that are allowed go."""
    host, wait = features.host, features.loop.share["data"]
    if host is None or not 0 < wait < 1:
        return ()
    have = host.workers if known(host.workers) else features.fact("num_workers", "workers")
    making = max(have if known(have) else round(host.wait_busy), 1)
    need = math.ceil(making / (1 - wait))
    room = max(int(host.allowed) - 1, 1)
    in_the_loop = known(have) and have < 0.5  # the first worker takes nobody's core but the loop's
    if making >= room and need > room and not (in_the_loop and host.allowed >= 2):
        busy = f"{counted(round(making), 'worker')} for {counted(host.allowed, 'core')}"
        return (f"a batch must become cheaper: more workers find no core ({busy}, {host.busy:.1f} busy)",)
    are = "is" if host.allowed == 1 else "are"
    count = f"{counted(host.allowed, 'core')} {are} allowed and {host.busy:.1f} busy"
    if need > room:
        short = f"keeping up takes {need}, so a batch must also become cheaper"
        return (f"DataLoader(num_workers={room}): {count}; {short}",)
    pace = f"batches come at {percent(1 - wait)} of the pace from {making:.0f} at work"
    return (f"DataLoader(num_workers={need}): {pace}, {count}",)


def _raise_quota(features: Features) -> str:
    host, wait = features.host, features.loop.share["data"]
    if host is None or not math.isfinite(host.quota):
        return "raise the CPU limit of the container"
    need = math.ceil(host.quota / (1 - min(wait, 0.9)))
    late = f"with {counted(host.quota, 'core')} {percent(1 - wait)} of the batches come in time"
    return f'resources: {{limits: {{cpu: "{need}"}}}}: {late}'


def copy(cause: str) -> tuple[str, ...]:
    """Against copies that the loop waits for."""
    overlap = "copy the next batch on a stream of its own: .to(device, non_blocking=True), or stoker.feed"
    smaller = "send the smaller type (uint8 images, int32 tokens) and convert on the GPU"
    pin = "DataLoader(pin_memory=True), or tensor.pin_memory() once on a buffer that is reused"
    return (overlap, smaller) if cause == "not overlapped" else (pin, overlap, smaller)


def save(*, pause_s: float, step_s: float) -> tuple[str, ...]:
    """Against saving that stops the loop; a blocking save should cost one percent at most."""
    background = "save in the background: stoker's Checkpointer, or torch.distributed.checkpoint.async_save"
    if not (pause_s > 0 and step_s > 0):
        return (
            background,
            "or save less often: a blocking save should cost under 1% of the time between two",
        )
    steps = math.ceil(99 * pause_s / step_s)
    return (background, f"or save every {counted(steps, 'step')}: then {pause_s:.1f} s of saving cost 1%")


def shm(features: Features) -> tuple[str, ...]:
    """The size that workers × batches in flight × bytes of a batch need, and half more."""
    workers, batch = features.fact("num_workers", "workers"), features.fact("batch_bytes")
    ahead = features.fact("prefetch_factor", "prefetch")
    ahead = ahead if known(ahead) else 2.0
    gib, sum_ = 16, ""
    if workers >= 1 and batch > 0:
        need = workers * (ahead + 1) * batch / 2**30
        gib = max(math.ceil(1.5 * need), 1)
        each = f"{counted(round(workers), 'worker')} × ({ahead:.0f} + 1) batches × {batch / 2**20:.0f} MiB"
        sum_ = f" ({each} = {need:.2g} GiB, and half more)"
    kubernetes = f"Kubernetes: emptyDir {{medium: Memory, sizeLimit: {gib}Gi}} at /dev/shm"
    return (
        f"{kubernetes}; Docker: --shm-size={gib}g{sum_}",
        "fewer workers or a smaller prefetch_factor; or stoker.feed: threads, nothing in /dev/shm",
    )


def host_code(what: str) -> tuple[str, ...]:
    """Against the program's own code between steps, by what it does."""
    less = "do it every 50 steps, or in a thread with a queue: the next step need not wait for it"
    known = {
        "logging": (less, "a logger that sends over the network wants its asynchronous or offline mode"),
        "metrics": (
            "sum on the device and read the sum every 50 steps: torch._foreach_norm for all weights",
            less,
        ),
        "output": (less, "print to a file or a pipe is as slow as whoever reads it: print once a second"),
        "io": (less, "fsync, open and requests wait for a disk or a server: collect, and write once"),
        "saving": (
            "save in the background: stoker's Checkpointer, or torch.distributed.checkpoint.async_save",
            less,
        ),
        "average": (
            "torch._foreach_lerp_(averages, weights, 1 - decay): one launch, or a few, for all of them",
            "or average every 10 steps, with the decay to the tenth power",
        ),
        "gc": (
            "gc.freeze() once the model stands, and gc.disable() with gc.collect() every 1000 steps",
            "no gc.collect() nor torch.cuda.empty_cache() in every step",
        ),
        "gil": (
            "move that thread's work into a process (multiprocessing), or into code that releases the GIL",
        ),
        "optimizer": (
            "torch.optim with fused=True or foreach=True: a loop over weights takes a launch for each",
            "torch.compile(optimizer.step), where the arithmetic is one's own",
        ),
    }
    return known.get(what, (less, "py-spy record --pid PID shows all of it"))


OWN_LOOP = (
    "make the next batch while the card computes: a DataLoader with workers, or stoker.feed",
    "decode and tokenise offline (stoker prepare): what is left is a copy",
)
CRASHED = ("the program's own output has the whole traceback",)
WORKER_KILLED = (
    "SIGKILL: memory, see `dmesg`; SIGBUS: /dev/shm is full, see `df /dev/shm`; num_workers=0 shows where",
    "fewer workers, or a smaller prefetch_factor, need less memory",
)
OUT_OF_MEMORY = (
    "SIGKILL is most often the kernel's or the scheduler's: `dmesg`, the memory limit, `sacct -o MaxRSS`",
    "raise the memory limit, or fewer loader workers: each has its own copy of what a dataset keeps in lists",
)
PREEMPTED = (
    "stoker's Checkpointer saves on SIGTERM and resumes there; ask the scheduler for a longer grace time",
)
EVALUATION = (
    "evaluate less often, or on fewer batches: a share of 5% is usual",
    "evaluate in a job of its own that reads the checkpoints",
)
COLLECTIVE_HANG = (
    "TORCH_FR_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1: the flight recorder names collective and rank",
    "look for a branch that only some ranks take; stoker watch records every rank's stack while it hangs",
    "init_process_group(timeout=timedelta(minutes=5)): a lost peer then ends the job and frees the cards",
)
HOST_HANG = (
    "py-spy dump --pid PID names the line it stands in (stoker watch records it while it lasts)",
    "look for a lock, a queue or a request without a timeout in that line",
)
PRECISION = (
    'torch.set_float32_matmul_precision("high") allows tf32: one line, no change of types',
    'torch.autocast("cuda", dtype=torch.bfloat16) around forward and loss: twice tf32',
)
LAUNCH_BOUND = (
    'torch.compile(model, mode="reduce-overhead"): fuses kernels and replays them as CUDA graphs',
    "a larger batch: kernels grow, their number does not",
    "fused=True or foreach=True for the optimizer: one kernel instead of one per parameter",
)
HOST_SYNC = (
    "no .item(), .cpu(), print(loss) or synchronize() in every step: sum on the GPU, read every 50 steps",
    'torch.cuda.set_sync_debug_mode("warn") names the lines; CUDA_LAUNCH_BLOCKING must not be set',
)
HEAT = (
    "fans, air flow, dust; compare with the node's other cards: nvidia-smi -q -d TEMPERATURE,PERFORMANCE",
    "drain the node if it stays: one slow card slows every rank",
)
POWER_BRAKE = (
    "the power supply asks the card to slow down: check the rack's feeds and the node's supplies",
    "drain the node if it stays: one slow card slows every rank",
)
MEMORY = (
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True: less fragmentation, fewer retries",
    "no torch.cuda.empty_cache() in the loop: it gives back what the next step takes again",
    "a smaller batch with gradient accumulation, or activation checkpointing, frees the last tenth",
)
STRAGGLER = (
    "look at that rank's node: clocks, neighbours, disks (stoker doctor)",
    "if it moves with the rank, the work is unequal (longer samples, more experts); if not, drain the node",
)
EXCHANGE = (
    "overlap it with backward (DDP bucket_cap_mb=100, FSDP prefetch), or accumulate over more steps",
    "NCCL_DEBUG=INFO names the links in use; stoker doctor checks NVLink and the network",
)
