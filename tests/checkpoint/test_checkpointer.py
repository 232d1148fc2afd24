"""Saving and restoring in one process: everything comes back, nothing waits, nothing is lost."""

from __future__ import annotations

import os
import random
import signal
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch

from stoker.errors import BadCheckpointError, CheckpointError, UsageError


def test_everything_comes_back(make_job, same, open_checkpointer) -> None:
    job, other = make_job(), make_job(seed=1)
    for _ in range(3):
        job.step()
    with open_checkpointer() as checkpointer:
        assert checkpointer.save(3, **job.objects, epoch=7)
    with open_checkpointer() as checkpointer:
        restored = checkpointer.restore(**other.objects)
    assert same(job.state(), other.state())
    assert (restored.step, restored.fresh, restored.extras) == (3, False, {"epoch": 7})


def test_an_empty_folder_is_a_fresh_start(make_job, same, open_checkpointer) -> None:
    job = make_job()
    before = job.state()
    restored = open_checkpointer().restore(**job.objects)
    assert (restored.fresh, restored.step, same(before, job.state())) == (True, 0, True)


@pytest.mark.parametrize("options", [{}, {"overlap": True}, {"max_host_bytes": 8192}], ids=str)
def test_a_resumed_run_has_the_losses_of_an_uninterrupted_one(make_job, open_checkpointer, options) -> None:
    whole = make_job()
    losses = [whole.step() for _ in range(8)]
    first = make_job()
    with open_checkpointer(every=5, **options) as checkpointer:
        for step in range(1, 8):  # goes on after the save: what is saved must not change any more
            first.step()
            checkpointer.step(step, **first.objects)
    second = make_job(seed=3)
    with open_checkpointer(**options) as checkpointer:
        assert checkpointer.restore(**second.objects).step == 5
    assert [second.step() for _ in range(3)] == losses[5:]


def test_random_generators_go_on_where_they_were(open_checkpointer) -> None:
    def draw():
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    with open_checkpointer() as checkpointer:
        checkpointer.save(1, weights={"w": torch.ones(3)})
        wanted = draw()
        checkpointer.restore(weights={"w": torch.zeros(3)})
        assert draw() == wanted


def test_every_says_when_to_save(make_job, open_checkpointer) -> None:
    job = make_job()
    with open_checkpointer(every=3) as checkpointer:
        assert [step for step in range(10) if checkpointer.step(step, **job.objects)] == [3, 6, 9]


def test_every_auto_saves_once_a_step_is_known_and_then_as_advised(make_job, open_checkpointer) -> None:
    job = make_job()
    with open_checkpointer(every="auto", mtbf_s=1e9) as checkpointer:
        saved = []
        for step in range(1, 41):
            job.step()
            if checkpointer.step(step, **job.objects):
                saved.append(step)
                checkpointer.wait()
        assert saved == [10, 20]  # once to measure, once more as known from then on; then hardly ever
        assert checkpointer.advice(mtbf_s=1e9).interval_s > checkpointer.advice(mtbf_s=1e3).interval_s


def test_only_the_newest_are_kept(make_job, open_checkpointer, tmp_path: Path) -> None:
    job = make_job()
    with open_checkpointer(every=1, keep=2) as checkpointer:
        for step in range(1, 6):
            checkpointer.step(step, **job.objects)
    names = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert [name[:21] for name in names] == ["000004-step-000000004", "000005-step-000000005"]


def test_a_save_of_the_same_step_overwrites_nothing(make_job, same, open_checkpointer) -> None:
    job, other = make_job(), make_job()
    with open_checkpointer() as checkpointer:
        checkpointer.save(1, **job.objects)
        checkpointer.wait()
        first = checkpointer.latest()
        job.step()
        checkpointer.save(1, **job.objects)
        checkpointer.wait()
        assert checkpointer.latest().name != first.name
        assert first.verify() == []
        checkpointer.restore(**other.objects)
    assert same(job.state(), other.state())


def test_a_busy_checkpointer_skips_and_counts(open_checkpointer) -> None:
    from stoker.checkpoint.storm import Limits

    state = {"w": torch.zeros(40_000)}
    slow = Limits(write_bytes_per_s=400_000)
    with open_checkpointer(when_busy="skip", limits=slow) as checkpointer:
        assert checkpointer.save(1, state=state)
        assert not checkpointer.save(2, state=state)
        checkpointer.wait()
        assert checkpointer.save(3, state=state)
        checkpointer.wait()
        assert (checkpointer.report().saves, checkpointer.report().skipped) == (2, 1)


def test_memory_is_allocated_once(open_checkpointer) -> None:
    state = {"w": torch.zeros(3_000_000)}
    with open_checkpointer(every=1, chunk_bytes=1 << 20) as checkpointer:
        checkpointer.step(1, state=state)
        checkpointer.wait()
        held = checkpointer.report().host_bytes
        for step in range(2, 6):
            checkpointer.step(step, state=state)
        assert checkpointer.report().host_bytes == held < 16 << 20


def test_memory_is_ready_before_the_first_save(open_checkpointer) -> None:
    state = {"w": torch.zeros(3_000_000)}
    with open_checkpointer(every=3) as checkpointer:
        checkpointer.step(1, state=state)
        while not checkpointer.report().host_bytes:
            pass
        held = checkpointer.report().host_bytes
        checkpointer.step(2, state=state)
        assert checkpointer.step(3, state=state)
        assert checkpointer.report().host_bytes == held >= 12_000_000


@pytest.mark.long
def test_waves_hold_no_more_than_allowed(same, open_checkpointer) -> None:
    state = {f"w{at}": torch.randn(300, 700) for at in range(9)}
    state["odd"] = torch.randn(31, 77).t()  # not contiguous
    back = {key: torch.zeros_like(one).contiguous() for key, one in state.items()}
    with open_checkpointer(max_host_bytes=1 << 20) as checkpointer:
        checkpointer.save(1, state=state)
        assert checkpointer.report().host_bytes <= 2 << 20
        checkpointer.restore(state=back)
    assert same(state, back)


# --- what goes wrong ------------------------------------------------------------------------------


def test_a_failure_in_the_background_surfaces_at_the_next_step(make_job, open_checkpointer, tmp_path) -> None:
    job = make_job()
    checkpointer = open_checkpointer(every=1)
    checkpointer.step(1, **job.objects)
    checkpointer.wait()
    good = checkpointer.latest().name
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    (tmp_path / "run").write_text("a file where the folder was")
    checkpointer.step(2, **job.objects)
    with pytest.raises(CheckpointError, match="a checkpoint was not saved: cannot write") as caught:
        checkpointer.wait()
    assert caught.value.__cause__ is not None
    (tmp_path / "run").unlink()
    (tmp_path / "elsewhere").rename(tmp_path / "run")
    assert checkpointer.latest().name == good
    checkpointer.step(3, **job.objects)  # and it goes on
    checkpointer.wait()
    assert checkpointer.report().failed == 1


def test_a_failure_can_be_a_warning(make_job, open_checkpointer, tmp_path) -> None:
    checkpointer = open_checkpointer(every=1, on_failure="warn")
    (tmp_path / "run").write_text("a file where the folder should be")
    checkpointer.step(1, **make_job().objects)
    with pytest.warns(RuntimeWarning, match="was not saved"):
        checkpointer.wait()


def test_what_cannot_be_saved_is_named(open_checkpointer) -> None:
    with pytest.raises(UsageError, match=r"state\.bad is a builtins\.object"):
        open_checkpointer().save(1, state={"bad": object()})


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")  # it goes, but is still met
@pytest.mark.parametrize(
    ("kind", "make"),
    [
        ("sparse_coo", lambda: torch.eye(3).to_sparse()),
        ("quantized", lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8)),
        ("meta", lambda: torch.empty(3, device="meta")),
    ],
)
def test_a_tensor_without_plain_memory_is_named(open_checkpointer, kind, make) -> None:
    tensor = make()
    with pytest.raises(UsageError, match=rf"state\.a is a .*{kind} tensor"):
        open_checkpointer().save(1, state={"a": tensor})


@pytest.mark.parametrize("step", ["five", 2.5, -1, None])
def test_a_step_that_is_no_number_is_said_at_once(open_checkpointer, step) -> None:
    with pytest.raises(UsageError, match="whole number"):
        open_checkpointer(every=1).step(step, state={})


@pytest.mark.parametrize("options", [{"keep": -1}, {"keep": "3"}, {"every": 1.5}, {"max_host_bytes": "1GB"}])
def test_an_option_that_is_no_count_is_said_at_once(open_checkpointer, options) -> None:
    with pytest.raises(UsageError, match=next(iter(options))):
        open_checkpointer(**options)


def test_a_step_counted_by_numpy_or_torch_is_a_step(open_checkpointer) -> None:
    with open_checkpointer(every=1) as checkpointer:
        checkpointer.step(np.int64(3), state={})
        checkpointer.step(torch.tensor(4), state={})
        assert checkpointer.restore().step == 4


def test_a_model_without_memory_is_not_restored_into(open_checkpointer) -> None:
    with open_checkpointer() as checkpointer:
        checkpointer.save(1, model=torch.nn.Linear(4, 4))
        with pytest.raises(UsageError, match=r"model\.weight has no memory yet"):
            checkpointer.restore(model=torch.nn.Linear(4, 4, device="meta"))


def test_a_name_that_is_not_there_is_said(open_checkpointer) -> None:
    with pytest.raises(UsageError, match="has no checkpoint nope"):
        open_checkpointer().restore(name="nope")


def test_a_store_is_no_folder_to_save_in(open_checkpointer) -> None:
    with pytest.raises(UsageError, match="no folder") as caught:
        open_checkpointer("s3://bucket/run")
    assert "remote='s3://bucket/run'" in caught.value.hint


def test_a_forked_child_is_told_instead_of_hanging(make_job, open_checkpointer) -> None:
    job = make_job()
    with open_checkpointer() as checkpointer:
        checkpointer.save(1, **job.objects)
        child = os.fork()
        if not child:
            signal.alarm(20)
            with suppress(UsageError), checkpointer:
                checkpointer.save(2, **job.objects)
                os._exit(1)
            os._exit(0)
        assert os.waitpid(child, 0) == (child, 0)
    assert checkpointer.latest().step == 1


def test_another_optimizer_is_refused(make_job, open_checkpointer) -> None:
    job, other = make_job(), make_job()
    job.step()
    halves = [{"params": layer.parameters()} for layer in other.model]
    with open_checkpointer() as checkpointer:
        checkpointer.save(1, model=job.model, optimizer=job.optimizer)
        with pytest.raises(UsageError, match=r"optimizer state for '0\.weight'"):
            checkpointer.restore(optimizer=other.optimizer)
        with pytest.raises(UsageError, match="different number of parameter groups"):
            checkpointer.restore(model=other.model, optimizer=torch.optim.AdamW(halves))


def test_another_model_is_refused_by_name(open_checkpointer) -> None:
    with open_checkpointer() as checkpointer:
        checkpointer.save(1, model=torch.nn.Linear(4, 4))
        with pytest.raises(UsageError, match=r"lacks 1 .* 'model.other' first and has 2 tensors"):
            checkpointer.restore(model=torch.nn.ParameterDict({"other": torch.zeros(1)}))
        with pytest.raises(UsageError, match=r"model.weight is \(5, 4\) here, in .* \(4, 4\)"):
            checkpointer.restore(model=torch.nn.Linear(4, 5))


def test_a_damaged_newest_is_skipped_and_said(make_job, same, open_checkpointer) -> None:
    job, other = make_job(), make_job(seed=1)
    with open_checkpointer(every=1) as checkpointer:
        checkpointer.step(1, **job.objects)
        wanted = job.state()
        job.step()
        checkpointer.step(2, **job.objects)
        checkpointer.wait()
        newest = Path(checkpointer.latest().folder.url)
        flip(newest / "part-00000.bin", 5000)
        with pytest.warns(RuntimeWarning, match="was skipped: .* is damaged"):
            restored = checkpointer.restore(**other.objects)
    assert (restored.step, same(wanted, other.state())) == (1, True)
    assert "is damaged at bytes 4,096 to 8,192" in restored.skipped[0]


def test_the_latest_is_the_newest_whole_one_and_others_are_named(open_checkpointer) -> None:
    checkpointer = open_checkpointer()
    for step in (1, 2):
        checkpointer.save(step, state={"w": torch.ones(2000)})
        checkpointer.wait()
    path = Path(checkpointer.latest().folder.url) / "part-00000.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.warns(RuntimeWarning, match=r"skipped: 000002.* is 7,999 bytes, its manifest says 8,000"):
        assert checkpointer.latest().step == 1


def test_when_only_a_damaged_one_is_there_restoring_fails(make_job, open_checkpointer) -> None:
    job = make_job()
    with open_checkpointer(every=1) as checkpointer:
        checkpointer.step(1, **job.objects)
        checkpointer.wait()
        flip(Path(checkpointer.latest().folder.url) / "part-00000.bin", 100)
        with pytest.raises(BadCheckpointError, match="start again"):
            checkpointer.restore(**job.objects)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 16
    path.write_bytes(data)


# --- kinds of state -------------------------------------------------------------------------------


def test_any_state_of_tensors_and_plain_values_comes_back(open_checkpointer) -> None:
    state = {
        "bf16": torch.randn(5, 3).bfloat16(),
        "scalar": torch.tensor(3),
        "empty": torch.zeros(0, 4),
        "bool": torch.tensor([True, False]),
        "complex": torch.randn(3, dtype=torch.complex64),
        "list": [torch.ones(2), {"a": 1}, "text"],
        "numbers": {1: 2.5, (3, "x"): None, "inf": float("inf")},
        "bytes": b"\0\xff",
        "array": np.arange(6).reshape(2, 3),
        "tuple": (1, "two", [3]),
        "dtype": torch.float16,
        "nothing": {},
    }
    with open_checkpointer() as checkpointer:
        checkpointer.save(1, state=state)
        checkpointer.wait()
        found = checkpointer.load()["state"]
    assert found.keys() == state.keys()
    for key in ("bf16", "scalar", "empty", "bool", "complex"):
        assert torch.equal(found[key], state[key])
        assert found[key].dtype == state[key].dtype
    assert torch.equal(found["list"][0], torch.ones(2))
    assert found["list"][1:] == [{"a": 1}, "text"]
    assert np.array_equal(found["array"], state["array"])
    for key in ("numbers", "bytes", "tuple", "dtype", "nothing"):
        assert found[key] == state[key]


def test_tied_weights_are_saved_once_and_come_back_tied(open_checkpointer) -> None:
    def make():
        model = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False), torch.nn.Linear(64, 64, bias=False))
        model[1].weight = model[0].weight
        return model

    one, other = make(), make()
    with open_checkpointer() as checkpointer:
        checkpointer.save(1, model=one)
        checkpointer.wait()
        assert checkpointer.latest().manifest.bytes == one[0].weight.nbytes
        checkpointer.restore(model=other)
    assert torch.equal(other[0].weight, one[0].weight)
    assert other[0].weight is other[1].weight


def test_the_extra_state_of_a_module_comes_back(open_checkpointer) -> None:
    class Counting(torch.nn.Linear):
        calls: torch.Tensor | None = None

        def get_extra_state(self):
            return {"calls": self.calls, "words": ["a"]}

        def set_extra_state(self, state):
            self.calls = state["calls"]

    one, other = Counting(2, 2), Counting(2, 2)
    one.calls = torch.tensor(7)
    with open_checkpointer() as checkpointer:
        checkpointer.save(1, model=one)
        checkpointer.restore(model=other)
    assert other.calls == 7
    assert torch.equal(one.weight, other.weight)


def test_tensors_that_no_longer_share_memory_are_both_saved(open_checkpointer) -> None:
    weights = torch.zeros(3)
    with open_checkpointer() as checkpointer:
        checkpointer.save(1, state={"weights": weights, "average": weights})
        checkpointer.save(2, state={"weights": weights, "average": weights + 1})
        checkpointer.wait()
        assert checkpointer.load()["state"]["average"].tolist() == [1, 1, 1]


def test_what_torch_put_off_is_done_before_it_is_saved(open_checkpointer) -> None:
    numbers = torch.tensor([1 + 2j])
    state = {"a": numbers, "conjugate": numbers.conj(), "negated": numbers.conj().imag}
    live = {"a": torch.zeros(1) + 0j, "conjugate": (torch.zeros(1) + 0j).conj(), "negated": torch.zeros(1)}
    with open_checkpointer() as checkpointer:
        checkpointer.save(1, state=state)
        checkpointer.restore(state=live)
        found = checkpointer.load()["state"]
    for key in state:
        assert torch.equal(found[key], state[key])
        assert torch.equal(live[key], state[key])


def test_a_compiled_or_wrapped_model_has_the_same_names(make_job, open_checkpointer) -> None:
    job = make_job()
    with open_checkpointer() as checkpointer:
        checkpointer.save(1, model=torch.compile(job.model, backend="eager"))
        checkpointer.wait()
        assert set(checkpointer.load()["model"]) == set(job.model.state_dict())


def test_a_subset_of_keys_reads_only_what_it_needs(open_checkpointer, tmp_path) -> None:
    state = {f"w{at}": torch.full((4096,), float(at)) for at in range(8)}
    with open_checkpointer() as checkpointer:
        checkpointer.save(1, state=state)
        checkpointer.wait()
        path = Path(checkpointer.latest().folder.url) / "part-00000.bin"
        flip(path, 0)  # w0 is damaged, and nobody wants it
        found = checkpointer.load(keys=["state.w5"])
    assert list(found["state"]) == ["w5"]
    assert torch.equal(found["state"]["w5"], state["w5"])


def test_a_model_alone_comes_back_without_its_optimizer(make_job, open_checkpointer) -> None:
    job, other = make_job(), make_job(seed=1)
    job.step()
    with open_checkpointer() as checkpointer:
        checkpointer.save(1, **job.objects)
        checkpointer.restore(model=other.model)
    assert torch.equal(job.model[0].weight, other.model[0].weight)
    assert torch.equal(job.model[1].running_mean, other.model[1].running_mean)


def test_closing_twice_is_safe(make_job, open_checkpointer) -> None:
    checkpointer = open_checkpointer()
    checkpointer.save(1, **make_job().objects)
    checkpointer.close()
    checkpointer.close()
    with suppress(UsageError):
        checkpointer.advice()
