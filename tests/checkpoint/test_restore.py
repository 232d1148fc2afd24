"""Bringing objects back: from copies that cannot be read, into objects that are not quite those saved."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from stoker.errors import BadCheckpointError, UsageError

# --- which checkpoint is taken ------------------------------------------------------------------------


@pytest.fixture
def bad_sector(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the local part of the second save can be read; a disk that does so is hard to come by."""
    read = os.preadv

    def preadv(handle: int, buffers: list[memoryview], at: int) -> int:
        if "/run/000002" in os.readlink(f"/proc/self/fd/{handle}"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(handle, buffers, at)

    monkeypatch.setattr(os, "preadv", preadv)


@pytest.mark.parametrize(("has_remote", "step"), [(True, 2), (False, 1)])
def test_a_disk_that_cannot_read_gives_way_to_the_next_good_copy(
    open_checkpointer, tmp_path: Path, bad_sector: None, has_remote: bool, step: int
) -> None:
    remote = str(tmp_path / "far") if has_remote else ""
    with open_checkpointer(remote=remote) as checkpointer:
        for number in (1, 2):
            checkpointer.save(number, state={"w": torch.full((3,), float(number))})
            checkpointer.wait()
    back = {"w": torch.zeros(3)}
    with pytest.warns(RuntimeWarning, match="cannot be read at bytes 0 to 64: .* Input/output error"):
        assert open_checkpointer(remote=remote).restore(state=back).step == step
    assert torch.equal(back["w"], torch.full((3,), float(step)))


def test_a_profiler_that_holds_the_frames_of_the_readers_fails_no_restore(open_checkpointer) -> None:
    with open_checkpointer() as checkpointer:
        checkpointer.save(1, state={"w": torch.ones(6000)})
        checkpointer.wait()
    held: list[Any] = []  # as `stoker watch` holds them for a moment, with the memory they have views of
    threading.setprofile(lambda frame, event, found: held.append(frame))
    try:
        assert open_checkpointer().restore(state={"w": torch.zeros(6000)}).step == 1
    finally:
        threading.setprofile(None)
    assert any(frame.f_code.co_name == "_read_chunk" for frame in held)


def test_verifying_says_what_cannot_be_read(open_checkpointer, bad_sector: None) -> None:
    with open_checkpointer() as checkpointer:
        for number in (1, 2):
            checkpointer.save(number, state={"w": torch.ones(6000)})
            checkpointer.wait()
        faults = checkpointer.latest().verify()
    assert len(faults) == 6  # every chunk of it
    assert all("Input/output error" in fault for fault in faults)


def test_a_part_that_cannot_be_opened_is_a_fault(open_checkpointer, tmp_path: Path) -> None:
    with open_checkpointer() as checkpointer:
        checkpointer.save(1, state={"w": torch.ones(6000)})
        checkpointer.wait()
        found = checkpointer.latest()
        assert found.parts
        (tmp_path / "run" / found.name / "part-00000.bin").unlink()
        assert ["cannot be opened" in fault for fault in found.verify()] == [True]
        with pytest.raises(BadCheckpointError, match=r"part-00000\.bin of .* cannot be opened"):
            checkpointer.load(name=found.name)


@pytest.mark.parametrize("file", ["checkpoint.json", "part-00000.json", "part-00000.bin"])
def test_when_none_is_whole_there_is_no_fresh_start(open_checkpointer, tmp_path, file: str) -> None:
    with open_checkpointer() as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state={"w": torch.ones(3)})
            checkpointer.wait()
    for path in (tmp_path / "run").glob(f"0*/{file}"):
        os.truncate(path, 10)
    with pytest.raises(BadCheckpointError, match=r"could be restored: 000002.*; 000001") as caught:
        open_checkpointer().restore(state={"w": torch.zeros(3)})
    assert "to begin anew, delete them" in caught.value.hint
    assert "start again" not in caught.value.hint


def test_what_killed_saves_left_is_still_a_fresh_start(open_checkpointer, tmp_path) -> None:
    leftover = tmp_path / "run" / ".saving-000001-step-000000001-0a0a0a0a"
    leftover.mkdir(parents=True)
    (leftover / "part-00000.bin").write_bytes(bytes(10))
    (tmp_path / "run" / "notes").mkdir()
    assert open_checkpointer().restore(state={"w": torch.zeros(3)}).fresh


# --- objects that are not quite those saved -----------------------------------------------------------


def trained(model: torch.nn.Module, kind: Any = torch.optim.AdamW, **options: Any) -> torch.optim.Optimizer:
    optimizer = kind(model.parameters(), **options)
    for parameter in model.parameters():
        parameter.grad = torch.rand_like(parameter)
    optimizer.step()
    return optimizer


def saved_by(open_checkpointer, **objects: Any):
    """A checkpointer on a folder with these objects in its only checkpoint."""
    checkpointer = open_checkpointer()
    checkpointer.save(1, **objects)
    checkpointer.wait()
    return checkpointer


class Master(torch.optim.SGD):
    """Keeps a float32 copy of every weight, as optimizers for bfloat16 do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter_state = self.state[parameter]
            parameter_state["copies"] = [torch.rand(parameter.shape)]
            parameter_state["master"] = torch.rand(parameter.shape)


@pytest.mark.parametrize("kind", [Master, torch.optim.NAdam, torch.optim.ASGD])
def test_the_state_of_an_optimizer_keeps_its_precision(open_checkpointer, kind) -> None:
    model, other = (torch.nn.Linear(4, 4).bfloat16() for _ in range(2))
    optimizer, back = trained(model, kind), kind(other.parameters())
    for _ in range(2):  # the second time into state that is there
        saved_by(open_checkpointer, model=model, optimizer=optimizer).restore(model=other, optimizer=back)
        for slot, wanted in optimizer.state[model.weight].items():
            found = back.state[other.weight][slot]
            for one, two in (
                zip(wanted, found, strict=True) if isinstance(wanted, list) else [(wanted, found)]
            ):
                assert one.dtype == two.dtype
                assert torch.equal(one, two)


def test_state_follows_a_model_that_has_another_precision_now(open_checkpointer) -> None:
    model, other = torch.nn.Linear(4, 4).bfloat16(), torch.nn.Linear(4, 4)
    optimizer, back = trained(model), torch.optim.AdamW(other.parameters())
    saved_by(open_checkpointer, model=model, optimizer=optimizer).restore(model=other, optimizer=back)
    assert back.state[other.weight]["exp_avg"].dtype == torch.float32


class Counter:
    def __init__(self) -> None:
        self.count = 3

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def test_what_was_not_saved_is_left_alone_if_that_is_allowed(open_checkpointer) -> None:
    model = torch.nn.Linear(3, 3)
    checkpointer = saved_by(open_checkpointer, model=model)
    optimizer, counter, notes = trained(model), Counter(), {"a": 1}
    before = optimizer.state[model.weight]["exp_avg"].clone()
    given = {"optimizer": optimizer, "counter": counter, "notes": notes, "extra": torch.nn.Linear(2, 2)}
    restored = checkpointer.restore(strict=False, model=model, epoch=7, **given)
    assert (restored.step, restored.extras, counter.count, notes) == (1, {}, 3, {"a": 1})
    assert torch.equal(optimizer.state[model.weight]["exp_avg"], before)
    for name, thing in given.items():
        with pytest.raises(UsageError, match=f"lacks .* '{name}"):
            checkpointer.restore(**{name: thing})


class WithExtraState(torch.nn.Linear):
    def get_extra_state(self) -> dict[str, int]:
        return {"amax": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        pass


def test_extra_state_without_a_place_is_named_or_left_out(open_checkpointer) -> None:
    checkpointer = saved_by(open_checkpointer, model=WithExtraState(3, 3))
    with pytest.raises(UsageError, match=r"no place here, 'model\._extra_state\.amax'"):
        checkpointer.restore(model=torch.nn.Linear(3, 3))
    assert checkpointer.restore(model=torch.nn.Linear(3, 3), strict=False).step == 1


def test_extra_state_that_was_not_saved_is_named_or_left_out(open_checkpointer) -> None:
    checkpointer = saved_by(open_checkpointer, model=torch.nn.Linear(3, 3))
    with pytest.raises(UsageError, match=r"lacks .* 'model\._extra_state'"):
        checkpointer.restore(model=WithExtraState(3, 3))
    assert checkpointer.restore(model=WithExtraState(3, 3), strict=False).step == 1


def test_a_module_without_state_comes_back(open_checkpointer) -> None:
    checkpointer = saved_by(open_checkpointer, model=torch.nn.ReLU())
    assert checkpointer.restore(model=torch.nn.ReLU()).step == 1


class Noisy(torch.optim.SGD):
    """Has a tensor of its own beside `state`."""

    noise = torch.ones(2)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "noise": self.noise}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.noise = state_dict.pop("noise")
        super().load_state_dict(state_dict)


def test_a_tensor_of_an_optimizer_beside_its_state_comes_back(open_checkpointer) -> None:
    model = torch.nn.Linear(3, 3)
    optimizer, back = trained(model, Noisy), Noisy(model.parameters())
    optimizer.noise = torch.rand(2)
    saved_by(open_checkpointer, optimizer=optimizer).restore(optimizer=back)
    assert torch.equal(optimizer.noise, back.noise)


@pytest.mark.parametrize("saved", [7, {"a": 1}], ids=["a number", "a dictionary"])
def test_what_was_no_optimizer_is_not_restored_into_one(open_checkpointer, saved) -> None:
    checkpointer = saved_by(open_checkpointer, optimizer=saved)
    with pytest.raises(UsageError, match=r"lacks .* 'optimizer\.param_groups'"):
        checkpointer.restore(optimizer=torch.optim.SGD(torch.nn.Linear(3, 3).parameters()))


@pytest.mark.parametrize("then", [0, 1, 2])
@pytest.mark.parametrize("now", [0, 1, 2])
def test_modules_beside_the_model_change_nothing_for_its_optimizer(open_checkpointer, then, now) -> None:
    def beside(count: int) -> dict[str, torch.nn.Module]:
        return {f"a{at}": torch.nn.Linear(3, 3) for at in range(count)}

    model, other = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    optimizer, back = trained(model), torch.optim.AdamW(other.parameters())
    checkpointer = saved_by(open_checkpointer, model=model, optimizer=optimizer, **beside(then))
    checkpointer.restore(model=other, optimizer=back, strict=False, **beside(now))
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(optimizer.state[one]["exp_avg"], back.state[two]["exp_avg"])


def test_one_name_for_two_parameters_is_not_guessed_at(open_checkpointer) -> None:
    model, second, third = (torch.nn.Linear(3, 3) for _ in range(3))
    checkpointer = saved_by(open_checkpointer, model=model, optimizer=trained(model))
    both = torch.optim.AdamW([*second.parameters(), *third.parameters()])
    with pytest.raises(UsageError, match="optimizer state for 'weight', which this optimizer does not hold"):
        checkpointer.restore(model=second, third=third, optimizer=both, strict=False)


def test_state_goes_to_its_parameter_though_their_order_is_another(open_checkpointer) -> None:
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 3), "b": torch.nn.Linear(3, 3)})
    other = torch.nn.ModuleDict({"b": torch.nn.Linear(3, 3), "a": torch.nn.Linear(3, 3)})
    optimizer, back = trained(model), torch.optim.AdamW(other.parameters())
    saved_by(open_checkpointer, model=model, optimizer=optimizer).restore(model=other, optimizer=back)
    for name in ("a", "b"):
        one, two = optimizer.state[model[name].weight], back.state[other[name].weight]
        assert torch.equal(one["exp_avg"], two["exp_avg"])


def test_a_parameter_that_changed_its_group_is_refused(open_checkpointer) -> None:
    model = torch.nn.Linear(3, 3)
    groups = [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.5}]
    checkpointer = saved_by(open_checkpointer, model=model, optimizer=torch.optim.SGD(groups, lr=0.1))
    swapped = torch.optim.SGD([{"params": [model.bias]}, {"params": [model.weight]}], lr=0.1)
    with pytest.raises(UsageError, match="group 0 of the optimizer has other parameters"):
        checkpointer.restore(model=model, optimizer=swapped)
