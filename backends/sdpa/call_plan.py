"""The views of all tensors in all calls of a problem, worked out once: a call then takes `as_strided` and the kernel alone."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from dilkit import plan
from dilkit.backends.sdpa.grids import queries_of
from dilkit.backends.sdpa.strided_calls import StridedCall, TensorStrides, strided_calls
from dilkit.problem import Problem

if TYPE_CHECKING:
    from torch import Tensor

Strides = tuple[int, ...]

_CALL_BYTES = 2600
MOST_ROUNDINGS = 3
"""The most results of a row, on average, that `RowKernels` merge in halves."""


class Views(NamedTuple):
    """A view of one tensor for each call, by its size, its strides, and its distance from the first element."""

    sizes: tuple[tuple[int, ...], ...]
    strides: tuple[Strides, ...]
    starts: tuple[int, ...]

    def of(self, x: Tensor, first: int = 0) -> Iterator[Tensor]:
        """Yield the views of `x`, which has the strides of the plan, from that of call `first` on."""
        offset = x.storage_offset()
        starts = tuple([offset + start for start in self.starts]) if offset else self.starts
        return map(x.as_strided, self.sizes[first:], self.strides[first:], starts[first:])


class Accumulated(NamedTuple):
    """A contiguous tensor in which results of calls are merged or summed, in its dtype if `rounded`, else at least fp32.

    `whole`: the strides of the first call's result where that is the tensor itself; None where no result is.
    """

    shape: tuple[int, ...]
    views: Views
    whole: Strides | None
    rounded: bool

    def begin(self, like: Tensor, part: Tensor | None = None) -> tuple[Tensor, int]:
        """Return the accumulator and the number of calls in it: `part`, the first result, if its layout fits; else zeros."""
        import torch

        dtype = like.dtype if self.rounded else torch.promote_types(like.dtype, torch.float32)
        if part is None or not self._is_whole(part):
            return like.new_zeros(self.shape, dtype=dtype), 0
        _, seq, heads, width = self.shape
        return part.as_strided(self.shape, (seq * heads * width, heads * width, width, 1)).to(dtype), 1

    def _is_whole(self, part: Tensor) -> bool:
        strides, whole = part.stride(), self.whole
        if strides == whole or whole is None:
            return whole is not None
        return all(size == 1 or have == want for size, have, want in zip(part.shape, strides, whole, strict=True))


class CallPlan(NamedTuple):
    """The planned calls and, for each tensor they read or write, its views; `queries` and `keys` hold one set per layout.

    Views of results are `(batch, heads, rows, head_dim)` if fused, else on the call's grid; `sums` are of lse
    `(batch, seq, heads)`, `merged` is `out`, `dquery` and `dkey` are gradients.
    """

    calls: tuple[StridedCall, ...]
    queries: tuple[Views, ...]
    keys: tuple[Views, ...]
    sums: Views
    merged: Accumulated
    dquery: Accumulated
    dkey: Accumulated

    @property
    def nbytes(self) -> int:
        return _CALL_BYTES * len(self.calls)


def call_plan(problem: Problem, queries: tuple[Strides, ...], keys: tuple[Strides, ...], fused: bool) -> CallPlan:
    """Plan the calls for tensors of these strides; if `fused`, for contiguous results as well."""
    return plan.cached(("sdpa", problem, queries, keys, fused), _planned, problem, queries, keys, fused)


def _planned(problem: Problem, queries: tuple[Strides, ...], keys: tuple[Strides, ...], fused: bool) -> CallPlan:
    import torch

    batch, seq, heads, kv_heads, width = problem.batch, problem.seq, problem.heads, problem.kv_heads, problem.head_dim
    positions = queries_of(problem)
    shape, kv_shape = (batch, seq if positions is None else positions[0], heads, width), (batch, seq, kv_heads, width)
    q = [torch.empty_strided(shape, strides, device="meta") for strides in queries]
    kv = [torch.empty_strided(kv_shape, strides, device="meta") for strides in keys]
    out, dkey, lse = (torch.empty(sizes, device="meta") for sizes in (shape, kv_shape, shape[:3]))
    fitted = ([*q, out], [*kv, dkey]) if fused else (q, kv)
    strides = tuple(TensorStrides.of(x, is_kv) for is_kv, tensors in zip((False, True), fitted, strict=True) for x in tensors)
    calls = strided_calls(problem.pattern, seq, heads, kv_heads, batch, strides, problem.is_causal, positions)
    several = len(problem.pattern.branches) > 1 or not problem.pattern.only_segments or positions is not None
    few = sum(prod(call.shape) for call in calls) <= MOST_ROUNDINGS * prod(shape[:3])
    views, kv_views = _views(calls, out, False, fused), _views(calls, dkey, True, fused)
    whole, kv_whole = _whole(calls, out, False), _whole(calls, dkey, True)
    return CallPlan(
        calls,
        tuple(_views(calls, x, False) for x in q),
        tuple(_views(calls, x, True) for x in kv),
        _views(calls, lse, False, fused),
        Accumulated(shape, views, whole, few if fused else not several),
        Accumulated(shape, views, whole, not several),
        Accumulated(kv_shape, kv_views, kv_whole, not several and heads == kv_heads),
    )


def _views(calls: tuple[StridedCall, ...], x: Tensor, kv: bool, is_of_kernel: bool = True) -> Views:
    views = [call.kernel_view(x, kv) if is_of_kernel else call.view(x, kv) for call in calls]
    return Views(
        tuple(tuple(y.shape) for y in views), tuple(y.stride() for y in views), tuple(int(y.storage_offset()) for y in views)
    )


def _whole(calls: tuple[StridedCall, ...], x: Tensor, kv: bool) -> Strides | None:
    if not calls or prod(calls[0].key_shape if kv else calls[0].shape) != prod(x.shape[:3]):
        return None
    try:
        return calls[0].kernel_view(x, kv).stride()
    except RuntimeError:  # no kernel writes rows in that order
        return None
