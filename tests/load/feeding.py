"""What feeding must do on any device: run by the tests of the CPU and of the GPU."""

from __future__ import annotations

import numpy as np

import stoker
from stoker.load.loader import Loader


def as_lists(batches, name="input_ids"):
    return [batch[name].cpu().tolist() for batch in batches]


def options(**more):
    return {"batch_size": 4, "seq_len": 32, "chunk_bytes": 2048, **more}


def check_same_batches_as_the_loader(folder, device, **more):
    with (
        stoker.feed(folder, device=device, **options(**more)) as feeder,
        Loader(folder, **options(**more)) as loader,
    ):
        for _ in range(2):
            ours, theirs = list(feeder), list(loader)
            assert len(ours) == len(theirs) > 0
            for mine, other in zip(ours, theirs, strict=True):
                assert set(mine) == set(other)
                for name in other:
                    assert mine[name].cpu().tolist() == other[name].tolist(), name
                    assert mine[name].device.type == device.partition(":")[0]


def check_resume(folder, device, **more):
    with stoker.feed(folder, device=device, **options(**more)) as feeder:
        it = iter(feeder)
        for _ in range(5):
            next(it)
        state = feeder.state_dict()
        rest = as_lists(it)
    with stoker.feed(folder, device=device, **options(**more)) as again:
        again.load_state_dict(state)
        assert as_lists(again) == rest


def check_a_loop_left_early_goes_on(folder, device, **more):
    with stoker.feed(folder, device=device, **options(**more)) as feeder:
        seen = []
        for batch in feeder:
            seen.append(batch)
            if len(seen) == 3:
                break
        seen += list(feeder)
    with Loader(folder, **options(**more)) as loader:
        assert as_lists(seen) == as_lists(loader)


def check_wide_ids(folder, device):
    """Ids over 32,767 must not come out negative after travelling as int16."""
    with stoker.feed(folder, device=device, **options()) as feeder:
        largest = max(int(batch["labels"].max()) for batch in feeder)
        smallest = min(int(batch["labels"].min()) for batch in feeder)
    assert largest > 40000
    assert smallest >= 0


def number(sample):
    return {"number": int(sample["id.txt"]), "pixels": np.full((8, 8), int(sample["id.txt"]) % 256, np.uint8)}


def check_pairs_arrive(tars, device):
    with stoker.feed(tars, device=device, batch_size=5, transform=pair) as feeder:
        batches = list(feeder)
    assert sorted(n for _, numbers in batches for n in numbers.tolist()) == list(range(40))
    assert {one.device.type for batch in batches for one in batch} == {device.partition(":")[0]}


def pair(sample):
    return np.zeros((2, 3)), int(sample["id.txt"])


def check_samples_arrive(tars, device):
    with stoker.feed(tars, device=device, batch_size=5, transform=number) as feeder:
        batches = list(feeder)
    numbers = [n for batch in batches for n in batch["number"].tolist()]
    assert sorted(numbers) == list(range(40))
    for batch in batches:
        assert batch["pixels"].device.type == device.partition(":")[0]
        assert (batch["pixels"][:, 0, 0].cpu() == batch["number"].cpu() % 256).all()
