"""What dilkit is compared with: attention as one would write it in plain PyTorch. For comparisons only."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from dilkit.pattern import DilatedSegment, Pattern
from dilkit.problem import Problem
from dilkit.tools.contestants import Contestant, Inputs


def gather_attention(query: Tensor, key: Tensor, value: Tensor, problem: Problem) -> Tensor:
    """The same function as `dilkit.dilated_attention`, in the manner of LongNet's published code, with exact gradients.

        out = sum_b softmax_b(lse_b) * out_b        (out_b, lse_b) = attention over the kept rows of branch b

    For every branch the kept rows of query, key and value are gathered into new contiguous tensors, attended to by torch's
    fused CPU kernel, and scattered back into tensors as long as the sequence; the branches are then merged. Where a rate does
    not divide the heads, heads of zeros are added.
    Gathering, scattering and merging are torch operators that autograd differentiates.
    """
    outs, lses = zip(*(_branch(query, key, value, problem, branch) for branch in problem.pattern.branches), strict=True)
    lse = torch.stack(lses)
    # A row that no branch keeps is -inf everywhere: a finite maximum makes its weights 0 and not NaN.
    weights = (lse - lse.amax(0).clamp(min=-1e30).detach()).exp()
    weights = (weights / weights.sum(0).clamp(min=1e-30)).transpose(-1, -2).unsqueeze(-1).to(query.dtype)
    return sum(weight * out for weight, out in zip(weights, outs, strict=True))


def _branch(query: Tensor, key: Tensor, value: Tensor, problem: Problem, branch: DilatedSegment) -> tuple[Tensor, Tensor]:
    """`out` `(batch, seq, heads, head_dim)`, `lse` `(batch, heads, seq)` of one branch; 0 and -inf in rows it does not keep."""
    length, rate = min(branch.segment_length, problem.seq), branch.dilation_rate
    by_offset = problem.pattern.offset == "block"
    lacking = -problem.heads % rate  # heads of zeros, so that each offset has as many heads as the others
    query, key, value = (torch.nn.functional.pad(x, (0, 0, 0, lacking)) if lacking else x for x in (query, key, value))
    views = [_kept(x, length, rate, by_offset).permute(0, 1, 5, 3, 2, 4) for x in (query, key, value)]
    q, k, v = (x.reshape(-1, problem.heads + lacking, *x.shape[-2:]).contiguous() for x in views)
    out, lse = _FlashWithLse.apply(q, k, v, problem.is_causal, problem.scale)
    segments = out.view(views[0].shape).permute(0, 1, 4, 3, 5, 2)
    lses = lse.view(views[0].shape[:-1]).permute(0, 1, 4, 3, 2).unsqueeze(4)
    whole_out, whole_lse = torch.zeros_like(query), lse.new_full((*query.shape[:3], 1), -math.inf)
    _kept(whole_out, length, rate, by_offset).copy_(segments)
    _kept(whole_lse, length, rate, by_offset).copy_(lses)
    return whole_out[:, :, : problem.heads], whole_lse[:, :, : problem.heads].squeeze(-1).transpose(1, 2)


def _kept(x: Tensor, length: int, rate: int, by_offset: bool) -> Tensor:
    """The view `(batch, segments, kept rows, heads / rate, head_dim, offset)` of `x` `(batch, seq, heads, head_dim)`.

    Head h starts at offset h mod rate, or with `by_offset` at h // (heads / rate): a diagonal over residue and offset.
    """
    rows = (
        x.unflatten(1, (-1, length // rate, rate))
        if length == x.shape[1]
        else x.unflatten(1, (-1, length)).unflatten(2, (-1, rate))
    )
    heads = rows.unflatten(4, (rate, -1)) if by_offset else rows.unflatten(4, (-1, rate))
    return heads.diagonal(dim1=3, dim2=4 if by_offset else 5)


class _FlashWithLse(torch.autograd.Function):
    """torch's fused CPU attention with both of its results differentiable; `(batch, heads, rows, head_dim)`."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal, scale=scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options = is_causal, scale
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Any, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        is_causal, scale = ctx.options
        # The kernel subtracts rowsum(dout * out) from the gradient of every score of a row and the gradient of lse adds to it:
        # an `out` moved along `dout` so that the sum falls by dlse does both.
        squares = dout.square().sum(-1, keepdim=True, dtype=lse.dtype).clamp(min=torch.finfo(lse.dtype).tiny)
        moved = (out - dout * (dlse.unsqueeze(-1) / squares).to(out.dtype)).contiguous()
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        grads = backward(dout.contiguous(), q, k, v, moved, lse, 0.0, is_causal, scale=scale)
        return *grads, None, None


def _gather_refusals(problem: Problem) -> tuple[str, ...]:
    pattern, seq = problem.pattern, problem.seq
    asked = {
        f"device {problem.device.type}: calls torch's CPU kernel": problem.device.type != "cpu",
        "key_padding_mask: not supported": problem.key_padding_mask,
        "grouped heads: not supported": problem.kv_heads != problem.heads,
        "head ranges: not supported": pattern.heads is not None,
        "a shard of heads: not supported": pattern.head_shard is not None,
        "overlap 'once': counts a key once for each branch": pattern.overlap != "count",
    }
    found = [reason for reason, wanted in asked.items() if wanted]
    for branch in pattern.branches:
        length, rate = min(branch.segment_length, seq), branch.dilation_rate
        if seq % length:
            found.append(f"seq {seq}: must be a multiple of segment length {length}; it has no short segments")
        if length % rate:
            found.append(f"dilation rate {rate}: must divide the segment length {length}")
    return tuple(found)


def dense_attention(
    query: Tensor, key: Tensor, value: Tensor, problem: Problem, key_padding_mask: Tensor | None = None
) -> Tensor:
    """Ordinary attention of every token to every token, `softmax(scale * q k^T) v`: another function than the pattern's.

    `torch.nn.functional.scaled_dot_product_attention`, with whichever of its kernels torch picks.
    """
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    mask = None if key_padding_mask is None else ~key_padding_mask[:, None, None, :]
    options: dict[str, Any] = dict(is_causal=problem.is_causal, scale=problem.scale, enable_gqa=problem.kv_heads != problem.heads)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, **options).transpose(1, 2)


def _dense_refusals(problem: Problem) -> tuple[str, ...]:
    both = problem.is_causal and problem.key_padding_mask
    return ("is_causal with key_padding_mask: torch takes one of them",) if both else ()


def _dense(inputs: Inputs, problem: Problem) -> Tensor:
    return dense_attention(inputs.query, inputs.key, inputs.value, problem, inputs.key_padding_mask)


def _gather(inputs: Inputs, problem: Problem) -> Tensor:
    return gather_attention(inputs.query, inputs.key, inputs.value, problem)


BASELINES = {
    "gather": Contestant("gather", "baseline", "gather a copy per branch, torch's kernel, merge", _gather, _gather_refusals),
    "dense": Contestant(
        "dense",
        "baseline",
        "torch's attention over all tokens",
        _dense,
        _dense_refusals,
        lambda _: Pattern.dense(),
        quadratic=True,
    ),
}
"""The baselines by name."""
