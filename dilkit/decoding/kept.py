"""What a `DilatedCache` keeps, as a matrix, from the definition alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dilkit.decoding.stores import check_decodable
from dilkit.pattern import Branch, DilatedSegment, GlobalTokens, Pattern, SlidingWindow

if TYPE_CHECKING:
    from torch import Tensor


def kept_count(pattern: Pattern, seq: int, kv_heads: int) -> Tensor:
    """`kept[g, i, j]`: in how many branches some row after i sees key j <= i, for key/value head g; int32 `(kv_heads, seq, seq)`.

        kept[g, i, j] = number of branches in which a row i' > i of head g sees j <= i

    Of blocks, all keys are. For small `seq`, to be looked at. Ranges of heads are not taken into account. Raises `PatternError`
    for heads that do not fit, and for a neighborhood, which `DilatedCache` does not take.

        >>> from dilkit import Pattern
        >>> from dilkit.decoding.kept import kept_count
        >>> kept_count(Pattern([4], [2]), 6, 1)[0].tolist()  # token 2 is the last that a segment keeps
        [[1, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 1, 0], [0, 0, 0, 0, 1, 0]]
    """
    import torch

    check_decodable(pattern)
    pattern.check_heads(kv_heads, kv_heads)
    token = torch.arange(seq)
    total = torch.zeros(kv_heads, seq, seq, dtype=torch.int32)
    for branch in pattern.branches:
        if not isinstance(branch, DilatedSegment):
            total += _seen_after(branch, token) & (token <= token[:, None])
            continue
        length, rate = branch.segment_length, branch.dilation_rate
        place, segment = token % length, token // length
        for head in range(kv_heads):
            offset = pattern.head_offset(rate, head, kv_heads)
            last = length - 1 - (length - 1 - offset) % rate
            goes_on = (segment[:, None] == segment) & (place < last)[:, None]
            total[head] += goes_on & (place % rate == offset) & (token <= token[:, None])
    return total


def _seen_after(branch: Branch, token: Tensor) -> Tensor | bool:
    """Whether a row after i sees j <= i: bool `(seq, seq)`, or the same for all."""
    import torch

    if isinstance(branch, SlidingWindow):
        return token[:, None] + 1 - token <= branch.reach
    if not isinstance(branch, GlobalTokens):
        return True
    tokens = branch.positions
    is_global = torch.isin(token, torch.tensor(tokens[: branch.count(len(token))]))
    return is_global | (token < tokens[-1])[:, None] if branch.direction == "both" else is_global
