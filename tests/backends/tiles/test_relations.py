"""Relations of windows, strides, global tokens and runs, and their tiles."""

import numpy as np
import pytest
from helpers.odd_kinds import Gap, Posts, Reach, Turns
from helpers.strategies import mixes, patterns
from hypothesis import assume, given, strategies as st

from dilkit import (
    BlockSparse,
    DilatedSegment,
    Documents,
    GlobalTokens,
    Intervals,
    Neighborhood,
    Pattern,
    Prefix,
    SlidingWindow,
    Strided,
)
from dilkit.backends.tiles.backend import FEW_TILES, fill_refusals
from dilkit.backends.tiles.relations import FORMS, MOST_RUNS, relations
from dilkit.backends.tiles.schedule import schedule, schedule_refusals
from dilkit.pattern import runs
from dilkit.problem import Problem

SIZES = dict(heads=4, kv_heads=2, head_dim=8)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("overlap", ["count", "once"])
@pytest.mark.parametrize(
    "branches",
    [
        (SlidingWindow(9), SlidingWindow(3)),
        (SlidingWindow(20, 4), SlidingWindow(6, 2, heads=(1, 4)), GlobalTokens([2, 9, 10, 22])),
        (Strided(6), SlidingWindow(7, 3), GlobalTokens(2, "read"), GlobalTokens([1, 12])),
        (SlidingWindow(6), Reach(4, 9, heads=(1, 4)), Reach(8, 0, rate=2)),
        (Posts((2, 4), (5, 9)), Gap("window", (3, 9), (0, 1)), Gap("tokens", (7, 10), (3, 4))),
        (BlockSparse.bigbird(9, 3, heads=4), Documents([4, 1, 30]), GlobalTokens([0, 9, 24])),
        (Prefix(7), Intervals([[i % 5, i] for i in range(30)], [[i % 7, i + 2] for i in range(30)], heads=(1, 3))),
    ],
)
def test_relations_show_the_count(branches, overlap, is_causal):
    check_count(Problem(pattern=Pattern.of(*branches, overlap=overlap), seq=25, is_causal=is_causal, **SIZES))


def check_count(problem):
    if "unlowered" in problem.forms.names or any(form.without for form in problem.forms):  # what no relation is left of
        return
    want = problem.pattern.count(problem.seq, 4, kv_heads=2, is_causal=problem.is_causal).numpy()
    for of_keys in (False, True):
        count = np.zeros(want.shape, int)
        for relation in relations(problem):
            for _, part in relation.numbered(of_keys):
                own, others = (sorted(positions(runs.progressions(x))) for x in part)
                queries, keys = (others, own) if of_keys else (own, others)
                apart = np.array(keys) - np.array(queries)[:, None]
                seen = (apart % relation.rate == 0) & (-relation.back <= apart) & (apart <= relation.ahead)
                count[np.ix_(range(*relation.heads), queries, keys)] += seen
        np.testing.assert_array_equal(count, want)


@pytest.mark.parametrize("is_causal", [False, True])
def test_rows_that_see_many_runs_are_in_a_relation_for_so_many_each(is_causal):
    layout = np.add.outer(np.arange(2 * MOST_RUNS + 12), np.arange(2 * MOST_RUNS + 12)) % 2 == 0
    layout[7, 3] = layout[3, 7] = True
    problem = Problem(pattern=Pattern.of(BlockSparse(layout, 1)), seq=len(layout), is_causal=is_causal, **SIZES)
    first, second = relations(problem)
    assert max(len(part.columns) for relation in (first, second) for part in relation.parts) == MOST_RUNS
    check_count(problem)


def test_blocks_that_see_the_same_are_one_part():
    layout = np.tile(np.tril(np.ones((40, 40), bool)), (2, 2))
    [relation] = relations(Problem(pattern=Pattern.of(BlockSparse(layout, 2)), seq=160, **SIZES))
    assert [len(relation.queries), len(relation.keys)] == [40, 40]
    assert relation.queries[3].rows.tolist() == [[6, 8], [86, 88]]
    assert relation.queries[3].columns.tolist() == [[0, 8], [80, 88]]


@pytest.mark.parametrize(
    ("branch", "rows"),
    [
        (Documents([32] * 100), None),
        (Documents([65] * 100), None),
        (Documents([32] * 100 + [1]), None),
        (Documents([16] * FEW_TILES), None),
        (Documents([16] * (FEW_TILES + 1)), "16"),
        (Documents([31, 30] * 50), "30.5"),
        (BlockSparse.bigbird(100, 32, heads=4), None),
        (BlockSparse.bigbird(400, 8), "8"),
        (BlockSparse(np.ones((400, 400), bool), 8), None),
        (BlockSparse(np.tile([True, False], (400, 200)), 8), "8"),
        (Prefix(5), None),
        (Intervals(np.arange(3201) % 33 // 32, np.where(np.arange(3201) % 33 < 32, 3200, 0)), None),
        (Intervals(np.zeros(3200, int), np.arange(3200)), "1"),
    ],
)
def test_tiles_of_runs_that_are_mostly_empty_are_refused(branch, rows):
    found = fill_refusals(Problem(pattern=Pattern.of(branch, SlidingWindow(4)), seq=min(branch.max_seq, 3201), **SIZES))
    assert [x.value for x in found] == [rows] * (rows is not None)
    assert all('backend="flex"' in x.hint for x in found)


PATTERNS = st.one_of(mixes(heads=4, kv_heads=2, tokens=40), patterns(heads=4, kv_heads=2))


@given(PATTERNS, st.integers(0, 40), st.sampled_from([1, 4, 16]), st.booleans())
def test_every_row_is_in_one_tile_of_the_first_group(pattern, seq, rows, is_causal):
    problem = Problem(pattern=pattern, seq=seq, is_causal=is_causal, **SIZES)
    assume(problem.forms.names <= FORMS and not schedule_refusals(problem))
    for i, group in enumerate(schedule(problem, rows).groups):
        for tiles, heads in ((group.query_tiles, 4), (group.key_tiles, 2)):
            taken = np.zeros((heads, seq), int)
            for tile in tiles:
                assert 1 <= tile["rows"] <= rows
                taken[tile["head"], tile["row"] + np.arange(tile["rows"]) * tile["step"]] += 1
            assert (taken == 1).all() if i == 0 else (taken <= 1).all()


@pytest.mark.parametrize("branch", [SlidingWindow(2**16), SlidingWindow(5000, 8), Strided(500), GlobalTokens([0, 9, 70, 4000])])
def test_tiles_are_as_many_as_the_rows_need(branch):
    groups = [schedule(Problem(pattern=Pattern.of(branch), seq=seq, **SIZES), 64).groups for seq in (2**15, 2**18)]
    short, long = (sum(len(group.query_tiles) for group in own) for own in groups)
    assert len(groups[0]) == len(groups[1]) == 1
    assert long < 8.5 * short


def test_tiles_at_the_ends_of_a_causal_window_come_last():
    [group] = schedule(Problem(pattern=Pattern.of(SlidingWindow(64)), seq=256, is_causal=True, **SIZES), 16).groups
    assert (group.query_tiles["row"][-1], group.key_tiles["row"][-1]) == (0, 240)


def test_a_window_of_one_has_tall_tiles_whatever_its_rate():
    [group] = schedule(Problem(pattern=Pattern.of(SlidingWindow(7, 7)), seq=64, **SIZES), 64).groups
    assert set(group.query_tiles["rows"]) == {64}


@pytest.mark.parametrize(
    ("branches", "refused"),
    [
        ((SlidingWindow(40, 4), Strided(6)), True),
        ((SlidingWindow(40), DilatedSegment(16, 2)), True),
        ((GlobalTokens(2), DilatedSegment(16, 2)), True),
        ((SlidingWindow(40, 4), SlidingWindow(9, 2), GlobalTokens(2)), False),
        ((SlidingWindow(40, 4, heads=(0, 2)), Strided(6, heads=(2, 4)), GlobalTokens(2)), False),
        ((SlidingWindow(40, heads=(0, 1)), DilatedSegment(16, 2, heads=(1, 4)), DilatedSegment(8, 1, heads=(2, 3))), False),
        ((SlidingWindow(40, heads=(0, 2)), DilatedSegment(16, 2, heads=(1, 4))), True),
    ],
)
def test_mixes_that_count_once_are_refused_where_branches_have_no_order(branches, refused):
    found = schedule_refusals(Problem(pattern=Pattern.of(*branches, overlap="once"), seq=64, **SIZES))
    assert [x.code for x in found] == ["overlap"] * refused
    assert not refused or found[0].hint == 'use overlap="count", or backend="native"'


@pytest.mark.parametrize("branch", [Turns(8, 3), Gap("segments", (3, 5), (8, 12))])
def test_segments_that_no_tiles_are_known_for_are_refused(branch):
    assert schedule_refusals(Problem(pattern=Pattern.of(branch), seq=64, **SIZES))


def test_kinds_that_are_no_relations_are_an_error():
    problem = Problem(pattern=Pattern.of(Neighborhood((8, 8), 3)), seq=64, **SIZES)
    with pytest.raises(TypeError, match="is lowered to grid of windows; tiles are known for band, global, runs, segments"):
        schedule(problem, 16)


def positions(found):
    return {first + i * step for first, step, count in found.tolist() for i in range(count)}


@given(st.sets(st.integers(0, 30)), st.sets(st.integers(0, 30)), st.integers(0, 31), st.integers(1, 5))
def test_sets_of_positions(one, other, seq, rate):
    a, b = (runs.union(*(np.array([[x, x + 1]]) for x in sorted(chosen))) for chosen in (one, other))
    below = set(range(seq))
    assert (np.diff(a.reshape(-1)) > 0).all(), "runs that touch are one"
    assert positions(runs.progressions(a)) == one
    assert positions(runs.classes(runs.union(a, b), rate)) == one | other
    assert positions(runs.progressions(runs.complement(a, seq))) == below - one
    assert positions(runs.progressions(runs.difference(a, b, seq))) == (one - other) & below
