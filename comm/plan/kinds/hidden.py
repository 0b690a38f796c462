"""Hidden tokens: with `overlap="once"`, the global tokens whose pairs another branch shows already.

A global token is seen by all, and with `direction="both"` sees all. So a pair with one of them counts in the first branch of
global tokens that it belongs to, and is left out of all branches after it, and of those of other kinds.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from dilkit.pattern import GlobalTokens, Pattern, SlidingWindow

Edges = tuple[int, ...]
"""Runs of positions, ascending and apart, as `(start, stop, start, stop, ...)`."""


@lru_cache(maxsize=256)
def token_runs(branches: tuple[GlobalTokens, ...], start: int, stop: int) -> tuple[tuple[int, int], ...]:
    """The global tokens of all branches among the rows `start .. stop - 1`, as runs of positions, ascending and apart.

    >>> token_runs((GlobalTokens(2), GlobalTokens([2, 5, 9])), 1, 9)
    ((1, 3), (5, 6))
    """
    ranges = [
        run
        for tokens in (branch.tokens for branch in branches)
        for run in ([(0, tokens)] if isinstance(tokens, int) else [(token, token + 1) for token in tokens])
    ]
    found: list[tuple[int, int]] = []
    for first, last in sorted((max(first, start), min(last, stop)) for first, last in ranges):
        if first < last and found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], last)
        elif first < last:
            found.append((first, last))
    return tuple(found)


class Hidden(NamedTuple):
    """The branches of global tokens whose tokens a branch does not show as `queries`, and as `keys`."""

    queries: tuple[GlobalTokens, ...] = ()
    keys: tuple[GlobalTokens, ...] = ()

    @classmethod
    def of(cls, pattern: Pattern, branch: int) -> Hidden:
        """Those of a branch of a pattern."""
        if pattern.overlap == "count":
            return cls()
        before = pattern.branches[:branch] if isinstance(pattern.branches[branch], GlobalTokens) else pattern.branches
        tokens = tuple(branch for branch in before if isinstance(branch, GlobalTokens))
        return cls(tuple(branch for branch in tokens if branch.direction == "both"), tokens)

    def with_keys(self, branch: GlobalTokens) -> Hidden:
        """The same, with the keys of one branch more."""
        return Hidden(self.queries, (*self.keys, branch))

    def queries_among(self, start: int, stop: int) -> Edges:
        """The queries that are hidden among the rows `start .. stop - 1`."""
        return tuple(edge for run in token_runs(self.queries, start, stop) for edge in run)

    def keys_among(self, start: int, stop: int) -> Edges:
        """The keys that are hidden among the rows `start .. stop - 1`."""
        return tuple(edge for run in token_runs(self.keys, start, stop) for edge in run)


def is_separable(pattern: Pattern) -> bool:
    """Whether each pair counts once where tokens are hidden: global tokens beside one window at most, for the same heads."""
    others = [branch for branch in pattern.branches if not isinstance(branch, GlobalTokens)]
    one_window = len(others) <= 1 and all(isinstance(branch, SlidingWindow) for branch in others)
    return one_window and len({branch.heads for branch in pattern.branches}) == 1
