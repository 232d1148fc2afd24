"""The sums of a plan, through `make_plan`."""

from __future__ import annotations

import math
from dataclasses import asdict

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from stoker.errors import UsageError
from stoker.plan.arithmetic import LOADER_MEMORY, SHARD_BYTES, WORKER_MEMORY, Plan, make_plan, say_time
from stoker.plan.job import make_job

GIB = 1 << 30


def plan(**values: object) -> Plan:
    return make_plan(make_job(values))


def test_eight_gpus_of_200_mb_need_1600_and_72_need_14400() -> None:
    assert plan(gpus_per_node=8, read_rate="200MB/s").reading.node == 1.6e9
    assert plan(nodes=9, gpus_per_node=8, read_rate="200MB/s").reading.job == 14.4e9


def test_a_limit_of_100_gib_with_32_of_shm_leaves_68() -> None:
    made = plan(memory="100GiB", shm="32GiB")
    assert made.memory.processes == 68 * GIB
    assert made.needs().shm_bytes == 32 * GIB


def test_a_gpu_reads_its_batch_every_step() -> None:
    assert plan(step="500ms", batch=32, sample="3MB").reading.gpu == 192e6


def test_a_read_rate_that_contradicts_the_steps_is_said() -> None:
    steps = {"step": "1s", "batch": 100, "sample": "1MB"}
    assert "sample make 100 MB/s" in plan(**steps, read_rate="10MB/s").notes[0]
    assert not plan(**steps, read_rate="101MB/s").notes
    assert not plan(**steps).notes


def test_a_step_is_estimated_from_the_model_where_it_was_not_measured() -> None:
    made = plan(parameters="8B", tokens=8192, batch=1, gpu_flops=1e15, mfu=0.4)
    assert made.step_s == pytest.approx(6 * 8e9 * 8192 / 4e14)


def test_memory_that_does_not_add_up_is_refused_with_every_part_of_the_sum() -> None:
    with pytest.raises(UsageError) as refused:
        plan(memory="64GiB", shm="32GiB", rank_memory="6GiB")
    assert "/dev/shm 32 GiB, 8 ranks 48 GiB" in refused.value.message
    assert "memory: 82GiB" in refused.value.hint


def test_worker_processes_need_shm_for_the_batches_they_hold() -> None:
    made = plan(loader="process", workers=8, prefetch=2, batch=256, sample="100kB", decoded="600kB")
    assert made.loading.shm >= 8 * 8 * 3 * 256 * 600_000
    assert plan(loader="thread", batch=256, sample="600kB").loading.shm == 8 * GIB  # NCCL's


def test_worker_processes_take_memory_each() -> None:
    few, many = (plan(loader="process", workers=count, batch=1, sample="1kB") for count in (2, 16))
    assert many.memory.loaders - few.memory.loaders == 8 * 14 * WORKER_MEMORY


def test_shm_that_is_too_small_for_the_workers_is_said() -> None:
    job = {"loader": "process", "workers": 8, "batch": 256, "sample": "600kB"}
    assert "SIGBUS" in plan(**job, shm="1GiB").notes[0]
    assert not plan(**job, shm="40GiB").notes
    assert not plan(batch=256, sample="600kB", shm="1MiB").notes


def test_latency_is_hidden_by_requests_in_flight() -> None:
    near = plan(read_rate="100MB/s", store_latency="1ms")
    far = plan(read_rate="100MB/s", store_latency="200ms", read_block="4MiB")
    assert near.loading.threads == 1
    assert far.loading.threads == 5  # 100 MB/s for 0.2 s are 20 MB: five blocks of 4 MiB


def test_a_node_caches_its_share_and_the_rest_goes_to_the_store() -> None:
    made = plan(nodes=10, dataset="20TB", nvme="1TB", store_rate="10GB/s", read_rate="200MB/s")
    assert made.caching.share == 2 * 10**12
    assert made.caching.hit == pytest.approx(0.475)
    assert made.caching.everywhere_s == pytest.approx(10 * made.caching.stage_s)


def test_rates_of_nothing_and_of_next_to_nothing_are_planned_with() -> None:
    assert plan(parameters="8B", nvme="1TB", nvme_rate=0).saving.write_s == 0
    slow = plan(read_rate="1000TB/s", nodes=1000, dataset="20TB", store_rate=1)
    assert slow.starving.first == 1
    assert slow.starving.gpu_hours > 0


def test_starvation_has_a_price() -> None:
    made = plan(
        nodes=9, read_rate="200MB/s", dataset="14.4TB", store_rate="7.2GB/s", nvme="4TB", gpu_hour=2, epochs=3
    )
    assert made.starving.first == pytest.approx(0.5)
    assert made.starving.later == 0
    # the first epoch of 1,000 s takes 2,000
    assert made.starving.gpu_hours == pytest.approx(1000 / 3600 * 72)
    assert made.starving.money == pytest.approx(2 * made.starving.gpu_hours)
    assert "GPUs wait 50% of the first epoch" in made.notes[0]


def test_files_lie_on_as_many_targets_as_one_rank_reads_from() -> None:
    assert plan(read_rate="2.5GB/s", target_rate="1GB/s").reading.stripes == 3


def test_a_checkpoint_behind_the_loop_is_saved_more_often_and_loses_less() -> None:
    saving = plan(nodes=16, parameters="70B", nvme="4TB", store_rate="20GB/s").saving
    assert saving.bytes == 980e9
    assert saving.stall_s == pytest.approx(980e9 / 128 / 20e9)
    assert saving.interval_s < saving.sync_interval_s
    assert saving.loss < saving.sync_loss
    assert saving.drain_s <= saving.interval_s / 10, "checkpoints take more than a tenth of the store"


def test_what_is_not_known_is_named() -> None:
    unknown = " ".join(plan().unknown)
    for word in ("read_rate", "dataset", "store_rate", "nvme", "checkpoint", "gpu_hour"):
        assert word in unknown


@given(
    nodes=st.integers(1, 20_000),
    gpus=st.integers(1, 16),
    rate=st.floats(1e6, 1e10),
    store=st.floats(1e8, 1e14),
    dataset=st.integers(1, 10**17),
    nvme=st.integers(0, 10**14),
    parameters=st.one_of(st.just(0.0), st.floats(1, 1e13)),
    shm=st.integers(0, 64 * GIB),
)
def test_any_plan_adds_up(
    nodes: int, gpus: int, rate: float, store: float, dataset: int, nvme: int, parameters: float, shm: int
) -> None:
    made = plan(
        nodes=nodes, gpus_per_node=gpus, read_rate=rate, store_rate=store, dataset=dataset, nvme=nvme,
        parameters=parameters, shm=shm,
    )  # fmt: skip
    memory = made.memory
    parts = (memory.shm, memory.ranks, memory.loaders, memory.snapshot, memory.spare)
    assert sum(parts) == memory.limit
    assert min(parts) >= 0
    assert made.reading.job == pytest.approx(made.reading.gpu * nodes * gpus)
    assert 0 <= made.caching.hit <= 1
    assert 0 <= made.starving.first < 1
    assert 0 <= made.starving.later < 1
    assert all(value >= 0 for value in made.needs().as_plain().values())


@given(memory=st.integers(1, 200), shm=st.integers(1, 200))
def test_a_memory_limit_is_kept_or_refused(memory: int, shm: int) -> None:
    assume(shm < memory)
    try:
        made = plan(memory=f"{memory}GiB", shm=f"{shm}GiB", gpus_per_node=1)
    except UsageError:
        assert memory < shm + 7
    else:
        assert made.memory.limit == memory * GIB


def test_a_plan_holds_the_job_it_was_made_from() -> None:
    made = plan(nodes=3, read_rate="1GB/s")
    assert make_job(made.as_plain()["job"]) == made.job
    assert asdict(made.job)["nodes"] == 3


RATE, STORE = st.floats(1e6, 1e10), st.floats(1e6, 1e12)


@given(
    gpus=st.integers(1, 16),
    nodes=st.integers(1, 500),
    rate=RATE,
    store=STORE,
    node=STORE,
    dataset=st.integers(1, 10**15),
)
def test_an_epoch_from_the_store_takes_as_long_as_its_bytes_do(
    gpus: int, nodes: int, rate: float, store: float, node: float, dataset: int
) -> None:
    """Nothing stays on the node: what is lost is the time of the bytes less the time the GPUs would take."""
    made = plan(
        nodes=nodes, gpus_per_node=gpus, read_rate=rate, store_rate=store, node_rate=node, dataset=dataset,
        epochs=3, gpu_hour=2.5,
    )  # fmt: skip
    given_, wanted = min(store / nodes, node) * nodes, rate * gpus * nodes
    lost_s = 3 * max(0.0, dataset / given_ - dataset / wanted)
    assert made.reading.store_node * nodes == pytest.approx(given_)
    assert made.starving.gpu_hours == pytest.approx(lost_s * gpus * nodes / 3600, rel=1e-6, abs=1e-9)
    assert made.starving.money == pytest.approx(made.starving.gpu_hours * 2.5)


@given(
    rate=RATE, thread=st.floats(1e7, 1e10), latency=st.floats(1e-6, 0.5), block=st.integers(1 << 16, 1 << 26)
)
def test_threads_are_the_fewest_that_bring_the_bytes_and_hide_the_latency(
    rate: float, thread: float, latency: float, block: int
) -> None:
    made = plan(read_rate=rate, thread_rate=thread, store_latency=latency, read_block=block).loading
    assert made.threads * thread >= rate * (1 - 1e-9)
    assert made.threads * block >= rate * latency * (1 - 1e-9)
    fewer = made.threads - 1
    assert not fewer or fewer * thread < rate or fewer * block < rate * latency


@given(
    gpus=st.integers(1, 16), workers=st.integers(1, 32), prefetch=st.integers(1, 8), batch=st.integers(1, 256)
)
def test_a_node_of_worker_processes_holds_its_batches_and_its_processes(
    gpus: int, workers: int, prefetch: int, batch: int
) -> None:
    made = plan(
        gpus_per_node=gpus, loader="process", workers=workers, prefetch=prefetch, batch=batch, sample=3000,
        decoded=150_000, step=1000,
    )  # fmt: skip
    threads = made.loading.threads
    assert threads == workers
    assert made.loading.shm_needed == gpus * workers * (prefetch + 1) * batch * 150_000
    assert made.loading.shm >= made.loading.shm_needed
    assert made.loading.shm % GIB == 0
    assert made.loading.cores == math.ceil(gpus * (1 + max(workers * 0.5, 0.0))) + 1
    assert made.memory.loaders == gpus * (LOADER_MEMORY + workers * WORKER_MEMORY)
    assert made.memory.limit % GIB == 0
    assert 0 <= made.memory.spare < GIB
    assert not made.notes
    assert made.needs().threads == gpus * workers


@given(
    nodes=st.integers(1, 300),
    gpus=st.integers(1, 16),
    dataset=st.integers(1, 10**15),
    nvme=st.integers(1, 10**13),
    rate=STORE,
)
def test_a_share_is_staged_at_the_pace_of_the_slower_of_store_and_disk(
    nodes: int, gpus: int, dataset: int, nvme: int, rate: float
) -> None:
    made = plan(
        nodes=nodes, gpus_per_node=gpus, dataset=dataset, nvme=nvme, store_rate=rate * nodes, nvme_rate=2e9
    )
    caching, pace = made.caching, min(rate, 2e9)
    assert (caching.share - 1) * nodes < dataset <= caching.share * nodes
    assert caching.cache == min(caching.share, int(nvme * 0.95))
    assert caching.hit == pytest.approx(caching.cache / caching.share)
    assert caching.stage_s == pytest.approx(caching.share / pace)
    assert caching.everywhere_s == pytest.approx(dataset / pace)
    first = min(caching.share, gpus * SHARD_BYTES)
    assert caching.first_s == pytest.approx(made.job.store_latency + first / pace)
    needs = made.needs()
    assert needs.inodes == 64 + 3 * math.ceil(caching.cache / SHARD_BYTES)
    assert needs.open_files == 512 + math.ceil(caching.share / SHARD_BYTES / gpus)
    assert needs.memlock_bytes == (GIB * gpus if nodes > 1 else 0)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.5, "500 ms"), (1, "1.0 s"), (119, "119.0 s"), (120, "2.0 min"), (7200, "2.0 h"), (172_800, "2.0 d")],
)
def test_times_are_said_in_the_largest_unit_of_which_there_are_two(seconds: float, text: str) -> None:
    assert say_time(seconds) == text
