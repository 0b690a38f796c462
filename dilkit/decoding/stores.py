"""What a cache keeps for each branch of a pattern, by its kind."""

from __future__ import annotations

from dilkit.decoding.branch_rows import BranchRows
from dilkit.decoding.global_rows import GlobalRows
from dilkit.decoding.layout import Layout
from dilkit.decoding.recent import RecentRows
from dilkit.decoding.segment import OpenSegment
from dilkit.pattern import BlockSparse, Branch, DilatedSegment, GlobalTokens, Pattern, PatternError, SlidingWindow, Strided


def open_stores(pattern: Pattern, layout: Layout, rollback: int) -> list[BranchRows]:
    """One for each branch, with nothing in it."""
    return [_store(pattern, branch, layout, rollback) for branch in pattern.branches]


def _store(pattern: Pattern, branch: Branch, layout: Layout, rollback: int) -> BranchRows:
    if isinstance(branch, DilatedSegment):
        return OpenSegment(pattern, branch, layout, rollback)
    if isinstance(branch, GlobalTokens):
        return GlobalRows(pattern, branch, layout, rollback)
    assert isinstance(branch, (SlidingWindow, Strided, BlockSparse))  # by `check_decodable`
    return RecentRows(pattern, branch, layout, rollback)


def check_decodable(pattern: Pattern) -> None:
    """Raise `PatternError` for a branch that is defined for whole sequences alone."""
    for branch in pattern.branches:
        if not isinstance(branch, (DilatedSegment, GlobalTokens, SlidingWindow, Strided, BlockSparse)):
            raise PatternError(
                f"{branch.call()}: what a token of a {branch.kind} sees is defined for a whole grid, and a sequence that grows "
                "is none before its last token; DilatedCache takes windows, segments, global tokens, strides and blocks"
            )
