"""torch's fused attention, called on strided views of the sequence: no gather copies.

    lse = logsumexp_b lse_b        out = sum_b exp(lse_b - lse) * out_b

A branch is a few grids of equal small attention problems (`problem_grid`), which a kernel computes in a few calls
(`strided_calls`). The partial results of the calls merge exactly into `out` and `lse` (`accumulators`). In the backward pass the
kernel gets the `out` and `lse` of the whole softmax, so its gradients are exact and need only be added up.

On a CPU the same number of threads gives the same bits; another one may not, as MKL's matrix products do not.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from dilkit.backend import Backend, Limits, Refusal
from dilkit.backends.ignored_keys import without_ignored
from dilkit.backends.sdpa.accumulators import GradientAccumulator, OutputAccumulator
from dilkit.backends.sdpa.kernels import KERNELS, SdpaKernel
from dilkit.backends.sdpa.last_rows import last_rows
from dilkit.backends.sdpa.overlap import overlap_refusals
from dilkit.backends.sdpa.packed import packed_backward, packed_forward
from dilkit.backends.sdpa.strided_calls import StridedCall, TensorStrides, strided_calls
from dilkit.problem import Problem

if TYPE_CHECKING:
    from torch import Tensor


class SDPA(Backend):
    """torch's fused kernels on strided views, merged by lse. The first of `kernels` that refuses nothing computes."""

    name = "sdpa"
    summary = (
        'torch\'s fused attention on strided views: CPU, CUDA from 5.0 on; `overlap="once"` only where no branches share a row'
    )
    requires = ("torch",)
    limits = Limits(devices=frozenset({"cpu", "cuda"}), varlen=True, kv_cache=True)
    priority = 10

    def __init__(self, kernels: tuple[SdpaKernel, ...] = KERNELS) -> None:
        self.kernels = kernels

    def refusals(self, problem: Problem) -> tuple[Refusal, ...]:
        common = (*super().refusals(problem), *overlap_refusals(problem))
        if common or problem.kv_cache:  # which takes no kernel
            return common
        kernel, passed_over = self._choose_kernel(problem)
        if kernel is not None:
            return ()
        return tuple(replace(r, code=f"{name}: {r.code}") for name, reasons in passed_over for r in reasons)

    def detail(self, problem: Problem) -> str:
        if problem.kv_cache:
            return "plain matrix products"
        kernel, passed_over = self._choose_kernel(problem)
        if kernel is None:
            return ""
        return "; ".join((f"{kernel.name} kernel", *(f"{name}: {reasons[0]}" for name, reasons in passed_over)))

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, problem: Problem, key_padding_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        kernel = self._kernel(problem)
        sign, scale = _sign_and_factor(problem.scale)
        key, value = (without_ignored(x, key_padding_mask) for x in (key, value))
        q, k, v = (_aligned(x) for x in (_times(sign, query), key, value))
        total = OutputAccumulator(query, problem)
        with kernel.active():
            for call in _calls(problem, (q,), (k, v)):
                ignored = _ignored_keys(call, key_padding_mask, problem.heads)
                views = call.kernel_view(q), call.kernel_view(k, kv=True), call.kernel_view(v, kv=True)
                out, lse = kernel.forward(*views, ignored, problem.is_causal, scale)
                if ignored is not None:
                    empty = _rows_without_keys(ignored, problem.is_causal)
                    out.masked_fill_(empty.unsqueeze(-1), 0.0)
                    lse = lse.masked_fill(empty, -math.inf)
                total.add(call, out, lse)
        return total.result()

    def backward(
        self,
        dout: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        problem: Problem,
        key_padding_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        kernel = self._kernel(problem)
        sign, scale = _sign_and_factor(problem.scale)
        key, value = (without_ignored(x, key_padding_mask) for x in (key, value))
        if key_padding_mask is not None:  # rows that see nothing have no gradient, whatever is in them
            unseen = (lse == -math.inf).transpose(1, 2).unsqueeze(-1)
            dout, query, out = (x.masked_fill(unseen, 0.0) for x in (dout, query, out))
        do, q, k, v, out = (_aligned(x) for x in (dout, _times(sign, query), key, value, out))
        # exp(s - inf) = 0: a row that sees nothing has no gradient.
        by_token = lse.masked_fill(lse == -math.inf, math.inf).transpose(1, 2).unsqueeze(-1)
        totals = [GradientAccumulator(x, problem, kv) for x, kv in ((query, False), (key, True), (value, True))]
        with kernel.active():
            for call in _calls(problem, (q, do, out), (k, v)):
                ignored = _ignored_keys(call, key_padding_mask, problem.heads)
                queries = call.kernel_view(do), call.kernel_view(q), call.kernel_view(k, kv=True), call.kernel_view(v, kv=True)
                whole = call.kernel_view(out), call.view(by_token).reshape(call.shape).contiguous()
                parts = kernel.backward(*queries, *whole, ignored, problem.is_causal, scale)
                for total, part in zip(totals, parts, strict=True):
                    total.add(call, part)
        dq, dk, dv = (total.result() for total in totals)
        return _times(sign, dq), dk, dv

    def forward_varlen(
        self, query: Tensor, key: Tensor, value: Tensor, problem: Problem, cu_seqlens: Tensor
    ) -> tuple[Tensor, Tensor]:
        """On a GPU this waits for `cu_seqlens`, for how many segments have which length decides what kernels are called with."""
        sign, scale = _sign_and_factor(problem.scale)
        return packed_forward(self._kernel(problem), _times(sign, query), key, value, problem, cu_seqlens, scale)

    def backward_varlen(
        self,
        dout: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        problem: Problem,
        cu_seqlens: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        sign, scale = _sign_and_factor(problem.scale)
        tensors = dout, _times(sign, query), key, value, out, lse
        dq, dk, dv = packed_backward(self._kernel(problem), *tensors, problem, cu_seqlens, scale)
        return _times(sign, dq), dk, dv

    def forward_last(self, query: Tensor, key: Tensor, value: Tensor, problem: Problem, lengths: Tensor) -> tuple[Tensor, Tensor]:
        return last_rows(query, key, value, problem, lengths)

    def _kernel(self, problem: Problem) -> SdpaKernel:
        kernel, _ = self._choose_kernel(problem)
        if kernel is None:
            raise ValueError("; ".join(map(str, self.refusals(problem))))
        return kernel

    def _choose_kernel(self, problem: Problem) -> tuple[SdpaKernel | None, tuple[tuple[str, tuple[Refusal, ...]], ...]]:
        """The first kernel without a refusal, and the refusals of those before it, by name."""
        passed_over: list[tuple[str, tuple[Refusal, ...]]] = []
        for kernel in self.kernels:
            if kernel.limits.devices is not None and problem.device.type not in kernel.limits.devices:
                continue
            reasons = kernel.refusals(problem)
            if not reasons:
                return kernel, tuple(passed_over)
            passed_over.append((kernel.name, reasons))
        return None, tuple(passed_over)


def _calls(problem: Problem, queries: tuple[Tensor, ...], keys: tuple[Tensor, ...]) -> tuple[StridedCall, ...]:
    strides = (*(TensorStrides.of(x) for x in queries), *(TensorStrides.of(x, kv=True) for x in keys))
    return strided_calls(problem.pattern, problem.seq, problem.heads, problem.kv_heads, problem.batch, strides)


def _sign_and_factor(scale: float) -> tuple[int, float]:
    """`scale` as sign and positive factor: kernels multiply the -inf of a masked score by it, and 0 gives NaN, -1 gives +inf."""
    if scale > 0:
        return 1, scale
    return (-1, -scale) if scale < 0 else (0, 1.0)


def _times(sign: int, x: Tensor) -> Tensor:
    return x if sign == 1 else x * sign


def _ignored_keys(call: StridedCall, key_padding_mask: Tensor | None, heads: int) -> Tensor | None:
    """The ignored keys of a call, contiguous bool `(batch, heads, rows)`; None without a mask."""
    if key_padding_mask is None:
        return None
    by_head = key_padding_mask.unsqueeze(-1).unsqueeze(-1).expand(-1, -1, heads, 1)
    return call.view(by_head).reshape(call.shape).contiguous()


def _rows_without_keys(ignored: Tensor, is_causal: bool) -> Tensor:
    """The rows of a call that see no key, shaped like `ignored`: kernels return different things there."""
    import torch

    if is_causal:
        return ignored.cumprod(-1, dtype=torch.uint8).bool()
    return ignored.all(-1, keepdim=True).expand_as(ignored)


def _aligned(x: Tensor) -> Tensor:
    """`x`, or a copy if its rows do not start at multiples of 16 bytes (or of a whole row), as CUDA kernels require.

    On the CPU, where torch's kernel leaves results unwritten if rows of the query share memory, and refuses other such tensors
    of 16 bits, it is a copy of those.
    """
    if not x.is_cuda:
        return x.contiguous() if x.stride(1) < x.shape[3] else x
    unit = math.gcd(16, x.shape[3] * x.element_size())
    places = (x.storage_offset(), *x.stride()[:3])
    return x if all(place * x.element_size() % unit == 0 for place in places) else x.contiguous()
