"""Which patterns with `overlap="once"` branches can be computed one by one: those of which no two branches share a row."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from dilkit.backend import Refusal
from dilkit.problem import Problem


@lru_cache(maxsize=256)
def overlap_refusals(problem: Problem) -> tuple[Refusal, ...]:
    """`overlap="once"` is refused where two branches share a row: each of them scores that row with itself."""
    pattern, group = problem.pattern, problem.heads // problem.kv_heads
    if pattern.overlap == "count" or not pattern.only_segments:  # other kinds are refused by the limits
        return ()
    served = {
        tuple(
            (branch.segment_length, branch.dilation_rate, pattern.head_offset(branch.dilation_rate, h // group, problem.kv_heads))
            for branch in pattern.segments
            if branch.serves(h)
        )
        for h in range(problem.heads)
    }
    hint = 'overlap="count", or another backend'
    for branches in served:
        if len(branches) > 1 and (why := _why_not_once(branches, problem.seq)):
            return (Refusal("overlap", "'once'", why, hint),)
    return ()


_MOST_ROWS, _BLOCK = 2**26, 2**20
"""Rows that are looked at, most of all and at once."""


def _why_not_once(branches: tuple[tuple[int, int, int], ...], seq: int) -> str:
    """Why branches `(segment_length, dilation_rate, offset)` cannot be computed one by one; empty where no two share a row."""
    repeats = math.lcm(*(length if length < seq else rate for length, rate, _ in branches))
    rows = min(seq, repeats)
    if rows > _MOST_ROWS:
        return f"whether two branches see the same key shows after {rows:,} rows only, more than {_MOST_ROWS:,}"
    for start in range(0, rows, _BLOCK):
        block = np.arange(start, min(start + _BLOCK, rows))
        taken = sum((block % length % rate == offset).astype(np.int8) for length, rate, offset in branches)
        if np.max(taken) > 1:
            return "two branches see the same key, and what is left is not evenly spaced"
    return ""
