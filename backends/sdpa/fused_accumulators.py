"""The accumulators of `accumulators` with one launch for each result of a call: a merge, or an addition to a gradient.

    results of a call (batch, heads, rows, head_dim) --one kernel--> the same rows of the whole (batch, seq, heads, head_dim)

A first result that already lies in memory as the whole does is adopted. Calls are chosen so that in the whole, too, their batch,
their heads and their rows have one stride each (`TensorStrides.contiguous`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from dilkit.backends.sdpa.accumulators import GradientAccumulator, OutputAccumulator, adopted, zeros
from dilkit.backends.sdpa.strided_calls import StridedCall
from dilkit.problem import Problem

if TYPE_CHECKING:
    from torch import Tensor


class RowKernels(Protocol):
    """Interface of `row_kernels`: tensors `(batch, heads, rows, head_dim)` of any strides, `lse` `(batch, heads, rows)`."""

    def merge(self, out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
        """Merge a partial result into `out` and `lse`. Rows whose lse is -inf are not read."""
        ...

    def add(self, total: Tensor, part: Tensor) -> None:
        """Add `part` to `total`, of which several problems may be the same memory."""
        ...


class FusedOutput(OutputAccumulator):
    """`out` and `lse` of the partial results added so far. `kernels` merge in fp32 and round to the dtype of the query each time:
    no tensor of fp32 is held beside, and no pass over all rows converts one."""

    def __init__(self, query: Tensor, problem: Problem, kernels: RowKernels) -> None:
        super().__init__(query, problem)
        self.kernels, self.dtype = kernels, query.dtype
        self.lse = self.lse.view(*query.shape[:3], 1)  # in the order of `out`, so that both have the same strides

    def add(self, call: StridedCall, out: Tensor, lse: Tensor) -> None:
        whole_lse = call.kernel_view(self.lse).squeeze(-1)
        if self.out is None and (first := adopted(call, out, self.like)) is not None:
            self.out = first.to(self.dtype)
            whole_lse.copy_(lse)
            return
        self.out = zeros(self.like, self.dtype) if self.out is None else self.out
        self.kernels.merge(call.kernel_view(self.out), whole_lse, out, lse)

    def result(self) -> tuple[Tensor, Tensor]:
        out, lse = super().result()
        return out, lse.squeeze(-1).transpose(1, 2).contiguous()


class FusedGradient(GradientAccumulator):
    """The gradient of `like`, summed by `kernels`."""

    def __init__(self, like: Tensor, problem: Problem, kernels: RowKernels, kv: bool = False) -> None:
        super().__init__(like, problem, kv)
        self.kernels = kernels

    def add(self, call: StridedCall, part: Tensor) -> None:
        if self.total is None and (first := adopted(call, part, self.like, self.kv)) is not None:
            self.total = first.to(self.dtype)
            return
        self.total = zeros(self.like, self.dtype) if self.total is None else self.total
        self.kernels.add(call.kernel_view(self.total, self.kv), part)
