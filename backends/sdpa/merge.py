"""What the sdpa backend makes of partial results: outputs merge by lse, gradients add up, both on views of the whole.

A result that already lies in memory as the whole would is adopted, not copied; others are used up where they lie.
What is done to each element is the same wherever torch cuts a tensor for its threads: by exp, log and single roundings, added up
one by one. Not so `sigmoid`, `logaddexp`, `lerp` and `sum`, whose vectors and leftover elements round differently.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from dilkit.backends.sdpa.calls import Call, Layout
from dilkit.problem import Problem

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Merged:
    """`out` and `lse` of everything added so far. Halves are merged in fp32 when there is more than one branch."""

    def __init__(self, query: Tensor, problem: Problem) -> None:
        import torch

        batch, seq, heads, _ = query.shape
        kind = torch.float64 if query.dtype == torch.float64 else torch.float32
        self.lse = query.new_full((batch, heads, seq), -math.inf, dtype=kind)
        self.like = query
        self.dtype = kind if len(problem.pattern.branches) > 1 else query.dtype
        self.out: Tensor | None = None

    def add(self, call: Call, out: Tensor, lse: Tensor) -> None:
        """Merge a call's `out` `(batch, heads, rows, head_dim)` and `lse` `(batch, heads, rows)`."""
        old, new = call.view(self.lse.transpose(1, 2).unsqueeze(-1)).squeeze(-1), _on_grid(call, lse)
        total, keep, share = _joined(old, new)
        adopted = _adopted(call, out, self.like) if self.out is None else None
        if adopted is not None:
            self.out = adopted.to(self.dtype)
        else:
            self.out = _zeros(self.like, self.dtype) if self.out is None else self.out
            keep, share = (x.to(self.dtype).unsqueeze(-1) for x in (keep, share))
            for whole, k, part, s in _slices(call.view(self.out), keep, _on_grid(call, out), share):
                whole.mul_(k).add_(part.to(self.dtype).mul_(s))
        old.copy_(total)

    def result(self) -> tuple[Tensor, Tensor]:
        out = _zeros(self.like, self.dtype) if self.out is None else self.out
        return out.to(self.like.dtype), self.lse


class Sum:
    """The gradient of `like`: the sum of everything added so far. Halves are summed in fp32 when there is more than one term."""

    def __init__(self, like: Tensor, problem: Problem, kv: bool = False) -> None:
        import torch

        several = len(problem.pattern.branches) > 1 or (kv and problem.heads > problem.kv_heads)
        self.like, self.kv = like, kv
        self.dtype = torch.promote_types(like.dtype, torch.float32) if several else like.dtype
        self.total: Tensor | None = None

    def add(self, call: Call, part: Tensor) -> None:
        """Add a call's gradient `(batch, heads, rows, head_dim)`; query heads of one key/value head are summed."""
        part = part.to(self.dtype)
        if self.total is None and (adopted := _adopted(call, part, self.like, self.kv)) is not None:
            self.total = adopted
            return
        self.total = _zeros(self.like, self.dtype) if self.total is None else self.total
        part, view = _on_grid(call, part), call.view(self.total, self.kv)
        for dim, axis in enumerate(call.axes):
            if self.kv and not (axis.kv_head or axis.row or axis.batch):
                first, *others = part.split(1, dim)
                for other in others:
                    first.add_(other)
                part, view = first, view.narrow(dim, 0, 1)
        view.add_(part)

    def result(self) -> Tensor:
        total = _zeros(self.like, self.dtype) if self.total is None else self.total
        return total.to(self.like.dtype)


def _joined(old: Tensor, new: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`lse = log(exp(old) + exp(new))` and the shares `exp(old - lse)`, `exp(new - lse)`: -inf, 0, 0 where both are -inf."""
    import torch

    highest = torch.maximum(old, new).clamp_min_(torch.finfo(old.dtype).min)  # -inf - -inf would be NaN
    of_old, of_new = (old - highest).exp_(), (new - highest).exp_()
    total = of_old + of_new
    lse = highest.add_(total.log())
    total.clamp_min_(1.0)  # changes nothing but 0 / 0
    return lse, of_old.div_(total), of_new.div_(total)


def _slices(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Tensors of equal sizes but the last, cut along the longest dimension: what halves become in fp32 stays small."""
    sizes = tensors[0].shape[:-1]
    dim = sizes.index(max(sizes))
    return zip(*(x.chunk(8, dim) for x in tensors), strict=True)


def _zeros(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Contiguous zeros of the shape of `like`."""
    return like.new_zeros(like.shape, dtype=dtype)


def _on_grid(call: Call, x: Tensor) -> Tensor:
    """`(batch, heads, ...)` as `(*grid, ...)`: a view, for two dimensions are but split."""
    return x.reshape(*call.grid, *x.shape[2:])


def _adopted(call: Call, part: Tensor, like: Tensor, kv: bool = False) -> Tensor | None:
    """`part` as a contiguous tensor of the shape of `like` if it already lies in memory as one; else None."""
    _, seq, heads, width = like.shape
    steps = call.steps(Layout(seq * heads * width, heads * width, width, kv))
    on_grid = _on_grid(call, part)
    sizes = zip(on_grid.shape, on_grid.stride(), (*steps, 1), strict=True)
    if part.numel() == like.numel() and all(size == 1 or have == want for size, have, want in sizes):
        return part.as_strided(like.shape, (seq * heads * width, heads * width, width, 1))
    return None
