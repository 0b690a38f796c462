"""What is kept of a branch, and what a row sees of it, against the definition."""

from __future__ import annotations

import numpy as np
import torch
from helpers.strategies import mixes_with_heads
from hypothesis import given
from torch import Tensor

from dilkit.decoding._kept_tokens import KeptTokens, kept_tokens
from dilkit.decoding.block import seen_by
from dilkit.pattern import Pattern
from dilkit.pattern.heads import Heads

SEQ = 40


def count_of(kept: KeptTokens, given: Heads) -> Tensor:
    """How often query i of each head sees token j."""
    total = torch.zeros(given.count, SEQ, SEQ, dtype=torch.int64)
    for row in range(SEQ):
        tokens = np.array(kept.tokens(kept.seen(row)), dtype=np.int64)
        shown = torch.ones(kept.heads, given.group, len(tokens), dtype=torch.int64)
        if kept.masked:
            heads = slice(kept.head, kept.head + kept.heads * kept.head_step, kept.head_step)
            branches, row_range, keys = (kept.branch,), range(row, row + 1), torch.from_numpy(tokens)
            shown = shown * seen_by(branches, row_range, keys, given, heads, torch.device("cpu"))[:, 0, 0]
        for place in range(kept.heads):
            first = (kept.head + place * kept.head_step) * given.group
            total[first : first + given.group, row, tokens] += shown[place]
    return total


@given(mixes_with_heads(tokens=SEQ))
def test_a_row_sees_what_the_pattern_shows(drawn: tuple[Pattern, tuple[int, int]]) -> None:
    pattern, (heads, kv_heads) = drawn
    given_heads = pattern.among(heads, kv_heads)
    for branch, kept in zip(pattern.branches, kept_tokens(pattern, given_heads), strict=True):
        expected = pattern.with_branches(branch, overlap="count").count(SEQ, heads, kv_heads=kv_heads, is_causal=True)
        assert torch.equal(sum(count_of(one, given_heads) for one in kept), expected.long())
        for one in kept:
            look_at_order(one)


def look_at_order(kept: KeptTokens) -> None:
    """Indices count what is kept, in order, and `needed` is the first that a later row sees."""
    for row in range(SEQ):
        seen = kept.seen(row)
        assert not seen or seen[-1] < kept.before(row + 1)
        firsts = [kept.seen(later).start for later in range(row, 3 * SEQ) if kept.seen(later)]
        stored = kept.before(row)
        assert kept.needed(row) == min(firsts) if firsts and min(firsts) < stored else kept.needed(row) >= stored
