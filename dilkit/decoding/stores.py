"""What a cache keeps for each branch of a pattern, by the forms that show it."""

from __future__ import annotations

from collections.abc import Sequence

from dilkit.decoding.branch_rows import BranchRows
from dilkit.decoding.global_rows import GlobalRows
from dilkit.decoding.layout import Layout
from dilkit.decoding.recent import RecentRows
from dilkit.decoding.segment import OpenSegment
from dilkit.pattern import Branch, Pattern, PatternError
from dilkit.pattern.heads import Heads
from dilkit.pattern.lowering import Form, Global, Segments


def open_stores(pattern: Pattern, layout: Layout, rollback: int) -> list[BranchRows]:
    """One for each branch, with nothing in it."""
    given = pattern.among(layout.heads, layout.kv_heads)
    return [_store(branch, list(branch.forms(given)), given, layout, rollback) for branch in pattern.branches]


def _store(branch: Branch, forms: Sequence[Form], given: Heads, layout: Layout, rollback: int) -> BranchRows:
    first, *others = forms
    if isinstance(first, Segments) and not others:
        return OpenSegment(branch, first, layout, rollback)
    if isinstance(first, Global) and not others and (len(first.rows) == 0 or first.rows is first.columns):
        return GlobalRows(branch, first, given, layout, rollback)
    return RecentRows(branch, forms, given, layout, rollback)


def check_decodable(pattern: Pattern) -> None:
    """Raise `PatternError` for a branch that is defined for whole sequences alone."""
    for branch in pattern.branches:
        if branch.is_of_whole_sequences:
            raise PatternError(
                f"{branch.call()}: what a token of a {branch.kind} sees is defined for a whole grid, and a sequence that grows "
                "is none before its last token; DilatedCache takes windows, segments, global tokens, strides and blocks"
            )
