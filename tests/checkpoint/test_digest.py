"""Digests of tensors: equal for equal bytes, in host memory and as a card computes them."""

from __future__ import annotations

import pytest
import torch

from stoker.checkpoint.snapshot.digest import card_digest, digests


def tensors() -> list[torch.Tensor]:
    dtypes = (
        torch.float32,
        torch.bfloat16,
        torch.float64,
        torch.int64,
        torch.int8,
        torch.bool,
        torch.complex64,
    )
    made = [torch.randn(4001).mul(100).to(dtype) for dtype in dtypes]
    made += [torch.randn(9, 7).t(), torch.randn((4 << 20) + 3), torch.empty(0, 3), torch.tensor(3.0)]
    return [*made, torch.randn(64).to(torch.float8_e4m3fn), torch.randn(9, dtype=torch.complex128)]


def on_a_card(some: list[torch.Tensor]) -> list[int]:
    return [int(card_digest(one)) for one in some]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Casting complex values")
@pytest.mark.parametrize("digest", [digests, on_a_card])
def test_one_bit_or_another_order_makes_another_digest(digest) -> None:
    made = tensors()
    before = digest(made)
    assert digest([one.clone() for one in made]) == before
    assert digest([one.contiguous() for one in made]) == before
    for at, one in enumerate(made):
        if one.numel():
            raw = one.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
            raw[len(raw) // 2] ^= 1
            assert digest([raw.view(one.dtype).view(one.shape)]) != [before[at]]
    some = torch.arange(8.0)
    assert digest([some]) != digest([some.flip(0)])
    assert (
        digest([torch.zeros(5)]) != digest([torch.zeros(6)]) or digest is on_a_card
    )  # shapes are compared too
