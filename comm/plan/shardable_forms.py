"""The forms of a branch that shards divide, the heads that they serve, and the patterns whose rows need one piece.

A branch that no shard can divide is *joint*, as are branches with `overlap="once"`, where a key counts once over all of them: a
row's softmax is then computed in one piece. The plan moves whole segments for it, long enough that no branch's segment crosses
their ends; with branches of other kinds, the whole sequence.

Windows and global tokens need not be joint. A global token is seen by all, and with `direction="both"` sees all. So a pair with
one of them counts in the first branch of global tokens that it belongs to, and later branches *exclude* it.
"""

from __future__ import annotations

from math import lcm
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dilkit.pattern import Branch, Pattern
from dilkit.pattern.heads import Heads
from dilkit.pattern.lowering import Band, Form, Global, Runs, Segments, lower
from dilkit.pattern.runs import UNBOUNDED, union

if TYPE_CHECKING:
    from dilkit.pattern.runs import Positions

Forms = tuple[Form, ...]
"""The forms of one branch, with all their pairs: one, or for blocks one for each layout; none where one rank computes a head."""
Spans = tuple[tuple[int, int], ...]
"""Ranges of positions, `(start, stop)` each."""


def shardable_forms(pattern: Pattern, seq: int, heads: int, kv_heads: int) -> tuple[Forms, ...]:
    """Return the forms of each branch of `pattern`, with the pairs that other branches show as well."""
    sizes = pattern.among(heads, kv_heads)
    return tuple(_forms_of(pattern, branch, seq, sizes) for branch in pattern.branches)


def _forms_of(pattern: Pattern, branch: Branch, seq: int, heads: Heads) -> Forms:
    if branch.is_evaluated:
        return ()
    alone = pattern.with_branches(branch, overlap="count", tail="exact")
    forms = tuple(lower(alone, seq, heads.count, heads.kv_heads))
    return forms if _are_shardable(forms, heads) else ()


def _are_shardable(forms: Forms, heads: Heads) -> bool:
    if any(form.without_rows is not None for form in forms):
        return False
    match forms:
        case [Segments(offsets=offsets) as form]:
            served = range(*form.heads)
            return offsets == tuple(heads.offset(form.rate, head // heads.group) for head in served)
        case [Band(begin=0)]:
            return True
        case [Global() as form]:
            return not len(form.rows) or form.rows.tolist() == form.columns.tolist()
        case [Runs() as first, *others]:
            return first.block < UNBOUNDED and all(isinstance(form, Runs) and form.block == first.block for form in others)
    return False


def is_stride(forms: Forms) -> bool:
    """True if a branch is a stride over the whole sequence: its residue classes are moved like segments."""
    return isinstance(forms[0], Band) and forms[0].back == forms[0].ahead == UNBOUNDED


class ServedHead(NamedTuple):
    """A key/value head that a branch serves: its query heads are `first .. first + width - 1`, its rows start at `offset`."""

    kv_head: int
    first: int
    width: int
    offset: int = 0


def served_heads(forms: Forms, heads: int, kv_heads: int) -> tuple[ServedHead, ...]:
    """Return the key/value heads that a branch serves, ascending; only segments leave out rows before an offset."""
    group, start, stop = heads // kv_heads, forms[0].heads[0], forms[-1].heads[1]
    offsets = forms[0].offsets if isinstance(forms[0], Segments) else (0,) * (stop - start)
    served = ((kv, max(start, kv * group), min(stop, (kv + 1) * group)) for kv in range(start // group, -(-stop // group)))
    return tuple(ServedHead(kv, first, last - first, offsets[first - start]) for kv, first, last in served)


def why_joint(pattern: Pattern, seq: int, heads: int, kv_heads: int) -> str:
    """Return why a row's whole softmax is computed in one piece; empty if it need not be."""
    branches = shardable_forms(pattern, seq, heads, kv_heads)
    if whole := [branch.kind for branch, forms in zip(pattern.branches, branches, strict=True) if not forms]:
        return f"a branch of kind {whole[0]} is computed in one piece"
    if pattern.overlap == "once" and len(branches) > 1 and not _is_separable(branches, heads, kv_heads):
        return "with overlap='once' a key counts once over all branches"
    return ""


def _is_separable(branches: tuple[Forms, ...], heads: int, kv_heads: int) -> bool:
    """True if every pair is seen by one branch only, once windows leave out the global tokens.

    That takes windows of which none serve the same head, and global tokens that are excluded from whole groups of query heads.
    """
    others = [forms for forms in branches if not isinstance(forms[0], Global)]
    if not all(isinstance(forms[0], Band) and not is_stride(forms) for forms in others):
        return False
    if any(sum(forms[0].serves(head) for forms in others) > 1 for head in range(heads)):
        return False
    tokens = [forms[0] for forms in branches if isinstance(forms[0], Global)]
    served = {head for forms in branches for head in served_heads(forms, heads, kv_heads)}
    return all(len({form.serves(h.first + i) for i in range(h.width)}) == 1 for h in served for form in tokens)


def joint_segments(pattern: Pattern, seq: int, heads: int, kv_heads: int) -> Pattern:
    """Return the segments that joint branches are exchanged in, as a pattern of one branch that keeps every row."""
    length = lcm(*(min(branch.segment_length, seq) for branch in pattern.segments)) if pattern.only_segments else seq
    ranges = [branch.heads or (0, heads) for branch in pattern.branches]
    served = min(start for start, _ in ranges), max(stop for _, stop in ranges)
    if not pattern.only_segments:  # other kinds may count the heads of the model: all query heads of a key/value head travel
        group = heads // kv_heads
        served = served[0] // group * group, -(-served[1] // group) * group
    return Pattern([min(length, seq)], [1], heads=[served], head_shard=pattern.head_shard)


def pattern_in_segment(
    pattern: Pattern, served: tuple[int, int], seq: int, heads: int, kv_heads: int, kv_head: int
) -> Pattern | None:
    """Return the pattern that a key/value head's query heads among `served` follow within an exchanged segment, if any."""
    group = heads // kv_heads
    first, total = pattern.head_shard or (0, kv_heads)
    start, stop = max(kv_head * group, served[0]), min((kv_head + 1) * group, served[1])
    branches = [branch.of_tokens(seq) for branch in pattern.branches]
    parts = [part for branch in branches if branch and (part := branch.within(start, stop))]
    if not parts:
        return None
    return pattern.with_branches(*parts, head_shard=(first + kv_head, total), tail="exact")


def excluding_forms(pattern: Pattern, branch: int, seq: int, heads: int, kv_heads: int) -> Forms:
    """Return the forms of a branch that exclude tokens; none where every branch counts."""
    if pattern.overlap == "count":
        return ()
    return tuple(form for form in lower(pattern, seq, heads, kv_heads) if form.branch == branch)


def excluded_queries(forms: Forms, head: ServedHead, start: int, stop: int) -> tuple[int, ...]:
    """Return the queries of a head that are excluded among the rows `start .. stop - 1`: `(start, stop, start, stop, ...)`."""
    return _edges([form.without_rows for form in forms if form.serves(head.first)], start, stop)


def excluded_keys(forms: Forms, head: ServedHead, start: int, stop: int, more: Positions | None = None) -> tuple[int, ...]:
    """Return the keys that are excluded from these queries, and those of `more`, in the same way."""
    return _edges([*(form.without_columns for form in forms if form.serves(head.first)), more], start, stop)


def _edges(positions: list[Positions | None], start: int, stop: int) -> tuple[int, ...]:
    runs = [some for some in positions if some is not None]
    return tuple(edge for span in spans_within(union(*runs), start, stop) for edge in span) if runs else ()


def spans_within(runs: Positions, start: int, stop: int) -> Spans:
    """Return the runs of positions `(n, 2)`, ascending and apart, among the rows `start .. stop - 1`.

    >>> spans_within(np.array([[0, 3], [5, 6], [9, 10]]), 1, 9)
    ((1, 3), (5, 6))
    >>> spans_within(np.array([[0, 4]]), 3, 3)
    ()
    """
    first, last = np.searchsorted(runs[:, 1], start, "right"), np.searchsorted(runs[:, 0], stop, "left")
    return tuple((low, high) for low, high in np.clip(runs[first:last], start, stop).tolist() if low < high)
