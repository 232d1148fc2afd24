"""What a checkpoint can hold comes back as what it was, and what it cannot hold is refused by name."""

from __future__ import annotations

import enum
import inspect
from collections import Counter, OrderedDict, defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor  # as quantized and float8 tensors are made

from stoker.checkpoint.checkpointer import Checkpointer
from stoker.checkpoint.saved.layout import item_bytes
from stoker.checkpoint.saved.values import decode, encode
from stoker.checkpoint.snapshot.state import RESERVED
from stoker.errors import UsageError


class Colour(enum.Enum):
    RED = 1


class Named(str, enum.Enum):
    RED = "red"


class Counted(enum.IntEnum):
    ONE = 1


@pytest.mark.parametrize(
    "value",
    [
        frozenset({1}),
        {frozenset({1, 2}), (frozenset({3}), 4)},
        ({frozenset({1}): 2},),
        {((1, 2), None): 4},
        {1.5: {True: 3}},
        {Named.RED: 1, Counted.ONE: [{"a": 1}]},
        Counter({3: 2, 5: 1}),
        Counter(),
        defaultdict(list, a=[1]),
        OrderedDict(),
        bytearray(b"ab"),
    ],
    ids=str,
)
def test_a_plain_value_comes_back_as_what_it_was(open_checkpointer, value: Any) -> None:
    with open_checkpointer() as checkpointer:
        checkpointer.save(1, value=value)
    back = open_checkpointer().restore().extras["value"]
    assert (back, type(back)) == (value, type(value))


@pytest.mark.parametrize("kind", [dict, list], ids=["a dictionary", "a list"])
def test_what_holds_itself_is_refused_by_name(open_checkpointer, kind: type) -> None:
    endless: Any = kind()
    endless.update(more=endless) if isinstance(endless, dict) else endless.append([endless])
    with open_checkpointer() as checkpointer, pytest.raises(UsageError, match="state holds itself"):
        checkpointer.save(1, state=endless)


def test_a_schedule_with_milestones_goes_on_after_a_restore(open_checkpointer) -> None:
    def schedule() -> torch.optim.lr_scheduler.MultiStepLR:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
        return torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 9])

    first, second = schedule(), schedule()
    with open_checkpointer() as checkpointer:
        checkpointer.save(1, schedule=first)
    open_checkpointer().restore(schedule=second)
    assert (second.milestones, type(second.milestones)) == (Counter({2: 2, 9: 1}), Counter)
    second.optimizer.step()
    second.step()  # asks its Counter for a step that is no milestone


def test_a_defaultdict_of_a_function_is_refused_by_name(open_checkpointer) -> None:
    with pytest.raises(UsageError, match=r"value is a defaultdict whose default is .*lambda"):
        open_checkpointer().save(1, value=defaultdict(lambda: 3, a=1))


def test_every_dtype_of_torch_has_its_size_or_is_refused() -> None:
    words = [word for word in dir(torch) if isinstance(getattr(torch, word), torch.dtype)]
    dtypes = {str(getattr(torch, word)).removeprefix("torch.") for word in words}
    quantized = {"qint8", "quint8", "qint32", "quint4x2", "quint2x4"}  # refused as tensors
    for word in dtypes - quantized:
        assert item_bytes(word) == getattr(torch, word).itemsize, word
    with pytest.raises(UsageError, match="float9 is a dtype that this stoker does not know"):
        item_bytes("float9")


def test_sixteen_bits_without_a_meaning_come_back_whole(open_checkpointer) -> None:
    bits = torch.arange(1000, dtype=torch.int16).view(torch.bits16)
    with open_checkpointer() as checkpointer:
        checkpointer.save(1, state={"bits": bits})
    back = open_checkpointer().load()["state"]["bits"]
    assert torch.equal(back.view(torch.int16), bits.view(torch.int16))


def test_a_set_of_sets_of_an_earlier_version_can_be_read() -> None:
    inner = {"~": "set", "v": [1, 2]}
    assert decode({"~": "set", "v": [inner, {"~": "tuple", "v": [inner]}]}) == {
        frozenset({1, 2}),
        (frozenset({1, 2}),),
    }
    assert decode(inner) == {1, 2}
    assert decode({"~": "dict", "v": [[inner, 3]]}) == {frozenset({1, 2}): 3}


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (np.array([(1, 2.5)], dtype=[("a", "i4"), ("b", "f8")]), "an array of records"),
        (np.array([(1, 2.5)], dtype=[("a", "i4"), ("b", "f8")])[0], "an array of records"),
        (np.ma.array([1, 2], mask=[0, 1]), "a masked array"),
        (np.array([object()]), "an array of Python objects"),
        (np.zeros(2, "V3"), r"an array of \|V3"),
    ],
    ids=["records", "record", "masked", "objects", "void"],
)
def test_an_array_that_would_come_back_as_another_is_refused(value: Any, said: str) -> None:
    with pytest.raises(UsageError, match=rf"state\.a\[1\] is {said}"):
        encode([0, value], name="state.a")


@pytest.mark.parametrize("key", [np.int64(3), b"a", Colour.RED, frozenset({1}), (1, Colour.RED)], ids=repr)
def test_a_key_that_json_has_no_word_for_is_refused(open_checkpointer, key: Any) -> None:
    checkpointer = open_checkpointer()
    checkpointer.save(1, state={"inner": {"a": 4}, "w": torch.ones(2)})  # its plan is kept
    checkpointer.wait()
    with pytest.raises(UsageError, match=r"state\.inner has the key .*which a checkpoint cannot hold"):
        checkpointer.save(2, state={"inner": {key: 4}, "w": torch.ones(2)})


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(3)


def freed() -> torch.Tensor:
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)
    return tensor


STRANGE = [
    ("TwoTensor", lambda: TwoTensor(torch.ones(3), torch.ones(3))),
    ("TwoTensor", lambda: torch.nn.Parameter(TwoTensor(torch.ones(3), torch.ones(3)))),
    ("FakeTensor", fake),
    ("lazy", torch.nn.UninitializedParameter),
    ("nested", lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])),
    ("nested", lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)),
    ("torch.sparse_csr", lambda: torch.eye(3).to_sparse_csr()),
    ("freed", freed),
]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Sparse CSR tensor support")
@pytest.mark.parametrize(("kind", "make"), STRANGE)
def test_a_tensor_without_memory_of_its_own_is_refused(open_checkpointer, kind, make) -> None:
    tensor = make()
    with pytest.raises(UsageError, match=rf"state\.a is a {kind} tensor"):
        open_checkpointer().save(1, state={"a": tensor})


def test_a_tensor_that_became_a_wrapper_is_refused_though_the_plan_is_kept(open_checkpointer) -> None:
    checkpointer = open_checkpointer()
    checkpointer.save(1, state={"a": torch.ones(3)})
    checkpointer.wait()
    with pytest.raises(UsageError, match=r"state\.a is a TwoTensor"):
        checkpointer.save(2, state={"a": TwoTensor(torch.ones(3), torch.ones(3))})


def test_a_wrapper_is_not_restored_into(open_checkpointer) -> None:
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    checkpointer = open_checkpointer()
    checkpointer.save(1, model=model, state={"a": torch.ones(3)}, optimizer=optimizer)
    checkpointer.wait()
    other = torch.nn.Linear(3, 3)
    other.weight = torch.nn.Parameter(TwoTensor(torch.ones(3, 3), torch.ones(3, 3)))
    wrapped = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    for given, said in (
        ({"model": other}, r"model\.weight is a TwoTensor"),
        ({"state": {"a": TwoTensor(torch.ones(3), torch.ones(3))}}, r"state\.a is a TwoTensor"),
        ({"optimizer": wrapped, "modell": other}, r"optimizer.* is a TwoTensor without memory of its own"),
        ({"model": torch.nn.LazyLinear(3)}, r"model\.weight is a lazy tensor"),
    ):
        with pytest.raises(UsageError, match=said):
            checkpointer.restore(strict=False, **given)


def test_no_object_can_have_the_name_of_an_option(open_checkpointer) -> None:
    """Or it could be saved and not restored: `restore(name=...)` asks for a checkpoint of that name."""
    options = {
        name
        for method in (Checkpointer.save, Checkpointer.restore)
        for name, one in inspect.signature(method).parameters.items()
        if one.kind is not inspect.Parameter.VAR_KEYWORD and name != "step"
    }
    assert options == RESERVED
    checkpointer = open_checkpointer(every=1)
    with pytest.raises(UsageError, match=r"'metric' is a word of save.*\n.*takes a metric"):
        checkpointer.step(1, metric=0.5)  # what keep_best goes by, given where it would be lost
    with pytest.raises(UsageError, match="'name' is a word of save"):
        checkpointer.save(1, name={"w": torch.ones(2)})
