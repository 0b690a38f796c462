"""Malformed blocks, intervals and calls that cannot take them."""

from collections.abc import Callable
from typing import Any

import torch
from core.malformed.case import MASK, Case, Q, attend, made
from core.malformed.kinds import of, over_ranks, written

from dilkit import (
    BlockSparse,
    DilatedCache,
    Intervals,
    Pattern,
    PatternError,
    attention_rows,
    dilated_attention,
    dilated_attention_varlen,
    dilated_attention_with_kvcache,
    order,
    ordered_dilated_attention,
)
from dilkit.selector import NoBackendError
from dilkit.sparse import intervals_of_mask, top_k_blocks

GIVEN, ALL, OWN = Pattern.of(BlockSparse(None, 2)), torch.ones(1, 1, 3, 3).bool(), torch.arange(3).view(1, 1, 3, 1)
BY_ROW, WHOLE = Pattern.of(Intervals(None, most=2)), torch.tensor([[0, 6], [0, 0]]).int().expand(1, 1, 6, 2, 2)
PAIR, STEP, SIX = Q[:, :, :2], (Q[:, :1], Q.clone(), Q.clone()), torch.full((2,), 6, dtype=torch.int32)


def laid(layout, pattern: Pattern = GIVEN, **options) -> Callable[[], Any]:
    return attend(key=PAIR, value=PAIR, pattern=pattern, block_layout=layout, **options)


def by_row(intervals, pattern: Pattern = BY_ROW, **options) -> Callable[[], Any]:
    return attend(key=PAIR, value=PAIR, pattern=pattern, intervals=intervals, **options)


def ends(*numbers: int) -> Callable[[], Any]:
    """Give the last query these two intervals, and the others none."""
    return by_row(torch.tensor([[0] * 4] * 5 + [[*numbers]]).int().view(1, 1, 6, 2, 2))


def mapped(pattern: Pattern, **given) -> Callable[[], Any]:
    return lambda: torch.vmap(lambda q: dilated_attention(q, PAIR, PAIR, pattern, **given))(Q[None])


BLOCKS = {
    "missing": Case(laid(None), ValueError, "block_layout is missing"),
    "not asked for": Case(laid(ALL, Pattern.dense()), ValueError, "no branch for it", "BlockSparse(None"),
    "a list": Case(laid([[True]]), TypeError, "block_layout is a list"),
    "floats": Case(laid(ALL.float()), TypeError, "float32; torch.bool, True = seen"),
    "another batch": Case(laid(ALL.expand(3, -1, -1, -1)), ValueError, "(3, 1, 3, 3); (2 or 1, 4 or 1, 3, 3)"),
    "numbers by query head": Case(laid(OWN.expand(-1, 4, -1, -1)), ValueError, "(1, 4, 3, 1); (2 or 1, 2 or 1, 3, k)"),
    "more columns": Case(laid(ALL.repeat(1, 1, 1, 2)), ValueError, "(1, 1, 3, 6)"),
    "out of range": Case(laid(OWN + 1), ValueError, "numbers from 1 to 3; those of blocks, 0 to 2, or -1"),
    "below -1": Case(laid(OWN - 2), ValueError, "numbers from -2 to 0"),
    "twice": Case(laid(torch.tensor([0, 2, 0]).expand(1, 1, 3, -1)), ValueError, "a block twice"),
    "after its query": Case(laid(OWN.flip(2), is_causal=True), ValueError, "a block after its query block"),
    "elsewhere": Case(laid(ALL.to("meta")), ValueError, "block_layout is on meta but query on cpu"),
    "sparse": Case(laid(ALL.to_sparse()), TypeError, "plain tensor"),
    "a step": Case(made(dilated_attention_with_kvcache, *STEP, GIVEN, cache_seqlens=SIX), ValueError, "block_layout is missing"),
    "along an order": Case(made(ordered_dilated_attention, Q, Q, Q, GIVEN, order((6,))), ValueError, "missing"),
    "weights": Case(made(attention_rows, Q, Q, GIVEN, [0]), ValueError, "no layout of its own"),
    "over ranks": Case(over_ranks(*GIVEN.branches), ValueError, "block_layout"),
    "mapped": Case(mapped(GIVEN, block_layout=ALL), RuntimeError, "vmap with a block_layout"),
    "a count": Case(made(GIVEN.count, 6, 4), PatternError, "BlockSparse(None, 2) has no layout of its own", "block_layout="),
    "two that are given": Case(of(*GIVEN.branches * 2), PatternError, "two that are given by each call"),
    "a choice of none": Case(made(top_k_blocks, Q, Q, 2, k=0), ValueError, "at least 1"),
    "a choice of blocks of nothing": Case(made(top_k_blocks, Q, Q, 0, k=1), ValueError, "at least 1"),
    "a choice among fewer keys": Case(made(top_k_blocks, Q, Q[:, :5], 2, k=1), ValueError, "key"),
}

INTERVALS = {
    "missing": Case(by_row(None), ValueError, "intervals is missing", "Intervals(None, most=2)", "Intervals(first, last)"),
    "beside blocks": Case(laid(ALL, intervals=WHOLE), ValueError, "intervals is given, but", "dilkit.Intervals(None, most=k)"),
    "a list": Case(by_row([[0, 6]]), TypeError, "intervals is a list", "torch.int32"),
    "long": Case(by_row(WHOLE.long()), TypeError, "torch.int64; torch.int32"),
    "another batch": Case(by_row(WHOLE.expand(3, -1, -1, -1, -1)), ValueError, "(3, 1, 6, 2, 2); (2 or 1, 4 or 1, 6, 2, 2)"),
    "by key/value head": Case(by_row(WHOLE.expand(1, 2, -1, -1, -1)), ValueError, "(1, 2, 6, 2, 2); (2 or 1, 4 or 1"),
    "fewer intervals": Case(by_row(WHOLE[:, :, :, :1]), ValueError, "(1, 1, 6, 1, 2)", "for Intervals(None, most=2)", "0, 0"),
    "fewer queries": Case(by_row(WHOLE[:, :, :5]), ValueError, "(1, 1, 5, 2, 2)"),
    "elsewhere": Case(by_row(WHOLE.to("meta")), ValueError, "intervals is on meta but query on cpu"),
    "sparse": Case(by_row(WHOLE.to_sparse()), TypeError, "plain tensor"),
    "below 0": Case(ends(-1, 2, 0, 0), ValueError, "reaches from -1 to 2", "0 <= begin < end <= 6"),
    "beyond the keys": Case(ends(0, 0, 2, 7), ValueError, "reaches from 0 to 7", "0, 0 for none"),
    "overlapping": Case(ends(0, 3, 2, 4), ValueError, "[[0, 3], [2, 4]] for query 5 of head 0 in sequence 0"),
    "descending": Case(ends(4, 5, 0, 1), ValueError, "[[4, 5], [0, 1]]", "at or behind the end"),
    "another backend": Case(by_row(WHOLE, backend="sdpa"), NoBackendError, "branch kind intervals", "given intervals", "native"),
    "packed": Case(made(dilated_attention_varlen, *[Q[0]] * 3, BY_ROW, torch.tensor([0, 6]).int()), ValueError, "intervals is m"),
    "a step": Case(made(dilated_attention_with_kvcache, *STEP, BY_ROW, cache_seqlens=SIX), ValueError, "intervals is missing"),
    "a cache": Case(made(DilatedCache, BY_ROW, 4), PatternError, "Intervals(None, most=2)", "each call"),
    "other keys": Case(
        attend(Q[:, :2], pattern=BY_ROW, intervals=WHOLE[:, :, :2]), ValueError, "intervals is of as many queries"
    ),
    "over ranks": Case(over_ranks(*BY_ROW.branches), ValueError, "intervals"),
    "mapped": Case(mapped(BY_ROW, intervals=WHOLE), RuntimeError, "vmap with intervals"),
    "a count": Case(made(BY_ROW.count, 6, 4), PatternError, "no intervals of its own", "intervals="),
    "blocks of each call": Case(of(*BY_ROW.branches, *GIVEN.branches), PatternError, "two that are given by each call"),
    "given twice": Case(made(Intervals, [0], [0], most=1), PatternError, "Intervals(None, most=k)"),
    "given never": Case(made(Intervals, None), PatternError, "Intervals(None, most=k)"),
    "none at most": Case(made(Intervals, None, most=0), PatternError, "most=0", "from 1"),
    "written twice": Case(written("intervals", rows=1, most=2), PatternError, "most stands alone"),
    "a mask of numbers": Case(made(intervals_of_mask, torch.ones(1, 1, 2, 2)), TypeError, "torch.bool", "mask == 0"),
    "a mask without heads": Case(made(intervals_of_mask, MASK), ValueError, "shape (2, 6)", "(batch or 1"),
    "a mask of many runs": Case(made(intervals_of_mask, ~torch.eye(3).bool()[None, None], 1), ValueError, "a row of 2 runs"),
}
