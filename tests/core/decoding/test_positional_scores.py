"""Caches with scores that know positions: each row is the oracle's, whatever is kept."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from dilkit import (
    Alibi,
    BlockSparse,
    CoordinateAlibi,
    DilatedCache,
    Documents,
    GlobalTokens,
    GridTable,
    PagedCache,
    Pattern,
    Prefix,
    RelativeTable,
    SlidingWindow,
    Strided,
    dilated_attention_with_kvcache,
    t5_buckets,
)
from dilkit.bias.base import Bias
from dilkit.oracle import oracle_attention

SEQ, HEADS = 30, 4
Rows = tuple[Tensor, Tensor, Tensor]
PATTERNS = {
    "segments": Pattern([4, 8], [1, 2]),
    "once": Pattern([4, 6, 20], [1, 2, 3], overlap="once"),
    "ranges": Pattern([5, 10], [1, 2], heads=[(0, 2), None]),
    "window": Pattern.of(SlidingWindow(6, 2), GlobalTokens([0, 5])),
    "strides": Pattern.of(Strided(4)),
}


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


COORDINATES = 3 * drawn(2, SEQ, 2)
BIASES: dict[str, Bias] = {
    "alibi": Alibi(drawn(HEADS).abs() / 4),
    "coordinates": CoordinateAlibi(drawn(HEADS).abs(), COORDINATES),
    "table": RelativeTable(drawn(HEADS, 12), t5_buckets(12, 20)),
    "grid": GridTable(drawn(HEADS, 3, 5), (5, 7)),
}


def until(bias: Bias, length: int) -> Bias:
    """What is given to a cache that has then seen so many rows."""
    return CoordinateAlibi(bias.slopes, bias.coordinates[:, :length]) if isinstance(bias, CoordinateAlibi) else bias


def by_dilated_cache(rows: Rows, pattern: Pattern, bias: Bias) -> Iterator[Tensor]:
    cache = DilatedCache(pattern, kv_heads=2)
    for start, stop in CHUNKS:
        yield cache.attend(*(x[:, start:stop] for x in rows), bias=until(bias, stop), softcap=1.5, backend="reference")


def by_paged_cache(rows: Rows, pattern: Pattern, bias: Bias) -> Iterator[Tensor]:
    """One sequence is a row behind the other, so that it takes its chunks off the starts of segments."""
    cache = PagedCache(pattern, HEADS, 2, 6, nbytes=1 << 16, dtype=torch.float64)
    numbers, options = [cache.add(), cache.add()], dict(bias=bias, softcap=1.5)
    late = [(max(start - 1, 0), stop - 1 if stop < SEQ else SEQ) for start, stop in CHUNKS]
    outs: list[list[Tensor]] = [[], []]
    for pieces in zip(CHUNKS, late, strict=True):
        new = (torch.cat([x[b, start:stop] for b, (start, stop) in enumerate(pieces)]) for x in rows)
        parts = cache.attend(*new, numbers, counts := [stop - start for start, stop in pieces], **options).split(counts)
        for out, part in zip(outs, parts, strict=True):
            out.append(part)
    yield torch.stack([torch.cat(out) for out in outs])


def by_kvcache(rows: Rows, pattern: Pattern, bias: Bias) -> Iterator[Tensor]:
    caches = torch.full((2, 2, SEQ, 2, 6), torch.nan, dtype=torch.float64).unbind()
    for start, stop in CHUNKS:
        query, key, value = (x[:, start:stop] for x in rows)
        options = dict(key=key, value=value, cache_seqlens=torch.tensor([start] * 2, dtype=torch.int32))
        yield dilated_attention_with_kvcache(query, *caches, pattern, bias=bias, softcap=1.5, **options)


CHUNKS = list(pairwise([0, 5, 6, 8, 11, 16, 24, 29, SEQ]))
"""At starts of segments and off them."""
CACHES = dict(dilated=by_dilated_cache, paged=by_paged_cache, kvcache=by_kvcache)


BIASES_OF = [(cache, name) for cache in CACHES for name in BIASES if cache != "paged" or not BIASES[name].by_row]


@pytest.mark.parametrize(("cache", "name"), BIASES_OF)
@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_rows_are_the_oracles(cache: str, name: str, pattern: Pattern) -> None:
    rows, bias = (drawn(2, SEQ, HEADS, 6), drawn(2, SEQ, 2, 6), drawn(2, SEQ, 2, 6) + 1), BIASES[name]
    right = oracle_attention(*rows, pattern, is_causal=True, bias=bias, softcap=1.5)[0]
    torch.testing.assert_close(torch.cat(list(CACHES[cache](rows, pattern, bias)), 1), right)


GOING_BACK: dict[str, tuple[Pattern, int]] = {
    "strides": (Pattern.of(Strided(1)), 4),
    "prefix": (Pattern.of(Prefix(4)), 4),
    "documents": (Pattern.of(Documents([3, 9])), 4),
    "blocks": (Pattern.of(BlockSparse.local_global(12, 3)), 4),
    "tokens to come": (Pattern.of(GlobalTokens([0, 11])), 4),
    "tokens of some heads": (Pattern.of(GlobalTokens([0, 4, 8], "read", heads=(0, 3))), 4),
    "ring": (Pattern.of(SlidingWindow(3, heads=(1, 4)), SlidingWindow(5, 2)), 8),
}
"""A pattern, and where 10 rows are cropped to."""


@pytest.mark.parametrize("name", ["coordinates", "grid"])
@pytest.mark.parametrize(("pattern", "back"), GOING_BACK.values(), ids=GOING_BACK)
def test_of_rows_that_were_taken_back_nothing_is_asked(name: str, pattern: Pattern, back: int) -> None:
    """Neither their positions, which a bias given afterwards has not, nor their keys and values, which are NaN."""
    query, key, value = drawn(2, 12, HEADS, 6), drawn(2, 12, 2, 6), drawn(2, 12, 2, 6) + 1
    bias = until(BIASES[name], 12) if name == "coordinates" else GridTable(drawn(HEADS, 3, 5), (4, 3))
    right = oracle_attention(query, key, value, pattern, is_causal=True, bias=bias)[0]
    gone = torch.arange(12)[:, None, None] >= back
    for cuts in ([back, back + 1, 12], [back, min(back + 5, 12), 12]):
        cache = DilatedCache(pattern, kv_heads=2, rollback=10 - back)
        for start, stop in ((0, 5), (5, 10)):
            rows = (x.masked_fill(gone, torch.nan)[:, start:stop] for x in (query, key, value))
            cache.attend(*rows, bias=until(bias, stop))
        cache.crop(back)
        for start, stop in pairwise(cuts):
            out = cache.attend(*(x[:, start:stop] for x in (query, key, value)), bias=until(bias, stop))
            torch.testing.assert_close(out, right[:, start:stop])


def test_a_chunk_before_the_first_global_token_sees_no_key() -> None:
    query, key, value = drawn(2, SEQ, HEADS, 6), drawn(2, SEQ, 2, 6), drawn(2, SEQ, 2, 6)
    pattern = Pattern.of(SlidingWindow(3), GlobalTokens([20], "read"))
    cache, bias = DilatedCache(pattern, kv_heads=2), BIASES["alibi"]
    right = oracle_attention(query, key, value, pattern, is_causal=True, bias=bias)[0]
    for start, stop in pairwise([0, 2, 8, 19, SEQ]):
        out = cache.attend(*(x[:, start:stop] for x in (query, key, value)), bias=bias)
        torch.testing.assert_close(out, right[:, start:stop])


@pytest.mark.parametrize(
    ("bias", "message"),
    [
        (CoordinateAlibi(drawn(HEADS).abs(), COORDINATES[:, :2]), r"coordinates .* \(2, 2, 2\); \(2, 3, 1 to 3\)"),
        (GridTable(drawn(HEADS, 3), (2,)), r"grid of 2 tokens; at least the 3"),
        (Alibi(drawn(HEADS).requires_grad_()), "requires a gradient"),
    ],
    ids=["coordinates of the new rows alone", "a small grid", "a gradient"],
)
def test_what_does_not_fit_leaves_the_cache_as_it_was(bias: Bias, message: str) -> None:
    cache, rows = DilatedCache(Pattern([4], [1]), kv_heads=HEADS), [torch.zeros(2, 1, HEADS, 6, dtype=torch.float64)] * 3
    for _ in range(2):
        cache.attend(*rows)
    options: dict[str, Any] = dict(bias=bias)
    with pytest.raises(ValueError, match=message):
        cache.attend(*rows, **options)
    assert cache.seen == 2
