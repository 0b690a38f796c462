"""How many query-key pairs a branch has, by formula: nothing is gone through pair by pair, or head by head."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dilkit.pattern.branch import DilatedSegment

if TYPE_CHECKING:
    from dilkit.pattern.pattern import Pattern


def pairs(pattern: Pattern, branch: DilatedSegment, tokens: int, heads: int, kv_heads: int, is_causal: bool) -> int:
    """Query-key pairs of one segment of `tokens` tokens, over all heads: those of the first offsets keep one row more."""
    rows, more = divmod(tokens, branch.dilation_rate)
    start, stop = branch.heads or (0, heads)
    before_start, before_stop = (
        _heads_before(pattern, limit, more, branch.dilation_rate, heads, kv_heads) for limit in (start, stop)
    )
    longer = before_stop - before_start
    return longer * _seen(rows + 1, is_causal) + (stop - start - longer) * _seen(rows, is_causal)


def _heads_before(pattern: Pattern, stop: int, more: int, rate: int, heads: int, kv_heads: int) -> int:
    """How many of the query heads `0 .. stop - 1` have an offset below `more`, without a look at each of them."""
    first, total = pattern.head_shard or (0, kv_heads)

    def before(kv_head: int) -> int:
        """How many key/value heads before this one do."""
        if pattern.offset == "modulo":
            return kv_head // rate * more + min(kv_head % rate, more)
        return min(kv_head, more * -(-total // rate))

    kv_head, part = divmod(stop, heads // kv_heads)
    whole, next_one = (before(first + h) for h in (kv_head, kv_head + 1))
    return (whole - before(first)) * (heads // kv_heads) + (next_one - whole) * part


def _seen(rows: int, is_causal: bool) -> int:
    """Query-key pairs of one segment in which a head keeps `rows` rows."""
    return rows * (rows + 1) // 2 if is_causal else rows * rows
