"""Grids of small problems against the definition: every query head and row once, and the pairs of `Pattern.count`."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.sdpa import small_problems
from helpers.strategies import Heads, patterns_with_heads
from hypothesis import given
from hypothesis import strategies as st

from dilkit import Pattern
from dilkit.backends.sdpa.grids import form_grids


@given(patterns_with_heads(), st.integers(1, 50))
def test_grids_add_up_to_the_count(chosen: tuple[Pattern, Heads], seq: int) -> None:
    pattern, (heads, kv_heads) = chosen
    pattern = Pattern(pattern.segment_lengths, pattern.dilation_rates, offset=pattern.offset, heads=pattern.heads)
    count = np.zeros((heads, seq, seq), dtype=int)
    for grids in form_grids(pattern, seq, heads, kv_heads):
        taken = np.zeros((heads, seq), dtype=int)
        for grid in grids:
            for head, kv_head, rows in small_problems(grid):
                assert kv_head == head // (heads // kv_heads)
                taken[head, rows] += 1
                count[head, np.array(rows)[:, None], rows] += 1
        assert taken.max() <= 1, "a query head and row is in two problems of one branch"
    assert np.array_equal(count, pattern.count(seq, heads, kv_heads=kv_heads).numpy())


def test_a_million_tokens_are_a_handful_of_grids() -> None:
    pattern = Pattern([2048, 8192, 32768, 131072, 2**20], [1, 4, 16, 64, 512])
    grids = [grid for branch in form_grids(pattern, 2**20, 8, 8) for grid in branch]
    assert len(grids) <= 2 * 5
    assert sum(grid.problems * grid.rows**2 for grid in grids) * 4 * 64 == pattern.flops(2**20, 8, 64)


def test_an_unknown_kind_of_branch_is_refused() -> None:
    with pytest.raises(TypeError, match=r"Neighborhood.* is lowered to grid; backend sdpa computes segments, band"):
        form_grids(Pattern.natten((2, 4), (1, 3)), 8, 1, 1)
