"""`DilatedCache` with scores that know positions: each row is the oracle's, whatever is kept."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from dilkit import (
    Alibi,
    CoordinateAlibi,
    DilatedCache,
    GlobalTokens,
    GridTable,
    Pattern,
    RelativeTable,
    SlidingWindow,
    Strided,
    t5_buckets,
)
from dilkit.bias.base import Bias
from dilkit.oracle import oracle_attention

SEQ, HEADS = 30, 4
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


@pytest.mark.parametrize("name", BIASES)
@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_rows_are_the_oracles(name: str, pattern: Pattern) -> None:
    query, key, value = drawn(2, SEQ, HEADS, 6), drawn(2, SEQ, 2, 6), drawn(2, SEQ, 2, 6) + 1
    bias, cache = BIASES[name], DilatedCache(pattern, kv_heads=2)
    right = oracle_attention(query, key, value, pattern, is_causal=True, bias=bias, softcap=1.5)[0]
    for start, stop in pairwise([0, 5, 6, 8, 11, 16, 29, SEQ]):
        rows = (x[:, start:stop] for x in (query, key, value))
        out = cache.attend(*rows, bias=until(bias, stop), softcap=1.5, backend="reference")
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
