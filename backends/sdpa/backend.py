"""torch's fused attention, called on strided views of the sequence: no gather copies.

A branch is a few grids of equal small attention problems (`grids`), which a kernel computes in a few calls (`strided_calls`).
Their partial results merge exactly (`accumulators`), on CUDA by one kernel a call (`row_kernels`). In the backward pass the
kernel gets the `out` and `lse` of the whole softmax, so its gradients are exact and need only be added up.

On a CPU the same number of threads gives the same bits; another one may not, as MKL's matrix products do not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from dilkit.backend import Backend, Limits, Refusal
from dilkit.backends.ignored_keys import without_ignored
from dilkit.backends.packed_sequences import backward_each, forward_each
from dilkit.backends.sdpa.accumulators import GradientAccumulator, OutputAccumulator, RowKernels
from dilkit.backends.sdpa.call_plan import call_plan
from dilkit.backends.sdpa.fusing import row_kernels, why_eager
from dilkit.backends.sdpa.grids import FORMS
from dilkit.backends.sdpa.kernels import KERNELS, SdpaKernel, has_no_plan
from dilkit.backends.sdpa.last_rows import last_rows
from dilkit.backends.sdpa.packed import packed_backward, packed_forward
from dilkit.backends.sdpa.refused import NO_VIEW, kind_refusals, overlap_refusals
from dilkit.backends.sdpa.strided_calls import StridedCall
from dilkit.device import capturing
from dilkit.inputs import Inputs
from dilkit.problem import Problem

if TYPE_CHECKING:
    from torch import Tensor


class SDPA(Backend):
    """The fused kernels of torch on strided views, merged by lse: the first of `kernels` that refuses nothing computes.

    `row_kernels` merge; by default Triton's, where they work.
    """

    name = "sdpa"
    summary = (
        "torch's fused attention on strided views: CPU, CUDA from 5.0 on; windows, global tokens and runs as tiles; "
        '`overlap="once"` for some patterns'
    )
    requires = ("torch",)
    limits = Limits(devices=frozenset({"cpu", "cuda", "hip"}), varlen=True, kv_cache=True, query_offset=True, forms=FORMS)
    priority = 10

    def __init__(self, kernels: tuple[SdpaKernel, ...] = KERNELS, row_kernels: RowKernels | None = None) -> None:
        self.kernels, self.row_kernels = kernels, row_kernels
        self._chosen = lru_cache(maxsize=256)(lambda problem, deterministic: self._kernel(problem))

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
        if problem.queries is not None and problem.query_offset is None:
            details, passed_over = ["sequence by sequence, each by the first kernel that can compute it"], ()
        if problem.device.type == "cuda":
            reason = why_eager(problem)
            details.append(f"merges by eager operators: {reason}" if reason else "merges by one kernel a call")
        return "; ".join((*details, *(f"{name}: {reasons[0]}" for name, reasons in passed_over)))

    def proof_facts(self, problem: Problem) -> tuple[str, ...]:
        """On AMD's GPUs the kernels of torch are proven: none has run them for dilkit."""
        if problem.device.platform != "hip" or problem.kv_cache:
            return ()
        import torch

        sizes = (
            f"{problem.dtype}, head_dim {problem.head_dim}",
            f"packed {problem.varlen}, gradients {problem.requires_grad}",
            f"segments {problem.pattern.only_segments}, other queries {problem.queries is not None}",
        )
        return ("sdpa", self._kernel(problem).name, str(problem.device), torch.__version__, f"HIP {torch.version.hip}", *sizes)

    def forward(self, inputs: Inputs, problem: Problem) -> tuple[Tensor, Tensor]:
        """On a GPU packed sequences wait for `cu_seqlens`, for how many segments have which length decides what is called."""
        query, key, value, _, _, cache_seqlens, *_ = inputs
        if cache_seqlens is not None:
            return last_rows(query, key, value, problem, cache_seqlens)
        if _is_of_each(inputs):
            return forward_each(self, inputs, problem)
        results: tuple[Tensor, Tensor] = self._compute(_forward, problem, inputs)
        return results

    def backward(self, dout: Tensor, inputs: Inputs, out: Tensor, lse: Tensor, problem: Problem) -> tuple[Tensor, ...]:
        if _is_of_each(inputs):
            return backward_each(self, dout, inputs, out, lse, problem)
        gradients: tuple[Tensor, Tensor, Tensor] = self._compute(_backward, problem, inputs, dout, out, lse)
        return gradients

    def _compute(self, run: Callable[..., Any], problem: Problem, inputs: Inputs, *others: Tensor) -> Any:
        """Return the results of `run` by the first kernel; by the next one, from the start, where cuDNN cannot plan its calls."""
        import torch

        merging = self.row_kernels or row_kernels(inputs.query, problem)
        with torch._C._AutoDispatchBelowAutograd():
            while True:
                kernel = self._chosen(problem, torch.are_deterministic_algorithms_enabled())
                try:
                    with kernel.active():
                        return run(kernel, merging, problem, inputs, *others)
                except RuntimeError as error:
                    if not has_no_plan(error) or capturing(inputs.query.device):
                        raise
                    kernel.remember_failure(problem, error)
                    self._chosen.cache_clear()
                    if self._choose_kernel(problem)[0] is None:
                        raise

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


def _is_of_each(inputs: Inputs) -> bool:
    """True if sequences, or elements of a batch, are calls of their own: keys or offsets differ from one to the next."""
    return inputs.cu_seqlens_k is not None or inputs.query_offset is not None


def _forward(kernel: SdpaKernel, merging: RowKernels | None, problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor]:
    query, key, value, mask, cu_seqlens, *_ = inputs
    sign, scale = _sign_and_factor(problem.scale)
    if cu_seqlens is not None:
        return packed_forward(kernel, inputs._replace(query=_times(sign, query)), problem, scale, merging)
    q, k, v = map(kernel.layout, (_times(sign, query), without_ignored(key, mask), without_ignored(value, mask)))
    plan = call_plan(problem, (q.stride(),), (k.stride(), v.stride()), merging is not None)
    total = OutputAccumulator(query, plan, merging)
    views = (x.of(y) for x, y in zip((*plan.queries, *plan.keys), (q, k, v), strict=True))
    for call, *rows in zip(plan.calls, *views, strict=True):
        total.add(*_partial(kernel, call, rows, _ignored_keys(call, mask, problem.heads), scale))
    return total.result()


def _backward(
    kernel: SdpaKernel,
    adding: RowKernels | None,
    problem: Problem,
    inputs: Inputs,
    dout: Tensor,
    out: Tensor,
    lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    import torch

    query, key, value, mask, cu_seqlens, *_ = inputs
    sign, scale = _sign_and_factor(problem.scale)
    if cu_seqlens is not None:
        inputs = inputs._replace(query=_times(sign, query))
        dq, dk, dv = packed_backward(kernel, dout, inputs, out, lse, problem, scale, adding)
        return _times(sign, dq), dk, dv
    key, value = without_ignored(key, mask), without_ignored(value, mask)
    if mask is not None:  # rows that see nothing have no gradient, whatever is in them
        unseen = (lse == -math.inf).transpose(1, 2).unsqueeze(-1)
        dout, query, out = (x.masked_fill(unseen, 0.0) for x in (dout, query, out))
    do, q, k, v, out = map(kernel.layout, (dout, _times(sign, query), key, value, out))
    if kernel.equal_strides:
        do, q, out = (x.contiguous() for x in (do, q, out))
    sums = torch.nan_to_num(lse, math.nan, math.inf, math.inf)  # exp(s - inf) = 0: a row that sees nothing has no gradient
    sums = sums.transpose(1, 2).contiguous()  # in the order of `out`, whose strides the calls fit
    plan = call_plan(problem, (q.stride(), do.stride(), out.stride()), (k.stride(), v.stride()), adding is not None)
    totals = [
        GradientAccumulator(x, y, adding) for x, y in zip((query, key, value), (plan.dquery, plan.dkey, plan.dkey), strict=True)
    ]
    of_q, of_do, of_out, of_k, of_v, of_sums = (
        x.of(y) for x, y in zip((*plan.queries, *plan.keys, plan.sums), (q, do, out, k, v, sums), strict=True)
    )
    for call, *rows, call_sums in zip(plan.calls, of_do, of_q, of_k, of_v, of_out, of_sums, strict=True):
        whole = *rows, call_sums.contiguous() if adding else call_sums.reshape(call.shape).contiguous()
        whole = tuple(map(call.in_order, whole)) if call.reverse else whole
        parts = kernel.backward(*whole, _ignored_keys(call, mask, problem.heads), call.is_causal, scale)
        for total, part in zip(totals, parts, strict=True):
            total.add(call.in_order(part) if call.reverse else part)
        del parts, part  # before the next ones are computed
    dq, dk, dv = (total.result() for total in totals)
    return _times(sign, dq), dk, dv


def _partial(
    kernel: SdpaKernel, call: StridedCall, rows: Sequence[Tensor], ignored: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute `out` and `lse` of a call; 0 and -inf in rows that see no key, where kernels differ."""
    import torch

    if call.reverse:
        rows = tuple(map(call.in_order, rows))
    out, lse = kernel.forward(*rows, ignored, call.is_causal, scale)
    if ignored is not None:
        empty = ignored.all(-1, keepdim=True).expand(lse.shape)
        if call.is_causal:
            empty = ignored.cumprod(-1, dtype=torch.uint8).bool()
        out, lse = out.masked_fill_(empty.unsqueeze(-1), 0.0), lse.masked_fill(empty, -math.inf)
    return (call.in_order(out), call.in_order(lse)) if call.reverse else (out, lse)


def _sign_and_factor(scale: float) -> tuple[int, float]:
    """Split `scale` into sign and positive factor: kernels multiply a masked -inf by it, and 0 gives NaN, -1 gives +inf."""
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
