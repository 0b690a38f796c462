"""Rows of every cache, kind of pattern, bias and dtype against the whole sequence."""

import re
from collections.abc import Iterable
from types import SimpleNamespace

import pytest
import torch
from fuzz.calls import Call
from fuzz.steps import decoding
from fuzz.world import World
from helpers.odd_kinds import Gap, Reach
from helpers.strategies import mixes_with_heads, patterns_with_heads
from hypothesis import assume, given, settings, strategies as st
from torch import Tensor

from dilkit import (
    BlockSparse,
    DilatedCache,
    DilatedSegment,
    Documents,
    GlobalTokens,
    Intervals,
    Pattern,
    Prefix,
    SlidingWindow,
    Strided,
)
from dilkit.decoding.protocol import Span
from dilkit.decoding.stores import kept_count
from dilkit.oracle import oracle_attention
from dilkit.pattern.checks import WHOLE_SEQUENCE
from dilkit.problem import DTYPES, STORED
from dilkit.testing.bias_forms import CACHED_BIASES
from dilkit.testing.problems import LAYOUTS, Case

SEQ, BATCH, HEAD_DIM = 40, 2, 4
ROW = 2 * BATCH * HEAD_DIM * 8
PATTERNS = {
    "nested": Pattern([4, 8, 16], [1, 2, 4]),
    "ragged": Pattern([6, 10, 21], [1, 3, 5]),
    "sparse": Pattern([16], [5]),
    "twice": Pattern([8, 8], [2, 2]),
    "whole sequence": Pattern([4, WHOLE_SEQUENCE], [1, 3]),
    "block": Pattern([6, 12], [2, 3], offset="block"),
    "once": Pattern([4, 6, 20], [1, 2, 3], overlap="once"),
    "once, ranges": Pattern([5, 10, 15], [1, 2, 3], overlap="once", heads=[(0, 5), None, (3, 6)]),
    "head split": Pattern.head_split([4, 8], [1, 2], 6),
    "shard": Pattern([6, 12], [2, 4], head_shard=(3, 11)),
    "padded tails": Pattern([8, 24], [3, 5], tail="zeros"),
    "single tokens": Pattern([1], [1]),
    "dense": Pattern.dense(),
    "window": Pattern.of(SlidingWindow(6)),
    "dilated window": Pattern.of(SlidingWindow(17, 4)),
    "window of 1": Pattern.of(SlidingWindow(1)),
    "window beyond all": Pattern.of(SlidingWindow(2**62)),
    "sinks": Pattern.streaming_llm(5, sinks=3),
    "tokens that see all": Pattern.of(GlobalTokens([3, 20, 31]), SlidingWindow(3)),
    "tokens that are read": Pattern.of(GlobalTokens([3, 20], "read")),
    "tokens of some heads": Pattern.of(GlobalTokens([0, 4, 8], "read", heads=(0, 3))),
    "strides": Pattern.sparse_transformer(7),
    "blocks": Pattern.of(BlockSparse.bigbird(9, 6, heads=6)),
    "documents": Pattern.of(Documents([9, 20, 30]), SlidingWindow(3)),
    "prefix": Pattern.of(Prefix(7)),
    "intervals": Pattern.of(Intervals([i // 2 for i in range(SEQ)], [i + 1 for i in range(SEQ)])),
    "mix": Pattern.of(DilatedSegment(8, 2), SlidingWindow(5), GlobalTokens(2), Strided(9)),
    "mix once": Pattern.of(Strided(4), DilatedSegment(12, 3), SlidingWindow(9, 2), GlobalTokens([1, 17]), overlap="once"),
    "by heads": Pattern.of(SlidingWindow(3, heads=(0, 2)), SlidingWindow(9, 2, heads=(1, 4)), GlobalTokens(1, heads=(5, 6))),
    "once by heads": Pattern.of(SlidingWindow(9, heads=(1, 4)), GlobalTokens([9, 2], heads=(0, 3)), overlap="once"),
    "once, global twice": Pattern.of(GlobalTokens([0]), GlobalTokens([3, 9]), overlap="once"),
    "mixed shard": Pattern.of(SlidingWindow(4), DilatedSegment(12, 4), head_shard=(3, 11)),
    "one side": Pattern.of(Reach(9, 2)),
    "left out": Pattern.of(Gap("segments", (4, 9), (12, 15)), Gap("tokens", (2, 5), (9, 10))),
}
FIVE = ("steps", 0, 5)
ACTIONS = {
    "row by row": [
        *(FIVE, FIVE, ("back", 0, 3), FIVE, ("draft", 0, 3), ("move", 0, 1), FIVE, FIVE, ("move", 0, 2), FIVE),
    ],
    "chunks": [
        *(("rows", 0, 4), ("back", 0, 4), ("rows", 1, 7), ("segment", 0, 0), ("draft", 0, 4), ("steps", 0, 1), ("move", 0, 3)),
        *(("rows", 1, 3), ("back", 1, 2), ("steps", 0, 2), ("rows", 0, 9), ("move", 0, 4), ("back", 0, 3)),
    ],
}
"""See `fuzz.steps.decoding`. What is left of the sequences comes at the end, in one chunk."""
STORES = [(dtype, stored) for dtype in DTYPES for stored in (None, *STORED[dtype])]
BIASES = ["none", *CACHED_BIASES]


@pytest.mark.parametrize("actions", ACTIONS)
@pytest.mark.parametrize("name", PATTERNS)
def test_rows_are_those_of_the_whole(name, actions, monkeypatch):
    at, turn = [*PATTERNS].index(name), [*ACTIONS].index(actions)
    dtype, stored = STORES[(at + 3 * turn) % len(STORES)]
    scores = dict(bias=BIASES[(at + 5 * turn) % len(BIASES)], softcap=(at + turn) % 2 * 0.7)
    heads = dict(heads=6, kv_heads=(3, 6, 1)[(at + turn) % 3] if name != "shard" else 3, head_dim=4)
    sink = "random" if (at + turn) % 3 == 0 else "none"
    case = Case(
        feature="decoding",
        variant=name,
        pattern=PATTERNS[name],
        seq=SEQ,
        dtype=dtype,
        sink=sink,
        layout=LAYOUTS[(at + turn) % 4],
        **heads,
        **scores,
    )
    call = Call(case=case, backend=("native", "reference")[(at // 2 + turn) % 2]).to_data()
    without = SimpleNamespace(util=SimpleNamespace(find_spec=lambda name: None))
    monkeypatch.setattr(decoding, "importlib", without)  # to import transformers takes seconds
    world = World()
    try:
        more = dict(page_rows=3 + at % 2, pages=60 if at % 2 == turn else None, rollback=3 + turn % 3, stored=stored)
        world.perform(dict(do="decoded", call=call, actions=ACTIONS[actions], **more))
    finally:
        world.close()
    assert world.compared > 5


def tensors(kv_heads: int, heads: int = 6, seq: int = SEQ) -> tuple[Tensor, Tensor, Tensor]:
    key, value = torch.randn(2, BATCH, seq, kv_heads, HEAD_DIM, dtype=torch.float64)
    return torch.randn(BATCH, seq, heads, HEAD_DIM, dtype=torch.float64), key, value


def decoded(cache: DilatedCache, rows: tuple[Tensor, ...], cuts: Iterable[int]) -> Tensor:
    return torch.cat([cache.attend(*(x[:, cache.seen : cut] for x in rows)) for cut in cuts], 1)


@pytest.mark.parametrize("name", PATTERNS)
def test_a_token_reaches_the_rows_that_see_it_alone(name, poisoned):
    pattern = PATTERNS[name]
    for token in (0, 20) if [*PATTERNS].index(name) % 2 else (9, 30):  # that come by themselves, or in a chunk
        rows = tensors(3)
        rows[1][:, token] = rows[2][:, token] = torch.nan
        seen = pattern.count(SEQ, 6, kv_heads=3, is_causal=True)[:, :, token].T > 0
        found = decoded(DilatedCache(pattern, 3), rows, [*range(1, 14), *range(14, SEQ, 5), SEQ])
        assert (found.isnan().all(-1) == seen).all()
        assert not found[:, ~seen].isnan().any()


@settings(deadline=None, max_examples=40)
@given(patterns_with_heads() | mixes_with_heads(), st.integers(1, 60), st.integers(0, 8))
def test_kept_is_what_a_later_row_sees(drawn, seen, rollback):
    """A key stays for each branch that shows it to a row from `seen - rollback` on; blocks keep all."""
    pattern, (heads, kv_heads) = drawn
    kept = [branch for branch in pattern.branches if not isinstance(branch, (BlockSparse, Documents, Prefix, Intervals))]
    assume(kept)
    pattern, segments = pattern.with_branches(*kept), [branch for branch in kept if isinstance(branch, DilatedSegment)]
    rollback = min([rollback, *(branch.segment_length for branch in segments)])
    cache, rows, needed = DilatedCache(pattern, kv_heads, rollback=rollback), tensors(kv_heads, heads, seen), 0
    found = decoded(cache, rows, [seen] if seen % 2 else range(1, seen + 1))  # at once, and one by one
    torch.testing.assert_close(found, oracle_attention(*rows, pattern, is_causal=True)[0])
    for branch in kept:
        count = pattern.with_branches(branch, overlap="count").count(seen + 50, heads, kv_heads=kv_heads, is_causal=True)
        later = count[:, max(0, seen - rollback) :, :seen].any(1)
        needed += int(later.unflatten(0, (kv_heads, -1)).any(1).sum())
    assert cache.nbytes == ROW * needed
    assert cache.nbytes <= cache.allocated_nbytes
    if len(segments) == len(kept):
        bound = sum(-(-one.segment_length // one.dilation_rate) - (-rollback // one.dilation_rate) for one in segments)
        assert cache.allocated_nbytes <= ROW * kv_heads * bound


FOR_ALL_HEADS = [
    name for name in PATTERNS if not re.search("heads|ranges|split|blocks|documents|prefix|intervals|left out", name)
]


@pytest.mark.parametrize("name", FOR_ALL_HEADS)
def test_the_picture_is_of_what_a_later_row_sees(name):
    kept, cache, rows = kept_count(PATTERNS[name], SEQ, 3), DilatedCache(PATTERNS[name], 3), tensors(3)
    for seen in range(1, SEQ + 1):
        decoded(cache, rows, [seen])
        assert int(kept[:, seen - 1].sum()) * ROW == cache.nbytes


BOUNDS = {
    "window": (SlidingWindow(9), 9),
    "dilated window": (SlidingWindow(9, 4), 9),
    "first tokens": (GlobalTokens(5), 5),
    "tokens that are read": (GlobalTokens([2, 30], "read"), 2),
    "tokens that see all, when they have come": (GlobalTokens([2, 30]), 2),
    "segment": (DilatedSegment(16, 4), 4),
}


@pytest.mark.parametrize(("branch", "most"), BOUNDS.values(), ids=BOUNDS)
def test_memory_does_not_grow_with_the_sequence(branch, most):
    cache, row = DilatedCache(Pattern.of(branch), 1), torch.ones(BATCH, 1, 1, HEAD_DIM, dtype=torch.float64)
    sizes = []
    for _ in range(200):
        cache.attend(row, row, row)
        sizes.append(cache.allocated_nbytes)
    assert set(sizes[40:]) == {ROW * most}


def test_strides_and_blocks_keep_all_rows_a_whole_sequence_one_in_r_and_a_step_of_a_stride_reads_its_own():
    for branch in (Strided(7), BlockSparse.local_global(10, 6)):
        cache = DilatedCache(Pattern.of(branch), 3)
        decoded(cache, tensors(3), [SEQ])
        assert cache.nbytes == ROW * 3 * SEQ
    whole = DilatedCache(Pattern([WHOLE_SEQUENCE], [4]), 1)
    decoded(whole, tensors(1, seq=400), range(1, 401))
    assert whole.nbytes == ROW * 100
    assert whole.allocated_nbytes <= 2 * whole.nbytes
    cache = DilatedCache(Pattern.of(Strided(7)), 3)
    decoded(cache, tensors(3), [SEQ])
    cache.attend(*(x[:, :1] for x in tensors(3)))
    assert cache._step is not None
    (span,) = (Span(*line) for line in cache._step.spans.tables.spans.tolist())
    assert (span.position, span.position_step, span.seen) == (SEQ % 7, 7, SEQ // 7 + 1)
