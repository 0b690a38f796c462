"""The forms of a pattern against its count."""

import numpy as np
import pytest
from helpers.odd_kinds import Reach
from helpers.strategies import mixes_with_heads, neighborhoods
from hypothesis import example, given, settings, strategies as st
from numpy.typing import NDArray

from dilkit import BlockSparse, DilatedSegment, Documents, GlobalTokens, Neighborhood, Pattern, Prefix, SlidingWindow, Strided
from dilkit.pattern.lowering import Band, CutGrid, Global, Grid, Runs, Segments, lower

Bools = NDArray[np.bool_]


def members(runs, seq):
    found = np.zeros(seq, bool)
    for start, stop in runs.tolist():
        found[start:stop] = True
    return found


def of_table(table, seq):
    found, first, at = np.zeros((seq, seq), bool), 0, 0
    for stop, count in zip(table.stop.tolist(), table.runs.tolist(), strict=True):
        for low, high in table.columns[at : at + count].tolist():
            found[first:stop, low:high] = True
        first, at = stop, at + count
    return found


def segments(form, head, seq):
    i, j, offset = *np.ogrid[:seq, :seq], form.offsets[head - form.heads[0]]
    kept = (np.arange(seq) % form.length % form.rate) == offset
    return (i // form.length == j // form.length) & kept[:, None] & kept


def band(form, head, seq):
    i, j = np.ogrid[:seq, :seq]
    apart = np.asarray(i - j)
    return (abs(apart) >= form.first) & (apart <= form.back) & (-apart <= form.ahead) & (apart % form.rate == 0)


def to_all(form, head, seq):
    return members(form.rows, seq)[:, None] | members(form.columns, seq)


def runs(form, head, seq):
    found = of_table(form.queries, seq)
    assert np.array_equal(found, of_table(form.keys, seq).T)
    return found


def grid(form, head, seq):
    border = "cut" if isinstance(form, CutGrid) else "move"
    branch = Neighborhood(form.shape, form.kernel, form.dilation, stride=form.stride, causal=form.causal, border=border)
    return Pattern.of(branch).count(seq, 1)[0].numpy().astype(bool)


SHOWN = {
    Segments: segments,
    Band: band,
    Global: to_all,
    Runs: runs,
    Grid: grid,
    CutGrid: grid,
}


def count_of(forms, heads, seq):
    """Count the forms that show each pair, by the fields' definition in docs/design.md."""
    total = np.zeros((heads, seq, seq), np.int64)
    for at, form in enumerate(forms):
        for head in range(*form.heads):
            seen = SHOWN[type(form)](form, head, seq)
            if form.without_rows is not None and form.without_columns is not None:
                seen &= ~members(form.without_rows, seq)[:, None] & ~members(form.without_columns, seq)
            for place in form.without:
                assert place < at
                assert forms[place].heads == form.heads
                seen &= ~SHOWN[type(forms[place])](forms[place], head, seq)
            total[head] += seen
    return total


@given(mixes_with_heads(), st.integers(0, 26))
@example((Pattern.of(Prefix(1), Documents([30]), overlap="once"), (1, 1)), 2)
def test_forms_show_the_count(drawn, seq):
    pattern, (heads, kv_heads) = drawn
    forms = lower(pattern, seq, heads, kv_heads)
    if "unlowered" in forms.names:  # what is left beside a prefix
        assert pattern.overlap == "once"
        assert any(isinstance(branch, Prefix) for branch in pattern.branches)
        return
    np.testing.assert_array_equal(count_of(forms, heads, seq), pattern.count(seq, heads, kv_heads=kv_heads).numpy())


@pytest.mark.parametrize(
    "branches",
    [
        (Reach(9, 2), SlidingWindow(4)),
        (SlidingWindow(4), Reach(9, 0, rate=2), Reach(0, 9, rate=3)),
        (Reach(2, 9), SlidingWindow(6, heads=(0, 2)), Reach(5, 7)),
        (Reach(7, 3), Reach(3, 7), Strided(2), SlidingWindow(20, 4)),
    ],
    ids=str,
)
@pytest.mark.parametrize("overlap", ["count", "once"])
def test_bands_that_reach_farther_on_one_side(branches, overlap):
    pattern = Pattern.of(*branches, overlap=overlap)
    np.testing.assert_array_equal(count_of(lower(pattern, 26, 3), 3, 26), pattern.count(26, 3).numpy())


@settings(max_examples=40, deadline=None)
@given(neighborhoods(heads=3, tokens=40), st.sampled_from(["count", "once"]))
def test_forms_show_the_count_on_a_grid(drawn, overlap):
    seq = drawn.max_seq
    others = DilatedSegment(7, 2), SlidingWindow(3), GlobalTokens([1]), Strided(4, heads=(0, 2)), Neighborhood(seq, 1)
    blocks = BlockSparse(np.eye(seq // 3 + 1, dtype=bool), 3), BlockSparse(np.eye(seq, dtype=bool), 1)
    pattern = Pattern.of(*drawn.branches, *others, *blocks, overlap=overlap)
    found = count_of(lower(pattern, seq, 3, 3), 3, seq)
    np.testing.assert_array_equal(found, pattern.count(seq, 3).numpy())


@pytest.mark.parametrize(
    ("branches", "begins"),
    [
        ((SlidingWindow(3), SlidingWindow(9)), [0]),  # the wide one shows all of the other
        ((SlidingWindow(9, 2), SlidingWindow(4)), [0, 4]),
        ((SlidingWindow(9, 3), SlidingWindow(7, 2)), [0, 0]),  # no rate divides the other: pair by pair
        ((Strided(4), Strided(2), SlidingWindow(5)), [0, 5]),
    ],
)
def test_a_band_begins_where_a_narrower_one_ends(branches, begins):
    forms = lower(Pattern.of(*branches, overlap="once"), 64, 1)
    assert [form.first for form in forms if isinstance(form, Band)] == begins


def test_numbers_are_cut_to_what_fits():
    most = 2**63 - 1
    (segment, stride, tokens) = lower(Pattern.of(DilatedSegment(most, most), Strided(most), GlobalTokens(most)), 64, 1)
    assert isinstance(segment, Segments)
    assert isinstance(stride, Band)
    assert isinstance(tokens, Global)
    assert (segment.length, segment.rate, stride.rate, stride.back) == (2**62,) * 4
    assert tokens.columns.tolist() == [[0, 2**62 - 1]]
