"""Jobs, plans and results that nobody should have written: refused in a moment, with a reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.cli import plan as cli
from stoker.errors import UsageError
from stoker.plan.arithmetic import make_plan
from stoker.plan.documents import read_document
from stoker.plan.job import FIELDS, make_job, read_job
from stoker.plan.measured import read_measured
from stoker.plan.text import say_plan

_LAYERS = range(1, 30)
BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in _LAYERS)
MERGES = "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}\n" for n in _LAYERS)
HOSTILE = {
    "deep.yaml": "nodes: " + "[" * 100_000,
    "deep-map.yaml": "nodes: " + "{a: " * 3_000 + "1" + "}" * 3_000,
    "deep-lines.yaml": "".join(" " * n + "a:\n" for n in range(400)),
    "deep.json": '{"nodes": ' * 100_000,
    "deep-list.json": '{"nodes": ' + "[" * 100_000 + "]" * 100_000 + "}",
    "bomb.yaml": BOMB,
    "merges.yaml": MERGES,
    "itself.yaml": "nodes: &a [*a]",
    "twice.yaml": "nodes: 1\nnodes: 2",
    "twice-inside.yaml": "job:\n  nodes: 1\n  nodes: 2",
    "twice.json": '{"job": {"nodes": 1, "nodes": 2}}',
    "runs.yaml": "nodes: !!python/object/apply:os.system [id]",
    "two.yaml": "nodes: 1\n---\nnodes: 2",
    "key.yaml": "? [nodes]\n: 1",
    "digits.json": '{"nodes": ' + "9" * 5000 + "}",
    "long.yaml": "name: " + "x" * 2_000_000,
    "list.yaml": "- nodes",
    "bytes.yaml": b"name: \xff",
}


@pytest.mark.parametrize("read", [read_job, read_measured])
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_with_its_reason(
    tmp_path: Path, name: str, read: Callable[[Path], object]
) -> None:
    path, text = tmp_path / name, HOSTILE[name]
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UsageError) as refused:
        read(path)
    assert name in refused.value.message
    assert len(refused.value.message) < 1000
    assert refused.value.hint


def test_a_device_without_an_end_is_refused() -> None:
    with pytest.raises(UsageError, match="is longer than"):
        read_document(Path("/dev/zero"))


@pytest.mark.parametrize(
    "line", ["nodes: 010", "nodes: 0o10", "nodes: 0x10", "nodes: 1_0", "step: 1:30", "nodes: yes",
             "nodes: !!int 010", "read_rate: 0100MB/s", "step: 01s", "nodes: +8", "nodes: .inf"],
)  # fmt: skip
def test_what_readers_of_yaml_take_for_different_numbers_is_refused(tmp_path: Path, line: str) -> None:
    (tmp_path / "job.yaml").write_text(line)
    with pytest.raises(UsageError, match=line.partition(":")[0]):
        read_job(tmp_path / "job.yaml")


def test_words_that_yaml_takes_for_other_things_are_names(tmp_path: Path) -> None:
    for name in ("no", "2026-01-01", "1e3", "0.10"):
        (tmp_path / "job.yaml").write_text(f"name: {name}\nnodes: 16K\nstep: 0.5\n")
        job = read_job(tmp_path / "job.yaml")
        assert (job.name, job.nodes, job.step) == (name, 16_000, 0.5)


def test_a_plan_that_was_written_is_read_again(tmp_path: Path) -> None:
    plan = make_plan(make_job({"nodes": 3, "read_rate": "20MB/s", "mfu": 0.05}))
    (tmp_path / "plan.json").write_text(json.dumps(plan.as_plain()))
    assert read_job(tmp_path / "plan.json") == plan.job


@pytest.mark.parametrize("name", ["a\0b", "\x1b[31mred", "", "x" * 300])
def test_names_that_a_terminal_would_obey_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="name"):
        make_job({"name": name})


@settings(max_examples=300, deadline=None)
@given(
    values=st.dictionaries(
        st.sampled_from(sorted(FIELDS)),
        st.one_of(
            st.integers(-1, 10**30),
            st.floats(),
            st.sampled_from(
                ["0", "1e308", "1e-308", "1PB", "1ms", "9e15GiB", "thread", "process", "1K", "0.5"]
            ),
            st.text(max_size=5),
            st.none(),
            st.booleans(),
            st.lists(st.integers(), max_size=1),
        ),
        max_size=6,
    )
)
def test_any_job_is_planned_or_refused(values: dict[str, object]) -> None:
    with suppress(UsageError):
        plan = make_plan(make_job(values))
        assert say_plan(plan)
        assert json.loads(json.dumps(plan.as_plain(), allow_nan=False))


def test_the_command_says_so_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(BOMB)
    done: Result = CliRunner().invoke(cli.command, [str(tmp_path / "job.yaml")])
    assert isinstance(done.exception, UsageError)
