"""Which batch sizes are tried, and where they stand in a command."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import UsageError
from stoker.watch.sizes import find_flag, visits

TRAIN = ("python", "train.py", "--lr", "8")


@pytest.mark.parametrize(
    "name",
    ["--batch-size", "--batch_size", "--per_device_train_batch_size", "--micro-batch-size", "--bs"],
)
def test_a_usual_flag_is_found_in_both_spellings(name: str) -> None:
    apart, together = find_flag((*TRAIN, name, "8", "-v")), find_flag((*TRAIN, f"{name}=8", "-v"))
    assert (apart.name, apart.batch) == (together.name, together.batch) == (name, 8)
    assert apart.command_with(16) == (*TRAIN, name, "16", "-v")
    assert together.command_with(4) == (*TRAIN, f"{name}=4", "-v")


@pytest.mark.parametrize(
    ("name", "words"), [("-b", ("-b", "6")), ("data.size", ("data.size=6",)), ("--n_seq", ("--n_seq=6",))]
)
def test_any_other_flag_is_found_by_its_name(name: str, words: tuple[str, ...]) -> None:
    assert find_flag((*TRAIN, "--batch-size", "2", *words), name=name).batch == 6


def test_the_last_of_several_counts() -> None:
    found = find_flag((*TRAIN, "--bs", "2", "--bs", "8"))
    assert found.command_with(4) == (*TRAIN, "--bs", "2", "--bs", "4")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "none of --batch-size"),
        (("--batch-size",), "not given a value"),
        (("--batch-size", "7"), "--batch-size is 7"),
        (("--batch-size=0",), "--batch-size is 0"),
        (("--batch-size", "auto"), "--batch-size is auto"),
        (("--batch-size", "²"), "--batch-size is ²"),
        (("--bs", "8", "--micro-batch-size", "2"), "--bs and --micro-batch-size"),
    ],
)
def test_what_cannot_be_halved_or_found_is_refused(words: tuple[str, ...], said: str) -> None:
    with pytest.raises(UsageError, match=said) as refused:
        find_flag((*TRAIN, *words))
    assert refused.value.hint


def test_a_flag_that_was_named_and_is_not_there_is_refused() -> None:
    with pytest.raises(UsageError, match="no --tokens"):
        find_flag((*TRAIN, "--batch-size", "8"), name="--tokens")


@given(half=st.integers(1, 1 << 20), window_s=st.floats(0.1, 1000))
def test_every_size_is_in_the_middle_on_average_and_has_one_window(half: int, window_s: float) -> None:
    planned = visits(2 * half, window_s=window_s)
    for size in (half, 2 * half, 4 * half):
        at = [number for number, one in enumerate(planned) if one.batch == size]
        assert sum(at) / len(at) == (len(planned) - 1) / 2
        assert sum(planned[number].window_s for number in at) == pytest.approx(window_s)
    assert len({one.folder for one in planned}) == len(planned)
