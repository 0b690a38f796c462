"""What LongNet's procedure as published computes in training, in plain arithmetic: what the baseline `longnet` is checked by."""

from __future__ import annotations

import torch
from torch import Tensor

from dilkit.oracle import softmax_of_count
from dilkit.pattern import Pattern
from dilkit.problem import Problem


def detached_weights(query: Tensor, key: Tensor, value: Tensor, problem: Problem, rows: Tensor) -> tuple[Tensor, Tensor]:
    """`out` and `lse` of the queries in `rows`: branches merged by weights that are constants to the gradient."""
    q, k, v = (x.transpose(1, 2) for x in (query[:, rows], key, value))
    found = []
    for branch in problem.pattern.segments:
        alone = Pattern([branch.segment_length], [branch.dilation_rate], problem.pattern.offset)
        count = alone.count_rows(rows, problem.seq, problem.heads, is_causal=problem.is_causal)
        found.append(softmax_of_count(q, k, v, count, problem.scale))
    outs, lses = (torch.stack(parts) for parts in zip(*found, strict=True))
    lse = lses.detach().logsumexp(0)
    weights = (lses.detach() - lse).exp().nan_to_num().unsqueeze(-1)
    return (weights * outs).sum(0).transpose(1, 2), lse
