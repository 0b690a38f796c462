"""Windows, strides and global tokens by the sdpa backend."""

import re

import numpy as np
import pytest
import torch
from helpers.live_bytes import LiveBytes
from helpers.sdpa import agrees_with_the_oracle, other_queries, problem, problems_of, tensors, views_of_heads
from hypothesis import assume, example, given, strategies as st

from dilkit import (
    BlockSparse,
    DilatedSegment,
    GlobalTokens,
    Pattern,
    SlidingWindow,
    Strided,
)
from dilkit.backends.sdpa.backend import SDPA
from dilkit.backends.sdpa.grids import form_grids
from dilkit.backends.sdpa.refused import kind_refusals, overlap_refusals
from dilkit.backends.sdpa.strided_calls import ROWS_REVERSED, TensorStrides, strided_calls
from dilkit.inputs import Inputs
from dilkit.problem import Problem


@given(views_of_heads, st.integers(1, 40), st.booleans(), other_queries)
@example((Pattern.of(SlidingWindow(7)), (2, 1)), 10, True, None)  # the last block is short, and sees keys beside its triangle
@example((Pattern.of(SlidingWindow(5, 2), Strided(3)), (2, 1)), 23, False, (40, -9))
@example((Pattern.of(BlockSparse.local_global(12, 3, window=3)), (2, 1)), 36, False, None)  # keys of blocks overlap
def test_tiles_add_up_to_the_count_and_no_pair_is_masked_out(drawn, seq, is_causal, queries):
    pattern, (heads, kv_heads) = drawn
    pattern, seq = pattern.with_branches(*pattern.branches, tail="exact"), min(seq, pattern.max_seq)
    number, offset = queries or (seq, 0)
    assume(offset + number <= pattern.max_seq)
    posed = dict(seq=seq, heads=heads, kv_heads=kv_heads, head_dim=8, is_causal=is_causal)
    posed |= dict(queries=number, query_offset=offset) if queries else {}
    if overlap_refusals(Problem(pattern=pattern, **posed)) or kind_refusals(Problem(pattern=pattern, **posed)):
        pattern = pattern.with_branches(*pattern.branches, overlap="count")
    count, pairs = np.zeros((heads, number, seq), dtype=int), 0
    for grid in (grid for grids in form_grids(pattern, seq, heads, kv_heads, is_causal, queries) for grid in grids):
        pairs, places = pairs + grid.pairs, []
        for head, kv_head, rows, keys, kept in problems_of(grid):
            assert kv_head == head // (heads // kv_heads)
            assert min(rows[0], keys[0]) >= 0
            count[head, rows[:, None], keys] += kept
            places.append((head * number + rows, head * seq + keys))
        for of_problems in map(np.concatenate, zip(*places, strict=True)):
            assert len(np.unique(of_problems)) == len(of_problems), "one call writes a row twice"
    at_hand = dict(kv_heads=kv_heads, is_causal=is_causal, span=range(offset, offset + number))
    assert np.array_equal(count, pattern.count_rows(offset + torch.arange(number), seq, heads, **at_hand).numpy())
    assert pairs == count.sum()


def number_of_calls(pattern, seq, is_causal, heads=8):
    strides = TensorStrides.of(torch.empty(1, seq, heads, 64, device="meta"))
    of_keys = strides._replace(kv=True)
    return len(strided_calls(pattern, seq, heads, heads, 1, (strides, of_keys, of_keys), is_causal))


def test_a_window_takes_few_calls():
    """Within blocks, then the blocks before and after; what is copied in reverse order, some at a time."""
    window, tokens = Pattern.of(SlidingWindow(1024)), 2**20
    reversed_parts = -(-1023 // (ROWS_REVERSED // (8 * 1023)))
    assert number_of_calls(window, tokens, is_causal=True) == 1 + reversed_parts
    assert number_of_calls(window, tokens, is_causal=False) == 2 + reversed_parts
    assert number_of_calls(Pattern.of(GlobalTokens(64)), tokens, is_causal=True) == 2
    assert number_of_calls(Pattern.of(Strided(1024)), tokens, is_causal=True) == 1
    assert number_of_calls(Pattern.of(SlidingWindow(2**40)), tokens, is_causal=True) == 1


@pytest.mark.parametrize("is_causal", [False, True])
def test_memory_is_a_few_outputs(is_causal):
    q, k, v, dout = tensors(16_384, (4, 4), torch.float32, width=16)
    pattern = Pattern.of(SlidingWindow(128), GlobalTokens(16))
    posed, backend = Problem.of(q, k, pattern, is_causal=is_causal, requires_grad=True), SDPA()
    with LiveBytes(q, k, v) as live:
        out, lse = backend.forward(Inputs(q, k, v), posed)
    assert live.peak <= 6 * (out.nbytes + lse.nbytes)
    with LiveBytes(q, k, v, dout, out, lse) as live:
        backend.backward(dout, Inputs(q, k, v), out, lse, posed)
    assert live.peak <= 12 * out.nbytes


REFUSED = {
    "blocks": (Pattern.of(BlockSparse.bigbird(16, 16, heads=8)), {}, "block_sparse: at most 64 calls"),
    "grid": (Pattern.natten((16, 16), 3), {}, "neighborhood.*no strided view"),
    "once": (Pattern.of(DilatedSegment(32, 2), SlidingWindow(9), overlap="once"), {}, "two branches see the same key"),
    "once, two globals": (Pattern.of(GlobalTokens(3), GlobalTokens(9), overlap="once"), {}, "two branches see the same key"),
    "once, before the keys": (
        Pattern.of(GlobalTokens([3, 4]), SlidingWindow(9), overlap="once"),
        dict(is_causal=False, queries=20, query_offset=-3),
        "query_offset -3: from 0 on",
    ),
    "places": (Pattern.of(GlobalTokens(range(0, 20, 2))), {}, "global tokens in 10 places: at most 8"),
    "packed": (Pattern.of(SlidingWindow(9)), dict(varlen=True), "sliding_window: of packed sequences, segments alone"),
    "cache": (Pattern.of(Strided(9)), dict(kv_cache=True), "strided: of a cache, segments alone"),
}


@pytest.mark.parametrize(("pattern", "options", "reason"), REFUSED.values(), ids=list(REFUSED))
@pytest.mark.parametrize("device", ["cpu", "sm_90"])
def test_what_is_no_view_is_refused(pattern, options, reason, device):
    dtype = "float32" if device == "cpu" else "bfloat16"
    found = SDPA().refusals(problem(device, dtype, pattern=pattern, **dict(is_causal=True) | options))
    assert re.search(reason, "; ".join(map(str, found)))


ONCE = {
    "longformer": Pattern.longformer(10, 3),
    "streaming_llm": Pattern.streaming_llm(6, sinks=2),
    "sparse_transformer": Pattern.sparse_transformer(5),
    "bands in bands": Pattern.of(SlidingWindow(20, 2), SlidingWindow(7), Strided(4), SlidingWindow(11), overlap="once"),
    "heads": Pattern.of(SlidingWindow(9), SlidingWindow(4, heads=(1, 3)), GlobalTokens(5, heads=(2, 4)), overlap="once"),
    "beyond the end": Pattern.of(SlidingWindow(4), GlobalTokens([90]), overlap="once"),
    "in the middle": Pattern.of(SlidingWindow(9, 2), GlobalTokens([3, 4, 17]), overlap="once"),
}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("pattern", ONCE.values(), ids=list(ONCE))
def test_what_others_have_shown_is_left_out(pattern, is_causal):
    for seq in (1, 5, 23, 40):
        assert agrees_with_the_oracle(SDPA(), pattern, seq, (4, 2), is_causal=is_causal)


@pytest.mark.parametrize(
    "branches",
    [
        (SlidingWindow(9, heads=(0, 4)), DilatedSegment(8, 2, heads=(4, 8))),
        (SlidingWindow(9, 2, heads=(0, 4)), Strided(3, heads=(4, 8)), GlobalTokens(3)),
    ],
    ids=str,
)
def test_each_head_counts_once_by_itself(branches):
    assert agrees_with_the_oracle(SDPA(), Pattern.of(*branches, overlap="once"), 256, (8, 8))
    meeting = Pattern.of(*branches, DilatedSegment(24, 1, heads=(5, 8)), DilatedSegment(8, 2, heads=(5, 6)), overlap="once")
    assert SDPA().refusals(problem(pattern=meeting))


def test_segments_may_count_once_where_they_share_a_row_in_no_head():
    for served, refused in (((1, 3), False), ((1, 4), True), ((0, 3), True)):
        branches = (DilatedSegment(8, rate, heads=served) for rate in (4, 2))
        posed = problem(pattern=Pattern.of(*branches, offset="block", overlap="once"), heads=4, kv_heads=4)
        assert bool(SDPA().refusals(posed)) == refused


@pytest.mark.parametrize(("device", "dtype"), [("sm_61", "float32"), ("sm_80", "bfloat16"), ("sm_90", "float16")])
def test_kernels_for_gpus_take_windows(device, dtype):
    pattern = Pattern.of(SlidingWindow(16, 2), GlobalTokens([0, 9]))
    for is_causal in (False, True):
        assert not SDPA().refusals(problem(device, dtype, pattern=pattern, is_causal=is_causal, requires_grad=True))
