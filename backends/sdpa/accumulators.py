"""Accumulators of the sdpa backend: outputs of calls merge by their lse, gradients of calls add up, both on views of the whole.

    lse = log(exp(lse_a) + exp(lse_b))        out = exp(lse_a - lse) * out_a + exp(lse_b - lse) * out_b

A first result that already lies in memory as the whole does is adopted, not copied. Later ones are overwritten where they lie.
The bits must not depend on the number of threads more than the kernel's do, so every operator used here computes each element
alike wherever torch splits a tensor: exp, log, and operations that round once. `sigmoid`, `logaddexp`, `lerp` and `sum` do not.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from dilkit.backends.sdpa.strided_calls import StridedCall, TensorStrides
from dilkit.problem import Problem

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def has_parts(problem: Problem) -> bool:
    """True if a row may have several partial results, from several branches or from tiles of one."""
    return len(problem.pattern.branches) > 1 or not problem.pattern.only_segments


class OutputAccumulator:
    """`out` and `lse` of the partial results added so far. Halves are merged in fp32 where a row has more than one of them."""

    def __init__(self, query: Tensor, problem: Problem) -> None:
        import torch

        batch, seq, heads, _ = query.shape
        kind = torch.float64 if query.dtype == torch.float64 else torch.float32
        self.lse = query.new_full((batch, heads, seq), -math.inf, dtype=kind)
        self.like = query
        self.dtype = kind if has_parts(problem) else query.dtype
        self.out: Tensor | None = None

    def add(self, call: StridedCall, out: Tensor, lse: Tensor) -> None:
        """Merge the partial result of a call: `out` `(batch, heads, rows, head_dim)` and `lse` `(batch, heads, rows)`."""
        old, new = call.view(self.lse.transpose(1, 2).unsqueeze(-1)).squeeze(-1), _on_grid(call, lse)
        merged, old_share, new_share = merge_lse(old, new)
        first = adopted(call, out, self.like) if self.out is None else None
        if first is not None:
            self.out = first.to(self.dtype)
        else:
            self.out = zeros(self.like, self.dtype) if self.out is None else self.out
            old_share, new_share = (x.to(self.dtype).unsqueeze(-1) for x in (old_share, new_share))
            # Cut along the longest dimension: the fp32 copies of halves stay small.
            tensors = call.view(self.out), old_share, _on_grid(call, out), new_share
            sizes = old_share.shape[:-1]
            dim = sizes.index(max(sizes))
            for whole, keep, part, share in zip(*(x.chunk(8, dim) for x in tensors), strict=True):
                whole.mul_(keep).add_(part.to(self.dtype).mul_(share))
        old.copy_(merged)

    def result(self) -> tuple[Tensor, Tensor]:
        """`out`, contiguous and in the dtype of the query, and `lse` `(batch, heads, seq)`."""
        out = zeros(self.like, self.dtype) if self.out is None else self.out
        return out.to(self.like.dtype), self.lse


class GradientAccumulator:
    """The gradient of `like`: the sum of the gradients of calls. Halves are summed in fp32 when there is more than one term.

    `kv`: `like` has key/value heads, and the gradients to be added have query heads.
    """

    def __init__(self, like: Tensor, problem: Problem, kv: bool = False) -> None:
        import torch

        several = has_parts(problem) or (kv and problem.heads > problem.kv_heads)
        self.like, self.kv = like, kv
        self.dtype = torch.promote_types(like.dtype, torch.float32) if several else like.dtype
        self.total: Tensor | None = None

    def add(self, call: StridedCall, part: Tensor) -> None:
        """Add a call's gradient `(batch, heads, rows, head_dim)`; query heads of one key/value head are summed."""
        part = part.to(self.dtype)
        if self.total is None and (first := adopted(call, part, self.like, self.kv)) is not None:
            self.total = first
            return
        self.total = zeros(self.like, self.dtype) if self.total is None else self.total
        part, view = _on_grid(call, part), call.view(self.total, self.kv)
        for dim, axis in enumerate(call.axes):
            if self.kv and not (axis.kv_head or axis.row or axis.batch):
                part, *others = (part.narrow(dim, i, 1) for i in range(axis.size))
                for other in others:
                    part.add_(other)
                view = view.narrow(dim, 0, 1)
        view.add_(part)

    def result(self) -> Tensor:
        """The gradient, contiguous and in the dtype of `like`."""
        total = zeros(self.like, self.dtype) if self.total is None else self.total
        return total.to(self.like.dtype)


def merge_lse(old: Tensor, new: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The merged lse, and the shares `exp(old - lse)` and `exp(new - lse)`; -inf, 0 and 0 where both are -inf."""
    import torch

    highest = torch.maximum(old, new).clamp_min_(torch.finfo(old.dtype).min)  # -inf - -inf would be NaN
    of_old, of_new = (old - highest).exp_(), (new - highest).exp_()
    total = of_old + of_new
    lse = highest.add_(total.log())
    total.clamp_min_(1.0)  # changes nothing but 0 / 0
    return lse, of_old.div_(total), of_new.div_(total)


def zeros(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Contiguous zeros of the shape of `like`."""
    return like.new_zeros(like.shape, dtype=dtype)


def _on_grid(call: StridedCall, x: Tensor) -> Tensor:
    """`(batch, heads, ...)` as a view `(*grid_sizes, ...)`: the two dimensions are split into the axes of the call."""
    return x.reshape(*call.grid_sizes, *x.shape[2:])


def adopted(call: StridedCall, part: Tensor, like: Tensor, kv: bool = False) -> Tensor | None:
    """`part` as a contiguous tensor of the shape of `like` if it already lies in memory as one; else None."""
    strides = TensorStrides.contiguous(like, kv)
    steps = call.steps(strides)
    on_grid = _on_grid(call, part)
    sizes = zip(on_grid.shape, on_grid.stride(), (*steps, 1), strict=True)
    if part.numel() == like.numel() and all(size == 1 or have == want for size, have, want in sizes):
        return part.as_strided(like.shape, (*strides[:3], 1))
    return None
