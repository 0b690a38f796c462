"""Branches of every kind as values."""

import copy
import dataclasses
import gc
import json
import pickle
import weakref

import numpy as np
import pytest
import torch
from helpers.definition import brute_force, brute_force_edges
from helpers.strategies import mixes_with_heads, neighborhoods, patterns_with_heads
from hypothesis import given, settings, strategies as st

from dilkit import BlockSparse, DilatedSegment, GlobalTokens, Intervals, Neighborhood, Pattern, SlidingWindow, Strided, plan
from dilkit.pattern import KINDS, WHOLE_SEQUENCE, BlockLayout, RowIntervals
from dilkit.pattern.kinds import block_sparse

LAYOUT = [[True, False, False], [True, True, True], [False, False, True]]
MIX = Pattern.of(
    DilatedSegment(16, 4), SlidingWindow(3), GlobalTokens([5, 2]), Strided(7), BlockSparse(LAYOUT, 16), Neighborhood((4, 5), 3)
)
NAMES = {cls.__name__: cls for cls in (Pattern, BlockLayout, RowIntervals, *KINDS.values())}


def test_what_layouts_take_is_bounded_in_bytes():
    """Not in number: a thousand of them would be of many GiB."""
    branch = BlockSparse(np.tri(512, dtype=np.bool_), 1)
    plan.cache_clear()
    assert branch.layout.array().nbytes <= plan.cache_info().bytes
    dropped = weakref.ref(Pattern.from_json(Pattern.of(branch).to_json()))
    gc.collect()
    assert dropped() is None


DRAWN = {
    "segments": st.tuples(patterns_with_heads(), st.integers(0, 17)),
    "mixes": st.tuples(mixes_with_heads(), st.integers(0, 17)),
    "grids": neighborhoods(heads=3, tokens=40).map(lambda pattern: ((pattern, (3, 3)), pattern.max_seq)),
}


@pytest.mark.parametrize("kind", DRAWN)
@settings(max_examples=40, deadline=None)
@given(st.data(), st.booleans())
def test_count_and_flops_are_the_definition(kind, data, is_causal):
    (pattern, heads), seq = data.draw(DRAWN[kind])
    expected = brute_force(pattern, seq, heads, is_causal)
    flops = pattern.flops(seq, heads[0], 5, batch=3, kv_heads=heads[1], is_causal=is_causal)
    assert flops == 4 * 5 * 3 * expected.sum()
    expected = np.minimum(expected, 1) if pattern.overlap == "once" else expected
    count = pattern.count(seq, heads[0], kv_heads=heads[1], is_causal=is_causal)
    assert count.dtype == torch.int32
    np.testing.assert_array_equal(count.numpy(), expected)
    some = pattern.count_rows(torch.arange(seq)[1::2], seq, heads[0], kv_heads=heads[1], is_causal=is_causal)
    np.testing.assert_array_equal(some.numpy(), expected[:, 1::2])


def test_flops_of_a_long_sequence_need_no_matrix():
    assert Pattern.dense().flops(2**20, 8, 64) == 4 * 64 * 8 * 2**40
    seq, window = 2**40, 2**10
    assert Pattern.of(SlidingWindow(window)).flops(seq, 1, 1, is_causal=True) == 4 * (seq * window - window * (window - 1) // 2)
    assert Pattern.of(GlobalTokens(1)).flops(seq, 1, 1) == 4 * (2 * seq - 1)
    assert Pattern.of(Strided(seq // 2)).flops(seq, 1, 1) == 4 * 2 * seq


@settings(max_examples=40, deadline=None)
@given(patterns_with_heads() | mixes_with_heads())
def test_a_pattern_survives_every_way_of_writing_it_down(drawn):
    pattern, _ = drawn
    assert Pattern.from_json(pattern.to_json()) == pattern
    assert eval(repr(pattern), NAMES) == pattern
    if not any(isinstance(branch, (BlockSparse, Intervals)) for branch in pattern.branches):  # too long to be shown as a whole
        assert eval(str(pattern), NAMES) == pattern
    assert (
        all(branch.call() in str(pattern) for branch in pattern.branches) or pattern.only_segments or pattern == Pattern.dense()
    )
    for twin in (pickle.loads(pickle.dumps(pattern)), copy.copy(pattern), copy.deepcopy(pattern)):
        assert (twin, hash(twin), twin.to_json()) == (pattern, hash(pattern), pattern.to_json())
    assert len(pattern.describe().splitlines()) == len(pattern.branches) + 1


def test_both_ways_of_making_a_pattern_of_segments_give_the_same_value():
    by_lists = Pattern([4, 8], [1, 2], heads=[(0, 2), None], offset="block")
    by_branches = Pattern.of(DilatedSegment(4, 1, heads=range(2)), DilatedSegment(8, 2), offset="block")
    assert by_branches == by_lists
    assert hash(by_branches) == hash(by_lists)
    assert (repr(by_branches), str(by_branches), by_branches.to_json()) == (repr(by_lists), str(by_lists), by_lists.to_json())
    assert by_branches.segment_lengths == (4, 8)
    assert dataclasses.replace(by_branches, overlap="once") == dataclasses.replace(by_lists, overlap="once")


def test_a_pattern_of_segments_is_written_as_it_always_was():
    pattern = Pattern([4, 8], [1, 2], heads=[(0, 2), None], tail="zeros")
    assert pattern.to_json() == (
        '{"segment_lengths":[4,8],"dilation_rates":[1,2],"offset":"modulo","overlap":"count","heads":[[0,2],null],'
        '"head_shard":null,"tail":"zeros"}'
    )
    assert repr(pattern) == (
        "Pattern(segment_lengths=(4, 8), dilation_rates=(1, 2), offset='modulo', overlap='count', heads=((0, 2), None), "
        "head_shard=None, tail='zeros')"
    )


def test_json_may_leave_out_what_is_as_by_default():
    text = '{"branches": [{"kind": "sliding_window", "window": 3}, {"kind": "global_tokens", "tokens": [2, 5]}]}'
    assert Pattern.from_json(text) == Pattern.of(SlidingWindow(3), GlobalTokens([2, 5]))
    assert set(json.loads(MIX.to_json())) == {"branches", "offset", "overlap", "head_shard", "tail"}


def test_every_argument_tells_patterns_apart():
    branches = [
        *(SlidingWindow(4), SlidingWindow(5), SlidingWindow(4, 2), SlidingWindow(4, heads=(0, 1))),
        *(Strided(4), Strided(5), Strided(4, heads=(0, 1))),
        *(GlobalTokens(4), GlobalTokens([4]), GlobalTokens(4, "read"), GlobalTokens(4, heads=(0, 1))),
        *(Neighborhood(9, 3), Neighborhood(9, 5), Neighborhood(9, 3, 2), Neighborhood(9, 3, border="cut")),
        *(
            Neighborhood(9, 4),
            Neighborhood(9, 3, stride=2),
            Neighborhood(9, 3, causal=True),
            Neighborhood((9, 1), (3, 1), causal=(False, True)),
        ),
        *(Neighborhood((9, 1), (3, 1)), Neighborhood(9, 3, heads=(0, 1)), BlockSparse(LAYOUT, 4), BlockSparse(LAYOUT, 5)),
        *(BlockSparse(LAYOUT[::-1], 4), BlockSparse([LAYOUT, LAYOUT], 4), BlockSparse(LAYOUT, 4, heads=(0, 1))),
        *(BlockSparse(None, 4), Intervals(None, most=1), Intervals(None, most=2), Intervals(None, most=1, heads=(0, 1))),
    ]
    base = Pattern([4, 8], [1, 2])
    fields = dict(offset="block", overlap="once", heads=[(0, 1), None], head_shard=(1, 4), tail="zeros")
    patterns = [base, Pattern([4, 9], [1, 2]), Pattern([4, 8], [1, 1]), *map(Pattern.of, branches)]
    patterns += [dataclasses.replace(base, **{name: value}) for name, value in fields.items()]
    texts = ({p.to_json() for p in patterns}, {str(p) for p in patterns})
    assert [len(set(patterns)), *map(len, texts)] == [len(patterns)] * 3


def test_equal_branches_written_differently():
    assert GlobalTokens([2, 0, 1]) == GlobalTokens(3) == GlobalTokens(np.arange(3)) == GlobalTokens(torch.tensor(3))
    assert GlobalTokens(torch.tensor([9, 4])).tokens == (4, 9)
    assert Intervals([[0, 3]] * 6, [[2, 4]] * 6) == Intervals([0] * 6, [4] * 6), "intervals that touch"
    assert SlidingWindow(np.int64(4), torch.tensor(2)) == SlidingWindow(4, 2)
    assert type(SlidingWindow(np.int64(4)).window) is int


def test_global_tokens_beyond_the_end_are_left_out():
    assert GlobalTokens(WHOLE_SEQUENCE).count(5) == 5
    assert torch.equal(Pattern.of(GlobalTokens(WHOLE_SEQUENCE)).count(4, 1), Pattern.dense().count(4, 1))


def test_a_tail_is_that_of_the_segments_in_a_mix():
    alone = Pattern([4], [2], tail="zeros")
    mixed = Pattern.of(SlidingWindow(3), DilatedSegment(4, 2), Strided(2), tail="zeros")
    assert torch.equal(mixed.zero_keys(7, 2), alone.zero_keys(7, 2))
    assert mixed.zero_keys(7, 2).any()


@settings(max_examples=40, deadline=None)
@given(mixes_with_heads(), st.data())
def test_a_part_of_the_heads_sees_what_it_sees_among_all(drawn, data):
    pattern, (heads, kv_heads) = drawn
    start = data.draw(st.integers(0, kv_heads - 1))
    stop, group = data.draw(st.integers(start + 1, kv_heads)), heads // kv_heads
    expected = pattern.count(11, heads, kv_heads=kv_heads)[start * group : stop * group]
    part = pattern.of_kv_heads(start, stop, heads, kv_heads)
    if part is None:
        assert not expected.any()
    else:
        assert torch.equal(part.count(11, (stop - start) * group, kv_heads=stop - start), expected)


def test_a_layout_is_the_same_value_however_it_is_given():
    array = np.array(LAYOUT)
    same = [BlockSparse(x, 4) for x in (LAYOUT, array, array[None], torch.tensor(LAYOUT), array.copy(order="F"))]
    assert len({*same}) == len({hash(branch) for branch in same}) == 1
    array[0, 0] = False
    assert same[1] == same[0] != BlockSparse(array, 4)
    with pytest.raises(ValueError, match="read-only"):
        same[0].layout.array()[0, 0, 0] = False


def test_bigbird_has_its_three_parts():
    layout = BlockSparse.bigbird(20, 16, seed=3, heads=4).layout.array()
    apart = np.abs(np.arange(20)[:, None] - np.arange(20))
    assert layout[:, apart <= 1].all()
    assert layout[:, [0, -1]].all()
    assert layout[:, :, [0, -1]].all()
    inner = layout[:, 2:-2].sum(-1)
    assert (inner == 3 + 2 + 3).all()
    assert len({matrix.tobytes() for matrix in layout}) == 4
    again = BlockSparse.bigbird(20, 16, seed=3, heads=4)
    assert again == BlockSparse.bigbird(20, 16, seed=3, heads=4) != BlockSparse.bigbird(20, 16, seed=4, heads=4)
    assert np.array_equal(BlockSparse.bigbird(20, 16, random_blocks=0, global_blocks=0).layout.array()[0], apart <= 1)


CUT = [
    Neighborhood(7, 3, border="cut"),
    Neighborhood(13, 5, 3, border="cut"),
    Neighborhood((4, 6), (3, 7), border="cut"),
    Neighborhood((3, 4), (3, 5), (2, 9), border="cut"),
    Neighborhood((3, 4, 5), (3, 1, 5), (1, 1, 2), heads=(1, 2), border="cut"),
    Neighborhood((6, 7), (4, 5), (1, 2), stride=(3, 2), causal=(False, True), border="cut"),
]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("branch", CUT, ids=str)
def test_neighborhoods_that_are_cut_off_see_zeros_beyond_the_edge(branch, is_causal):
    pattern = Pattern.of(branch, tail="zeros")
    zeros = pattern.zero_keys(branch.tokens, 2, is_causal=is_causal)
    expected = brute_force_edges(pattern, branch.tokens, (2, 2)) * (not is_causal)
    np.testing.assert_array_equal(zeros.numpy(), expected)
    assert Pattern.from_json(pattern.to_json()) == pattern == eval(str(pattern), NAMES) == eval(repr(pattern), NAMES)


def test_flops_of_a_large_grid_need_no_matrix():
    pattern = Pattern.natten((2**14, 2**14), 7)
    assert pattern.flops(2**28, 1, 1) == 4 * 2**28 * 49
    assert pattern.flops(2**28, 1, 1, is_causal=True) == 4 * 2**28 * 25


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 3), st.integers(1, 40), st.sampled_from([0.0, 0.1, 0.6, 1.0]), st.integers(0, 99), st.data())
def test_runs_of_a_layout_are_what_it_shows(heads, blocks, share, seed, data):
    array = np.random.default_rng(seed).random((heads, blocks, blocks)) < share
    layout, first = BlockLayout.of(array), data.draw(st.integers(0, heads - 1))
    used, low = data.draw(st.integers(1, blocks)), data.draw(st.integers(0, blocks - 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_sparse, "CHUNK", data.draw(st.sampled_from([1, 3, 2**20])))
        runs = layout.runs(range(first, heads), used)
        part = layout.part(low, blocks)
    assert BlockLayout.of_runs(runs, heads - first, used) == BlockLayout.of(array[first:, :used, :used])
    assert runs[:, :3].tolist() == sorted(runs[:, :3].tolist())
    assert part == BlockLayout.of(array[:, low:, low:])


SEQ = 37


def _bigbird(i, j):
    a, b = i // 4, j // 4
    return abs(a - b) < 2 or a in (0, 9) or b in (0, 9)


PRESETS = {
    "mistral": (Pattern.mistral(6), lambda i, j: i - j < 6),
    "streaming_llm": (Pattern.streaming_llm(6, sinks=3), lambda i, j: i - j < 6 or j < 3),
    "sparse_transformer": (Pattern.sparse_transformer(7), lambda i, j: i - j <= 7 or (i - j) % 7 == 0),
    "longformer": (Pattern.longformer(8, 2), lambda i, j: abs(i - j) <= 4 or i < 2 or j < 2),
    "bigbird": (Pattern.bigbird(SEQ, 4, random_blocks=0), _bigbird),
}


CAUSAL = ("mistral", "streaming_llm", "sparse_transformer")
"""Patterns that their papers define for causal attention alone."""
CASES = [(name, is_causal) for name in PRESETS for is_causal in (True, False) if is_causal or name not in CAUSAL]


@pytest.mark.parametrize(("name", "is_causal"), CASES)
def test_a_preset_is_what_its_paper_says(name, is_causal):
    pattern, sees = PRESETS[name]
    expected = [[int(sees(i, j) and (j <= i or not is_causal)) for j in range(SEQ)] for i in range(SEQ)]
    assert torch.equal(pattern.count(SEQ, 2, is_causal=is_causal), torch.tensor([expected] * 2, dtype=torch.int32))
