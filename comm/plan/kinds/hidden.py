"""Hidden tokens: with `overlap="once"`, the global tokens whose pairs another branch shows already.

A global token is seen by all, and with `direction="both"` sees all. So a pair with one of them counts in the first branch of
global tokens that it belongs to, and is left out of all branches after it, and of those of other kinds.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from dilkit.comm.plan.sharded_segments import ServedHead, served_heads
from dilkit.pattern import GlobalTokens, Pattern, SlidingWindow
from dilkit.pattern.runs import union

Edges = tuple[int, ...]
"""Runs of positions, ascending and apart, as `(start, stop, start, stop, ...)`."""


@lru_cache(maxsize=256)
def token_runs(branches: tuple[GlobalTokens, ...], start: int, stop: int) -> tuple[tuple[int, int], ...]:
    """The global tokens of all branches among the rows `start .. stop - 1`, as runs of positions, ascending and apart.

    >>> token_runs((GlobalTokens(2), GlobalTokens([2, 5, 9])), 1, 9)
    ((1, 3), (5, 6))
    """
    runs = np.clip(union(*(branch.runs() for branch in branches)), start, stop)
    return tuple((first, last) for first, last in runs.tolist() if first < last)


class Hidden(NamedTuple):
    """The branches of global tokens before a branch: it does not show their tokens as keys, nor as queries if they see all."""

    branches: tuple[GlobalTokens, ...] = ()

    @classmethod
    def of(cls, pattern: Pattern, branch: int) -> Hidden:
        """Those of a branch of a pattern: none where every branch counts."""
        if pattern.overlap == "count":
            return cls()
        before = pattern.branches[:branch] if isinstance(pattern.branches[branch], GlobalTokens) else pattern.branches
        return cls(tuple(branch for branch in before if isinstance(branch, GlobalTokens)))

    def queries(self, head: ServedHead, start: int, stop: int) -> Edges:
        """The queries of a head that are hidden among the rows `start .. stop - 1`."""
        both = tuple(branch for branch in self.branches if branch.direction == "both" and branch.serves(head.first))
        return tuple(edge for run in token_runs(both, start, stop) for edge in run)

    def keys(self, head: ServedHead, start: int, stop: int, more: tuple[GlobalTokens, ...] = ()) -> Edges:
        """The keys that are hidden from these queries, and those of `more`."""
        every = tuple(branch for branch in self.branches if branch.serves(head.first)) + more
        return tuple(edge for run in token_runs(every, start, stop) for edge in run)


def is_separable(pattern: Pattern, heads: int, kv_heads: int) -> bool:
    """Whether each pair counts once where tokens are hidden.

    That takes windows of which none serve the same head, and no global tokens that are hidden from some of the query heads of a
    key/value head alone.
    """
    others = [branch for branch in pattern.branches if not isinstance(branch, GlobalTokens)]
    several = any(sum(branch.serves(head) for branch in others) > 1 for head in range(heads))
    if several or not all(isinstance(branch, SlidingWindow) for branch in others):
        return False
    tokens = [branch for branch in pattern.branches if isinstance(branch, GlobalTokens)]
    served = {head for branch in pattern.branches for head in served_heads(pattern, branch, heads, kv_heads)}
    return all(len({branch.serves(h.first + i) for i in range(h.width)}) == 1 for h in served for branch in tokens)
