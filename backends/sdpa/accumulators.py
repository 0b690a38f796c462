"""Accumulators of the sdpa backend: outputs of calls merge by their lse, gradients of calls add up, both on views of the whole.

    lse = log(exp(lse_a) + exp(lse_b))        out = exp(lse_a - lse) * out_a + exp(lse_b - lse) * out_b

A first result that already lies in memory as the whole does is adopted, not copied. Others are merged by torch's operators, which
overwrite them, or by one launch of `RowKernels` each. Every operator used here computes each element alike wherever torch splits
a tensor, so that bits do not depend on threads: exp, log, and operations that round once, no `sigmoid`, `logaddexp`, `lerp` or
`sum`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from dilkit.backends.sdpa.strided_calls import StridedCall, TensorStrides
from dilkit.problem import Problem

if TYPE_CHECKING:
    import torch
    from torch import Tensor


MOST_ROUNDINGS = 3
"""The most results of a row, on average, that `RowKernels` merge in halves."""


class RowKernels(Protocol):
    """Interface of `row_kernels`: tensors `(batch, heads, rows, head_dim)` of any strides, `lse` `(batch, heads, rows)`."""

    def merge(self, out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
        """Merge a partial result into `out` and `lse`. Rows whose lse is -inf are not read."""

    def add(self, total: Tensor, part: Tensor) -> None:
        """Add `part` to `total`, of which several problems may be the same memory."""


def _has_parts(problem: Problem) -> bool:
    return len(problem.pattern.branches) > 1 or not problem.pattern.only_segments


class OutputAccumulator:
    """`out` and `lse` of the partial results of `calls`.

    torch's operators merge halves in fp32 where a row has several results. `kernels` round to the query's dtype each time, which
    takes no tensor of fp32 but adds an error: more than `MOST_ROUNDINGS` results a row are merged in fp32.
    """

    def __init__(self, query: Tensor, problem: Problem, kernels: RowKernels | None, calls: Sequence[StridedCall]) -> None:
        from dilkit.op.boundary import lse_dtype

        kind, results = lse_dtype(query.dtype), sum(math.prod(call.shape) for call in calls)
        rounded = results <= MOST_ROUNDINGS * math.prod(query.shape[:3]) if kernels else not _has_parts(problem)
        self.like, self.kernels = query, kernels
        self.lse = query.new_full((*query.shape[:3], 1), -math.inf, dtype=kind)  # in the order of `out`
        self.dtype = query.dtype if rounded else kind
        self.out: Tensor | None = None

    def add(self, call: StridedCall, out: Tensor, lse: Tensor) -> None:
        """Merge the partial result of a call: `out` `(batch, heads, rows, head_dim)` and `lse` `(batch, heads, rows)`."""
        if self.out is None and (first := _adopted(call, out, self.like)) is not None:
            self.out = first.to(self.dtype)
            call.view(self.lse).squeeze(-1).copy_(_on_grid(call, lse))
            return
        self.out = _zeros(self.like, self.dtype) if self.out is None else self.out
        if self.kernels is None:
            merge(call.view(self.out), call.view(self.lse).squeeze(-1), _on_grid(call, out), _on_grid(call, lse))
        else:
            self.kernels.merge(call.kernel_view(self.out), call.kernel_view(self.lse).squeeze(-1), out, lse)

    def result(self) -> tuple[Tensor, Tensor]:
        """`out`, contiguous and in the dtype of the query, and `lse` `(batch, heads, seq)`."""
        import torch

        out = _zeros(self.like, self.dtype) if self.out is None else self.out
        return out.to(self.like.dtype), self.lse.squeeze(-1).transpose(1, 2).clone(memory_format=torch.contiguous_format)


class GradientAccumulator:
    """The gradient of `like`: the sum of the gradients of calls. Halves are summed in fp32 when there is more than one term.

    `kv`: `like` has key/value heads, and the gradients to be added have query heads.
    """

    def __init__(self, like: Tensor, problem: Problem, kv: bool, kernels: RowKernels | None) -> None:
        import torch

        several = _has_parts(problem) or (kv and problem.heads > problem.kv_heads)
        self.like, self.kv, self.kernels = like, kv, kernels
        self.dtype = torch.promote_types(like.dtype, torch.float32) if several else like.dtype
        self.total: Tensor | None = None

    def add(self, call: StridedCall, part: Tensor) -> None:
        """Add a call's gradient `(batch, heads, rows, head_dim)`; query heads of one key/value head are summed."""
        if self.total is None and (first := _adopted(call, part, self.like, self.kv)) is not None:
            self.total = first.to(self.dtype)
            return
        self.total = _zeros(self.like, self.dtype) if self.total is None else self.total
        if self.kernels is not None:
            self.kernels.add(call.kernel_view(self.total, self.kv), part)
            return
        part, view = _on_grid(call, part.to(self.dtype)), call.view(self.total, self.kv)
        for dim, axis in enumerate(call.axes):
            if self.kv and not (axis.kv_head or axis.row or axis.batch):
                part, *others = (part.narrow(dim, i, 1) for i in range(axis.size))
                for other in others:
                    part.add_(other)
                view = view.narrow(dim, 0, 1)
        view.add_(part)

    def result(self) -> Tensor:
        """The gradient, contiguous and in the dtype of `like`."""
        total = _zeros(self.like, self.dtype) if self.total is None else self.total
        return total.to(self.like.dtype)


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge a partial result into `out` and `lse` by torch's operators, which overwrite it."""
    merged, *shares = merge_lse(lse, part_lse)
    keep, add = (share.to(out.dtype).unsqueeze(-1) for share in shares)
    sizes = part_lse.shape
    dim = sizes.index(max(sizes))  # cut along the longest dimension: the fp32 copies of halves stay small
    for whole, kept, added, share in zip(*(x.chunk(8, dim) for x in (out, keep, part, add)), strict=True):
        whole.mul_(kept).add_(added.to(out.dtype).mul_(share))
    lse.copy_(merged)


def merge_lse(old: Tensor, new: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The merged lse, and the shares `exp(old - lse)` and `exp(new - lse)`; -inf, 0 and 0 where both are -inf."""
    import torch

    highest = torch.maximum(old, new).clamp_min_(torch.finfo(old.dtype).min)  # -inf - -inf would be NaN
    of_old, of_new = (old - highest).exp_(), (new - highest).exp_()
    total = of_old + of_new
    lse = highest.add_(total.log())
    total.clamp_min_(1.0)  # changes nothing but 0 / 0
    return lse, of_old.div_(total), of_new.div_(total)


def _zeros(like: Tensor, dtype: torch.dtype) -> Tensor:
    return like.new_zeros(like.shape, dtype=dtype)


def _on_grid(call: StridedCall, x: Tensor) -> Tensor:
    """`(batch, heads, ...)` as a view `(*grid_sizes, ...)`: the two dimensions are split into the axes of the call."""
    return x.reshape(*call.grid_sizes, *x.shape[2:])


def _adopted(call: StridedCall, part: Tensor, like: Tensor, kv: bool = False) -> Tensor | None:
    """`part` as a contiguous tensor of the shape of `like` if it already lies in memory as one; else None."""
    strides = TensorStrides.contiguous(like, kv)
    on_grid = _on_grid(call, part)
    sizes = zip(on_grid.shape, on_grid.stride(), (*call.steps(strides), 1), strict=True)
    if part.numel() == like.numel() and all(size == 1 or have == want for size, have, want in sizes):
        return part.as_strided(like.shape, (*strides[:3], 1))
    return None
