"""`DilatedCache` of windows, global tokens, strides and blocks: each row is the full computation's, and memory is bounded."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from helpers.odd_kinds import Reach
from helpers.strategies import Heads, mixes_with_heads
from helpers.thinned import diagonal
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dilkit import (
    BlockSparse,
    DilatedAttention,
    DilatedCache,
    DilatedSegment,
    Documents,
    GlobalTokens,
    Intervals,
    MultiheadDilatedAttention,
    PagedCache,
    Pattern,
    Prefix,
    SlidingWindow,
    Strided,
)
from dilkit.decoding.kept import kept_count
from dilkit.oracle import oracle_attention
from dilkit.pattern import Branch, PatternError
from dilkit.testing.accuracy import expected
from dilkit.testing.problems import Case
from dilkit.testing.tensors import make_tensors

SEQ, BATCH, HEAD_DIM = 37, 2, 4
ROW = 2 * BATCH * HEAD_DIM * 8
"""Bytes of key and value of one token of one head."""
PATTERNS = {
    "window": Pattern.of(SlidingWindow(6)),
    "dilated window": Pattern.of(SlidingWindow(17, 4)),
    "window of 1": Pattern.of(SlidingWindow(1)),
    "window beyond all": Pattern.of(SlidingWindow(2**62)),
    "sinks": Pattern.streaming_llm(5, sinks=3),
    "first tokens": Pattern.of(GlobalTokens(4)),
    "tokens that see all": Pattern.of(GlobalTokens([3, 20, 31]), SlidingWindow(3)),
    "tokens that are read": Pattern.of(GlobalTokens([3, 20], "read")),
    "strides": Pattern.sparse_transformer(7),
    "blocks": Pattern.of(BlockSparse.bigbird(9, 6, heads=6)),
    "documents": Pattern.of(Documents([9, 20, 30]), SlidingWindow(3)),
    "prefix": Pattern.of(Prefix(7)),
    "with segments": Pattern.of(DilatedSegment(8, 2), SlidingWindow(5), GlobalTokens(2), Strided(9)),
    "once": Pattern.of(Strided(4), DilatedSegment(12, 3), SlidingWindow(9, 2), GlobalTokens([1, 17]), overlap="once"),
    "windows by heads": Pattern.of(
        SlidingWindow(3, heads=(0, 2)), SlidingWindow(9, 2, heads=(1, 4)), GlobalTokens(1, heads=(5, 6))
    ),
    "once by heads": Pattern.of(SlidingWindow(9, heads=(1, 4)), GlobalTokens([9, 2], heads=(0, 3)), overlap="once"),
    "once, global twice": Pattern.of(GlobalTokens([0]), GlobalTokens([3, 9]), overlap="once"),
    "shard": Pattern.of(SlidingWindow(4), DilatedSegment(12, 4), head_shard=(3, 11)),
    "one side": Pattern.of(Reach(9, 2)),
}
each_pattern = pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)


def tensors(kv_heads: int, heads: int = 6, seq: int = SEQ) -> tuple[Tensor, Tensor, Tensor]:
    """Random query, key and value in fp64."""
    key, value = torch.randn(2, BATCH, seq, kv_heads, HEAD_DIM, dtype=torch.float64)
    return torch.randn(BATCH, seq, heads, HEAD_DIM, dtype=torch.float64), key, value


def decoded(cache: DilatedCache, rows: tuple[Tensor, ...], cuts: Iterable[int], **options: Any) -> Tensor:
    """What the cache gives for chunks of `rows` that end at `cuts`, from what it has seen on."""
    return torch.cat([cache.attend(*(x[:, cache.seen : cut] for x in rows), **options) for cut in cuts], 1)


def seen_later(pattern: Pattern, seen: int, heads: int, kv_heads: int, horizon: int, rollback: int = 0) -> int:
    """By definition: keys before `seen` that a row from `seen - rollback` on sees, each for as many branches as show it."""
    total = 0
    for branch in pattern.branches:
        count = pattern.with_branches(branch).count(horizon, heads, kv_heads=kv_heads, is_causal=True)
        later = count[:, max(0, seen - rollback) :, :seen].any(1)
        total += int(later.unflatten(0, (kv_heads, -1)).any(1).sum())
    return total


@each_pattern
def test_each_step_is_the_last_row(pattern: Pattern) -> None:
    for kv_heads, seq in ((3, SEQ), (6, 12)):
        rows = tensors(kv_heads, seq=seq)
        exact, _ = oracle_attention(*rows, pattern, is_causal=True)
        torch.testing.assert_close(decoded(DilatedCache(pattern, kv_heads), rows, range(1, seq + 1)), exact)


@pytest.mark.parametrize(("name", "chunk"), diagonal(PATTERNS, [2, 20]))
def test_each_chunk_is_the_last_rows(name: str, chunk: int) -> None:
    """And rows one by one after chunks, and chunks after rows one by one."""
    pattern = PATTERNS[name]
    rows = tensors(3)
    exact, _ = oracle_attention(*rows, pattern, is_causal=True)
    cuts = sorted({*range(13, SEQ, chunk), *range(26, 29), SEQ})
    torch.testing.assert_close(decoded(DilatedCache(pattern, 3), rows, cuts), exact)


@pytest.mark.parametrize(("dtype", "name"), diagonal(["float32", "bfloat16", "float16"], ["sinks", "with segments", "blocks"]))
def test_dtypes(dtype: str, name: str) -> None:
    sizes = dict(seq=SEQ, heads=6, kv_heads=2, layout="sliced", is_causal=True)
    case = Case(feature="decoding", variant=name, pattern=PATTERNS[name], dtype=dtype, **sizes)  # type: ignore[arg-type]
    tensors, problem = make_tensors(case), case.problem(requires_grad=False)
    found = decoded(DilatedCache(PATTERNS[name], 2), tensors.qkv, [5, 6, 7, 20, *range(21, SEQ + 1)])
    assert found.dtype == tensors.query.dtype
    for check in expected(problem, tensors).checks(dict(out=found), SEQ):
        assert check.passed, check.complaint


def test_in_the_module() -> None:
    layer = MultiheadDilatedAttention(
        24, 6, DilatedAttention(PATTERNS["sinks"]), num_kv_heads=2, rotary=True, is_causal=True
    ).eval()
    cache, x = DilatedCache(PATTERNS["sinks"], 2), torch.randn(1, SEQ, 24)
    with torch.no_grad():
        found = torch.cat([layer(x[:, cache.seen : cut], cache=cache)[0] for cut in (9, *range(10, SEQ + 1))], 1)
        torch.testing.assert_close(found, layer(x)[0], atol=1e-5, rtol=1e-5)


@settings(deadline=None, max_examples=15)
@given(mixes_with_heads(), st.integers(1, 30), st.integers(0, 5))
def test_kept_is_what_a_later_row_sees(drawn: tuple[Pattern, Heads], seen: int, rollback: int) -> None:
    """Of blocks, all rows are kept."""
    pattern, (heads, kv_heads) = drawn
    kept = [branch for branch in pattern.branches if not isinstance(branch, (BlockSparse, Documents, Prefix, Intervals))]
    if not kept:
        return
    pattern, segments = pattern.with_branches(*kept), [b.segment_length for b in kept if isinstance(b, DilatedSegment)]
    rollback = min([rollback, *segments])
    cache, rows = DilatedCache(pattern, kv_heads, rollback=rollback), tensors(kv_heads, heads, seen)
    decoded(cache, rows, [seen] if seen % 2 else range(1, seen + 1))  # at once, and one by one
    assert cache.nbytes == ROW * seen_later(pattern, seen, heads, kv_heads, 90, rollback)
    assert cache.nbytes <= cache.allocated_nbytes


BOUNDS: dict[str, tuple[Branch, int]] = {
    "window": (SlidingWindow(9), 9),
    "dilated window": (SlidingWindow(9, 4), 12),  # the last 9, and to a multiple of the rate
    "first tokens": (GlobalTokens(5), 5),
    "tokens that are read": (GlobalTokens([2, 30], "read"), 2),
    "tokens that see all, when they have come": (GlobalTokens([2, 30]), 2),
}


@pytest.mark.parametrize("bound", BOUNDS)
def test_memory_does_not_grow_with_the_sequence(bound: str) -> None:
    branch, rows = BOUNDS[bound]
    cache, row = DilatedCache(Pattern.of(branch), 1), torch.ones(BATCH, 1, 1, HEAD_DIM, dtype=torch.float64)
    sizes = []
    for _ in range(200):
        cache.attend(row, row, row)
        sizes.append(cache.allocated_nbytes)
    assert set(sizes[40:]) == {ROW * rows}


def test_a_long_prompt_leaves_as_much_as_steps_do_and_a_chunk_a_few_rows_more() -> None:
    pattern = Pattern.of(SlidingWindow(8), GlobalTokens(2, "read"))
    cache, rows = DilatedCache(pattern, 3), tensors(3, seq=400)
    decoded(cache, rows, [100, 101, 102])
    assert cache.allocated_nbytes == ROW * 3 * (8 + 2)
    decoded(cache, rows, [400])
    assert cache.allocated_nbytes == ROW * 3 * (7 + 64 + 2)


def test_strides_and_blocks_keep_all_rows_and_a_step_of_a_stride_reads_its_own() -> None:
    for branch in (Strided(7), BlockSparse.local_global(10, 6)):
        cache = DilatedCache(Pattern.of(branch), 3)
        decoded(cache, tensors(3), [SEQ])
        assert cache.nbytes == ROW * 3 * SEQ
    cache = DilatedCache(Pattern.of(Strided(7)), 3)
    decoded(cache, tensors(3), [SEQ])
    (block,) = cache._stores[0].extend(SEQ, torch.zeros(2, BATCH, 1, 3, HEAD_DIM))
    assert list(block.keys) == list(range(SEQ % 7, SEQ + 1, 7))


@each_pattern
def test_a_token_reaches_the_rows_that_see_it_alone(pattern: Pattern, poisoned: None) -> None:
    for token in (9, 20):  # one that comes by itself, and one of a chunk
        rows = tensors(3)
        rows[1][:, token] = rows[2][:, token] = torch.nan
        seen = pattern.count(SEQ, 6, kv_heads=3, is_causal=True)[:, :, token].T > 0
        found = decoded(DilatedCache(pattern, 3), rows, [*range(1, 14), *range(14, SEQ, 5), SEQ])
        assert (found.isnan().all(-1) == seen).all()
        assert not found[:, ~seen].isnan().any()


@pytest.mark.parametrize(
    "name", ["dilated window", "sinks", "first tokens", "tokens that see all", "strides", "one side", "with segments"]
)
def test_the_picture_is_of_what_a_later_row_sees(name: str) -> None:
    kept, cache, rows = kept_count(PATTERNS[name], SEQ, 3), DilatedCache(PATTERNS[name], 3), tensors(3)
    for seen in range(1, SEQ + 1):
        decoded(cache, rows, [seen])
        assert int(kept[:, seen - 1].sum()) * ROW == cache.nbytes


@each_pattern
def test_saved_chosen_and_gone_on_with(pattern: Pattern) -> None:
    rows, cache = tensors(3), DilatedCache(pattern, 3, rollback=2)
    decoded(cache, rows, [20, 21, 22, 31])
    cache.reorder([1])
    file = io.BytesIO()
    torch.save(cache.state_dict(), file)
    file.seek(0)
    again = DilatedCache(pattern, 3, rollback=2)
    again.load_state_dict(torch.load(file, weights_only=True))
    again.crop(29)
    own = tuple(x[1:] for x in rows)
    exact, _ = oracle_attention(*own, pattern, is_causal=True)
    torch.testing.assert_close(decoded(again, own, [30, 31, 32, SEQ]), exact[:, 29:])


@each_pattern
def test_a_copy_goes_on_by_itself(pattern: Pattern) -> None:
    rows, cache = tensors(3), DilatedCache(pattern, 3)
    decoded(cache, rows, [20, *range(21, 34)])
    again = pickle.loads(pickle.dumps(cache))
    decoded(cache, tuple(x.flip(1) for x in rows), range(34, SEQ + 1))
    exact, _ = oracle_attention(*rows, pattern, is_causal=True)
    torch.testing.assert_close(decoded(again, rows, range(34, SEQ + 1)), exact[:, 33:])


@pytest.mark.parametrize("change", [dict(seen=40), dict(since=[9, 0]), dict(latest=[80, 80]), dict(since=[0, 7])], ids=str)
def test_a_state_of_something_else_is_refused(change: dict[str, Any]) -> None:
    cache = DilatedCache(Pattern.of(SlidingWindow(5), GlobalTokens(2)), 3)
    decoded(cache, tensors(3), [*range(1, 12)])
    with pytest.raises(ValueError, match="not what the branch keeps after"):
        cache.load_state_dict(cache.state_dict() | change)


def test_what_is_left_out_is_refused() -> None:
    cache = DilatedCache(Pattern.of(SlidingWindow(5), GlobalTokens([12])), 3)
    decoded(cache, tensors(3), [*range(1, 17)])
    with pytest.raises(
        ValueError, match=r"length=14 needs keys from token 10 on, .*window of 5 tokens.*; a cache with rollback=2 does"
    ):
        cache.crop(14)
    with pytest.raises(PatternError, match=r"Neighborhood\(.*: what a token of a neighborhood sees is defined for a whole grid"):
        DilatedCache(Pattern.natten((4, 4), 3), 3)
    cache = DilatedCache(Pattern.of(BlockSparse.local_global(5, 4)), 3)
    decoded(cache, tensors(3), [18])
    with pytest.raises(PatternError, match="seq=21: layout has 5 blocks of 4 tokens"):
        cache.attend(*(x[:, 18:21] for x in tensors(3)))
    assert cache.seen == 18


def test_rows_after_the_last_document_are_refused() -> None:
    pattern, whole = Pattern.of(Documents([3, 4])), [x[:1] for x in tensors(3)]
    alone = DilatedCache(pattern, 3)
    paged = PagedCache(pattern, whole[0].shape[2], 3, HEAD_DIM, nbytes=1 << 16, dtype=whole[0].dtype)
    paged.add()
    for at in range(7):
        alone.attend(*(x[:, at : at + 1] for x in whole))
        paged.attend(*(x[0, at : at + 1] for x in whole), [0], [1])
    with pytest.raises(PatternError, match="seq=8: the documents have 7 tokens in all"):
        alone.attend(*(x[:, 7:8] for x in whole))
    with pytest.raises(PatternError, match="seq=8: the documents have 7 tokens in all"):
        paged.attend(*(x[0, 7:8] for x in whole), [0], [1])
    assert alone.seen == paged.seen(0) == 7
