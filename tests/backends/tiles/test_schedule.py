"""The schedule of a pattern."""

from dataclasses import replace

import pytest

from dilkit import Pattern
from dilkit.backends.tiles.schedule import MAX_BRANCHES, schedule, schedule_refusals
from dilkit.problem import Problem

SIZES = dict(heads=4, kv_heads=2, head_dim=8)


def test_branches_share_a_launch_while_a_segment_holds_a_tile_of_a_class():
    problem = Problem(pattern=Pattern([64, 128, 256], [1, 2, 16]), seq=512, **SIZES)
    assert [list(group.branches["rate"]) for group in schedule(problem, 32).groups] == [[1, 2], [16]]
    assert len(schedule(problem, 4).groups) == 1


def test_rows_of_a_tile_are_as_close_as_rows_of_other_branches_allow():
    problem = Problem(pattern=Pattern([32, 64, 128], [1, 2, 8]), seq=128, heads=1, head_dim=8)
    (group,) = schedule(problem, 4).groups
    steps = {(int(tile["set"]), int(tile["row"]) % 8): int(tile["step"]) for tile in group.query_tiles}
    assert steps == {(1, 1): 2, (3, 2): 4, (3, 4): 8, (7, 0): 8}
    (other,) = schedule(replace(problem, pattern=Pattern([32, 64, 128], [1, 2, 3])), 4).groups
    assert set(other.query_tiles["step"].tolist()) == {6}
    (dense,) = schedule(replace(problem, pattern=Pattern.dense()), 4).groups
    assert set(dense.query_tiles["step"].tolist()) == {1}


def test_once_is_never_split():
    problem = Problem(pattern=Pattern([4, 5, 7], [4, 5, 7], overlap="once"), seq=29, **SIZES)
    assert len(schedule(problem, 64).groups) == 1
    many = Pattern([4] * (MAX_BRANCHES + 1), [1] * (MAX_BRANCHES + 1), overlap="once")
    with pytest.raises(ValueError, match="at most 32"):
        schedule(replace(problem, pattern=many), 64)


def test_once_makes_no_difference_where_each_head_has_a_branch_of_its_own():
    sizes = dict(seq=512, heads=2, head_dim=8)
    once, count = (
        Problem(pattern=Pattern([64, 512], [1, 16], overlap=overlap, heads=[(0, 1), (1, 2)]), **sizes)
        for overlap in ("once", "count")
    )
    assert [len(group.query_tiles) for group in schedule(once, 16).groups] == [
        len(group.query_tiles) for group in schedule(count, 16).groups
    ]
    many = Pattern([4] * (MAX_BRANCHES + 1), [1] * (MAX_BRANCHES + 1), overlap="once", heads=[(h, h + 1) for h in range(33)])
    problem = Problem(pattern=many, seq=8, heads=33, head_dim=8)
    assert schedule_refusals(problem) == []
    assert [len(group.branches) for group in schedule(problem, 4).groups] == [32, 1]


def test_many_branches_are_split():
    many = Pattern([4] * (MAX_BRANCHES + 1), [1] * (MAX_BRANCHES + 1))
    assert [len(group.branches) for group in schedule(Problem(pattern=many, seq=8, **SIZES), 64).groups] == [32, 1]


def test_the_tiles_with_the_most_keys_come_first():
    tiles = schedule(Problem(pattern=Pattern([16, 64], [1, 4]), seq=64, **SIZES), 4).groups[0].query_tiles
    depth = [bin(tile["set"]).count("1") for tile in tiles]
    assert depth == sorted(depth, reverse=True)
    assert depth[0] == 2


def test_too_long_a_sequence_is_refused():
    with pytest.raises(ValueError, match="seq=2147483648 exceeds"):
        schedule(Problem(pattern=Pattern([64], [1]), seq=2**31, **SIZES), 64)
