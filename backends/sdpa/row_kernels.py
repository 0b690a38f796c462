"""Rows of a call merged with, or added to, the rows of the whole where these lie: one launch each, in Triton.

    merge    m = max(lse, lse_b)     w = exp(lse - m)     w_b = exp(lse_b - m)
             out = (w out + w_b out_b) / (w + w_b)        lse = m + log(w + w_b)
    add      total = total + sum_g part_g                 g: query heads that share a key/value head

    program --> ROWS rows of one problem: lse, lse_b --> w, w_b (registers) --> those rows of out, out_b, in fp32 --> out, lse

Tensors are `(batch, heads, rows, head_dim)`, their last dimension contiguous, and `lse` `(batch, heads, rows)`, in any strides. A
row whose lse is -inf is not read, so whatever it holds cannot reach the result.
"""

from __future__ import annotations

from threading import Lock
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from dilkit.device import capturing

if TYPE_CHECKING:
    from torch import Tensor

NUMBERS = 2048
"""Numbers of a tensor per program, about: 16 for each of its threads. A guess until it is measured."""
LOWEST = tl.constexpr(-3.4028234663852886e38)
LSE_STRIDES = [f"{of}_{axis}" for of in ("lse", "part_lse") for axis in ("batch", "head", "row")]
"""Strides that depend on the length of the sequence: nothing is compiled again for one that is a multiple of 16, or 1."""


@triton.jit
def place(heads, rows, PADDED: tl.constexpr, ROWS: tl.constexpr):
    """Batch, head, rows and columns of a program."""
    blocks = (rows + ROWS - 1) // ROWS
    problem, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    batch, head = (problem // heads).to(tl.int64), (problem % heads).to(tl.int64)
    return batch, head, block.to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, PADDED)[None, :]


@triton.jit(do_not_specialize=["heads", "rows", *LSE_STRIDES])
def merge_rows(
    out,
    lse,
    part,
    part_lse,
    heads,
    rows,
    out_batch,
    out_head,
    out_row,
    lse_batch,
    lse_head,
    lse_row,
    part_batch,
    part_head,
    part_row,
    part_lse_batch,
    part_lse_head,
    part_lse_row,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Merge `ROWS` rows of one problem; `WIDTH` is head_dim, `PADDED` the power of two that holds it."""
    batch, head, row, column = place(heads, rows, PADDED, ROWS)
    inside = row < rows
    old_lse = lse + batch * lse_batch + head * lse_head + row * lse_row
    new_lse = part_lse + batch * part_lse_batch + head * part_lse_head + row * part_lse_row
    old_sum, new_sum = tl.load(old_lse, inside, float("-inf")), tl.load(new_lse, inside, float("-inf"))
    highest = tl.maximum(tl.maximum(old_sum, new_sum), LOWEST)  # -inf - -inf would be NaN
    old_weight, new_weight = tl.exp(old_sum - highest), tl.exp(new_sum - highest)
    weights = old_weight + new_weight
    total = tl.maximum(weights, 1.0)  # changes nothing but 0, of two rows without a key
    tl.debug_barrier()  # every warp holds the lse of these rows: none is written before all have read
    tl.store(old_lse, tl.where(weights == 0.0, float("-inf"), highest + tl.log(total)), inside)
    old_rows = out + (batch * out_batch + head * out_head + row * out_row)[:, None] + column
    new_rows = part + (batch * part_batch + head * part_head + row * part_row)[:, None] + column
    in_width = column < WIDTH
    old = tl.load(old_rows, in_width & (old_weight != 0.0)[:, None], 0.0).to(tl.float32)
    new = tl.load(new_rows, in_width & (new_weight != 0.0)[:, None], 0.0).to(tl.float32)
    merged = (old_weight[:, None] * old + new_weight[:, None] * new) / total[:, None]
    tl.store(old_rows, merged.to(out.dtype.element_ty), in_width & inside[:, None])


@triton.jit(do_not_specialize=["heads", "rows", "group"])
def add_rows(
    total,
    part,
    heads,
    rows,
    group,
    total_batch,
    total_head,
    total_row,
    part_batch,
    part_head,
    part_row,
    part_group,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Add `group` rows of `part`, `part_group` apart, to each of `ROWS` rows of `total`."""
    batch, head, row, column = place(heads, rows, PADDED, ROWS)
    here = (column < WIDTH) & (row < rows)[:, None]
    whole = total + (batch * total_batch + head * total_head + row * total_row)[:, None] + column
    first = part + (batch * part_batch + head * part_head + row * part_row)[:, None] + column
    summed = tl.load(first, here, 0.0).to(tl.float32)
    for _ in range(1, group):
        first += part_group
        summed += tl.load(first, here, 0.0).to(tl.float32)
    summed += tl.load(whole, here, 0.0).to(tl.float32)
    tl.store(whole, summed.to(total.dtype.element_ty), here)


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    strides = (*out.stride()[:3], *lse.stride(), *part.stride()[:3], *part_lse.stride())
    _launch(merge_rows, out, out, lse, part, part_lse, *out.shape[1:3], *strides)


def add(total: Tensor, part: Tensor) -> None:
    """Add `part` to `total`. Where the batch or the heads of `total` have the stride 0, all of `part` there goes to one place."""
    if total.shape[0] > 1 and not total.stride(0):
        total, part = total.transpose(0, 1), part.transpose(0, 1)
    heads, group = (total.shape[1], 1) if total.stride(1) or total.shape[1] == 1 else (1, total.shape[1])
    problems = total[:, :heads]
    strides = (*total.stride()[:3], *part.stride()[:3], part.stride(1))
    _launch(add_rows, problems, total, part, heads, total.shape[2], group, *strides)


_LAUNCHING: dict[torch.device, Lock] = {}
"""Held for a launch on a device: a kernel that a thread is loading there is broken for another thread that launches it."""


def _launch(kernel: Any, problems: Tensor, *arguments: Any) -> None:
    batch, heads, rows, width = problems.shape
    padded = 1 << (width - 1).bit_length()  # Triton's own functions of integers take microseconds
    at_once = max(1, NUMBERS // padded)
    programs = batch * heads * -(-rows // at_once)
    options: dict[str, Any] = dict(WIDTH=width, PADDED=padded, ROWS=at_once, enable_fp_fusion=False)
    with torch.cuda.device_of(problems), _LAUNCHING.setdefault(problems.device, Lock()):
        if capturing(problems.device) and kernel.warmup(*arguments, grid=(programs,), **options).module is None:
            raise RuntimeError(
                f"a merge kernel is not loaded on {problems.device}, and cannot be while a CUDA graph is captured: make the same "
                "call once before"
            )
        kernel[(programs,)](*arguments, **options)
