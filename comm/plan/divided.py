"""What ranks can compute of each branch in parts: the forms of its pairs that shards divide."""

from __future__ import annotations

from dilkit.pattern import Branch, Pattern
from dilkit.pattern.heads import Heads
from dilkit.pattern.lowering import Band, Form, Global, Runs, Segments, lower
from dilkit.pattern.runs import UNBOUNDED

DividedForms = tuple[Form, ...]
"""The forms of one branch, with all their pairs: one, or for blocks one for each layout; none where one rank computes a head."""


def divided(pattern: Pattern, seq: int, heads: int, kv_heads: int) -> tuple[DividedForms, ...]:
    """Those of each branch of `pattern`, whichever of its pairs others show as well."""
    given = pattern.among(heads, kv_heads)
    return tuple(_of_branch(pattern, branch, seq, given) for branch in pattern.branches)


def _of_branch(pattern: Pattern, branch: Branch, seq: int, heads: Heads) -> DividedForms:
    if branch.is_evaluated:
        return ()
    alone = pattern.with_branches(branch, overlap="count", tail="exact")
    forms = tuple(lower(alone, seq, heads.count, heads.kv_heads))
    return forms if _in_parts(forms, heads) else ()


def _in_parts(forms: DividedForms, heads: Heads) -> bool:
    if any(form.without_rows is not None for form in forms):
        return False
    match forms:
        case [Segments(offsets=offsets) as form]:
            served = range(*form.heads)
            return offsets == tuple(heads.offset(form.rate, head // heads.group) for head in served)
        case [Band(begin=0) as form]:
            return form.back == form.ahead
        case [Global() as form]:
            return not len(form.rows) or form.rows.tolist() == form.columns.tolist()
        case [Runs() as first, *others]:
            return first.block < UNBOUNDED and all(isinstance(form, Runs) and form.block == first.block for form in others)
    return False


def is_stride(forms: DividedForms) -> bool:
    """Whether a branch shows every so many tokens of the whole sequence: its residue classes are segments."""
    return isinstance(forms[0], Band) and forms[0].back == UNBOUNDED
