"""The schedule of a pattern against its count: every pair of rows as often as it should be, every row in one tile."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers.strategies import patterns
from hypothesis import given
from hypothesis import strategies as st

from dilkit import Pattern
from dilkit.backends.tiles.schedule import MAX_BRANCHES, Group, schedule, schedule_refusals
from dilkit.problem import Problem

SIZES = dict(heads=4, kv_heads=2, head_dim=8)


def pairs(problem: Problem, group: Group, of_keys: bool) -> np.ndarray[Any, Any]:
    """How often the tiles of a group show each query each key: `(heads, seq, seq)`, without causality."""
    seq, per_head = problem.seq, problem.heads // problem.kv_heads
    count = np.zeros((problem.heads, seq, seq), int)
    for tile in group.key_tiles if of_keys else group.query_tiles:
        rows = [tile["row"] + i * tile["step"] for i in range(tile["rows"])]
        heads = range(tile["head"] * per_head, (tile["head"] + 1) * per_head) if of_keys else [tile["head"]]
        for b, branch in enumerate(group.branches):
            if not tile["set"] >> b & 1:
                continue
            low = tile["row"] // branch["segment"] * branch["segment"]
            high = min(low + branch["segment"], seq)
            assert all(low <= row < high for row in rows)
            seen = [x for x in range(low, high) if (x - tile["row"]) % branch["rate"] == 0]
            for head in heads:
                if branch["head_start"] <= head < branch["head_stop"]:
                    count[np.ix_([head], seen, rows) if of_keys else np.ix_([head], rows, seen)] += 1
    return count


def check(problem: Problem, tile_rows: int) -> None:
    groups = schedule(problem, tile_rows).groups
    want = problem.pattern.count(problem.seq, problem.heads, kv_heads=problem.kv_heads).numpy()
    for of_keys in (False, True):
        count = sum(pairs(problem, group, of_keys) for group in groups)
        assert np.array_equal(np.minimum(count, 1) if problem.pattern.overlap == "once" else count, want)
    for i, group in enumerate(groups):
        for tiles, heads in ((group.query_tiles, problem.heads), (group.key_tiles, problem.kv_heads)):
            assert (tiles["rows"] >= 1).all()
            assert (tiles["rows"] <= tile_rows).all()
            taken = np.zeros((heads, problem.seq), int)
            for tile in tiles:
                taken[tile["head"], tile["row"] + np.arange(tile["rows"]) * tile["step"]] += 1
            assert (taken == 1).all() if i == 0 else (taken <= 1).all()


@given(patterns(heads=4, kv_heads=2), st.integers(0, 40), st.sampled_from([1, 4, 16]), st.booleans())
def test_tiles_show_the_count(pattern: Pattern, seq: int, tile_rows: int, is_causal: bool) -> None:
    check(Problem(pattern=pattern, seq=seq, is_causal=is_causal, **SIZES), tile_rows)


def test_branches_share_a_launch_while_a_segment_holds_a_tile_of_a_class() -> None:
    problem = Problem(pattern=Pattern([64, 128, 256], [1, 2, 16]), seq=512, **SIZES)
    assert [list(group.branches["rate"]) for group in schedule(problem, 32).groups] == [[1, 2], [16]]
    assert len(schedule(problem, 4).groups) == 1


def test_rows_of_a_tile_are_as_close_as_rows_of_other_branches_allow() -> None:
    problem = Problem(pattern=Pattern([32, 64, 128], [1, 2, 8]), seq=128, heads=1, head_dim=8)
    (group,) = schedule(problem, 4).groups
    steps = {(int(tile["set"]), int(tile["row"]) % 8): int(tile["step"]) for tile in group.query_tiles}
    assert steps == {(1, 1): 2, (3, 2): 4, (3, 4): 8, (7, 0): 8}
    (other,) = schedule(replace(problem, pattern=Pattern([32, 64, 128], [1, 2, 3])), 4).groups
    assert set(other.query_tiles["step"].tolist()) == {6}
    (dense,) = schedule(replace(problem, pattern=Pattern.dense()), 4).groups
    assert set(dense.query_tiles["step"].tolist()) == {1}


def test_once_is_never_split() -> None:
    problem = Problem(pattern=Pattern([4, 5, 7], [4, 5, 7], overlap="once"), seq=29, **SIZES)
    assert len(schedule(problem, 64).groups) == 1
    many = Pattern([4] * (MAX_BRANCHES + 1), [1] * (MAX_BRANCHES + 1), overlap="once")
    with pytest.raises(ValueError, match="at most 32"):
        schedule(replace(problem, pattern=many), 64)


def test_once_makes_no_difference_where_each_head_has_a_branch_of_its_own() -> None:
    sizes: dict[str, Any] = dict(seq=512, heads=2, head_dim=8)
    once, count = (
        Problem(pattern=Pattern([64, 512], [1, 16], overlap=overlap, heads=[(0, 1), (1, 2)]), **sizes)
        for overlap in ("once", "count")
    )
    assert [len(group.query_tiles) for group in schedule(once, 16).groups] == [
        len(group.query_tiles) for group in schedule(count, 16).groups
    ]
    check(once, 16)
    many = Pattern([4] * (MAX_BRANCHES + 1), [1] * (MAX_BRANCHES + 1), overlap="once", heads=[(h, h + 1) for h in range(33)])
    problem = Problem(pattern=many, seq=8, heads=33, head_dim=8)
    assert schedule_refusals(problem) == []
    check(problem, 4)


def test_many_branches_are_split() -> None:
    many = Pattern([4] * (MAX_BRANCHES + 1), [1] * (MAX_BRANCHES + 1))
    assert [len(group.branches) for group in schedule(Problem(pattern=many, seq=8, **SIZES), 64).groups] == [32, 1]


def test_the_tiles_with_the_most_keys_come_first() -> None:
    tiles = schedule(Problem(pattern=Pattern([16, 64], [1, 4]), seq=64, **SIZES), 4).groups[0].query_tiles
    depth = [bin(tile["set"]).count("1") for tile in tiles]
    assert depth == sorted(depth, reverse=True)
    assert depth[0] == 2


def test_too_long_a_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match="seq=2147483648 exceeds"):
        schedule(Problem(pattern=Pattern([64], [1]), seq=2**31, **SIZES), 64)
