"""Windows, strides, global tokens, blocks and neighborhoods in the CPU kernel."""

from dataclasses import replace

import pytest
import torch
from helpers.odd_kinds import Reach
from helpers.strategies import has_tokens, mixes_with_heads, neighborhoods
from hypothesis import assume, example, given, settings, strategies as st

from dilkit import (
    BlockSparse,
    DilatedSegment,
    GlobalTokens,
    Neighborhood,
    Pattern,
    PatternError,
    Prefix,
    Problem,
    SlidingWindow,
    Strided,
    dilated_attention as attend,
    dilated_attention_varlen as attend_packed,
)
from dilkit.backends.native import _native
from dilkit.backends.native.backend import Native, encode_problem
from dilkit.backends.native.branches import MOST_TOKENS, MOST_WINDOW, branch_arrays, residue_classes
from dilkit.oracle import oracle_attention
from dilkit.problem import DTYPES
from dilkit.testing.conformance import check
from dilkit.testing.problems import Case


def tensors(seq, heads=2, dim=16):
    made = torch.Generator().manual_seed(seq)
    return [torch.randn(1, seq, heads, dim, generator=made) for _ in range(3)]


def test_a_window_of_a_long_sequence_is_that_of_its_surroundings():
    query, key, value = tensors(60_000, heads=1, dim=8)
    pattern = Pattern.of(SlidingWindow(9, dilation_rate=2))
    out = attend(query, key, value, pattern, backend="native")
    for first in (0, 31_000, 59_900):
        near = slice(max(first - 8, 0), first + 108)
        expected, _ = oracle_attention(*(x[:, near] for x in (query, key, value)), pattern)
        own = slice(first - near.start, first - near.start + 100)
        torch.testing.assert_close(out[:, first : first + 100].double(), expected[:, own], rtol=0, atol=1e-5)


def test_a_neighborhood_of_a_large_grid_is_that_of_its_surroundings():
    query, key, value = tensors(2500 * 40, heads=1, dim=8)
    out = attend(query, key, value, Pattern.natten((2500, 40), (5, 3)), backend="native")
    near = [slice(40 * line, 40 * (line + 9)) for line in (0, 1200, 2491)]
    for lines, own in zip(near, (slice(0, 3), slice(4, 5), slice(6, 9)), strict=True):
        expected, _ = oracle_attention(*(x[:, lines] for x in (query, key, value)), Pattern.natten((9, 40), (5, 3)))
        found = out[:, lines].unflatten(1, (9, 40))[:, own]
        torch.testing.assert_close(found.double(), expected.unflatten(1, (9, 40))[:, own], rtol=0, atol=1e-5)


def test_a_neighborhood_with_more_columns_than_a_box_goes_through_together_is_whole():
    """Its rows are attended to in several parts, whose sums are merged."""
    side, kernel = 96, 61
    query, key, value = tensors(side * side, heads=1, dim=8)
    out, lse = attend(query, key, value, Pattern.of(Neighborhood((side, side), kernel)), backend="native", return_lse=True)
    q, k, v = (x.double().view(side, side, 8) for x in (query, key, value))
    for y, x in ((48, 47), (3, 40), (95, 60)):
        first = [min(max(at - kernel // 2, 0), side - kernel) for at in (y, x)]
        near = (slice(first[0], first[0] + kernel), slice(first[1], first[1] + kernel))
        scores = k[near].reshape(-1, 8) @ q[y, x] * 8**-0.5
        row = y * side + x
        torch.testing.assert_close(out[0, row, 0].double(), scores.softmax(0) @ v[near].reshape(-1, 8), rtol=0, atol=1e-5)
        torch.testing.assert_close(lse[0, 0, row].double(), scores.logsumexp(0), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dim", [24, 64])
@pytest.mark.parametrize("border", ["move", "cut"])
@pytest.mark.parametrize(
    ("shape", "kernel", "dilation", "causal"),
    [
        ((37, 41), 13, 1, False),
        ((9, 14, 15), 7, 1, False),
        ((45, 33), (5, 31), 1, False),
        ((36, 30), 7, 4, False),
        ((31, 1, 40), (9, 1, 3), 2, False),
        ((999,), 51, 3, False),
        ((41, 30), (12, 6), 1, (True, False)),
        ((30, 41), (5, 8), 2, (False, True)),
    ],
)
def test_groups_of_a_few_rows_see_what_each_of_them_sees(shape, kernel, dilation, causal, border, dim):
    steps = (1,) * (len(shape) - 1) + (dilation,)
    pattern = Pattern.of(Neighborhood(shape, kernel, steps, causal=causal, border=border), tail="zeros")
    query, key, value = tensors(pattern.max_seq, heads=1, dim=dim)
    out, lse = attend(query, key, value, pattern, backend="native", return_lse=True)
    expected, expected_lse = oracle_attention(query, key, value, pattern)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(neighborhoods(heads=2), st.booleans(), st.sampled_from(["none", "random"]))
def test_neighborhoods_on_random_grids(pattern, is_causal, mask):
    sizes = dict(seq=pattern.max_seq, heads=2, kv_heads=1, batch=1, head_dim=5, dtype="float64")
    result = check("native", Case(feature="grid", variant="random", pattern=pattern, is_causal=is_causal, mask=mask, **sizes))
    assert result.verdict == "passed", "; ".join(result.reasons)


@given(
    mixes_with_heads(tokens=120), st.integers(1, 120), st.booleans(), st.sampled_from(DTYPES), st.none() | neighborhoods(heads=1)
)
def test_random_mixes(drawn, seq, is_causal, dtype, grid):
    pattern, (heads, kv_heads) = drawn
    further = () if grid is None else grid.branches
    pattern = pattern.with_branches(*further, *pattern.branches, tail="exact")
    sizes = dict(seq=seq if grid is None else grid.max_seq, heads=heads, kv_heads=kv_heads, batch=1, head_dim=5)
    assume(is_causal or has_tokens(pattern, sizes["seq"]))
    mixed = Case(feature="mix", variant="random", pattern=pattern, is_causal=is_causal, dtype=dtype, mask="random", **sizes)
    result = check("native", mixed)
    of_two_sides = (isinstance(x, Prefix) or getattr(x, "before", None) is not None for x in pattern.branches)
    if pattern.overlap == "once" and any(of_two_sides):
        assert result.verdict in ("passed", "refused")  # what is left beside them may be no form
    else:
        assert result.verdict == "passed", "; ".join(result.reasons)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 7),
    st.lists(st.tuples(st.integers(1, 3), st.none() | st.integers(1, 150)), min_size=1, max_size=3),
    st.lists(st.integers(0, 60), min_size=1, max_size=4).filter(any),
    st.sampled_from(["count", "once"]),
    st.booleans(),
)
@example(2, [(1, 8), (2, 20)], [40], "once", False)  # pairs 8 apart are the last that both show
@example(1, [(3, 27), (1, 9)], [50], "once", False)  # so are pairs 9 apart
@example(1, [(3, 27), (2, 7)], [50], "once", False)  # neither leaves out a stretch of the other
def test_bands_whose_rows_fall_into_classes(step, bands, lengths, overlap, packed):
    branches = [Strided(step * n) if reach is None else SlidingWindow(step * n + reach, step * n) for n, reach in bands]
    sizes = dict(seq=sum(lengths), heads=4, kv_heads=2, head_dim=5, dtype="float64", is_causal=step % 2 == 1, dropout_p=0.2)
    own = dict(batch=1, lengths=tuple(lengths)) if packed else dict(batch=3, mask="random")
    case = Case(feature="classes", variant="random", pattern=Pattern.of(*branches, overlap=overlap), **sizes, **own)
    assert residue_classes(case.problem()) % step == 0
    result = check("native", case)
    assert result.verdict == "passed", "; ".join(result.reasons)


def test_classes_are_those_of_all_branches_and_none_of_the_last_rows():
    far, near = Strided(12), SlidingWindow(40, 8)
    classes = {(far,): 12, (far, near): 4, (far, SlidingWindow(4)): 1, (far, GlobalTokens(1)): 1, (Strided(2**63 - 1),): 2**62}
    assert {branches: residue_classes(problem(Pattern.of(*branches))) for branches in classes} == classes
    assert residue_classes(replace(problem(Pattern.of(far)), kv_cache=True)) == 1


def test_blocks_of_different_sizes_are_one_table_where_they_count_once():
    first, second = BlockSparse([[True, False], [False, True]], 20), BlockSparse([[False, True, True, False]] * 4, 10)
    arrays = branch_arrays(problem(Pattern.of(first, second, overlap="once"), seq=40))
    assert arrays.offset.tolist() == [[0], [0]]
    assert arrays.rows_end.tolist() == [10, 20, 30, 40] * 2
    assert arrays.columns.reshape(-1, 2)[:4].tolist() == [[0, 30], [0, 30], [10, 40], [10, 40]]


def test_sequences_that_are_no_whole_grid_are_an_error():
    query, key, value = (x[0] for x in tensors(20))
    starts = torch.tensor([0, 12, 20], dtype=torch.int32)
    with pytest.raises(PatternError, match="seq=8: the neighborhood is of a grid of 3 x 4, 12 tokens"):
        attend_packed(query, key, value, Pattern.natten((3, 4), 3), starts, backend="native")
    sizes, *others = encode_problem(problem(Pattern.natten((3, 4), 3), seq=12))
    with pytest.raises(ValueError, match="a sequence has 13 tokens; the 12 of a grid are needed"):
        _native.EncodedProblem((1, 13, *sizes[2:]), *others)


def problem(pattern, seq=4096):
    return Problem(batch=1, seq=seq, heads=2, head_dim=16, pattern=pattern)


@pytest.mark.parametrize(
    ("pattern", "seq", "code"),
    [
        (Pattern.of(SlidingWindow(4), DilatedSegment(64, 2), overlap="once"), MOST_TOKENS + 1, "seq"),
        (Pattern.natten((2**15 + 1, 2**15), 3), (2**15 + 1) * 2**15, "seq"),
        (Pattern.of(SlidingWindow(MOST_WINDOW + 1)), 2**25, "window"),
        (Pattern.of(Reach(2, MOST_WINDOW)), 2**25, "window"),
        (Pattern.of(Reach(9, 2), SlidingWindow(4), overlap="once"), 64, "overlap"),
        (Pattern.of(*[SlidingWindow(i + 1) for i in range(65)]), 4096, "branches"),
    ],
)
def test_what_the_tables_cannot_hold_is_refused(pattern, seq, code):
    assert code in [refusal.code for refusal in Native().refusals(problem(pattern, seq))]


def test_a_window_of_the_whole_sequence_and_mixes_that_count_once_are_taken():
    once = Pattern.of(GlobalTokens(2), DilatedSegment(64, 2), SlidingWindow(40, 4), Strided(6), overlap="once")
    for pattern in (Pattern.of(SlidingWindow(MOST_WINDOW + 1)), once):
        assert Native().refusals(problem(pattern)) == ()


def test_many_short_sequences_are_not_cut_into_more_classes_than_they_have_rows():
    """Classes times sequences would be 2 * 10**10 problems."""
    query, key, value = torch.randn(3, 200_000, 1, 4).unbind()
    starts = torch.arange(0, 200_001, 2, dtype=torch.int32)
    out = attend_packed(query, key, value, Pattern.of(Strided(10**9)), starts, backend="native")
    assert torch.equal(out, value)


def test_packed_sequences_longer_than_a_layout_are_an_error():
    query, key, value = (x[0] for x in tensors(20))
    pattern = Pattern.of(BlockSparse.local_global(3, 5))
    starts = torch.tensor([0, 4, 20], dtype=torch.int32)
    with pytest.raises(PatternError, match=r"seq=16: BlockSparse is for 15 tokens at most"):
        attend_packed(query, key, value, pattern, starts, backend="native")


def test_neighbouring_blocks_that_are_seen_are_one_run():
    layout = [[[True, True, False, True], [False] * 4, [True] * 4, [False, False, False, True]]]
    arrays = branch_arrays(problem(Pattern.of(BlockSparse(layout, 10)), seq=40))
    assert arrays.rows_end.tolist() == [10, 20, 30, 40] * 2
    assert arrays.first_columns.tolist() == [0, 2, 2, 3, 4, 6, 8, 9, 11]
    assert arrays.columns.reshape(-1, 2)[:4].tolist() == [[0, 20], [30, 40], [0, 40], [30, 40]]
