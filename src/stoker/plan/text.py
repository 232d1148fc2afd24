"""Terminal output of a plan: its lines in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stoker.formats.sizes import counted, plural, say_size
from stoker.plan.arithmetic import Plan, say_gib, say_time
from stoker.plan.scene import Course

Row = tuple[str, str]


def say_plan(plan: Plan, courses: Sequence[Course] = ()) -> str:
    """Sections of aligned lines; what does not fit comes last, where it is read."""
    sections = [_section(title, rows) for title, rows in rows_of(plan)]
    if courses:
        sections.append(
            _section(f"simulated, {counted(courses[0].cluster.nodes, 'node')}", course_rows(courses))
        )
    if plan.unknown:
        sections.append("not known, so not planned\n" + "\n".join(f"  {line}" for line in plan.unknown))
    if plan.notes:
        sections.append("mind\n" + "\n".join(f"  {line}" for line in plan.notes))
    return "\n\n".join(sections)


def rows_of(plan: Plan) -> Iterator[tuple[str, list[Row]]]:
    """Titles with their rows of name and value; what is unknown is left out."""
    job = plan.job
    yield (
        f"{job.name}: {counted(job.nodes, 'node')} x {counted(job.gpus_per_node, 'GPU')}",
        list(_reading(plan)),
    )
    yield "a node needs", list(_node(plan))
    if job.dataset:
        yield "cache", list(_cache(plan))
    if plan.saving.bytes:
        yield "checkpoints", list(_saving(plan))
    if job.dataset and job.store_rate and plan.reading.job:
        yield "starvation", list(_starving(plan))


def course_rows(courses: Sequence[Course]) -> list[Row]:
    return [
        (
            course.policy.name,
            f"GPUs idle {course.idle_share:.0%}; {_first_step(course)}; "
            f"{say_size(course.store_bytes)} from the store, saturated {course.saturated:.0%} of the time",
        )
        for course in courses
    ]


def _first_step(course: Course) -> str:
    if course.first_step_s < 0:
        return f"no first step in {say_time(course.seconds)}"
    ended = "" if course.whole else f", not at its end after {say_time(course.seconds)}"
    return f"first step after {say_time(course.first_step_s)}{ended}"


def _reading(plan: Plan) -> Iterator[Row]:
    reading = plan.reading
    if plan.step_s:
        yield "a step", say_time(plan.step_s)
    if reading.gpu:
        yield (
            "reads",
            (f"{_rate(reading.gpu)} a GPU, {_rate(reading.node)} a node, {_rate(reading.job)} the job"),
        )
    if reading.store_node:
        yield "the store gives", f"{_rate(reading.store_node)} a node"
    if reading.stripes:
        yield "stripe count", f"{reading.stripes} (lfs setstripe -c {reading.stripes})"


def _node(plan: Plan) -> Iterator[Row]:
    memory, loading = plan.memory, plan.loading
    yield f"loader {plural(plan.job.loader)}", f"{loading.threads} a rank"
    yield "cores", str(loading.cores)
    yield (
        "memory",
        (
            f"{say_gib(memory.limit)} = /dev/shm {say_gib(memory.shm)} + ranks {say_gib(memory.ranks)} + "
            f"loaders {say_gib(memory.loaders)} + snapshot {say_gib(memory.snapshot)} + "
            f"spare {say_gib(memory.spare)}"
        ),
    )
    yield "for processes", f"{say_gib(memory.processes)}: /dev/shm counts inside the limit"
    if locked := plan.needs().memlock_bytes:
        yield "memlock", f"{say_gib(locked)} for NCCL over RDMA"


def _cache(plan: Plan) -> Iterator[Row]:
    caching = plan.caching
    yield "a node's share", say_size(caching.share)
    yield (
        "cache",
        say_size(caching.cache)
        + (f", {caching.hit:.0%} of later epochs" if plan.job.nvme else " would hold all of it"),
    )
    if caching.stage_s:
        yield (
            "to step one",
            (
                f"{say_time(caching.first_s)} (first shards), {say_time(caching.stage_s)} (whole share), "
                f"{say_time(caching.everywhere_s)} (everything to every node)"
            ),
        )


def _saving(plan: Plan) -> Iterator[Row]:
    saving = plan.saving
    yield "size", f"{say_size(saving.bytes)}, {say_size(saving.node_bytes)} a node"
    yield (
        "behind the loop",
        (
            f"stall {say_time(saving.stall_s)}{_durable(plan)}; "
            f"every {say_time(saving.interval_s)}, {saving.loss:.2%} lost"
        ),
    )
    if _durable(plan):
        yield (
            "stopping the loop",
            (
                f"stall {say_time(saving.sync_stall_s)}; every {say_time(saving.sync_interval_s)}, "
                f"{saving.sync_loss:.2%} lost"
            ),
        )
    yield "failures", f"one every {say_time(saving.mtbf_s)}"


def _durable(plan: Plan) -> str:
    if plan.saving.drain_s:
        return f", in the store after {say_time(plan.saving.drain_s)}"
    return f", on NVMe after {say_time(plan.saving.write_s)}" if plan.saving.write_s else ""


def _starving(plan: Plan) -> Iterator[Row]:
    starving = plan.starving
    yield "GPUs wait", f"{starving.first:.0%} of the first epoch, {starving.later:.0%} of later ones"
    money = f", {starving.money:,.0f} at {plan.job.gpu_hour:g} each" if plan.job.gpu_hour else ""
    yield "that costs", f"{starving.gpu_hours:,.0f} GPU-hours in {counted(plan.job.epochs, 'epoch')}{money}"


def _rate(value: float) -> str:
    return f"{say_size(value)}/s"


def _section(title: str, rows: Sequence[Row]) -> str:
    width = max((len(name) for name, _ in rows), default=0)
    return "\n".join([title, *(f"  {name:{width}}  {value}" for name, value in rows)])
