"""The pattern."""

import dataclasses
import pickle
from dataclasses import asdict, replace

import pytest

from dilkit import BlockSparse, DilatedSegment, Pattern, Problem
from dilkit.pattern import WHOLE_SEQUENCE


@pytest.mark.parametrize("offset", ["modulo", "block"])
def test_flops_of_many_heads_need_no_loop_over_them(offset):
    pattern = Pattern([16, 24], [4, 5], offset=offset)
    few, many = (pattern.flops(71, heads, 64, kv_heads=kv_heads) for heads, kv_heads in ((40, 20), (40 * 2**14, 20 * 2**14)))
    assert many == few * 2**14


def test_a_pattern_is_frozen():
    pattern = Pattern([4, 8], [3, 2], head_shard=(2, 8))
    for field in dataclasses.fields(pattern):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(pattern, field.name, None)
        with pytest.raises(dataclasses.FrozenInstanceError):
            delattr(pattern, field.name)


@pytest.mark.parametrize(
    ("heads", "ranges"),
    [(3, ((0, 1), (1, 2), (2, 3))), (7, ((0, 3), (3, 5), (5, 7))), (8, ((0, 3), (3, 6), (6, 8)))],
)
def test_head_split_deals_out_every_head_once(heads, ranges):
    pattern = Pattern.head_split(iter([4, 8, 16]), [1, 2, 4], heads, offset="block")
    assert pattern.heads == ranges
    assert pattern.offset == "block"
    for head in range(heads):
        assert sum(branch.serves(head) for branch in pattern.branches) == 1


def test_branches_are_told_in_words():
    pattern = Pattern([2048, WHOLE_SEQUENCE], [1, 4], overlap="once", heads=[(0, 2), None])
    assert pattern.branches == (DilatedSegment(2048, 1, (0, 2)), DilatedSegment(WHOLE_SEQUENCE, 4))
    assert pattern.describe().splitlines() == [
        "branch 0: segments of 2,048 tokens, every token, heads 0-1",
        "branch 1: segments of the whole sequence, 1 token in 4",
        "offset: head mod rate; overlap: a key seen by several branches counts once",
    ]


def test_a_large_layout_is_told_by_its_digest():
    assert str(Pattern.of(BlockSparse([[True]], 8))) == "Pattern.of(BlockSparse(<1 x 1 x 1 blocks, 1 of 1 seen, 76be8b52>, 8))"


PROBLEM = Problem(pattern=Pattern([8, 16], [1, 2]), seq=32, heads=4, head_dim=8)


def test_a_changed_copy_has_flops_of_its_own():
    assert PROBLEM.flops() == PROBLEM.flops() == PROBLEM.pattern.flops(32, 4, 8)
    assert replace(PROBLEM, batch=3).flops() == 3 * PROBLEM.flops()
    assert replace(PROBLEM, is_causal=True).flops() < PROBLEM.flops()


def test_what_was_asked_before_makes_no_difference():
    fresh = replace(PROBLEM)
    PROBLEM.flops()
    assert fresh == PROBLEM
    assert hash(PROBLEM) == hash(fresh)
    assert asdict(PROBLEM) == asdict(fresh)
    assert pickle.loads(pickle.dumps(PROBLEM)) == fresh
