"""What dilkit is compared with: attention as one would write it in plain PyTorch. For comparisons only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, unflatten

from dilkit.pattern import DilatedSegment, Pattern
from dilkit.problem import Problem
from dilkit.testing.tensors import Tensors
from dilkit.tools.measure import fused
from dilkit.tools.measure.flex import FLEX
from dilkit.tools.measure.implementation import Implementation
from dilkit.tools.measure.longnet import detached_weights


def gather_attention(query: Tensor, key: Tensor, value: Tensor, problem: Problem) -> Tensor:
    """The same function as `dilkit.dilated_attention`, in the manner of LongNet's published code, with exact gradients.

        out = sum_b softmax_b(lse_b) * out_b        (out_b, lse_b) = attention over the kept rows of branch b

    For every branch the kept rows of query, key and value are gathered into new contiguous tensors, attended to by one of
    torch's fused kernels, and scattered back into tensors as long as the sequence; the branches are then merged. Where a rate
    does not divide the heads, heads of zeros are added. Gathering, scattering and merging are torch operators that autograd
    differentiates.
    """
    return merged(*_branches(query, key, value, problem))


def longnet_attention(query: Tensor, key: Tensor, value: Tensor, problem: Problem) -> Tensor:
    """LongNet's procedure as published: as `gather_attention`, but the weights of the branches are constants to the gradient."""
    outs, lses = _branches(query, key, value, problem)
    return merged(outs, [lse.detach() for lse in lses])


def _branches(query: Tensor, key: Tensor, value: Tensor, problem: Problem) -> tuple[list[Tensor], list[Tensor]]:
    pairs = [(min(branch.segment_length, problem.seq), branch.dilation_rate) for branch in problem.pattern.segments]
    results = [branch_attention(query, key, value, problem, length, rate) for length, rate in pairs]
    return [out for out, _ in results], [lse for _, lse in results]


def merged(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> Tensor:
    """The sum of `outs` `(batch, seq, heads, head_dim)`, weighted by the softmax over `lses` `(batch, heads, seq)`."""
    lse = torch.stack(list(lses))
    # A row that no branch keeps is -inf everywhere: a finite maximum makes its weights 0 and not NaN.
    weights = (lse - lse.amax(0).clamp(min=-1e30).detach()).exp()
    weights = (weights / weights.sum(0).clamp(min=1e-30)).transpose(-1, -2).unsqueeze(-1).to(outs[0].dtype)
    merged: Tensor = sum(weight * out for weight, out in zip(weights, outs, strict=True))
    return merged


def branch_attention(
    query: Tensor, key: Tensor, value: Tensor, problem: Problem, length: int, rate: int
) -> tuple[Tensor, Tensor]:
    """`out` `(batch, seq, heads, head_dim)`, `lse` `(batch, heads, seq)` of one branch; 0 and -inf in rows it does not keep.

    The sequence has whole segments of `length`, a multiple of `rate`.
    """
    by_offset = problem.pattern.offset == "block"
    lacking = -problem.heads % rate  # heads of zeros, so that each offset has as many heads as the others
    if lacking:
        query, key, value = (torch.nn.functional.pad(x, (0, 0, 0, lacking)) for x in (query, key, value))
    views = [_kept(x, length, rate, by_offset).permute(0, 1, 5, 3, 2, 4) for x in (query, key, value)]
    q, k, v = (x.reshape(-1, problem.heads + lacking, *x.shape[-2:]).contiguous() for x in views)
    out, lse = fused.attention_and_lse(q, k, v, problem)
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
    whole = length == x.shape[1]
    rows = unflatten(x, 1, (-1, length // rate, rate)) if whole else unflatten(unflatten(x, 1, (-1, length)), 2, (-1, rate))
    heads = unflatten(rows, 4, (rate, -1) if by_offset else (-1, rate))
    return heads.diagonal(dim1=3, dim2=4 if by_offset else 5)


def _gather_refusals(problem: Problem) -> tuple[str, ...]:
    pattern, seq = problem.pattern, problem.seq
    no_kernel = f"device {problem.device.name}: no fused kernel of torch's can compute {problem.dtype} x {problem.head_dim}"
    asked = {
        no_kernel: not fused.kernels(problem),
        "key_padding_mask: not supported": problem.key_padding_mask,
        "grouped heads: not supported": problem.kv_heads != problem.heads,
        "head ranges: not supported": pattern.heads is not None,
        "a shard of heads: not supported": pattern.head_shard is not None,
        "overlap 'once': counts a key once for each branch": pattern.overlap != "count",
        "tail 'zeros': pads nothing": pattern.tail != "exact",
    }
    for branch in pattern.branches:
        if not isinstance(branch, DilatedSegment):
            asked[f"branch {branch.call()}: only dilated segments are gathered"] = True
            continue
        length, rate = min(branch.segment_length, seq), branch.dilation_rate
        asked[f"seq {seq}: must be a multiple of segment length {length}; it has no short segments"] = bool(seq % length)
        asked[f"dilation rate {rate}: must divide the segment length {length}"] = bool(length % rate)
    return tuple(reason for reason, wanted in asked.items() if wanted)


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


def _dense(inputs: Tensors, problem: Problem) -> Tensor:
    return dense_attention(*inputs.qkv, problem, inputs.mask)


def _gather(inputs: Tensors, problem: Problem) -> Tensor:
    return gather_attention(*inputs.qkv, problem)


def _longnet(inputs: Tensors, problem: Problem) -> Tensor:
    return longnet_attention(*inputs.qkv, problem)


BASELINES = {
    "gather": Implementation("gather", "baseline", "gather a copy per branch, torch's kernel, merge", _gather, _gather_refusals),
    "longnet": Implementation(
        "longnet",
        "baseline",
        "LongNet's procedure as published: gather, torch's kernel, merge with detached weights",
        _longnet,
        _gather_refusals,
        computes="the attention of the pattern; its gradients leave out those of the weights of the branches",
        own_gradients=detached_weights,
    ),
    "dense": Implementation(
        "dense",
        "baseline",
        "torch's attention over all tokens",
        _dense,
        _dense_refusals,
        lambda _: Pattern.dense(),
        quadratic=True,
        computes="the attention of every token to every token",
    ),
    "flex": FLEX,
}
"""What `dilkit bench --baseline` measures beside backends, by name."""
