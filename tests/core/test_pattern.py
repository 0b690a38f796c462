"""The pattern: its count against the definition written as loops, and its life as a value."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle

import numpy as np
import pytest
import torch
from helpers.definition import brute_force
from helpers.strategies import Heads, patterns_with_heads
from hypothesis import given, settings
from hypothesis import strategies as st

from dilkit import DilatedSegment, Pattern, PatternError
from dilkit.pattern import WHOLE_SEQUENCE

EXAMPLES = [
    Pattern([4], [1]),
    Pattern([4, 8, 16], [1, 2, 4]),
    Pattern([6, 4], [4, 3], offset="block", overlap="once"),
    Pattern([4, 8], [2, 1], heads=[range(0, 2), None]),
    Pattern.dense(),
    Pattern.head_split([4, 8, 16], [1, 2, 4], 7),
    Pattern([4, 8], [3, 2], head_shard=(2, 8)),
]
examples = pytest.mark.parametrize("pattern", EXAMPLES, ids=str)


@settings(max_examples=30, deadline=None)
@given(patterns_with_heads(), st.integers(0, 17), st.booleans())
def test_count_is_the_definition(drawn: tuple[Pattern, Heads], seq: int, is_causal: bool) -> None:
    pattern, heads = drawn
    expected = brute_force(pattern, seq, heads, is_causal)
    expected = np.minimum(expected, 1) if pattern.overlap == "once" else expected
    count = pattern.count(seq, heads[0], kv_heads=heads[1], is_causal=is_causal)
    assert count.dtype == torch.int32
    np.testing.assert_array_equal(count.numpy(), expected)
    rows = torch.arange(seq)[1::2]
    some = pattern.count_rows(rows, seq, heads[0], kv_heads=heads[1], is_causal=is_causal)
    np.testing.assert_array_equal(some.numpy(), expected[:, 1::2])


@settings(max_examples=40, deadline=None)
@given(patterns_with_heads(), st.integers(0, 17), st.booleans())
def test_flops_are_four_head_dims_a_pair(drawn: tuple[Pattern, Heads], seq: int, is_causal: bool) -> None:
    pattern, heads = drawn
    pairs = int(brute_force(pattern, seq, heads, is_causal).sum())
    assert pattern.flops(seq, heads[0], 5, batch=3, kv_heads=heads[1], is_causal=is_causal) == 4 * 5 * 3 * pairs


def test_flops_of_a_million_tokens_need_no_matrix() -> None:
    assert Pattern.dense().flops(2**20, 8, 64) == 4 * 64 * 8 * 2**40


@pytest.mark.parametrize("offset", ["modulo", "block"])
def test_flops_of_many_heads_need_no_loop_over_them(offset: str) -> None:
    pattern = Pattern([16, 24], [4, 5], offset=offset)
    few, many = (pattern.flops(71, heads, 64, kv_heads=kv_heads) for heads, kv_heads in ((40, 20), (40 * 2**14, 20 * 2**14)))
    assert many == few * 2**14


@settings(max_examples=30, deadline=None)
@given(patterns_with_heads())
def test_a_pattern_survives_every_way_of_writing_it_down(drawn: tuple[Pattern, Heads]) -> None:
    pattern, _ = drawn
    assert Pattern.from_json(pattern.to_json()) == pattern
    for text in (str(pattern), repr(pattern)):
        assert eval(text, {"Pattern": Pattern}) == pattern
    for twin in (pickle.loads(pickle.dumps(pattern)), copy.copy(pattern), copy.deepcopy(pattern), dataclasses.replace(pattern)):
        assert twin == pattern
        assert hash(twin) == hash(pattern)
        assert (twin.to_json(), twin.branches) == (pattern.to_json(), pattern.branches)


@examples
def test_json_holds_the_arguments_and_nothing_else(pattern: Pattern) -> None:
    arguments = {"segment_lengths", "dilation_rates", "offset", "overlap", "heads", "head_shard", "tail"}
    assert set(json.loads(pattern.to_json())) == arguments


@examples
def test_a_pattern_is_frozen(pattern: Pattern) -> None:
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


def test_dense_is_every_pair_once() -> None:
    assert bool((Pattern.dense().count(9, 3) == 1).all())
    assert torch.equal(Pattern.dense().count(9, 3, is_causal=True), torch.ones(3, 9, 9, dtype=torch.int32).tril())
    assert str(Pattern.dense()) == "Pattern.dense()"


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


@pytest.mark.parametrize("offset", ["modulo", "block"])
def test_a_shard_of_the_heads_counts_as_in_the_whole(offset: str) -> None:
    whole = Pattern([6, 20], [3, 4], offset=offset).count(40, 8, kv_heads=4)
    shard = Pattern([6, 20], [3, 4], offset=offset, head_shard=(1, 4)).count(40, 4, kv_heads=2)
    assert torch.equal(shard, whole[2:6])


@pytest.mark.parametrize(
    ("shard", "error"),
    [((4, 4), PatternError), ((-1, 2), PatternError), ("12", TypeError), ((1, 2, 3), TypeError), (3, TypeError)],
)
def test_a_shard_of_heads_that_means_nothing_is_refused(shard: object, error: type[Exception]) -> None:
    with pytest.raises(error, match="head_shard"):
        Pattern([4], [1], head_shard=shard)


def test_a_shard_of_heads_must_hold_the_heads() -> None:
    with pytest.raises(PatternError, match=r"head_shard=\(3, 4\) leaves 1 key/value heads, but there are 2"):
        Pattern([4], [1], head_shard=(3, 4)).count(8, 4, kv_heads=2)


def test_grouped_heads_keep_the_same_rows() -> None:
    count = Pattern([8], [4]).count(16, 8, kv_heads=4)
    assert torch.equal(count[0::2], count[1::2])
    assert not torch.equal(count[0], count[2])


def test_branches_are_told_in_words() -> None:
    pattern = Pattern([2048, WHOLE_SEQUENCE], [1, 4], overlap="once", heads=[(0, 2), None])
    assert pattern.branches == (DilatedSegment(2048, 1, (0, 2)), DilatedSegment(WHOLE_SEQUENCE, 4))
    assert pattern.describe().splitlines() == [
        "branch 0: segments of 2,048 tokens, every token, heads 0-1",
        "branch 1: segments of the whole sequence, 1 token in 4",
        "offset: head mod rate; overlap: a key seen by several branches counts once",
    ]


@pytest.mark.parametrize(
    ("text", "error"),
    [("", ValueError), ("[4]", PatternError), ('{"segment_lengths": [4]}', PatternError), ('{"windows": [4]}', PatternError)],
)
def test_other_json_is_no_pattern(text: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        Pattern.from_json(text)


def test_count_is_made_on_the_cpu_whatever_the_default_device():
    with torch.device("meta"):
        count = Pattern([4, 8], [1, 2]).count(8, 2)
    assert count.device.type == "cpu"
    assert int(count.sum()) > 0
