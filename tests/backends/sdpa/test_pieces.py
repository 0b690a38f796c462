"""Pieces against the definition: every query head and row once, the pairs of `Pattern.count`, and few library calls."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from helpers.strategies import Heads, patterns_with_heads
from hypothesis import given, settings
from hypothesis import strategies as st

from dilkit import Pattern
from dilkit.backends.sdpa.calls import MAX_PROBLEMS_PER_AXIS, Call, Layout, library_calls
from dilkit.backends.sdpa.pieces import Piece, branch_pieces


def problems(piece: Piece) -> list[tuple[int, int, range]]:
    """`(query head, key/value head, rows)` of every small problem of a piece."""
    found = []
    for index in product(*(range(axis.size) for axis in piece.axes)):
        row, head, kv_head = (
            getattr(piece, field) + sum(i * getattr(axis, field) for i, axis in zip(index, piece.axes, strict=True))
            for field in ("row", "head", "kv_head")
        )
        found.append((head, kv_head, range(row, row + piece.rows * piece.row_step, piece.row_step)))
    return found


def calls(pattern: Pattern, seq: int, heads: Heads, batch: int = 1) -> tuple[Call, ...]:
    """The library calls for contiguous tensors."""
    q, k = (torch.empty(batch, seq, h, 8, device="meta") for h in heads)
    return library_calls(pattern, seq, *heads, batch, (Layout.of(q), Layout.of(k, kv=True), Layout.of(k, kv=True)))


@given(patterns_with_heads(), st.integers(1, 50))
@settings(max_examples=200, deadline=None)
def test_pieces_add_up_to_the_count(chosen: tuple[Pattern, Heads], seq: int) -> None:
    pattern, (heads, kv_heads) = chosen
    pattern = Pattern(pattern.segment_lengths, pattern.dilation_rates, offset=pattern.offset, heads=pattern.heads)
    count = np.zeros((heads, seq, seq), dtype=int)
    for pieces in branch_pieces(pattern, seq, heads, kv_heads):
        taken = np.zeros((heads, seq), dtype=int)
        for piece in pieces:
            for head, kv_head, rows in problems(piece):
                assert kv_head == head // (heads // kv_heads)
                taken[head, rows] += 1
                count[head, np.array(rows)[:, None], rows] += 1
        assert taken.max() <= 1, "a query head and row is in two problems of one branch"
    assert np.array_equal(count, pattern.count(seq, heads, kv_heads=kv_heads).numpy())


@given(patterns_with_heads(), st.integers(1, 50), st.integers(1, 3))
@settings(max_examples=100, deadline=None)
def test_calls_cover_the_pieces(chosen: tuple[Pattern, Heads], seq: int, batch: int) -> None:
    pattern, heads = chosen
    rows = torch.arange(batch * seq * heads[0]).view(batch, seq, heads[0], 1)
    expected = np.zeros(rows.numel(), dtype=int)
    for piece in (piece for branch in branch_pieces(pattern, seq, *heads) for piece in branch):
        for head, _, kept in problems(piece):
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
def test_a_regular_branch_takes_few_calls(segments: int, rate: int, heads: int, offset: str) -> None:
    """min(rate, heads / rate) calls, 1 if the rate is 1 or not below the heads, or one segment is everything."""
    length = 64 * rate
    pattern = Pattern([length], [rate], offset=offset)
    most = 1 if segments == 1 else max(1, min(segments, rate, heads // rate))
    assert len(calls(pattern, length * segments, (heads, heads))) <= most


def test_longnet_takes_a_call_or_two_a_branch() -> None:
    pattern = Pattern([2048, 4096, 8192, 16384], [1, 2, 4, 8])
    found = calls(pattern, 16384, (8, 8))
    assert [sum(call.piece.row_step == rate for call in found) for rate in (1, 2, 4, 8)] == [1, 2, 2, 1]


def test_a_batch_of_contiguous_sequences_takes_no_more_calls() -> None:
    pattern = Pattern([64, 128], [1, 2])
    assert len(calls(pattern, 512, (8, 8), batch=5)) == len(calls(pattern, 512, (8, 8)))


def test_no_call_exceeds_what_a_cuda_grid_takes() -> None:
    found = calls(Pattern([2], [1]), 2 * MAX_PROBLEMS_PER_AXIS + 6, (2, 2))
    assert [call.shape for call in found] == [(MAX_PROBLEMS_PER_AXIS, 2, 2), (3, 2, 2)]


def test_a_million_tokens_are_a_handful_of_pieces() -> None:
    pattern = Pattern([2048, 8192, 32768, 131072, 2**20], [1, 4, 16, 64, 512])
    pieces = [piece for branch in branch_pieces(pattern, 2**20, 8, 8) for piece in branch]
    assert len(pieces) <= 2 * 5
    assert sum(piece.problems * piece.rows**2 for piece in pieces) * 4 * 64 == pattern.flops(2**20, 8, 64)


def test_an_unknown_kind_of_branch_is_refused() -> None:
    pattern = Pattern([4], [1])

    class Other:
        kind = "window"

    pattern.__dict__["branches"] = (Other(),)
    with pytest.raises(TypeError, match="window"):
        branch_pieces.__wrapped__(pattern, 8, 1, 1)
