"""Thresholds: every number a rule compares with, and why; docs/concepts/diagnosis.md shows them."""

from __future__ import annotations

from typing import NamedTuple


class Threshold(NamedTuple):
    """A border between fine and not, and where it comes from."""

    value: float
    why: str


THRESHOLDS = {
    # --- starving
    "data_share": Threshold(
        0.07, "a fed loop waits 0.2-0.3% of the time for batches; 7% is a day in two weeks"
    ),
    "least_wait_s": Threshold(
        0.25,
        "seconds of waiting in all: half a second of quick steps has hiccups, as many looks need as long",
    ),
    "overlapped_util": Threshold(97, "a card this busy while the loop waits is working off queued steps"),
    "burst": Threshold(0.7, "above it the usual batch is in time and a few late ones are the problem"),
    "first_batch": Threshold(0.7, "above it the wait is the first batch's, which a longer run pays once"),
    "wait_busy": Threshold(
        0.7, "cores: a process that computes without a stop shows 0.9-1.0, a sleeping one < 0.1"
    ),
    "cores_full": Threshold(0.85, "of the allowed cores: the rest is what the scheduler loses"),
    "throttled": Threshold(
        0.1, "share of time a cgroup was stopped: below it bursts borrow from quiet periods"
    ),
    "iowait": Threshold(
        0.3, "cores: one thread that only reads a slow disk shows 0.5-1, a background flush 0.1"
    ),
    "read_bytes_s": Threshold(
        2e6, "with idle cores: a loader that reads this slowly is waiting for its storage"
    ),
    "disk_full_s": Threshold(1e9, "bytes a second from disk: half of what the disks at hand give at best"),
    "lock_share": Threshold(0.25, "of the time in waits: below it workers also sleep because they are done"),
    "small_read": Threshold(65536, "bytes: a disk or server gives a fraction of its rate to smaller reads"),
    "small_reads_s": Threshold(500, "reads a second: fewer small ones are metadata beside large reads"),
    "blocked": Threshold(0.4, "share of workers in uninterruptible sleep"),
    "delay": Threshold(0.2, "of the time runnable without a core: an idle machine shows under 0.02"),
    "others": Threshold(0.3, "of the allowed cores busy with others' work"),
    "remote_bytes_s": Threshold(5e6, "from the network, with idle cores: more than logs and metrics send"),
    # --- copying
    "copy_share": Threshold(0.1, "a copy that is overlapped costs the loop under 1%"),
    "pinned_rate": Threshold(0.5, "of what the bus gives pinned memory; pageable copies reached 0.15 of it"),
    "copy_rx_gb_s": Threshold(
        4.0, "GB/s into the card with its units half idle, where copies were not timed"
    ),
    # --- stopping
    "spin_util": Threshold(90, "a kernel that spins shows 99-100% utilisation"),
    "spin_sm": Threshold(
        5, "a spinning kernel keeps one block busy: 0-1% SM activity, real work 30% and more"
    ),
    "spin_power": Threshold(0.35, "of the limit: a spinning card fell to 0.2, a working one takes 0.5-1.0"),
    "idle_util": Threshold(15, "what an idle card shows, with the tail of the work before it in the mean"),
    "spin_s": Threshold(2.0, "seconds: a reading lags by at most one, and collectives take milliseconds"),
    "hang_s": Threshold(5.0, "seconds without a step; below it garbage collections and logging do it"),
    "hang_share": Threshold(0.1, "of the recording in one stop: then half of that many seconds will do"),
    "hang_steps": Threshold(20, "usual steps without one ending"),
    "saving_bytes_s": Threshold(
        100e6, "bytes a second to disk: more than logs, as much as a small checkpoint"
    ),
    "pause_share": Threshold(0.05, "of the wall time in pauses: below it saving is cheap enough"),
    "written": Threshold(50e6, "bytes written in one pause: smaller than any checkpoint that takes time"),
    "written_s": Threshold(30e6, "bytes a second in a pause: no local disk that one waits for is slower"),
    "shm_full": Threshold(0.85, "of /dev/shm: one more batch a worker may not fit"),
    "shm_soon": Threshold(3.0, "recorded lengths until the trend fills /dev/shm, and at least five minutes"),
    # --- working
    "tensor_of_sm": Threshold(0.1, "tensor over SM activity: bf16 0.37, fp32 0.03"),
    "fp32_of_sm": Threshold(0.3, "fp32 pipe over SM activity: fp32 matrices 0.67, bf16 training 0.05"),
    "fp32_low": Threshold(
        0.3, "of the fp32 peak, where units were not read: less is a model of many small parts"
    ),
    "fp32_high": Threshold(
        0.85, "of the fp32 peak: plain fp32 training reached 0.73; more must be tensor cores"
    ),
    "memory_busy": Threshold(
        35, "percent, NVML's: fp32 matrices 12, bf16 training 50, memory-bound models more"
    ),
    "hot": Threshold(0.7, "of the power limit: the card works hard, whatever it works on"),
    "tensor_named": Threshold(
        0.1,
        "of the time in matrix kernels, by their names: in bf16 training most of it is on tensor cores",
    ),
    "matrices": Threshold(0.25, "of the kernels' time in fp32 matrices: less gives little when it is gone"),
    "tiny_of_util": Threshold(0.35, "SM activity over utilisation: tiny kernels 0.03, others 0.7-0.9"),
    "tiny_sm": Threshold(
        30, "SM activity while the loop computes: a launch-bound loop leaves most units empty"
    ),
    "warm_up": Threshold(
        5, "times the usual step: loading kernels or compiling, which a first step pays once, takes seconds"
    ),
    "gaps_util": Threshold(
        80,
        "utilisation while the loop computes, where kernels were not counted; a fed card shows 87-100",
    ),
    "gaps_share": Threshold(
        0.12, "of the time: what a busy loop leaves idle in spite of itself is under a tenth"
    ),
    "slowed": Threshold(0.1, "share of busy readings with a slowdown reason: single ones cost nothing"),
    "slowed_clock": Threshold(0.95, "of the boost clock: above it the slowdown cost nothing"),
    "low_clock": Threshold(0.75, "of the boost clock, far from the power limit, where reasons were not read"),
    "memory_full": Threshold(
        0.8, "of the card with memory going up and down: the allocator works at the limit"
    ),
    "memory_half": Threshold(0.5, "of the card where giving back and taking also shows in the step's time"),
    "memory_swing": Threshold(0.02, "of the card, given back and taken again"),
    "memory_turns": Threshold(0.2, "turns a second; a phase change makes one or two in a run"),
    "retries": Threshold(
        0.001, "of the allocator for each step: one in a thousand costs nothing one could measure"
    ),
    "memory_cost": Threshold(
        0.03, "share of time outside compute, where giving memory back and taking it shows"
    ),
    # --- together
    "late": Threshold(0.08, "of a step that one rank works longer than the others' median"),
    "late_often": Threshold(0.6, "share of steps in which the same rank is last; and a quarter above chance"),
    "late_share": Threshold(0.03, "of the wall time: less is not worth a word"),
    "rank_delay": Threshold(
        0.1, "of the time a rank could run and got no core: every other rank waits as long for it"
    ),
    "collective": Threshold(
        0.15, "of the time in collectives, counted by whoever came last to each: the exchange itself"
    ),
    "collective_on_host": Threshold(
        0.3, "the same of ranks that compute on the host: there the exchange uses the cores that compute"
    ),
    # --- the program's own code
    "own_loop": Threshold(
        0.1,
        "of the time making batches in the loop itself, or by a loader without workers: usually 1-5%",
    ),
    "host_code": Threshold(0.1, "of the time in one thing that is known: logging, metrics, output, files"),
    "other_code": Threshold(
        0.15, "of the time in code that nobody knows: Python between steps takes a few percent"
    ),
    "own_optimizer": Threshold(
        0.35, "of the time in an optimizer of one's own: AdamW on a CPU takes up to a fifth"
    ),
    "looks": Threshold(5, "at a stack: fewer say nothing"),
    "collections": Threshold(10, "of garbage, beyond the youngest: fewer come with imports"),
    "held": Threshold(0.3, "of the looks that another thread held up: a quiet interpreter is had at once"),
    "evaluation": Threshold(0.25, "of the time: evaluation is wanted, but not for a quarter of it"),
    # --- healthy
    "enough_steps": Threshold(3, "the first ones allocate, compile and fill queues; fewer say nothing"),
}


def at(name: str) -> float:
    """The value of a threshold."""
    return THRESHOLDS[name].value
