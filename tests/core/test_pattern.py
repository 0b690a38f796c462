"""The pattern: its count against the definition written as loops, and its life as a value."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from dilkit import DilatedSegment, Pattern, PatternError
from dilkit.pattern import WHOLE_SEQUENCE


def test_flops_of_a_million_tokens_need_no_matrix() -> None:
    assert Pattern.dense().flops(2**20, 8, 64) == 4 * 64 * 8 * 2**40


@pytest.mark.parametrize("offset", ["modulo", "block"])
def test_flops_of_many_heads_need_no_loop_over_them(offset: str) -> None:
    pattern = Pattern([16, 24], [4, 5], offset=offset)
    few, many = (pattern.flops(71, heads, 64, kv_heads=kv_heads) for heads, kv_heads in ((40, 20), (40 * 2**14, 20 * 2**14)))
    assert many == few * 2**14


def test_a_pattern_is_frozen() -> None:
    pattern = Pattern([4, 8], [3, 2], head_shard=(2, 8))
    for field in dataclasses.fields(pattern):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(pattern, field.name, None)
        with pytest.raises(dataclasses.FrozenInstanceError):
            delattr(pattern, field.name)


def test_every_argument_tells_patterns_apart() -> None:
    base = Pattern([4, 8], [1, 2])
    others = [
        Pattern([4, 9], [1, 2]),
        Pattern([4, 8], [1, 1]),
        Pattern([4, 8], [1, 2], offset="block"),
        Pattern([4, 8], [1, 2], overlap="once"),
        Pattern([4, 8], [1, 2], heads=[(0, 1), None]),
        Pattern([4, 8], [1, 2], head_shard=(1, 4)),
        Pattern([4, 8], [1, 2], tail="zeros"),
    ]
    assert len({base, *others}) == len({p.to_json() for p in (base, *others)}) == len({str(p) for p in (base, *others)}) == 8


def test_equal_patterns_written_differently() -> None:
    base = Pattern((4, 8), (1, 2), heads=[(0, 2), (1, 3)])
    assert Pattern(iter([4, 8]), [1, 2], heads=(range(2), range(1, 3))) == base
    assert Pattern([4, 8], [1, 2], heads=[None, None]) == Pattern([4, 8], [1, 2])


@pytest.mark.parametrize("array", [np.array([4, 8]), np.array([4, 8], np.uint8), torch.tensor([4, 8]), list(np.int16([4, 8]))])
def test_integers_of_numpy_and_torch_become_python_integers(array: object) -> None:
    pattern = Pattern(array, array)
    assert pattern == Pattern([4, 8], [4, 8])
    assert {type(x) for x in pattern.segment_lengths + pattern.dilation_rates} == {int}


@pytest.mark.parametrize("flag", [True, np.True_, torch.tensor(True)], ids=["python", "numpy", "torch"])
def test_bools_are_no_integers(flag: object) -> None:
    with pytest.raises(TypeError, match=r"dilation_rates\[1\].*bool"):
        Pattern([4, 8], [1, flag])


@pytest.mark.parametrize("seq", [5, 8, 11])
def test_a_segment_longer_than_the_sequence_is_the_sequence(seq: int) -> None:
    assert torch.equal(Pattern([WHOLE_SEQUENCE], [3]).count(seq, 4), Pattern([seq], [3]).count(seq, 4))


@pytest.mark.parametrize(
    ("heads", "ranges"),
    [(3, ((0, 1), (1, 2), (2, 3))), (7, ((0, 3), (3, 5), (5, 7))), (8, ((0, 3), (3, 6), (6, 8)))],
)
def test_head_split_deals_out_every_head_once(heads: int, ranges: tuple[tuple[int, int], ...]) -> None:
    pattern = Pattern.head_split(iter([4, 8, 16]), [1, 2, 4], heads, offset="block")
    assert pattern.heads == ranges
    assert pattern.offset == "block"
    for head in range(heads):
        assert sum(branch.serves(head) for branch in pattern.branches) == 1


def test_a_shard_of_heads_must_hold_the_heads() -> None:
    with pytest.raises(PatternError, match=r"head_shard=\(3, 4\) leaves 1 key/value heads, but there are 2"):
        Pattern([4], [1], head_shard=(3, 4)).count(8, 4, kv_heads=2)


def test_branches_are_told_in_words() -> None:
    pattern = Pattern([2048, WHOLE_SEQUENCE], [1, 4], overlap="once", heads=[(0, 2), None])
    assert pattern.branches == (DilatedSegment(2048, 1, (0, 2)), DilatedSegment(WHOLE_SEQUENCE, 4))
    assert pattern.describe().splitlines() == [
        "branch 0: segments of 2,048 tokens, every token, heads 0-1",
        "branch 1: segments of the whole sequence, 1 token in 4",
        "offset: head mod rate; overlap: a key seen by several branches counts once",
    ]


def test_count_is_made_on_the_cpu_whatever_the_default_device():
    with torch.device("meta"):
        count = Pattern([4, 8], [1, 2]).count(8, 2)
    assert count.device.type == "cpu"
    assert int(count.sum()) > 0
