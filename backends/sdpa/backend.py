"""torch's fused attention, called on strided views of the sequence: no gather copies.

A branch is a few grids of equal small attention problems (`grids`), which a kernel computes in a few calls (`strided_calls`).
Their partial results merge exactly (`accumulators`), on CUDA by one kernel a call (`row_kernels`). In the backward pass the
kernel gets the `out` and `lse` of the whole softmax, so its gradients are exact and need only be added up.

On a CPU the same number of threads gives the same bits; another one may not, as MKL's matrix products do not.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from dilkit.backend import Backend, Limits, Refusal
from dilkit.backends.ignored_keys import without_ignored
from dilkit.backends.sdpa.accumulators import GradientAccumulator, OutputAccumulator, RowKernels
from dilkit.backends.sdpa.fusing import row_kernels, why_eager
from dilkit.backends.sdpa.grids import FORMS
from dilkit.backends.sdpa.kernels import KERNELS, SdpaKernel
from dilkit.backends.sdpa.last_rows import last_rows
from dilkit.backends.sdpa.packed import packed_backward, packed_forward
from dilkit.backends.sdpa.refused import NO_VIEW, kind_refusals, overlap_refusals
from dilkit.backends.sdpa.strided_calls import StridedCall, TensorStrides, strided_calls
from dilkit.inputs import Inputs
from dilkit.problem import Problem

if TYPE_CHECKING:
    from torch import Tensor


class SDPA(Backend):
    """torch's fused kernels on strided views, merged by lse. The first of `kernels` that refuses nothing computes; `row_kernels`
    merge (default: Triton's, where they work)."""

    name = "sdpa"
    summary = (
        "torch's fused attention on strided views: CPU, CUDA from 5.0 on; windows and global tokens as tiles; "
        '`overlap="once"` for some patterns'
    )
    requires = ("torch",)
    limits = Limits(devices=frozenset({"cpu", "cuda", "hip"}), varlen=True, kv_cache=True, forms=FORMS)
    priority = 10

    def __init__(self, kernels: tuple[SdpaKernel, ...] = KERNELS, row_kernels: RowKernels | None = None) -> None:
        self.kernels, self.row_kernels = kernels, row_kernels

    def refusals(self, problem: Problem) -> tuple[Refusal, ...]:
        limits = (replace(r, hint=NO_VIEW) if r.code == "branch kind" else r for r in super().refusals(problem))
        common = (*limits, *overlap_refusals(problem), *kind_refusals(problem))
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
        details = [f"{kernel.name} kernel"]
        if problem.device.type == "cuda":
            reason = why_eager(problem)
            details.append(f"merges by eager operators: {reason}" if reason else "merges by one kernel a call")
        return "; ".join((*details, *(f"{name}: {reasons[0]}" for name, reasons in passed_over)))

    def proof_facts(self, problem: Problem) -> tuple[str, ...]:
        """On AMD's GPUs the kernels of torch are proven: none has run them for dilkit."""
        if problem.device.platform != "hip" or problem.kv_cache:
            return ()
        import torch

        sizes = f"{problem.dtype}, head_dim {problem.head_dim}", f"packed {problem.varlen}, gradients {problem.requires_grad}"
        return ("sdpa", self._kernel(problem).name, str(problem.device), torch.__version__, f"HIP {torch.version.hip}", *sizes)

    def forward(self, inputs: Inputs, problem: Problem) -> tuple[Tensor, Tensor]:
        """On a GPU packed sequences wait for `cu_seqlens`, for how many segments have which length decides what is called."""
        query, key, value, key_padding_mask, cu_seqlens, cache_seqlens, *_ = inputs
        if cache_seqlens is not None:
            return last_rows(query, key, value, problem, cache_seqlens)
        kernel, merging = self._kernel(problem), self.row_kernels or row_kernels(query, problem)
        sign, scale = _sign_and_factor(problem.scale)
        if cu_seqlens is not None:
            return packed_forward(kernel, inputs._replace(query=_times(sign, query)), problem, scale, merging)
        key, value = (without_ignored(x, key_padding_mask) for x in (key, value))
        q, k, v = (kernel.layout(x) for x in (_times(sign, query), key, value))
        calls = _calls(problem, (q,), (k, v), fused=merging is not None)
        total = OutputAccumulator(query, problem, merging, calls)
        with kernel.active():
            for call in calls:
                ignored = _ignored_keys(call, key_padding_mask, problem.heads)
                views = call.kernel_view(q), call.kernel_view(k, kv=True), call.kernel_view(v, kv=True)
                rows = tuple(map(call.in_order, views))
                total.add(call, *map(call.in_order, _partial(kernel, rows, ignored, call.is_causal, scale)))
        return total.result()

    def backward(self, dout: Tensor, inputs: Inputs, out: Tensor, lse: Tensor, problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, key_padding_mask, cu_seqlens, *_ = inputs
        kernel, adding = self._kernel(problem), self.row_kernels or row_kernels(query, problem)
        sign, scale = _sign_and_factor(problem.scale)
        if cu_seqlens is not None:
            inputs = inputs._replace(query=_times(sign, query))
            dq, dk, dv = packed_backward(kernel, dout, inputs, out, lse, problem, scale, adding)
            return _times(sign, dq), dk, dv
        key, value = (without_ignored(x, key_padding_mask) for x in (key, value))
        if key_padding_mask is not None:  # rows that see nothing have no gradient, whatever is in them
            unseen = (lse == -math.inf).transpose(1, 2).unsqueeze(-1)
            dout, query, out = (x.masked_fill(unseen, 0.0) for x in (dout, query, out))
        do, q, k, v, out = (kernel.layout(x) for x in (dout, _times(sign, query), key, value, out))
        if kernel.equal_strides:
            do, q, out = (x.contiguous() for x in (do, q, out))
        # exp(s - inf) = 0: a row that sees nothing has no gradient.
        sums = lse.transpose(1, 2)
        if adding:  # in the order of `out`, whose strides the calls fit
            sums = sums.contiguous()
        sums = sums.masked_fill(sums == -math.inf, math.inf).unsqueeze(-1)
        totals = [GradientAccumulator(x, problem, kv, adding) for x, kv in ((query, False), (key, True), (value, True))]
        with kernel.active():
            for call in _calls(problem, (q, do, out), (k, v), fused=adding is not None):
                ignored = _ignored_keys(call, key_padding_mask, problem.heads)
                queries = call.kernel_view(do), call.kernel_view(q), call.kernel_view(k, kv=True), call.kernel_view(v, kv=True)
                call_sums = call.kernel_view(sums).squeeze(-1) if adding else call.view(sums).reshape(call.shape)
                whole = call.kernel_view(out), call_sums.contiguous()
                parts = kernel.backward(*map(call.in_order, (*queries, *whole)), ignored, call.is_causal, scale)
                for total, part in zip(totals, parts, strict=True):
                    total.add(call, call.in_order(part))
                del parts, part  # before the next ones are computed
        dq, dk, dv = (total.result() for total in totals)
        return _times(sign, dq), dk, dv

    def _kernel(self, problem: Problem) -> SdpaKernel:
        kernel, _ = self._choose_kernel(problem)
        if kernel is None:
            raise ValueError("; ".join(map(str, self.refusals(problem))))
        return kernel

    def _choose_kernel(self, problem: Problem) -> tuple[SdpaKernel | None, tuple[tuple[str, tuple[Refusal, ...]], ...]]:
        passed_over: list[tuple[str, tuple[Refusal, ...]]] = []
        for kernel in self.kernels:
            if kernel.limits.devices is not None and problem.device.platform not in kernel.limits.devices:
                continue
            reasons = kernel.refusals(problem)
            if not reasons:
                return kernel, tuple(passed_over)
            passed_over.append((kernel.name, reasons))
        return None, tuple(passed_over)


def _partial(
    kernel: SdpaKernel, views: tuple[Tensor, ...], ignored: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """`out` and `lse` of a call; 0 and -inf in rows that see no key, where kernels return different things."""
    import torch

    out, lse = kernel.forward(*views, ignored, is_causal, scale)
    if ignored is None:
        return out, lse
    empty = ignored.cumprod(-1, dtype=torch.uint8).bool() if is_causal else ignored.all(-1, keepdim=True).expand(lse.shape)
    return out.masked_fill_(empty.unsqueeze(-1), 0.0), lse.masked_fill(empty, -math.inf)


def _calls(problem: Problem, queries: tuple[Tensor, ...], keys: tuple[Tensor, ...], fused: bool) -> tuple[StridedCall, ...]:
    """The calls for tensors of these strides; if `fused`, for contiguous results as well."""
    strides = (*(TensorStrides.of(x) for x in queries), *(TensorStrides.of(x, kv=True) for x in keys))
    if fused:
        strides = (*strides, TensorStrides.contiguous(queries[0]), TensorStrides.contiguous(keys[0], kv=True))
    sizes = problem.seq, problem.heads, problem.kv_heads, problem.batch
    return strided_calls(problem.pattern, *sizes, strides, problem.is_causal)


def _sign_and_factor(scale: float) -> tuple[int, float]:
    """`scale` as sign and positive factor: kernels multiply the -inf of a masked score by it, and 0 gives NaN, -1 gives +inf."""
    if scale > 0:
        return 1, scale
    return (-1, -scale) if scale < 0 else (0, 1.0)


def _times(sign: int, x: Tensor) -> Tensor:
    return x if sign == 1 else x * sign


def _ignored_keys(call: StridedCall, key_padding_mask: Tensor | None, heads: int) -> Tensor | None:
    if key_padding_mask is None:
        return None
    by_head = key_padding_mask.unsqueeze(-1).unsqueeze(-1).expand(-1, -1, heads, 1)
    return call.in_order(call.view(by_head, kv=True).reshape(call.key_shape)).contiguous()
