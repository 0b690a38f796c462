"""Baselines: attention as one would write it in plain PyTorch, for comparisons only."""

import math
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from importlib.util import find_spec
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, unflatten

from dilkit.backends.sdpa.kernels import KERNELS, SdpaKernel
from dilkit.pattern import DilatedSegment, Pattern
from dilkit.problem import Problem
from dilkit.testing.tensors import Tensors
from dilkit.tools.measure.implementation import Implementation

BOTH_MASKS = "is_causal with key_padding_mask: torch takes one of them"


def dense_attention(inputs: Tensors, problem: Problem) -> Tensor:
    """Return torch's attention of every token to every token, `softmax(scale * q k^T) v`."""
    q, k, v = (x.transpose(1, 2) for x in inputs.qkv)
    mask = None if inputs.mask is None else ~inputs.mask[:, None, None, :]
    options: Any = dict(is_causal=problem.is_causal, scale=problem.scale, enable_gqa=problem.kv_heads != problem.heads)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, **options).transpose(1, 2)


def _gathered(inputs: Tensors, problem: Problem) -> Tensor:
    """Return the attention by LongNet's published procedure, the gradients of the branches' weights included.

    The kept rows of a branch are gathered into new tensors, attended to by one of torch's fused kernels, and scattered back.
    """
    pairs = [(min(branch.segment_length, problem.seq), branch.dilation_rate) for branch in problem.pattern.segments]
    return merged(*zip(*(branch_attention(*inputs.qkv, problem, length, rate) for length, rate in pairs), strict=True))


def merged(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> Tensor:
    """Return the sum of `outs` `(batch, seq, heads, head_dim)`, weighted by the softmax over `lses` `(batch, heads, seq)`."""
    lse = torch.stack(list(lses))
    # A row that no branch keeps is -inf everywhere: a finite maximum makes its weights 0 and not NaN.
    weights = (lse - lse.amax(0).clamp(min=-1e30).detach()).exp()
    weights = (weights / weights.sum(0).clamp(min=1e-30)).transpose(-1, -2).unsqueeze(-1).to(outs[0].dtype)
    merged: Tensor = sum(weight * out for weight, out in zip(weights, outs, strict=True))
    return merged


def branch_attention(
    query: Tensor, key: Tensor, value: Tensor, problem: Problem, length: int, rate: int
) -> tuple[Tensor, Tensor]:
    """Return `out` `(batch, seq, heads, head_dim)` and `lse` `(batch, heads, seq)`; 0 and -inf in rows that are not kept.

    The sequence has whole segments of `length`, a multiple of `rate`.
    """
    by_offset = problem.pattern.offset == "block"
    lacking = -problem.heads % rate  # heads of zeros, so that each offset has as many heads as the others
    if lacking:
        query, key, value = (torch.nn.functional.pad(x, (0, 0, 0, lacking)) for x in (query, key, value))
    views = [_kept(x, length, rate, by_offset).permute(0, 1, 5, 3, 2, 4) for x in (query, key, value)]
    q, k, v = (x.reshape(-1, problem.heads + lacking, *x.shape[-2:]).contiguous() for x in views)
    apply: Any = _FusedWithLse.apply
    out, lse = apply(q, k, v, problem.is_causal, problem.scale, _kernels(problem)[0])
    segments = out.view(views[0].shape).permute(0, 1, 4, 3, 5, 2)
    lses = lse.view(views[0].shape[:-1]).permute(0, 1, 4, 3, 2).unsqueeze(4)
    whole_out, whole_lse = torch.zeros_like(query), lse.new_full((*query.shape[:3], 1), -math.inf)
    _kept(whole_out, length, rate, by_offset).copy_(segments)
    _kept(whole_lse, length, rate, by_offset).copy_(lses)
    return whole_out[:, :, : problem.heads], whole_lse[:, :, : problem.heads].squeeze(-1).transpose(1, 2)


def _kept(x: Tensor, length: int, rate: int, by_offset: bool) -> Tensor:
    """Return the view `(batch, segments, kept rows, heads / rate, head_dim, offset)` of `x` `(batch, seq, heads, head_dim)`.

    Head h starts at offset h mod rate, or with `by_offset` at h // (heads / rate): a diagonal over residue and offset.
    """
    whole = length == x.shape[1]
    rows = unflatten(x, 1, (-1, length // rate, rate)) if whole else unflatten(unflatten(x, 1, (-1, length)), 2, (-1, rate))
    heads = unflatten(rows, 4, (rate, -1) if by_offset else (-1, rate))
    return heads.diagonal(dim1=3, dim2=4 if by_offset else 5)


@lru_cache(maxsize=64)
def _kernels(problem: Problem) -> tuple[SdpaKernel, ...]:
    """Return the kernels of a plain torch that can compute gathered rows: the CPU's, or on CUDA flash and memory-efficient."""
    dense, names = replace(problem, pattern=Pattern.dense()), ("cpu-flash", "flash", "memory-efficient")
    return tuple(kernel for kernel in KERNELS if kernel.name in names and not kernel.refusals(dense))


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


def _gather_refusals(problem: Problem) -> tuple[str, ...]:
    pattern, seq = problem.pattern, problem.seq
    no_kernel = f"device {problem.device.name}: no fused kernel of torch's can compute {problem.dtype} x {problem.head_dim}"
    reasons = {
        no_kernel: not _kernels(problem),
        "key_padding_mask: not supported": problem.key_padding_mask,
        "grouped heads: not supported": problem.kv_heads != problem.heads,
        "head ranges: not supported": pattern.heads is not None,
        "a shard of heads: not supported": pattern.head_shard is not None,
        "overlap 'once': counts a key once for each branch": pattern.overlap != "count",
        "tail 'zeros': pads nothing": pattern.tail != "exact",
    }
    for branch in pattern.branches:
        if not isinstance(branch, DilatedSegment):
            reasons[f"branch {branch.call()}: only dilated segments are gathered"] = True
            continue
        length, rate = min(branch.segment_length, seq), branch.dilation_rate
        reasons[f"seq {seq}: must be a multiple of segment length {length}; it has no short segments"] = bool(seq % length)
        reasons[f"dilation rate {rate}: must divide the segment length {length}"] = bool(length % rate)
    return tuple(reason for reason, holds in reasons.items() if holds)


@lru_cache(maxsize=8)
def _compiled(problem: Problem, device: torch.device) -> Callable[..., Tensor]:
    """Return torch's FlexAttention of query, key and value `(batch, heads, seq, head_dim)`; compiling takes many seconds.

    The count of the pattern is a mask, and its log is added to scores where a key may be seen more than once.
    """
    from torch.nn.attention import flex_attention as flex

    sizes: dict[str, Any] = dict(kv_heads=problem.kv_heads, is_causal=problem.is_causal, device=device)
    pattern = problem.pattern
    options: dict[str, Any] = dict(scale=problem.scale, enable_gqa=problem.kv_heads != problem.heads)
    options |= dict(block_mask=pattern.block_mask(problem.seq, problem.heads, **sizes))
    options |= dict(score_mod=pattern.score_mod(problem.seq, problem.heads, **sizes))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = flex.flex_attention(q, k, v, **options)
        return out

    # torch counts compilations by code object and gives up after a few: each problem gets a code object of its own.
    copy = FunctionType(attend.__code__.replace(), globals(), attend.__name__, None, attend.__closure__)
    return torch.compile(copy, fullgraph=True, dynamic=False)


def _flex_refusals(problem: Problem) -> tuple[str, ...]:
    on_cpu = problem.device.type == "cpu"
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    reasons = {
        "key_padding_mask: not supported": problem.key_padding_mask,
        "dtype float64: FlexAttention is not compiled for it": problem.dtype == "float64",
        "backward: FlexAttention has none on the CPU": on_cpu and problem.requires_grad,
        f"C++ compiler {compiler!r}: not found, and torch.compile needs one; install it, or name yours in CXX": on_cpu
        and not shutil.which(compiler),
        "module triton: not installed, and torch.compile needs it on CUDA": not on_cpu and find_spec("triton") is None,
    }
    return tuple(reason for reason, holds in reasons.items() if holds)


_IMPLEMENTATIONS = (
    Implementation(
        "gather",
        "gather a copy per branch, torch's kernel, merge",
        _gathered,
        _gather_refusals,
    ),
    Implementation(
        "dense",
        "torch's attention over all tokens",
        dense_attention,
        lambda problem: (BOTH_MASKS,) * (problem.is_causal and problem.key_padding_mask),
        lambda _: Pattern.dense(),
        quadratic=True,
        computes="the attention of every token to every token",
    ),
    Implementation(
        "flex",
        "torch's FlexAttention, compiled: the count as mask_mod and score_mod",
        lambda inputs, problem: _compiled(problem, inputs.query.device)(*(x.transpose(1, 2) for x in inputs.qkv)).transpose(1, 2),
        _flex_refusals,
    ),
)
BASELINES = {one.name: one for one in _IMPLEMENTATIONS}
"""Implementations that `dilkit bench --baseline` measures beside backends, by name."""
