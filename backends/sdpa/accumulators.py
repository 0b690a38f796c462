"""Accumulators of the sdpa backend: outputs of calls merge by their lse, gradients of calls add up, both on views of the whole.

    lse = log(exp(lse_a) + exp(lse_b))        out = exp(lse_a - lse) * out_a + exp(lse_b - lse) * out_b

A first result that already lies in memory as the whole does is adopted, not copied. Others are merged by torch's operators, which
overwrite them, or by one launch of `RowKernels` each. Every operator used here computes each element alike wherever torch splits
a tensor, so that bits do not depend on threads: exp, log, and operations that round once, no `sigmoid`, `logaddexp`, `lerp` or
`sum`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

from dilkit.backends.sdpa.call_plan import Accumulated, CallPlan

if TYPE_CHECKING:
    from torch import Tensor


class RowKernels(Protocol):
    """Interface of `row_kernels`: tensors `(batch, heads, rows, head_dim)` of any strides, `lse` `(batch, heads, rows)`."""

    def merge(self, out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
        """Merge a partial result into `out` and `lse`. Rows whose lse is -inf are not read."""

    def add(self, total: Tensor, part: Tensor) -> None:
        """Add `part` to `total`, of which several problems may be the same memory."""


class OutputAccumulator:
    """`out` and `lse` of the partial results of the calls of a plan, which are added in the order of the calls.

    torch's operators merge halves in fp32 where a row has several results. `kernels` round to the query's dtype each time, which
    takes no tensor of fp32 but adds an error: more than `MOST_ROUNDINGS` results a row are merged in fp32.
    """

    def __init__(self, query: Tensor, plan: CallPlan, kernels: RowKernels | None) -> None:
        import torch

        self.like, self.plan, self.kernels = query, plan, kernels
        wide = torch.promote_types(query.dtype, torch.float32)
        self.lse = query.new_full(query.shape[:3], -math.inf, dtype=wide)  # (batch, seq, heads), in the order of `out`
        self.out: Tensor | None = None

    def add(self, out: Tensor, lse: Tensor) -> None:
        """Merge the result of the next call: `out` `(batch, heads, rows, head_dim)` and `lse` `(batch, heads, rows)`."""
        if self.out is None:
            self.out, done = self.plan.merged.begin(self.like, out)
            views, sums = self.plan.merged.views.of(self.out, done), self.plan.sums.of(self.lse)
            self._views = zip(views, sums, strict=True)
            if done:
                view = next(sums)
                view.copy_(lse.reshape(view.shape))
                return
        view, view_lse = next(self._views)
        if self.kernels is None:
            merge(view, view_lse, out.reshape(view.shape), lse.reshape(view_lse.shape))
        else:
            self.kernels.merge(view, view_lse, out, lse)

    def result(self) -> tuple[Tensor, Tensor]:
        """`out`, contiguous and in the dtype of the query, and `lse` `(batch, heads, seq)`."""
        import torch

        out = self.plan.merged.begin(self.like)[0] if self.out is None else self.out
        return out.to(self.like.dtype), self.lse.transpose(1, 2).clone(memory_format=torch.contiguous_format)


class GradientAccumulator:
    """The gradient of `like`: the sum of the gradients of calls, which are added in their order.

    Halves are summed in fp32 when there is more than one term. The gradients of keys and values that are added have query heads.
    """

    def __init__(self, like: Tensor, place: Accumulated, kernels: RowKernels | None) -> None:
        self.like, self.place, self.kernels = like, place, kernels
        self.total: Tensor | None = None

    def add(self, part: Tensor) -> None:
        """Add a call's gradient `(batch, heads, rows, head_dim)`; query heads of one key/value head are summed."""
        if self.total is None:
            self.total, done = self.place.begin(self.like, part)
            self._views = self.place.views.of(self.total, done)
            if done:
                return
        view = next(self._views)
        if self.kernels is not None:
            self.kernels.add(view, part)
            return
        part = part.to(view.dtype).reshape(view.shape)
        for dim, (size, step) in enumerate(zip(view.shape, view.stride(), strict=True)):
            if size > 1 and not step:  # query heads of one key/value head
                part, *others = (part.narrow(dim, i, 1) for i in range(size))
                for other in others:
                    part.add_(other)
                view = view.narrow(dim, 0, 1)
        view.add_(part)

    def result(self) -> Tensor:
        """The gradient, contiguous and in the dtype of `like`."""
        total = self.place.begin(self.like)[0] if self.total is None else self.total
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
    """Return the merged lse with the shares `exp(old - lse)` and `exp(new - lse)`; -inf, 0 and 0 where both are -inf."""
    import torch

    highest = torch.maximum(old, new).clamp_min_(torch.finfo(old.dtype).min)  # -inf - -inf would be NaN
    of_old, of_new = (old - highest).exp_(), (new - highest).exp_()
    total = of_old + of_new
    lse = highest.add_(total.log())
    total.clamp_min_(1.0)  # changes nothing but 0 / 0
    return lse, of_old.div_(total), of_new.div_(total)
