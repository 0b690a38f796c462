"""Joint branches: with `overlap="once"` a key counts once over all branches, so that a row's softmax is computed in one piece.

The exchange plan then moves whole segments, long enough that no branch's segment crosses their ends, in place of sparse rows: the
whole sequence where there are branches of other kinds. So are neighborhoods computed, which no interval of rows holds.
"""

from __future__ import annotations

from math import lcm

from dilkit.comm.plan.divided import divided
from dilkit.comm.plan.kinds.excluded import is_separable
from dilkit.pattern import Pattern


def why_joint(pattern: Pattern, seq: int, heads: int, kv_heads: int) -> str:
    """Why a row's whole softmax is computed in one piece; empty if it need not be."""
    branches = zip(pattern.branches, divided(pattern, seq, heads, kv_heads), strict=True)
    if whole := [branch.kind for branch, forms in branches if not forms]:
        return f"a branch of kind {whole[0]} is computed in one piece"
    if pattern.overlap == "once" and len(pattern.branches) > 1 and not is_separable(pattern, seq, heads, kv_heads):
        return "with overlap='once' a key counts once over all branches"
    return ""


def joint_segments(pattern: Pattern, seq: int, heads: int, kv_heads: int) -> Pattern:
    """The segments that joint branches are exchanged in, as a pattern of one branch that keeps every row."""
    length = lcm(*(min(branch.segment_length, seq) for branch in pattern.segments)) if pattern.only_segments else seq
    ranges = [branch.heads or (0, heads) for branch in pattern.branches]
    served = min(start for start, _ in ranges), max(stop for _, stop in ranges)
    if not pattern.only_segments:  # other kinds may count the heads of the model: all query heads of a key/value head travel
        group = heads // kv_heads
        served = served[0] // group * group, -(-served[1] // group) * group
    return Pattern([min(length, seq)], [1], heads=[served], head_shard=pattern.head_shard)


def pattern_in_segment(
    pattern: Pattern, served: tuple[int, int], kv_head: int, seq: int, heads: int, kv_heads: int
) -> Pattern | None:
    """The pattern that the query heads of one key/value head follow within an exchanged segment; None if no branch serves them.

    `served` are the query heads whose rows are exchanged. Of packed sequences one may lack tokens that a branch names.
    """
    group = heads // kv_heads
    first, total = pattern.head_shard or (0, kv_heads)
    start, stop = max(kv_head * group, served[0]), min((kv_head + 1) * group, served[1])
    own = [branch.of_tokens(seq) for branch in pattern.branches]
    branches = [part for branch in own if branch and (part := branch.within(start, stop))]
    if not branches:
        return None
    return pattern.with_branches(*branches, head_shard=(first + kv_head, total), tail="exact")
