"""Joint branches: with `overlap="once"` a key counts once over all branches, so that a row's softmax is computed in one piece.

The exchange plan then moves whole segments, long enough that no branch's segment crosses their ends, in place of sparse rows.
"""

from __future__ import annotations

from math import lcm

from dilkit.pattern import Pattern


def are_joint(pattern: Pattern) -> bool:
    """Whether a key counts once over several branches."""
    return pattern.overlap == "once" and len(pattern.branches) > 1


def joint_segments(pattern: Pattern, seq: int, heads: int) -> Pattern:
    """The segments that joint branches are exchanged in, as a pattern of one branch that keeps every row."""
    length = lcm(*(min(branch.segment_length, seq) for branch in pattern.segments))
    ranges = [branch.heads or (0, heads) for branch in pattern.segments]
    served = min(start for start, _ in ranges), max(stop for _, stop in ranges)
    return Pattern([min(length, seq)], [1], heads=[served], head_shard=pattern.head_shard)


def pattern_in_segment(pattern: Pattern, served: tuple[int, int], kv_head: int, heads: int, kv_heads: int) -> Pattern | None:
    """The pattern that the query heads of one key/value head follow within an exchanged segment; None if no branch serves them.

    `served` are the query heads whose rows are exchanged.
    """
    group = heads // kv_heads
    first, total = pattern.head_shard or (0, kv_heads)
    start, stop = max(kv_head * group, served[0]), min((kv_head + 1) * group, served[1])
    branches = [branch for branch in pattern.segments if any(map(branch.serves, range(start, stop)))]
    if not branches:
        return None
    limits = [branch.heads or (start, stop) for branch in branches]
    ranges = [(max(start, a) - start, min(stop, b) - start) for a, b in limits]
    lengths, rates = [b.segment_length for b in branches], [b.dilation_rate for b in branches]
    return Pattern(lengths, rates, pattern.offset, "once", ranges, (first + kv_head, total))
