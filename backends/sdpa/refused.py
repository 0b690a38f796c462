"""What cannot be computed branch by branch on views: `overlap="once"` where branches share a row, and what is no view."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from dilkit.backend import Refusal
from dilkit.backends.once import branches_of_heads, counts_once
from dilkit.backends.sdpa.grids import BRANCH_KINDS, token_runs
from dilkit.pattern import Branch, DilatedSegment, GlobalTokens
from dilkit.problem import Problem


@lru_cache(maxsize=256)
def overlap_refusals(problem: Problem) -> tuple[Refusal, ...]:
    """`overlap="once"` is refused where two branches share a row: each of them scores that row with itself.

    Of other kinds than segments, bands leave out what narrower ones and global tokens have shown, as far as that is a view.
    """
    pattern = problem.pattern
    if pattern.overlap == "count" or not {branch.kind for branch in pattern.branches} <= BRANCH_KINDS:
        return ()
    reasons = [_segments_refused(segments, problem.seq) for segments in _segments_of_heads(problem)]
    reasons += [_mix_refused(problem, branches) for branches in branches_of_heads(pattern, problem.heads)]
    return tuple(Refusal("overlap", "'once'", why, _HINT) for why in sorted(filter(None, reasons))[:1])


def _segments_of_heads(problem: Problem) -> set[tuple[tuple[int, int, int], ...]]:
    """The segments of each query head: (length, rate, offset)."""
    pattern, group = problem.pattern, problem.heads // problem.kv_heads
    return {
        tuple(
            (branch.segment_length, branch.dilation_rate, pattern.head_offset(branch.dilation_rate, h // group, problem.kv_heads))
            for branch in pattern.branches
            if isinstance(branch, DilatedSegment) and branch.serves(h)
        )
        for h in range(problem.heads)
    }


def _mix_refused(problem: Problem, branches: tuple[Branch, ...]) -> str:
    """Why the branches of a head, of which some are no segments, cannot be computed one by one; empty where they can."""
    if len(branches) < 2 or all(isinstance(branch, DilatedSegment) for branch in branches):
        return ""
    chosen = [branch for branch in branches if isinstance(branch, GlobalTokens)]
    if len(chosen) > 1 or not counts_once(branches):
        return "two branches see the same key, and what is left is no band"
    if chosen and [start for start, _ in token_runs(chosen[0], problem.seq)[0]] not in ([], [0]):
        return "without global tokens other than the first ones, what is left is no band"
    if chosen and chosen[0].direction == "read" and not problem.is_causal:
        return "without the keys that are read, what is left is no band; with is_causal=True it is"
    return ""


def kind_refusals(problem: Problem) -> tuple[Refusal, ...]:
    """Global tokens in too many places, each of which is a call of its own; and kinds that packed calls and caches lack."""
    kinds = {branch.kind for branch in problem.pattern.branches} & BRANCH_KINDS
    found, others = [], ", ".join(sorted(kinds - {DilatedSegment.kind}))
    if others and (problem.varlen or problem.kv_cache):
        where = "packed sequences" if problem.varlen else "a cache"
        found.append(Refusal("branch kind", others, f"of {where}, {DilatedSegment.kind} alone", "another backend"))
    for branch in problem.pattern.branches:
        if isinstance(branch, GlobalTokens) and (places := len(token_runs(branch, problem.seq)[0])) > MOST_PLACES:
            hint = "move them next to each other, or another backend"
            found.append(Refusal("global tokens", f"in {places} places", f"at most {MOST_PLACES}", hint))
    return tuple(found)


NO_VIEW = "another backend: what blocks and neighborhoods see is no strided view"
MOST_PLACES = 8
"""Runs of global tokens: with n of them a branch takes about n * n calls."""
_HINT = 'overlap="count", or another backend'
_MOST_ROWS, _BLOCK = 2**26, 2**20
"""Rows that are looked at, most of all and at once."""


def _segments_refused(branches: tuple[tuple[int, int, int], ...], seq: int) -> str:
    """Why segments `(segment_length, dilation_rate, offset)` cannot be computed one by one; empty where no two share a row."""
    if len(branches) < 2:
        return ""
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
