"""Sizing: what a job needs, by arithmetic. Pure: a job in, a plan out; what is unknown stays 0 and is named.

The sums that must hold: a node's read rate is its GPUs' together, a job's its nodes'; what is in /dev/shm
counts inside the memory limit, so 100 GiB with 32 GiB of it leave 68 GiB to the processes.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from stoker.doctor.need import SHM_A_GPU, Need
from stoker.errors import UsageError
from stoker.formats.sizes import counted, say_size
from stoker.plan.job import Job
from stoker.plan.saving import Saving, plan_saving

GIB = 1 << 30
WORKER_MEMORY = 512 << 20  # of a worker process: torch and a dataset, before it holds a batch
LOADER_MEMORY = 256 << 20  # LoaderOptions.memory: chunks and batches in waiting, of one rank
SHARD_BYTES = 512 << 20  # what `stoker prepare` writes
NCCL_BYTES = 1 << 30  # of a GPU, registered with the network card; CUDA's own pinned memory is not counted
ROOM = 0.95  # of a disk: a full one is slow, and something else is always on it
_MOST_MEMORY = 1 << 60
_OPEN_FILES = 512  # of a rank: libraries, the driver's devices, sockets of NCCL and of the store
_WRITE_CORES = 1  # a node's staging, checkpoint writer and exporter together, measured at under one core


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """Bytes a second: what GPUs need and what a node can get of the store."""

    gpu: float
    node: float
    job: float
    store_node: float  # a node's part of the store, through its own network; 0 unknown
    stripes: int  # storage targets a file should lie on; 0 unknown


@dataclass(frozen=True, kw_only=True, slots=True)
class Loading:
    """Threads (or worker processes) of a rank and cores of a node."""

    threads: int
    cores: int
    shm: int
    shm_needed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """A node's memory limit and its parts, which add up: limit = shm + ranks + loaders + snapshot + spare."""

    limit: int
    shm: int
    ranks: int
    loaders: int
    snapshot: int
    spare: int

    @property
    def processes(self) -> int:
        """What /dev/shm leaves of the limit."""
        return self.limit - self.shm


@dataclass(frozen=True, kw_only=True, slots=True)
class Caching:
    """A node's part of the dataset, what of it stays on its NVMe, and how long bringing it takes."""

    share: int
    cache: int
    hit: float  # of the reads from the second epoch on
    stage_s: float  # the whole share, before step one
    first_s: float  # the first shard of each rank, with which `stoker.feed` begins
    everywhere_s: float  # the whole dataset to every node, as a plain copy does it


@dataclass(frozen=True, kw_only=True, slots=True)
class Starving:
    """The share of time GPUs wait for data, and what the whole job loses by it."""

    first: float
    later: float
    gpu_hours: float
    money: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A sized job. `notes` says what does not fit and what to change; `unknown` what could not be told."""

    job: Job
    step_s: float
    reading: Reading
    loading: Loading
    memory: Memory
    caching: Caching
    saving: Saving
    starving: Starving
    notes: tuple[str, ...]
    unknown: tuple[str, ...]

    def needs(self) -> Need:
        """What a node must have; `stoker doctor --for` checks a machine against it."""
        ranks, shards = self.job.gpus_per_node, self.caching.share / SHARD_BYTES
        return Need(
            shm_bytes=self.memory.shm,
            memory_bytes=self.memory.limit,
            cpu_cores=self.loading.cores,
            threads=self.loading.threads * ranks,
            memlock_bytes=NCCL_BYTES * ranks if self.job.nodes > 1 else 0,
            cache_bytes=self.caching.cache,
            # a shard is two files and a record, and the cache has an index of its own
            inodes=64 + 3 * math.ceil(self.caching.cache / SHARD_BYTES),
            # a rank keeps a shard's file open while it reads it
            open_files=_OPEN_FILES + math.ceil(shards / ranks),
            read_bytes_s=math.ceil(self.reading.node),
            gpus=ranks,
            stripes=self.reading.stripes,
        )

    def as_plain(self) -> dict[str, Any]:
        return {"stoker": "plan", **asdict(self), "needs": self.needs().as_plain()}


def make_plan(job: Job) -> Plan:
    """Size a job; refuses one whose parts cannot add up."""
    reading = _reading(job)
    loading = _loading(job, reading)
    caching = _caching(job, reading)
    saving = plan_saving(job)
    memory = _memory(job, loading, saving)
    starving = _starving(job, reading, caching)
    return Plan(
        job=job,
        step_s=job.step_s,
        reading=reading,
        loading=loading,
        memory=memory,
        caching=caching,
        saving=saving,
        starving=starving,
        notes=tuple(_notes(job, reading, loading, caching, starving)),
        unknown=tuple(_unknown(job)),
    )


def _reading(job: Job) -> Reading:
    gpu = job.gpu_read_rate
    node = gpu * job.gpus_per_node
    # a stream is one rank's: files must lie on as many targets as that takes, and no more
    stripes = math.ceil(max(gpu, 1) / job.target_rate) if job.target_rate and gpu else 0
    return Reading(
        gpu=gpu, node=node, job=node * job.nodes, store_node=_store_node(job, job.nodes), stripes=stripes
    )


def _store_node(job: Job, nodes: int) -> float:
    known = [rate for rate in (job.store_rate / nodes, job.node_rate) if rate]
    return min(known, default=0.0)


def _loading(job: Job, reading: Reading) -> Loading:
    """Threads enough for the bytes, and enough requests in flight to hide the store's latency."""
    for_bytes = reading.gpu / job.thread_rate
    in_flight = reading.gpu * job.store_latency / job.read_block
    threads = max(1, math.ceil(for_bytes), math.ceil(in_flight))
    if job.loader == "process":
        threads = max(threads, job.workers)
    # a thread that waits for the store needs no core; one that makes bytes ready needs its share of one
    working = job.gpus_per_node * (1 + max(for_bytes, 0.25 if job.loader == "thread" else threads * 0.5))
    held = _held(job, threads)
    return Loading(
        threads=threads,
        cores=math.ceil(working) + _WRITE_CORES,
        shm=job.shm or SHM_A_GPU * job.gpus_per_node + _round_up(held, GIB),
        shm_needed=held,
    )


def _held(job: Job, workers: int) -> int:
    """Worker processes hand batches over in /dev/shm: each holds its prefetched ones and one being made."""
    if job.loader == "thread":
        return 0
    batch = job.batch * (job.decoded or job.sample)
    return job.gpus_per_node * workers * (job.prefetch + 1) * batch


def _memory(job: Job, loading: Loading, saving: Saving) -> Memory:
    ranks = job.gpus_per_node * job.rank_memory
    workers = loading.threads if job.loader == "process" else 0
    loaders = job.gpus_per_node * (LOADER_MEMORY + workers * WORKER_MEMORY)
    snapshot = math.ceil(saving.node_bytes)
    needed = loading.shm + ranks + loaders + snapshot
    if needed > _MOST_MEMORY:
        raise UsageError(
            f"a node would hold {needed:.3g} bytes: /dev/shm {loading.shm:.3g}, loaders {loaders:.3g}, "
            f"checkpoint snapshot {snapshot:.3g}",
            hint="no node has so much: check batch, sample, workers, parameters and checkpoint",
        )
    limit = job.memory or _round_up(needed, GIB)
    if needed > limit:
        raise UsageError(
            f"memory: {say_gib(limit)} are too little: /dev/shm {say_gib(loading.shm)}, "
            f"{counted(job.gpus_per_node, 'rank')} {say_gib(ranks)}, loaders {say_gib(loaders)}, "
            f"checkpoint snapshot {say_gib(snapshot)} make {say_gib(needed)}",
            hint=f"set memory: {math.ceil(needed / GIB)}GiB, or lower shm, rank_memory or the checkpoint",
        )
    return Memory(
        limit=limit,
        shm=loading.shm,
        ranks=ranks,
        loaders=loaders,
        snapshot=snapshot,
        spare=limit - needed,
    )


def _caching(job: Job, reading: Reading) -> Caching:
    share = math.ceil(job.dataset / job.nodes)
    room = int(job.nvme * ROOM)
    cache = min(share, room) if job.nvme else share
    rate = _slowest(reading.store_node, job.nvme_rate)
    first = min(share, job.gpus_per_node * SHARD_BYTES)
    return Caching(
        share=share,
        cache=cache,
        hit=cache / share if share and job.nvme else 0.0,
        stage_s=share / rate if rate else 0.0,
        first_s=job.store_latency + first / rate if rate else 0.0,
        everywhere_s=job.dataset / rate if rate else 0.0,
    )


def _starving(job: Job, reading: Reading, caching: Caching) -> Starving:
    first = _idle(wanted=reading.node, given=reading.store_node)
    missed = reading.node * (1 - caching.hit)
    later = max(
        _idle(wanted=missed, given=reading.store_node),
        _idle(wanted=reading.node - missed, given=job.nvme_rate),
    )
    epoch_s = job.dataset / reading.job if reading.job else 0.0
    epochs = max(0.0, job.epochs - 1)
    lost_s = epoch_s * (min(job.epochs, 1) * _lost(first) + epochs * _lost(later))
    hours = lost_s / 3600 * job.gpus
    return Starving(first=first, later=later, gpu_hours=hours, money=hours * job.gpu_hour)


def _idle(*, wanted: float, given: float) -> float:
    """The share of time that is waited; an unknown supply (0) says nothing."""
    return max(0.0, 1 - given / wanted) if wanted and given else 0.0


def _lost(idle: float) -> float:
    """Seconds waited for each second of work."""
    return idle / max(1 - idle, 1e-12)


def _slowest(*rates: float) -> float:
    known = [rate for rate in rates if rate]
    return min(known) if rates[0] and known else 0.0


def _round_up(value: float, step: int) -> int:
    return math.ceil(value / step) * step


def _notes(job: Job, reading: Reading, loading: Loading, caching: Caching, starving: Starving) -> list[str]:
    said = []
    if job.step_read_rate and not 0.9 < job.step_read_rate / reading.gpu < 1.1:
        said.append(
            f"read_rate ({say_size(job.read_rate)}/s a GPU) is planned with; step, batch and sample make "
            f"{say_size(job.step_read_rate)}/s: leave out what is not so"
        )
    if starving.first > 0.005:
        said.append(
            f"the store gives a node {say_size(reading.store_node)}/s of the {say_size(reading.node)}/s it "
            f"needs: GPUs wait {starving.first:.0%} of the first epoch; stage before training "
            f"({say_time(caching.stage_s)}), or get a faster store"
        )
    if starving.later > 0.005:
        said.append(f"later epochs wait {starving.later:.0%}: {_later_remedy(job, caching)}")
    elif job.dataset and job.nvme and caching.hit < 1:
        said.append(
            f"a node's share of the dataset is {say_size(caching.share)} and its NVMe holds "
            f"{say_size(caching.cache)}: {1 - caching.hit:.0%} of later reads go to the store, which bears it"
        )
    if loading.shm < loading.shm_needed:
        said.append(
            f"worker processes hold {say_gib(loading.shm_needed)} of batches in /dev/shm, which has "
            f"{say_gib(loading.shm)}: they die of SIGBUS; lower workers or prefetch, or use loader: thread"
        )
    if job.cores and loading.cores > job.cores:
        said.append(
            f"feeding takes {counted(loading.cores, 'core')} and a node has {job.cores}: decode before "
            "training (`stoker prepare`), or on the GPU"
        )
    return said


def _later_remedy(job: Job, caching: Caching) -> str:
    if caching.hit < 1:
        return f"give each node {say_size(caching.share / ROOM)} of NVMe so that its share stays there"
    return f"its NVMe reads {say_size(job.nvme_rate)}/s: use several, or keep the share in memory"


def _unknown(job: Job) -> list[str]:
    unknown = {
        "how fast GPUs read (step, batch and sample, or read_rate)": job.gpu_read_rate,
        "how much there is to read (dataset)": job.dataset,
        "what the store gives (store_rate)": job.store_rate,
        "what stays on a node (nvme)": job.nvme,
        "how large a checkpoint is (parameters, or checkpoint)": job.checkpoint_bytes,
        "what a GPU-hour costs (gpu_hour)": job.gpu_hour,
    }
    return [name for name, value in unknown.items() if not value]


def say_gib(count: float) -> str:
    """Memory as limits are written: 68 GiB."""
    gib = count / GIB
    return f"{gib:.0f} GiB" if gib >= 10 or gib == int(gib) else f"{gib:.1f} GiB"


def say_time(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"
