"""A transform over many samples: each once, in their order, in stretches that all threads share."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import UsageError
from stoker.load.assembly.transform import Transforms


@given(st.lists(st.integers(), max_size=40), st.integers(1, 5))
def test_what_becomes_of_samples_comes_in_their_order_whatever_the_threads(samples, threads):
    handed, seen = [], []

    class Watched(ThreadPoolExecutor):
        def submit(self, call, some, *rest):
            handed.append(len(some))
            return super().submit(call, some, *rest)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("stoker.load.assembly.transform.ThreadPoolExecutor", Watched)
        transforms = Transforms(lambda sample: (sample, "made"), threads=threads)
        made = transforms.of(samples, named="sample {}".format, on_sample=seen.append)
        transforms.close()
        transforms.close()
    assert made == [(sample, "made") for sample in samples]
    assert sorted(seen) == sorted(f"sample {at}" for at in range(len(samples)))
    assert sum(handed) in (0, len(samples))
    assert len(handed) <= 2 * threads, "a task for each sample costs more than it does"
    assert not handed or threads > 1
    assert handed or threads == 1 or len(samples) < 2


@given(st.integers(1, 20), st.integers(1, 3), st.data())
def test_an_error_says_which_sample_it_was_in(count, threads, data):
    bad = data.draw(st.integers(0, count - 1))
    transforms = Transforms(lambda sample: 1 // (sample != bad), threads=threads)
    try:
        with pytest.raises(ZeroDivisionError) as raised:
            transforms.of(range(count), named="sample {}".format, on_sample=lambda name: None)
    finally:
        transforms.close()
    assert getattr(raised.value, "__notes__", [f"in transform of sample {bad}"]) == [
        f"in transform of sample {bad}"
    ]


@given(st.lists(st.integers(), max_size=40), st.integers(1, 5))
def test_samples_that_are_still_to_come_keep_their_order(samples, threads):
    seen: list[str] = []
    transforms = Transforms(lambda sample: (sample, "made"), threads=threads)
    made = transforms.of_coming(iter(samples), named="sample {}".format, on_sample=seen.append)
    transforms.close()
    assert made == [(sample, "made") for sample in samples]
    assert sorted(seen) == sorted(f"sample {at}" for at in range(len(samples)))


def test_the_first_sample_does_not_wait_for_the_last_to_come():
    is_made = threading.Event()

    def coming():
        yield 0
        assert is_made.wait(60)
        yield 1

    transforms = Transforms(lambda sample: is_made.set() or sample, threads=2)
    assert transforms.of_coming(coming(), named=str, on_sample=lambda name: None) == [0, 1]
    transforms.close()


@given(st.sets(st.integers(0, 19), min_size=1), st.integers(1, 4), st.booleans())
def test_of_samples_still_to_come_the_first_error_is_raised(bad, threads, is_theirs):
    """Of a transform, or of what makes the samples; one that ends iterations is an error too."""

    def coming():
        for sample in range(20):
            if is_theirs and sample in bad:
                raise ZeroDivisionError(sample)
            yield sample

    def transform(sample):
        if sample in bad:
            raise StopIteration(sample)
        return sample

    transforms = Transforms(transform, threads=threads)
    try:
        with pytest.raises(ZeroDivisionError if is_theirs else (StopIteration, RuntimeError)) as raised:
            transforms.of_coming(coming(), named=str, on_sample=lambda name: None)
    finally:
        transforms.close()
    assert raised.value.args == (min(bad),)


def test_what_cannot_be_called_is_refused():
    with pytest.raises(UsageError, match="cannot be called"):
        Transforms(7)
