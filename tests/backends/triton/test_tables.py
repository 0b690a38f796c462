"""The tables of the kernels in Triton against the count."""

import numpy as np
import pytest
from helpers.strategies import mixes, patterns
from hypothesis import given, strategies as st

from dilkit import BlockSparse, Documents, GlobalTokens, Pattern, Prefix, SlidingWindow, Strided
from dilkit.backends.tiles.device import KEYS, QUERIES
from dilkit.backends.tiles.relations import FORMS
from dilkit.backends.tiles.schedule import schedule, schedule_refusals
from dilkit.backends.triton import segment_strips, strips
from dilkit.backends.triton.tables import make_tables
from dilkit.problem import Problem

SIZES = dict(heads=4, kv_heads=2, head_dim=8)


def seen(problem, made, group, kind, columns):
    """Count how often tiles show each query each key, `(heads, seq, seq)`, computed as in the kernels."""
    count = np.zeros((problem.heads, problem.seq, problem.seq))
    per_head = problem.heads // problem.kv_heads if kind == KEYS else 1
    for number, (row, rows, step, head, base) in enumerate(made.tiles.tolist()):
        own = row + step * np.arange(rows)
        for h in range(per_head):
            begin, whole, cut, end = made.spans[number * per_head + h].tolist()
            assert begin <= whole <= cut <= end
            for strip, (first, distance, length, bias) in enumerate(made.strips[begin:end].tolist(), begin):
                assert 0 < length <= columns
                others = base + first + distance * np.arange(length)
                weights = np.tile(2.0 ** made.biases[bias : bias + length], (rows, 1))
                query, key = (others[None], own[:, None]) if kind == KEYS else (own[:, None], others[None])
                within = (query - group.back <= key) & (key <= query + group.ahead)
                assert not whole <= strip < cut or within.all()
                weights *= within
                place = count[head * per_head + h]
                if kind == KEYS:
                    place[np.ix_(others, own)] += weights.T
                else:
                    place[np.ix_(own, others)] += weights
    return count


def check(problem, rows, columns):
    want = problem.pattern.count(problem.seq, problem.heads, kv_heads=problem.kv_heads, is_causal=problem.is_causal).numpy()
    for kind in (QUERIES, KEYS):
        count = np.zeros(want.shape)
        for group in schedule(problem, rows).groups:
            count += seen(problem, make_tables(problem, group, kind, columns), group, kind, columns)
        assert np.allclose(count, want)


@given(patterns(heads=4, kv_heads=2), st.integers(1, 40), st.sampled_from([1, 4, 16]), st.booleans())
def test_strips_show_the_count(pattern, seq, rows, is_causal):
    check(Problem(pattern=pattern, seq=seq, is_causal=is_causal, **SIZES), rows, 4)


@given(mixes(heads=4, kv_heads=2, tokens=40), st.integers(1, 40), st.sampled_from([1, 4, 16]), st.booleans())
def test_strips_show_the_count_of_every_kind(pattern, seq, rows, is_causal):
    problem = Problem(pattern=pattern, seq=seq, is_causal=is_causal, **SIZES)
    if not schedule_refusals(problem) and problem.forms.names <= FORMS:
        check(problem, rows, 4)


def test_strips_show_the_count_of_runs():
    layout = np.random.default_rng(0).random((4, 150, 150)) < 0.5
    layout[:, :, ::2], layout[:, 5, 1::2] = False, False
    layout[:, 5, ::2] = True
    check(Problem(pattern=Pattern.of(BlockSparse(layout, 1)), seq=150, **SIZES), 16, 16)
    few = Pattern.of(BlockSparse(layout[:1], 3), Documents([5, 30, 1, 400]), Prefix(20))
    check(Problem(pattern=few, seq=143, is_causal=True, **SIZES), 16, 16)


@pytest.mark.parametrize("rates", [(6, 4, 3), (4, 6, 2), (1, 2, 4)])
@pytest.mark.parametrize("overlap", ["count", "once"])
def test_keys_that_several_branches_show_are_listed_once(rates, overlap):
    check(Problem(pattern=Pattern([72, 72, 72], rates, overlap=overlap), seq=72, **SIZES), 16, 16)


def test_more_branches_than_a_launch_takes_count_once_where_each_head_has_its_own():
    pattern = Pattern([4] * 33, [1] * 33, overlap="once", heads=[(h, h + 1) for h in range(33)])
    check(Problem(pattern=pattern, seq=8, heads=33, head_dim=8), 4, 4)


def test_tiles_of_the_same_hash_are_told_apart(monkeypatch):
    monkeypatch.setattr(segment_strips, "_FACTOR", np.uint64(0))
    check(Problem(pattern=Pattern([6, 10, 21], [1, 3, 5]), seq=43, is_causal=True, **SIZES), 4, 4)


def test_tables_of_windows_and_global_tokens_grow_with_the_rows_alone():
    pattern = Pattern.of(SlidingWindow(2**20), SlidingWindow(3000, 8), Strided(16), GlobalTokens([0, 5, 9, 2000]))
    sizes = [Problem(pattern=pattern, seq=seq, **SIZES) for seq in (2**15, 2**18)]
    short, long = (
        sum(x.nbytes for group in schedule(problem, 64).groups for x in vars(make_tables(problem, group, kind, 64)).values())
        for problem in sizes
        for kind in (QUERIES,)
    )
    assert long < 8.5 * short


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kind", [QUERIES, KEYS])
def test_a_tile_of_a_window_sees_what_the_window_reaches(kind, is_causal):
    """No more than the keys of its first to its last row, and the rest of the strips at both ends."""
    problem = Problem(pattern=Pattern.of(SlidingWindow(1000)), seq=2**14, is_causal=is_causal, **SIZES)
    made = make_tables(problem, schedule(problem, 64).groups[0], kind, 32)
    seen, whole = (made.spans[:, to] - made.spans[:, begin] for begin, to in ((0, 3), (1, 2)))
    reach = 999 * (1 if is_causal else 2) + 64
    assert seen.max() * 32 < reach + 2 * 32
    assert (seen - whole).max() * 32 <= 4 * 64 + 2 * 32


def test_strips_do_not_grow_with_the_sequence():
    pattern = Pattern([2048, 4096, 8192], [1, 2, 4])
    short, long = (Problem(pattern=pattern, seq=seq, **SIZES) for seq in (2**14, 2**17))
    made = [make_tables(problem, schedule(problem, 64).groups[0], QUERIES, 64) for problem in (short, long)]
    assert len(made[0].strips) == len(made[1].strips)
    assert 8 * len(made[0].tiles) == len(made[1].tiles)


def test_tables_that_would_be_too_large_are_refused(monkeypatch):
    problem = Problem(pattern=Pattern([72, 72], [5, 7], overlap="once", offset="block"), seq=72, **SIZES)
    group = schedule(problem, 4).groups[0]
    monkeypatch.setattr(strips, "MOST_BYTES", 100)
    with pytest.raises(ValueError, match="strips need more than 100 bytes; use another backend"):
        make_tables(problem, group, QUERIES, 4)
    monkeypatch.setattr(strips, "MOST_BYTES", 20)
    with pytest.raises(ValueError, match="repeat after 35 tokens"):
        make_tables(problem, group, QUERIES, 4)
    problem = Problem(pattern=Pattern.of(Documents([4, 4])), seq=8, **SIZES)
    with pytest.raises(ValueError, match="tables of 2 strips need more than 20 bytes"):  # one of each document
        make_tables(problem, schedule(problem, 4).groups[0], QUERIES, 4)
