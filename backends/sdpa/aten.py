"""Calls of torch's fused attention operators: a forward and a backward function for each.

A forward function takes `q` `(batch, heads, rows, head_dim)`, `k, v` `(batch, heads, keys, head_dim)` and a contiguous `mask`
`(batch, heads, keys)` of ignored keys or None; with `causal`, there are as many keys as rows. It returns `out` and `lse`
`(batch, heads, rows)`. A backward function takes `dout` first, and the `out` and `lse` of the whole softmax, of which the keys of
this call may be a part; `lse` is contiguous, and +inf in rows that see nothing.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    Gradients = tuple[Tensor, Tensor, Tensor]


@lru_cache(maxsize=32)
def _aten(name: str) -> Any:
    import torch

    return getattr(torch.ops.aten, name).default


def _bias(mask: Tensor | None, dtype: Any) -> Tensor | None:
    """-inf where `mask`, else 0: `(batch, heads, 1, keys)`."""
    if mask is None:
        return None
    return mask.new_zeros(mask.shape, dtype=dtype).masked_fill_(mask, -float("inf")).unsqueeze(2)


_TILE, _ALIGNED_ROWS = 32, 16
"""The fewest queries that torch's CPU kernel gives to a thread at once, where there are as many; what these are filled up to."""


def cpu_forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    bias, batch, rows = _bias(mask, q.dtype), q.shape[0], q.shape[2]
    if rows <= _TILE:
        q, k, v = _at_least_two(_aligned_rows(q), k, v)
    run = _aten("_scaled_dot_product_flash_attention_for_cpu")
    out, lse = run(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
    return out[:batch, :, :rows], lse[:batch, :, :rows]


def cpu_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> Gradients:
    bias, batch = _bias(mask, q.dtype), q.shape[0]
    run = _aten("_scaled_dot_product_flash_attention_for_cpu_backward")
    dq, dk, dv = run(*_at_least_two(dout, q, k, v, out, lse), 0.0, causal, attn_mask=bias, scale=scale)
    return dq[:batch], dk[:batch], dv[:batch]


def _at_least_two(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Repeat a single problem: torch splits the matmuls of one among threads, and the split changes the rounding."""
    alone = tensors[0].shape[:2].numel() == 1
    return tuple(x.expand(2, *x.shape[1:]) for x in tensors) if alone else tensors


def _aligned_rows(q: Tensor) -> Tensor:
    """Pad `q` with rows that keep the kernel's scratch memory aligned on every thread: matmuls round by alignment."""
    batch, heads, rows, width = q.shape
    if rows % _ALIGNED_ROWS == 0:
        return q
    tile = q.new_zeros(batch, heads, _up(rows, _ALIGNED_ROWS), width)
    tile[:, :, :rows] = q
    return tile


def _no_dropout(like: Tensor, dtype: str, *shape: int) -> Tensor:
    """Return an uninitialised random-generator state, which is never read without dropout."""
    import torch

    return torch.empty(shape, dtype=getattr(torch, dtype), device=like.device)


def flash_forward(q: Tensor, k: Tensor, v: Tensor, mask: None, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    out, lse, *_ = _aten("_scaled_dot_product_flash_attention")(q, k, v, 0.0, causal, False, scale=scale)
    return out, lse


def flash_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: None, causal: bool, scale: float
) -> Gradients:
    rows, keys = q.shape[2], k.shape[2]
    random = _no_dropout(q, "uint64", 2), _no_dropout(q, "uint64")
    run = _aten("_scaled_dot_product_flash_attention_backward")
    dq, dk, dv = run(dout, q, k, v, out, lse, None, None, rows, keys, 0.0, causal, *random, scale=scale)
    return dq, dk, dv


@lru_cache(maxsize=1)
def _cudnn_lse_dims() -> int:
    """4 where cuDNN's operators give and take lse as `(batch, heads, rows, 1)`, as from torch 2.9 on, and 3 without the 1."""
    import torch

    x = torch.empty(1, 1, 2, 8, dtype=torch.bfloat16, device="meta")
    lse: Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention.default(x, x, x, None, True, 0.0, False, False, scale=1.0)[1]
    return lse.dim()


def cudnn_forward(q: Tensor, k: Tensor, v: Tensor, mask: None, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    out, lse, *_ = _aten("_scaled_dot_product_cudnn_attention")(q, k, v, None, True, 0.0, causal, False, scale=scale)
    return out, lse.squeeze(-1)


def cudnn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: None, causal: bool, scale: float
) -> Gradients:
    rows, keys = q.shape[2], k.shape[2]
    random = _no_dropout(q, "int64"), _no_dropout(q, "int64")
    run = _aten("_scaled_dot_product_cudnn_attention_backward")
    no_bias_or_ranges = None, None, None
    lse = lse.unsqueeze(-1) if _cudnn_lse_dims() == 4 else lse
    dq, dk, dv = run(dout, q, k, v, out, lse, *random, *no_bias_or_ranges, rows, keys, 0.0, causal, scale=scale)
    return dq, dk, dv


_ALIGNED_KEYS, _ALIGNED_LSE = 16, 32
"""Rows of the bias of the memory-efficient kernel start at multiples of so many elements; rows of `lse` have such a multiple."""


def _padded_bias(mask: Tensor | None, q: Tensor) -> Tensor | None:
    """Make `_bias` with aligned rows, expanded over the queries to `(batch, heads, rows, keys)` without copies."""
    if mask is None:
        return None
    *sizes, keys = mask.shape
    room = mask.new_zeros((*sizes, _up(keys, _ALIGNED_KEYS)), dtype=q.dtype).narrow(-1, 0, keys)
    return room.masked_fill_(mask, -float("inf")).unsqueeze(2).expand(-1, -1, q.shape[2], -1)


def _up(size: int, step: int) -> int:
    return -(-size // step) * step


def efficient_forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    bias = _padded_bias(mask, q)
    out, lse, *_ = _aten("_scaled_dot_product_efficient_attention")(q, k, v, bias, True, 0.0, causal, scale=scale)
    return out, lse.narrow(-1, 0, q.shape[2])


def efficient_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> Gradients:
    bias, rows = _padded_bias(mask, q), q.shape[2]
    # For halves the kernel itself sums dout * out, and takes the rows of `out` to be as far apart as all its heads are wide.
    out = out.transpose(1, 2).contiguous().transpose(1, 2)
    padded = lse.new_full((*lse.shape[:2], _up(rows, _ALIGNED_LSE)), float("inf"))
    padded.narrow(-1, 0, rows).copy_(lse)
    random = _no_dropout(q, "int64"), _no_dropout(q, "int64")
    run = _aten("_scaled_dot_product_efficient_attention_backward")
    dq, dk, dv, _ = run(dout, q, k, v, bias, out, padded, *random, 0.0, [True, True, True, False], causal, scale=scale)
    return dq, dk, dv
