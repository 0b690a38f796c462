"""What some peers compute that is no pattern's attention, written down in plain arithmetic: the oracles they are checked by."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, unflatten

from dilkit.pattern import DilatedSegment, Pattern
from dilkit.problem import Problem
from dilkit.tools.measure.implementation import Function, Inputs

AS_PUBLISHED = (
    "the attention of the pattern where no segment is filled up; else its rows see zeros as further keys, but for a causal mask. "
    "Gradients leave out those of the weights of the branches"
)
HEAD_SPLIT = (
    "the attention of each head in its own branch alone, divided by its sum over the sequence and by the number of branches; "
    "0 in rows that the branch does not keep"
)
NEIGHBOURHOOD = (
    "the attention of every token to its neighbours at equal distances: as many as it sees in the pattern on average, "
    "at the largest rate for which the sequence has room"
)

Softmax = tuple[Tensor, Tensor]


def softmax_rows(inputs: Inputs, problem: Problem, rows: Tensor, count: Tensor, zeros: Tensor, dtype: str) -> Softmax:
    """`out` `(batch, m, heads, head_dim)` and `lse` `(batch, heads, m)` of the queries in `rows`, each a row of `count`.

    `count` is `(heads, m, seq)`; `zeros` `(heads, m)` is how many keys of zeros, with values of zeros, a row sees besides.
    """
    kind = getattr(torch, dtype)
    q, k, v = inputs.query[:, rows].to(kind), inputs.key.to(kind), inputs.value.to(kind)
    scores = problem.scale * torch.einsum("bmhd,bnhd->bhmn", q, k) + count.to(kind).log()
    blank = zeros.to(kind).log().expand(len(scores), -1, -1).unsqueeze(-1)
    scores = torch.cat([scores, blank], -1)
    sees_none = scores.isneginf().all(-1, keepdim=True)
    scores = scores.masked_fill(sees_none, 0.0)
    weights = torch.softmax(scores, -1).masked_fill(sees_none, 0.0)
    lse = scores.logsumexp(-1).masked_fill(sees_none.squeeze(-1), -math.inf)
    return torch.einsum("bhmn,bnhd->bmhd", weights[..., :-1], v), lse


def longnet(problem: Problem, offset: str | None = None) -> Function | None:
    """LongNet's published procedure; None where that is the attention of the pattern, with `offset` where it has its own."""
    pattern, seq = problem.pattern, problem.seq
    lengths = [(min(branch.segment_length, seq), branch.dilation_rate) for branch in pattern.branches]
    filled_up = any(seq % length or length % rate for length, rate in lengths) and not problem.is_causal
    if not problem.requires_grad and not filled_up:
        return None
    pattern = Pattern(pattern.segment_lengths, pattern.dilation_rates, offset or pattern.offset)

    def out_rows(inputs: Inputs, problem: Problem, rows: Tensor, dtype: str) -> Tensor:
        outs, lses = zip(*(_branch(inputs, problem, pattern, b, rows, dtype) for b in pattern.branches), strict=True)
        lse = torch.stack(lses).detach()
        weights = (lse - lse.amax(0).clamp(min=-1e30)).exp()
        weights = (weights / weights.sum(0).clamp(min=1e-30)).transpose(-1, -2).unsqueeze(-1)
        return (weights * torch.stack(outs)).sum(0)

    return Function(out_rows, _flops(problem, pattern))


def _branch(inputs: Inputs, problem: Problem, pattern: Pattern, branch: DilatedSegment, rows: Tensor, dtype: str) -> Softmax:
    """One branch by itself, its segments filled up with zeros."""
    seq, length, rate = problem.seq, min(branch.segment_length, problem.seq), branch.dilation_rate
    alone = Pattern([length], [rate], pattern.offset)
    count = alone.count_rows(rows, seq, problem.heads, is_causal=problem.is_causal)
    zeros = torch.zeros(problem.heads, len(rows), device=rows.device)
    if not problem.is_causal:  # zeros come last: no query looks ahead at them
        real = torch.clamp(seq - rows // length * length, max=length)
        for head in range(problem.heads):
            first = alone.head_offset(rate, head, problem.heads)
            kept = rows % length % rate == first
            zeros[head] = kept * (_up_to(length + -length % rate, first, rate) - _up_to(real, first, rate))
    return softmax_rows(inputs, problem, rows, count, zeros, dtype)


def _up_to(stop: Any, first: int, rate: int) -> Any:
    """How many of `first, first + rate, ...` are below `stop`; `stop` a number above 0 or a tensor of them."""
    return (stop - first + rate - 1) // rate


def _flops(problem: Problem, pattern: Pattern) -> float:
    return pattern.flops(problem.seq, problem.heads, problem.head_dim, batch=problem.batch, is_causal=problem.is_causal)


def neighbourhood(problem: Problem) -> Function:
    """Dilated neighbourhood attention in one dimension, with the window of `window`."""
    size, dilation = window(problem)

    def out_rows(inputs: Inputs, problem: Problem, rows: Tensor, dtype: str) -> Tensor:
        seen = neighbours(rows, problem.seq, size, dilation, problem.is_causal)
        count = seen.expand(problem.heads, -1, -1)
        none = torch.zeros(problem.heads, len(rows), device=rows.device)
        return softmax_rows(inputs, problem, rows, count, none, dtype)[0]

    pairs = problem.seq * size - (dilation * size * (size - 1) // 2 if problem.is_causal else 0)
    return Function(out_rows, 4.0 * problem.head_dim * problem.batch * problem.heads * pairs)


def window(problem: Problem) -> tuple[int, int]:
    """The window of a neighbourhood for `problem`: how many keys, an odd number, and how far apart.

    As many keys as a query of the pattern sees on average, so that there is as much work; the largest rate of the pattern, or
    what the sequence has room for.
    """
    seq, pattern = problem.seq, problem.pattern
    seen = pattern.flops(seq, problem.heads, 1) / (4 * problem.heads * max(seq, 1))
    size = max(1, min(round(seen), seq))
    size -= 1 - size % 2
    return size, max(1, min(max(pattern.dilation_rates), seq // size))


def neighbours(rows: Tensor, seq: int, size: int, dilation: int, is_causal: bool) -> Tensor:
    """Bool `(m, seq)`: the `size` keys at steps of `dilation` that are nearest to each query, or those that end with it.

    At either end of the sequence the window is moved inwards; with a causal mask it is cut.
    """
    columns = torch.arange(seq, device=rows.device)
    residue, place = rows % dilation, rows // dilation
    if is_causal:
        first = place - (size - 1)
    else:
        there = (seq - residue + dilation - 1) // dilation
        first = torch.minimum((place - size // 2).clamp(min=0), there - size)
    steps = columns // dilation - first[:, None]
    seen = (columns % dilation == residue[:, None]) & (steps >= 0) & (steps < size)
    return seen & (columns <= rows[:, None]) if is_causal else seen


def head_split(problem: Problem) -> Function:
    """Heads dealt out to branches, each head in one branch alone, divided by its sum over the sequence and by the branches."""
    pattern = problem.pattern
    dealt = Pattern.head_split(pattern.segment_lengths, pattern.dilation_rates, problem.heads)
    return Function(_head_split_rows, _flops(problem, dealt), by_row=False, positive=True)


def _head_split_rows(inputs: Inputs, problem: Problem, rows: Tensor, dtype: str) -> Tensor:
    kind, branches = getattr(torch, dtype), problem.pattern.branches
    tensors = [x.to(kind).chunk(len(branches), 2) for x in (inputs.query, inputs.key, inputs.value)]
    parts = []
    for number, (branch, *qkv) in enumerate(zip(branches, *tensors, strict=True)):
        length, rate = branch.segment_length, branch.dilation_rate
        first = number % rate
        q, k, v = (unflatten(x, 1, (-1, length))[:, :, first::rate] for x in qkv)
        found = _segments(q, k, v, problem)
        whole = unflatten(torch.zeros_like(qkv[0]), 1, (-1, length)).clone()
        whole[:, :, first::rate] = found / found.sum((1, 2), keepdim=True)
        parts.append(whole.flatten(1, 2))
    return torch.cat(parts, 2)[:, rows] / len(branches)


def _segments(q: Tensor, k: Tensor, v: Tensor, problem: Problem, rows: int = 1024) -> Tensor:
    """Attention within each segment, `(batch, segments, kept rows, heads, head_dim)`, so many rows at a time."""
    kept, outs = q.shape[2], []
    for start in range(0, kept, rows):
        scores = problem.scale * torch.einsum("bsmhd,bsnhd->bshmn", q[:, :, start : start + rows], k)
        if problem.is_causal:
            scores = scores + torch.full_like(scores[0, 0, 0], -math.inf).triu(start + 1)
        outs.append(torch.einsum("bshmn,bsnhd->bsmhd", torch.softmax(scores, -1), v))
    return torch.cat(outs, 2)
