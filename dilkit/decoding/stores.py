"""What a cache keeps for each branch of a pattern, by the forms that show it."""

from __future__ import annotations

from collections.abc import Sequence

from dilkit.decoding.branch_rows import BranchRows
from dilkit.decoding.global_rows import GlobalRows
from dilkit.decoding.layout import Layout
from dilkit.decoding.recent import RecentRows
from dilkit.decoding.segment import OpenSegment
from dilkit.pattern import WHOLE_SEQUENCE, Branch, Pattern, PatternError
from dilkit.pattern.heads import Heads
from dilkit.pattern.lowering import Form, Global, Segments, forms_of


def open_stores(pattern: Pattern, layout: Layout, rollback: int) -> list[BranchRows]:
    """One for each branch, with nothing in it."""
    given = pattern.among(layout.heads, layout.kv_heads)
    return [_store(branch, _forms(branch, given), given, layout, rollback) for branch in pattern.branches]


def _forms(branch: Branch, given: Heads) -> list[Form]:
    """None where they would be those of one length: the sequence grows, and rows are held against what the branch says."""
    return [] if branch.is_evaluated else forms_of(branch, given, WHOLE_SEQUENCE)


def _store(branch: Branch, forms: Sequence[Form], given: Heads, layout: Layout, rollback: int) -> BranchRows:
    only = forms[0] if len(forms) == 1 and forms[0].without_rows is None else None
    if isinstance(only, Segments) and only.shares_offsets(given.group):
        return OpenSegment(branch, only, layout, rollback)
    if isinstance(only, Global) and (len(only.rows) == 0 or only.rows is only.columns):
        return GlobalRows(branch, only, given, layout, rollback)
    return RecentRows(branch, forms, given, layout, rollback)


def check_decodable(pattern: Pattern) -> None:
    """Raise `PatternError` for a branch that is defined for whole sequences alone."""
    for branch in pattern.branches:
        if branch.is_given_by_call:
            raise PatternError(
                f"{branch.call()}: what it shows is chosen by each call, for whole sequences; DilatedCache takes none"
            )
        if branch.is_of_whole_sequences:
            raise PatternError(
                f"{branch.call()}: what a token of a {branch.kind} sees is defined for a whole grid, and a sequence that grows "
                "is none before its last token; DilatedCache takes windows, segments, global tokens, strides and blocks"
            )
