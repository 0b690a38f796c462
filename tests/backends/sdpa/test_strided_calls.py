"""Calls on strided views."""

import numpy as np
import pytest
import torch
from helpers.sdpa import problems_of
from helpers.strategies import patterns_with_heads
from hypothesis import given, strategies as st

from dilkit import Pattern
from dilkit.backends.sdpa.grids import form_grids
from dilkit.backends.sdpa.strided_calls import MAX_PROBLEMS_PER_AXIS, TensorStrides, strided_calls


def calls(pattern, seq, heads, batch=1):
    q, k = (torch.empty(batch, seq, h, 8, device="meta") for h in heads)
    of_keys = TensorStrides.of(k, kv=True)
    return strided_calls(pattern, seq, *heads, batch, (TensorStrides.of(q), of_keys, of_keys))


@given(patterns_with_heads(), st.integers(1, 50), st.integers(1, 3))
def test_calls_cover_the_grids(chosen, seq, batch):
    pattern, heads = chosen
    rows = torch.arange(batch * seq * heads[0]).view(batch, seq, heads[0], 1)
    expected = np.zeros(rows.numel(), dtype=int)
    for grid in (grid for branch in form_grids(pattern, seq, *heads) for grid in branch):
        for head, _, kept, *_ in problems_of(grid):
            for b in range(batch):
                expected[rows[b, kept, head, 0]] += 1
    found = np.zeros_like(expected)
    for call in calls(pattern, seq, heads, batch):
        kernel_view = call.kernel_view(rows)
        assert kernel_view.shape == (*call.shape, 1)
        assert kernel_view.data_ptr() == call.view(rows).data_ptr(), "the kernel's view is a copy"
        np.add.at(found, kernel_view.flatten().numpy(), 1)
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("offset", ["modulo", "block"])
@pytest.mark.parametrize("heads", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize("rate", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize("segments", [1, 4, 64])
def test_a_regular_branch_takes_few_calls(segments, rate, heads, offset):
    """min(rate, heads / rate) calls, 1 if the rate is 1 or not below the heads, or one segment is everything."""
    length = 64 * rate
    pattern = Pattern([length], [rate], offset=offset)
    most = 1 if segments == 1 else max(1, min(segments, rate, heads // rate))
    assert len(calls(pattern, length * segments, (heads, heads))) <= most


def test_longnet_takes_a_call_or_two_a_branch():
    pattern = Pattern([2048, 4096, 8192, 16384], [1, 2, 4, 8])
    found = calls(pattern, 16384, (8, 8))
    assert [sum(call.grid.row_step == rate for call in found) for rate in (1, 2, 4, 8)] == [1, 2, 2, 1]


def test_a_batch_of_contiguous_sequences_takes_no_more_calls():
    pattern = Pattern([64, 128], [1, 2])
    assert len(calls(pattern, 512, (8, 8), batch=5)) == len(calls(pattern, 512, (8, 8)))


def test_no_call_exceeds_what_a_cuda_grid_takes():
    found = calls(Pattern([2], [1]), 2 * MAX_PROBLEMS_PER_AXIS + 6, (2, 2))
    assert [call.shape for call in found] == [(MAX_PROBLEMS_PER_AXIS, 2, 2), (3, 2, 2)]


def test_a_million_tokens_are_a_handful_of_grids():
    pattern = Pattern([2048, 8192, 32768, 131072, 2**20], [1, 4, 16, 64, 512])
    grids = [grid for branch in form_grids(pattern, 2**20, 8, 8) for grid in branch]
    assert len(grids) <= 2 * 5
    assert sum(grid.problems * grid.rows**2 for grid in grids) * 4 * 64 == pattern.flops(2**20, 8, 64)


def test_an_unknown_kind_of_branch_is_refused():
    with pytest.raises(TypeError, match=r"Neighborhood.* is lowered to grid of windows; backend sdpa computes segments, band"):
        form_grids(Pattern.natten((2, 4), (1, 3)), 8, 1, 1)
