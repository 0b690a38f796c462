"""Branches of other kinds than segments over ranks."""

import random
import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.ranks import assert_counted, assert_right, even_cuts, of_case, raised_on_all, uneven_cuts

from dilkit import BlockSparse, DilatedSegment, GlobalTokens, Pattern, SlidingWindow, Strided
from dilkit.comm import Rows, exchange_plan, ring_dilated_attention, shard_cuts
from dilkit.comm.passes.index_tables import index_tables
from dilkit.comm.plan.forecast import exchange_buffer_bytes
from dilkit.pattern import BlockLayout
from dilkit.problem import DTYPES
from dilkit.testing.problems import OTHER_KINDS, Case
from dilkit.testing.tensors import make_tensors

pytestmark = pytest.mark.usefixtures("on_one_core")

CASE = Case(feature="kinds over ranks", variant="window", pattern=Pattern.of(SlidingWindow(7)), seq=61, kv_heads=2)
LIST = [
    case
    for at, case in enumerate(OTHER_KINDS)
    if not case.lengths and not case.rows and at // len(DTYPES) % len(DTYPES) == at % len(DTYPES)
]


@pytest.mark.parametrize("case", LIST, ids=[case.name for case in LIST])
def test_problem_list(case):
    draw = random.Random(zlib.crc32(case.name.encode()))
    case = replace(case, dropout_p=0.0)  # which weights are dropped is compared below
    for cuts in (even_cuts(case.seq, draw.randint(2, 4)), uneven_cuts(case.seq, draw.randint(2, 5))):
        found = of_case(case, cuts)
        assert_right(case, found)
        assert_counted(found, make_tensors(case))


def with_and_without_causality(of):
    """Alternate causality by default."""
    both = [(at, one, is_causal) for at, one in enumerate(of) for is_causal in (False, True)]
    return [pytest.param(one, c, id=f"{one}-{c}", marks=[pytest.mark.slow] if (at + c) % 2 else []) for at, one, c in both]


TOKENS = {
    "first": GlobalTokens(3),
    "first on several ranks": GlobalTokens(40),
    "scattered": GlobalTokens([0, 7, 8, 30, 59]),
    "some beyond the end": GlobalTokens([4, 900]),
    "read": GlobalTokens(5, "read"),
    "read, scattered": GlobalTokens([3, 20, 60], "read"),
}


@pytest.mark.parametrize(("tokens", "is_causal"), with_and_without_causality(TOKENS))
def test_global_tokens(tokens, is_causal):
    beside = [SlidingWindow(7)], [GlobalTokens([2, 3, 31]), SlidingWindow(20, 3), GlobalTokens(4, "read")]
    mixes = ([], "count"), (beside[0], "count"), (beside[0], "once"), (beside[1], "once")
    for world_size, (others, overlap) in zip((3, 2, 4, 3), mixes, strict=True):
        pattern = Pattern.of(TOKENS[tokens], *others, overlap=overlap)
        may_come = is_causal or tokens == "some beyond the end"  # which is refused otherwise
        case = replace(CASE, pattern=pattern, is_causal=may_come, mask="random", variant=f"{tokens} {overlap} {len(others)}")
        found = of_case(case, uneven_cuts(case.seq, world_size, seed=world_size))
        assert {route.kind for route in found.plan.routes} <= {"local", "halo", "broadcast"}
        assert_right(case, found)
        assert_counted(found, make_tensors(case))


RANDOM = np.random.default_rng(5).random
BLOCKS = {
    "local and global": BlockSparse.local_global(9, 7),
    "random, by heads": BlockSparse(RANDOM((4, 13, 13)) < 0.3, 5),
    "all": BlockSparse(np.ones((8, 8), bool), 8),
    "few heads": BlockSparse(RANDOM((4, 31, 31)) < 0.6, 2, heads=(1, 4)),
    "longer than a shard": BlockSparse([[True, False], [True, True]], 40),
    "each one token": BlockSparse(RANDOM((61, 61)) < 0.1, 1),
    "none": BlockSparse(np.zeros((8, 8), bool), 8),
    "by heads, of a part of them": BlockSparse(RANDOM((10, 13, 13)) < 0.3, 5),
}


@pytest.mark.parametrize(("blocks", "is_causal"), with_and_without_causality(BLOCKS))
def test_blocks(blocks, is_causal):
    pattern = Pattern.of(BLOCKS[blocks], head_shard=(2, 5) if "a part" in blocks else None)
    case = replace(CASE, pattern=pattern, is_causal=is_causal, mask="random", variant=blocks)
    for cuts in ((0, 61), uneven_cuts(61, 4, seed=1), shard_cuts(61, 3, pattern)):
        found = of_case(case, cuts)
        assert {route.kind for route in found.plan.routes} <= {"local", "blocks"}
        assert_right(case, found)
        assert_counted(found, make_tensors(case))


def test_no_block_of_keys_travels_in_vain():
    """Blocks see themselves and the one before: a rank sends its last. Queries of a block that sees all travel."""
    layout = np.eye(16, dtype=bool) | np.eye(16, k=-1, dtype=bool)
    block = 8 * 2 * (2 * 16 * 2)
    sizes = dict(head_dim=16, dtype="bfloat16")
    plan = exchange_plan(Pattern.of(BlockSparse(layout, 8)), shard_cuts(128, 4), 2)
    assert plan.all_bytes("forward", **sizes).tolist() == [block, block, block, 0]
    layout[0] = True
    plan = exchange_plan(Pattern.of(BlockSparse(layout, 8)), shard_cuts(128, 4), 2)
    queries, results = 8 * 2 * 16 * 2, 8 * 2 * (16 * 2 + 4)
    assert plan.all_bytes("forward", **sizes).tolist() == [block + 3 * queries, block + results, block + results, results]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("blocks", [2**12, pytest.param(2**15, marks=pytest.mark.slow)])
def test_a_plan_of_blocks_looks_at_those_that_are_seen(blocks, is_causal, monkeypatch):
    """No matrix of all blocks is made: of 2**15 blocks that would be 2**30 bools."""
    bits = bytearray(blocks**2 // 8)
    for at in range(blocks):  # each block sees itself and the one before
        for place in (at * blocks + at, at * blocks + max(at - 1, 0)):
            bits[place // 8] |= 128 >> place % 8
    pattern = Pattern.of(BlockSparse(BlockLayout(1, blocks, bytes(bits)), 8))
    monkeypatch.setattr(BlockLayout, "array", None)
    plan = exchange_plan(pattern, shard_cuts(blocks * 8, 16, pattern), 2, is_causal=is_causal)
    assert plan.all_bytes("forward", head_dim=16, dtype="bfloat16").tolist() == [8 * 2 * (2 * 16 * 2)] * 15 + [0]
    assert sum(map(plan.work, range(16))) * 4 == pattern.flops(blocks * 8, 2, 1, is_causal=is_causal)


@pytest.mark.parametrize("is_causal", [False, True])
def test_blocks_of_others_are_computed_in_one_call(is_causal):
    pattern = Pattern.bigbird(512, 8)
    for cuts, calls in ((even_cuts(512, 4), 1), ((0, 100, 300, 410, 512), 1 + 2 * is_causal)):
        plan = exchange_plan(pattern, cuts, 4, 2, is_causal=is_causal)
        stacks = [index_tables(plan, rank, batch=2).stacks for rank in range(4)]
        assert max(map(len, stacks)) <= calls
        for rank, some in enumerate(stacks):  # and each row that is received lies in one of them once, at most
            for stack in some:
                real = slice(None) if stack.real_keys is None else stack.real_keys
                assert len(torch.unique(stack.keys[real])) == len(stack.keys[real]), rank


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("window", [SlidingWindow(65), SlidingWindow(before=64, after=16)], ids=str)
def test_the_bytes_of_a_window_do_not_grow_with_the_number_of_ranks(window, is_causal):
    """A rank sends as many rows of keys and values to each side as that side sees."""
    kv_heads, row = 2, 16 * 2
    rows = window.reaches[0] + (0 if is_causal else window.reaches[1])
    halo = rows * kv_heads * 2 * row
    for world_size in (4, 8, 64, 256):
        plan = exchange_plan(Pattern.of(window), even_cuts(64 * 512, world_size), 8, kv_heads, is_causal=is_causal)
        # Besides its own, a rank holds the halo, and copies of the queries that see it.
        held = exchange_buffer_bytes(plan, Rows(head_dim=16, dtype="bfloat16"))
        assert held.max() == halo + 8 * rows * row
        for phase in ("forward", "backward"):
            sent = plan.all_bytes(phase, head_dim=16, dtype="bfloat16")
            assert set(sent[1:-1].tolist()) == {halo}
            assert sent.max() == halo


def test_windows_of_any_length_in_a_plan_for_many_ranks():
    pattern = Pattern.of(SlidingWindow(10**7), DilatedSegment(2**20, 16))
    plan = exchange_plan(pattern, even_cuts(10**9, 1024), 32, 8, is_causal=True)
    sent = plan.all_bytes("forward", head_dim=128, dtype="bfloat16")
    assert sent[:-11].min() >= (10**7 - 1) * 8 * 2 * 256  # each row is sent to all shards within reach, the last in part
    assert sum(map(plan.work, range(1024))) * 4 == pattern.flops(10**9, 32, 1, kv_heads=8, is_causal=True)


@pytest.mark.parametrize("is_causal", [False, True])
def test_bytes_of_global_tokens(is_causal):
    """Each rank receives them once, and they meet the keys of each rank: other traffic is constant."""
    tokens, heads, kv_heads, row = 16, 8, 2, 32
    for world_size in (4, 8, 64):
        plan = exchange_plan(Pattern.of(GlobalTokens(tokens)), even_cuts(8192, world_size), heads, kv_heads, is_causal=is_causal)
        forward, backward = (plan.all_bytes(phase, head_dim=16, dtype="bfloat16") for phase in ("forward", "backward"))
        queries = 0 if is_causal else heads * tokens
        assert forward[0] == (world_size - 1) * (kv_heads * tokens * 2 * row + queries * row)
        assert set(forward[1:].tolist()) == {queries * (row + 4)}
        assert backward[0] == (world_size - 1) * queries * (2 * row + 4)
        assert set(backward[1:].tolist()) == {kv_heads * tokens * 2 * row + queries * row}


def test_windows_and_tokens_of_some_heads_count_once():
    """Each head has one window; the tokens hide none from some query heads of a group alone."""
    windows = SlidingWindow(5, heads=(0, 2)), SlidingWindow(12, 3, heads=(2, 4))
    for tokens, kinds in ((GlobalTokens(4, heads=(0, 2)), {"halo", "broadcast"}), (GlobalTokens(4, heads=(0, 1)), {"scatter"})):
        pattern = Pattern.of(*windows, tokens, GlobalTokens([1, 40], "read"), overlap="once")
        case = replace(CASE, pattern=pattern, variant=str(tokens))
        found = of_case(case, uneven_cuts(case.seq, 3, seed=3))
        assert {route.kind for route in found.plan.routes} == kinds
        assert_right(case, found)
        assert_counted(found, make_tensors(case))


def test_two_windows_of_one_head_count_once_in_one_piece():
    for served in ((0, 1), (3, 4)):
        pattern = Pattern.of(SlidingWindow(5), SlidingWindow(12, 3, heads=served), overlap="once")
        assert exchange_plan(pattern, (0, 20, 40), 4).is_joint


def test_a_stride_of_many_classes_is_computed_by_one_rank():
    exchange_plan(Pattern.of(Strided(10**6)), (0, 10**9), 8)  # several refuse it: tests/core/malformed/kinds.py


def test_dropout_of_scattered_tokens_is_refused():
    rows, pattern = torch.randn(1, 6, 2, 8), Pattern.of(GlobalTokens([0, 3]))
    text = r"dropout_p=0.5: .* to be contiguous; use fuse_branches=False"
    raised_on_all(2, lambda comm: ring_dilated_attention(rows, rows, rows, pattern, comm, dropout_p=0.5), text)
