"""The crop kernel: boxes of decoded images resized, turned, mirrored and made numbers of, in one pass over a
whole batch. The home of triton; `crops.py` has its twin.

The weights are Pillow's for its antialiased bilinear resize; those of both directions are multiplied for each
pixel that is looked at.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_ROWS, _ACROSS = 8, 32  # pixels of one program


def crop(
    arena: torch.Tensor,
    at: torch.Tensor,
    whole: torch.Tensor,
    boxes: torch.Tensor,
    out: torch.Tensor,
    scaling: tuple[float, ...],
) -> None:
    """Crops of images in `arena` into rows of `out`, on the current stream; see `crops.Cuts`."""
    side = out.shape[1]
    grid = (len(at), triton.cdiv(side, _ROWS) * triton.cdiv(side, _ACROSS))
    _crop[grid](
        arena,
        at,
        whole,
        boxes,
        out,
        side,
        *scaling,
        IS_BYTES=out.dtype == torch.uint8,
        ROWS=_ROWS,
        ACROSS=_ACROSS,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _crop(  # type: ignore[no-untyped-def]
    arena, at, whole, boxes, out, side, mean0, mean1, mean2, std0, std1, std2,
    IS_BYTES: tl.constexpr, ROWS: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    n, tile = tl.program_id(0), tl.program_id(1)
    across = tl.cdiv(side, ACROSS)
    r = (tile // across) * ROWS + tl.arange(0, ROWS)
    c = (tile % across) * ACROSS + tl.arange(0, ACROSS)
    row = tl.load(whole + n * 12)
    pitch = tl.load(whole + n * 12 + 1)
    plane = pitch.to(tl.int64) * tl.load(whole + n * 12 + 2)
    left, top = tl.load(boxes + n * 4), tl.load(boxes + n * 4 + 1)
    by_x = (tl.load(boxes + n * 4 + 2) - left) / side
    by_y = (tl.load(boxes + n * 4 + 3) - top) / side
    wide, high = tl.maximum(by_x, 1.0), tl.maximum(by_y, 1.0)
    x_at, y_at = left + (c + 0.5) * by_x, top + (r + 0.5) * by_y
    x_first = tl.maximum(tl.floor(x_at - wide + 0.5).to(tl.int32), tl.load(whole + n * 12 + 3))
    y_first = tl.maximum(tl.floor(y_at - high + 0.5).to(tl.int32), tl.load(whole + n * 12 + 4))
    x_end = tl.minimum(tl.floor(x_at + wide + 0.5).to(tl.int32), tl.load(whole + n * 12 + 5))
    y_end = tl.minimum(tl.floor(y_at + high + 0.5).to(tl.int32), tl.load(whole + n * 12 + 6))
    red = arena + tl.load(at + n)
    s0 = tl.zeros((ROWS, ACROSS), tl.float32)
    s1 = tl.zeros((ROWS, ACROSS), tl.float32)
    s2 = tl.zeros((ROWS, ACROSS), tl.float32)
    sum_y = tl.zeros((ROWS,), tl.float32)
    sum_x = tl.zeros((ACROSS,), tl.float32)
    for k in range((2 * high).to(tl.int32) + 2):
        y = y_first + k
        weight_y = tl.where(y < y_end, tl.maximum(1.0 - tl.abs(y + 0.5 - y_at) / high, 0.0), 0.0)
        sum_y += weight_y
        sum_x = tl.zeros((ACROSS,), tl.float32)
        for m in range((2 * wide).to(tl.int32) + 2):
            x = x_first + m
            weight_x = tl.where(x < x_end, tl.maximum(1.0 - tl.abs(x + 0.5 - x_at) / wide, 0.0), 0.0)
            sum_x += weight_x
            is_there = (y < y_end)[:, None] & (x < x_end)[None, :]
            there = red + y.to(tl.int64)[:, None] * pitch + x[None, :]
            weight = weight_y[:, None] * weight_x[None, :]
            s0 += weight * tl.load(there, mask=is_there, other=0).to(tl.float32)
            s1 += weight * tl.load(there + plane, mask=is_there, other=0).to(tl.float32)
            s2 += weight * tl.load(there + 2 * plane, mask=is_there, other=0).to(tl.float32)
    scale = 1.0 / (sum_y[:, None] * sum_x[None, :])
    s0, s1, s2 = tl.floor(s0 * scale + 0.5), tl.floor(s1 * scale + 0.5), tl.floor(s2 * scale + 0.5)
    y = tl.where(tl.load(whole + n * 12 + 8) != 0, side - 1 - r, r)
    x = tl.where(tl.load(whole + n * 12 + 9) != 0, side - 1 - c, c)
    is_inside = ((y >= 0) & (y < side))[:, None] & ((x >= 0) & (x < side))[None, :]
    is_turned = tl.load(whole + n * 12 + 7) != 0
    down = tl.where(
        is_turned, tl.broadcast_to(x[None, :], (ROWS, ACROSS)), tl.broadcast_to(y[:, None], (ROWS, ACROSS))
    )
    over = tl.where(
        is_turned, tl.broadcast_to(y[:, None], (ROWS, ACROSS)), tl.broadcast_to(x[None, :], (ROWS, ACROSS))
    )
    over = tl.where(tl.load(whole + n * 12 + 10) != 0, side - 1 - over, over)
    to = out + row.to(tl.int64) * side * side * 3 + (down * side + over) * 3
    if IS_BYTES:
        tl.store(to, s0.to(tl.uint8), mask=is_inside)
        tl.store(to + 1, s1.to(tl.uint8), mask=is_inside)
        tl.store(to + 2, s2.to(tl.uint8), mask=is_inside)
    else:  # divided as torch divides: the same numbers
        tl.store(to, tl.div_rn(tl.div_rn(s0, 255.0) - mean0, std0), mask=is_inside)
        tl.store(to + 1, tl.div_rn(tl.div_rn(s1, 255.0) - mean1, std1), mask=is_inside)
        tl.store(to + 2, tl.div_rn(tl.div_rn(s2, 255.0) - mean2, std2), mask=is_inside)
