"""torch's fused attention with the logsumexp of its rows, and gradients through both: for baselines."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from dilkit.backends.sdpa.kernels import KERNELS, SdpaKernel
from dilkit.pattern import Pattern
from dilkit.problem import Problem

_EVERY_TORCH_HAS = ("cpu-flash", "flash", "memory-efficient")


@lru_cache(maxsize=64)
def kernels(problem: Problem) -> tuple[SdpaKernel, ...]:
    """The kernels of a plain torch that can compute `problem`: the CPU's, or on CUDA flash and memory-efficient."""
    dense = replace(problem, pattern=Pattern.dense())  # which it is, whatever has been gathered
    return tuple(kernel for kernel in KERNELS if kernel.name in _EVERY_TORCH_HAS and not kernel.refusals(dense))


def attention_and_lse(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
    """`out` and `lse` `(batch, heads, rows)` of dense attention over `(batch, heads, rows, head_dim)`."""
    apply: Any = _FusedWithLse.apply
    out, lse = apply(q, k, v, problem.is_causal, problem.scale, kernels(problem)[0])
    return out, lse


class _FusedWithLse(torch.autograd.Function):
    """One of torch's fused kernels with both of its results differentiable; `(batch, heads, rows, head_dim)`."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float, kernel: SdpaKernel
    ) -> tuple[Tensor, Tensor]:
        out, lse = kernel.forward(q, k, v, None, is_causal, scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options = is_causal, scale, kernel
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Any, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        is_causal, scale, kernel = ctx.options
        # The kernel subtracts rowsum(dout * out) from the gradient of every score of a row and the gradient of lse adds to it:
        # an `out` moved along `dout` so that the sum falls by dlse does both.
        squares = dout.square().sum(-1, keepdim=True, dtype=lse.dtype).clamp(min=torch.finfo(lse.dtype).tiny)
        moved = (out - dout * (dlse.unsqueeze(-1) / squares).to(out.dtype)).contiguous()
        grads = kernel.backward(dout.contiguous(), q, k, v, moved, lse.contiguous(), None, is_causal, scale)
        return *grads, None, None, None
