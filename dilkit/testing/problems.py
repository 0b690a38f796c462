"""The problem list that every backend is checked on. The tests, `dilkit verify` and the docs use this one list."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from dilkit.device import Device, probe
from dilkit.pattern import (
    BlockSparse,
    Branch,
    DilatedSegment,
    Documents,
    GlobalTokens,
    Intervals,
    Neighborhood,
    Pattern,
    PatternError,
    Prefix,
    SlidingWindow,
    Strided,
)
from dilkit.pattern.text import RULES
from dilkit.problem import DTYPES, Problem, default_offset
from dilkit.testing.bias_forms import BIAS_FORMS

NESTED = Pattern([8, 16, 32], [1, 2, 4])
RAGGED = Pattern([6, 10, 21], [1, 3, 5])
SPARSE = Pattern([16], [4])
FIVE = Pattern([4, 8, 16, 32, 64], [1, 2, 4, 8, 16])

LAYOUTS = ("contiguous", "sliced", "transposed", "expanded")
SINKS = ("random", "large", "of some heads")
VALUES = ("normal", "large query", "large key", "large value", "huge", "constant value", "ignored NaN")
Fields = dict[str, Any]
MIXED = 80

BLOCKS = "bools", "bools by head", "numbers", "numbers for all"
"""Block layouts of a call: bools or numbers, for how many heads; "for all": also for all of a batch. Intervals are of all heads
with "bools", else by head."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One problem of the list. Its tensors are made by `dilkit.testing.tensors`, seeded by feature and variant.

    - `lengths`: of packed sequences, whose sum `seq` is; with `rows`, of sequences in a cache with the capacity `seq`, of which
      only so many last rows are computed.
    - `queries`: where they are others than the `seq` keys, with `query_offset`, or the default one; of packed sequences the sum
      of `lengths`, and `seq` that of `key_lengths`.
    - `mask`: the keys ignored: "random" ones, a third at the "left" or "right", those of one batch "element", "all".
    - `values`: sizes; "huge" scores have no digits left for a backward pass (`gradients=False`); "ignored NaN" is behind the
      mask.
    - `poisoned`: every other sequence is made of NaN and inf, of which nothing may show in the others.
    - `layout`: of the tensors in memory. `blocks`: the form of what a call gives, one of `BLOCKS`. `bias`: "none", or one of
      `BIAS_FORMS`. `sink`: "none", or one of `SINKS`.
    """

    feature: str
    variant: str
    pattern: Pattern = NESTED
    seq: int = 40
    heads: int = 4
    kv_heads: int | None = None
    head_dim: int = 16
    batch: int = 2
    dtype: str = "float32"
    is_causal: bool = False
    mask: str = "none"
    layout: str = "contiguous"
    values: str = "normal"
    sink: str = "none"
    scale: float | None = None
    gradients: bool = True
    lengths: tuple[int, ...] = ()
    rows: int = 0
    queries: int | None = None
    query_offset: int | None = None
    key_lengths: tuple[int, ...] = ()
    poisoned: bool = False
    dropout_p: float = 0.0
    bias: str = "none"
    softcap: float = 0.0
    blocks: str = "bools"

    @property
    def name(self) -> str:
        """Unique in the list, and fit for a test's id."""
        return f"{self.feature}-{self.variant}-{self.dtype}".replace(" ", "_")

    @property
    def zero_keys(self) -> bool:
        """True if rows may see keys of value 0 beside those of the count, which a backend's own passes know nothing of."""
        return self.sink != "none" or self.pattern.tail != "exact"

    def problem(self, device: Device | None = None, requires_grad: bool = True) -> Problem:
        """Return this case as the selector sees it, on `device` (default: the CPU)."""
        alike = "pattern", "seq", "heads", "kv_heads", "head_dim", "batch", "dtype", "is_causal", "scale", "dropout_p", "softcap"
        facts: Fields = {name: getattr(self, name) for name in alike}
        facts |= dict(varlen=bool(self.lengths) and not self.rows, kv_cache=bool(self.rows), key_padding_mask=self.mask != "none")
        if self.queries is not None:
            offset = default_offset(self.queries, self.seq, self.is_causal) if self.query_offset is None else self.query_offset
            facts |= dict(queries=self.queries, query_offset=None if self.lengths else offset)
        learned = requires_grad and self.gradients
        bias = None if self.bias == "none" else replace(BIAS_FORMS[self.bias], learned=learned)
        return Problem(**facts, bias=bias, device=device or probe("cpu"), requires_grad=learned)


def kinds(*branches: Branch, **fields: Any) -> Fields:
    """Return the fields of a case with a pattern of these branches, whose rules, such as `overlap`, are given among them."""
    rules = {name: fields.pop(name) for name in RULES if name in fields}
    return dict(pattern=Pattern.of(*branches, **rules), **fields)


def segments(lengths: Sequence[int], rates: Sequence[int], **fields: Any) -> Fields:
    return kinds(*map(DilatedSegment, lengths, rates), **fields)


def in_dtypes(feature: str, variants: dict[str, Fields], dtypes: Iterable[str] = DTYPES) -> tuple[Case, ...]:
    return tuple(
        Case(feature=feature, variant=variant, dtype=dtype, **fields) for variant, fields in variants.items() for dtype in dtypes
    )


FEATURES: dict[str, dict[str, Fields]] = {
    "plain": {
        "nested": {},
        "two branches": segments([8, 32], [1, 4]),
        "one branch": segments([8], [1]),
    },
    "causal": {"nested": dict(is_causal=True), "ragged": dict(is_causal=True, pattern=RAGGED, seq=53)},
    "mask": {mask: dict(mask=mask) for mask in ("random", "left", "right")}
    | {"random causal": dict(mask="random", is_causal=True), "right ragged": dict(mask="right", pattern=RAGGED, seq=47)},
    "grouped heads": {
        "4 over 2": dict(kv_heads=2),
        "4 over 1 causal": dict(kv_heads=1, is_causal=True),
        "6 over 3 block": segments([8, 32], [2, 4], offset="block", heads=6, kv_heads=3),
        "8 over 2 mask": dict(heads=8, kv_heads=2, mask="random"),
    },
    "offset": {
        "block": segments([8, 16, 32], [1, 2, 4], offset="block"),
        "block 6 heads": segments([16, 32], [3, 4], offset="block", heads=6, is_causal=True),
        "heads 3-6 of 8": segments([16, 32], [2, 4], head_shard=(3, 8)),
        "heads 5-8 of 12 block": segments([16, 35], [3, 4], offset="block", head_shard=(5, 12)),
    },
    "overlap": {
        "once": segments([8, 16, 32], [1, 2, 4], overlap="once"),
        "once causal": segments([6, 10, 21], [1, 3, 5], overlap="once", is_causal=True, seq=43),
        "twice the same": segments([16, 16], [2, 2]),
    },
    "head split": {
        "equal": dict(pattern=Pattern.head_split([8, 16], [1, 2], 4)),
        "unequal causal": dict(pattern=Pattern.head_split([8, 16, 32], [1, 2, 4], 4), is_causal=True),
        "overlapping": dict(pattern=Pattern([8, 16, 32], [1, 2, 4], heads=[None, (0, 3), (2, 4)])),
        "unserved head": dict(pattern=Pattern([8, 16], [1, 2], heads=[(0, 2), (1, 3)])),
        "grouped": dict(pattern=Pattern([8, 16], [1, 2], heads=[(0, 3), (3, 6)]), heads=6, kv_heads=2),
    },
    "tail": {
        "zeros": segments([8, 16, 32], [1, 2, 4], tail="zeros", seq=43),
        "zeros mask": segments([8, 16, 32], [1, 2, 4], tail="zeros", seq=41, mask="right"),
        "zeros block grouped": segments([12, 24, 64], [3, 4, 5], offset="block", tail="zeros", seq=53, heads=6, kv_heads=3),
        "zeros ragged": segments([6, 10, 21], [1, 3, 5], tail="zeros", seq=47),
        "zeros all masked": segments([8, 16], [1, 4], tail="zeros", seq=19, mask="all"),
        "zeros heads 3-6 of 8": dict(pattern=Pattern([16, 32], [2, 4], heads=[(0, 3), (1, 4)], head_shard=(3, 8), tail="zeros")),
        "zeros causal": segments([8, 16, 32], [1, 2, 4], tail="zeros", seq=43, is_causal=True),
    },
    "sink": {
        "nested": dict(sink="random"),
        "ragged causal": dict(sink="random", is_causal=True, pattern=RAGGED, seq=47),
        "mask": dict(sink="random", mask="random"),
        "of some heads": dict(sink="of some heads", kv_heads=2),
        "large": dict(sink="large"),
        "tail grouped": segments(
            [12, 24, 64], [3, 4, 5], offset="block", tail="zeros", sink="random", seq=53, heads=6, kv_heads=3
        ),
        "rows no head keeps": dict(sink="random", pattern=SPARSE),
        "unserved head": dict(sink="of some heads", pattern=Pattern([8, 16], [1, 2], heads=[(0, 2), (1, 3)])),
        "all masked": dict(sink="random", mask="all", seq=17),
    },
    "length": {str(n): dict(seq=n) for n in (1, 2, 7, 15, 16, 17, 31, 37, 61, 64)} | {"31 causal": dict(seq=31, is_causal=True)},
    "long segment": {
        "w > n": segments([64, 1000], [1, 4], seq=23),
        "1 token": segments([64], [4], seq=1),
    },
    "rate": {
        "equals segment": segments([4, 8], [4, 8]),
        "exceeds heads": segments([8, 16], [1, 8], heads=2),
        "does not divide heads": segments([12, 24], [1, 3]),
        "does not divide segment": segments([10, 22], [3, 4], is_causal=True),
        "exceeds tail": segments([16], [8], heads=8, seq=35),
    },
    "branches": {
        "not nested": dict(pattern=RAGGED, seq=59),
        "five": dict(pattern=FIVE, seq=67),
        "five causal": dict(pattern=FIVE, is_causal=True, seq=70),
    },
    "batch": {"1": dict(batch=1), "3": dict(batch=3, seq=24)},
    "head_dim": {"8": dict(head_dim=8), "7": dict(head_dim=7), "32": dict(head_dim=32, seq=24), "1 head": dict(heads=1)},
    "empty rows": {
        "rows no head keeps": dict(pattern=SPARSE),
        "masked left causal": dict(mask="left", is_causal=True),
        "masked element": dict(mask="element"),
        "masked element causal": dict(mask="element", is_causal=True, pattern=RAGGED),
        "all masked": dict(mask="all", seq=17),
    },
    "layout": {layout: dict(layout=layout) for layout in LAYOUTS[1:]}
    | {
        f"{layout} grouped mask": dict(layout=layout, kv_heads=2, mask="random", is_causal=True, seq=33) for layout in LAYOUTS[1:]
    },
    "values": {values: dict(values=values, gradients=values != "huge") for values in VALUES[1:-1]}
    | {
        "ignored NaN": dict(values="ignored NaN", mask="random"),
        "ignored NaN causal": dict(values="ignored NaN", mask="left", is_causal=True, pattern=RAGGED),
        "ignored NaN dense": dict(values="ignored NaN", mask="right", pattern=Pattern.dense(), kv_heads=2),
    },
    "scale": {
        "1": dict(scale=1.0),
        "0 causal": dict(scale=0.0, is_causal=True),
        "negative causal": dict(scale=-0.3, is_causal=True),
    },
    "dense": {
        "full": dict(pattern=Pattern.dense()),
        "causal": dict(pattern=Pattern.dense(), is_causal=True, seq=33),
        "mask grouped": dict(pattern=Pattern.dense(), mask="random", kv_heads=2),
    },
}
"""Every feature alone, and for each variant the fields in which its case differs from the default one."""


def _mixed(count: int) -> Iterator[Case]:
    draw = random.Random(20230705)
    for i in range(count):
        heads, kv_heads = draw.choice([(1, 1), (2, 2), (3, 3), (4, 4), (4, 2), (4, 1), (6, 2), (8, 4)])
        branches = draw.randint(1, 3)
        lengths = [draw.randint(1, 40) for _ in range(branches)]
        rates = [min(length, draw.choice([1, 1, 2, 3, 4, 5, 8])) for length in lengths]
        split = branches <= heads and draw.random() < 0.2
        options: Fields = dict(offset=draw.choice(["modulo", "block"]), overlap=draw.choice(["count", "count", "once"]))
        yield Case(
            feature="mix",
            variant=f"{i:02}",
            pattern=Pattern.head_split(lengths, rates, heads, **options) if split else Pattern(lengths, rates, **options),
            seq=draw.randint(1, 70),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=draw.choice([8, 16, 24, 32]),
            batch=draw.randint(1, 3),
            dtype=draw.choice(DTYPES),
            is_causal=draw.random() < 0.5,
            mask=draw.choice(["none", "none", "random", "left", "right", "element"]),
            layout=draw.choice(LAYOUTS),
        )


PROBLEMS = (
    *(case for feature, variants in FEATURES.items() for case in in_dtypes(feature, variants)),
    *_mixed(MIXED),
)

_DROPPING: dict[str, Fields] = {
    "nested": dict(dropout_p=0.2),
    "ragged causal": dict(dropout_p=0.5, is_causal=True, pattern=RAGGED, seq=53),
    "mask grouped": dict(dropout_p=0.1, mask="random", kv_heads=2),
    "once": segments([8, 16, 32], [1, 2, 4], overlap="once", dropout_p=0.3),
    "heads 3-6 of 8": segments([16, 32], [2, 4], head_shard=(3, 8), dropout_p=0.4),
    "tail sink": segments([8, 16, 32], [1, 2, 4], tail="zeros", dropout_p=0.25, sink="random", seq=43),
    "almost all dense": dict(dropout_p=0.9, pattern=Pattern.dense(), seq=67),
    "packed causal": dict(dropout_p=0.3, is_causal=True, kv_heads=2, batch=1, lengths=(0, 13, 0, 0, 25, 1, 0), seq=39),
}
DROPPING = in_dtypes("dropout", _DROPPING)

_IN_TURN = Intervals([[i - i % 9, i + 3] for i in range(60)], [[i, i + 5 * (i % 2)] for i in range(60)])
"""Each row sees what is before it in its nine rows, and a run or a row after it."""
_LAST: Fields = dict(lengths=(13, 25), seq=39, is_causal=True, gradients=False)
_MIXED = (DilatedSegment(16, 4), SlidingWindow(5), GlobalTokens(2), Strided(9))
_OTHER_KINDS: dict[str, Fields] = {
    "window of 1": kinds(SlidingWindow(1)),
    "even window": kinds(SlidingWindow(8), seq=53),
    "odd window causal": kinds(SlidingWindow(7), seq=53, is_causal=True, kv_heads=2),
    "window of all": kinds(SlidingWindow(40), mask="random"),
    "window beyond all causal": kinds(SlidingWindow(1000), seq=23, is_causal=True),
    "dilated window": kinds(SlidingWindow(16, 3), seq=47, mask="right"),
    "dilated window causal": kinds(SlidingWindow(17, 4), is_causal=True, layout="sliced"),
    "window of two sides": kinds(SlidingWindow(before=7, after=2), seq=53, kv_heads=2),
    "dilated window ahead": kinds(SlidingWindow(dilation_rate=2, before=0, after=5), seq=47, mask="random"),
    "window open behind": kinds(SlidingWindow(before=-1, after=3, heads=(1, 4)), seq=37),
    "windows by heads": kinds(SlidingWindow(3, heads=(0, 2)), SlidingWindow(9, 2, heads=(1, 4))),
    "global tokens": kinds(GlobalTokens(3), mask="left"),
    "global tokens causal": kinds(GlobalTokens([0, 7, 39]), is_causal=True),
    "read only": kinds(GlobalTokens([3, 30], "read"), kv_heads=2),
    "beyond the end": kinds(SlidingWindow(2), GlobalTokens([4, 90]), seq=31, is_causal=True),
    "strided": kinds(Strided(6), seq=37),
    "strided causal": kinds(Strided(8), is_causal=True, seq=41),
    "strides packed": kinds(Strided(4), SlidingWindow(9, 6), batch=1, lengths=(0, 13, 1, 25), seq=39, kv_heads=2, dropout_p=0.2),
    "strides last rows": kinds(Strided(4), **_LAST, rows=4),
    "blocks": kinds(BlockSparse.local_global(6, 8), seq=43, mask="random"),
    "blocks by heads causal": kinds(BlockSparse.bigbird(8, 6, heads=4), seq=45, kv_heads=2, is_causal=True),
    "blocks and segments": kinds(BlockSparse.bigbird(5, 9), DilatedSegment(16, 2), seq=41),
    "blocks packed": kinds(BlockSparse.bigbird(9, 3), batch=1, lengths=(26, 13), seq=39),
    "neighborhood": dict(pattern=Pattern.natten((5, 9), (3, 5)), seq=45, mask="random"),
    "neighborhood in a line causal": dict(pattern=Pattern.natten((43,), 7, 3), seq=43, is_causal=True),
    "neighborhood in space": dict(pattern=Pattern.natten((3, 4, 5), 3), seq=60, kv_heads=2),
    "neighborhood and global": kinds(Neighborhood((6, 8), 3, (2, 1)), GlobalTokens(1), seq=48, sink="random"),
    "neighborhood shared causal": dict(
        pattern=Pattern.natten((5, 6, 7), (4, 3, 2), (1, 2, 3), stride=(3, 1, 2), causal=(False, True, False)),
        seq=210,
        kv_heads=2,
    ),
    "neighborhood packed": dict(pattern=Pattern.natten((3, 8), 3), batch=1, lengths=(24, 24), seq=48, is_causal=True),
    "neighborhood last rows": dict(
        pattern=Pattern.natten((3, 8), 3), lengths=(24, 24), seq=48, rows=5, is_causal=True, gradients=False
    ),
    "neighborhoods by heads": kinds(
        Neighborhood((7, 6), 3, 2, heads=(0, 3)), Neighborhood((2, 21), (1, 9), heads=(2, 4)), seq=42, dropout_p=0.3
    ),
    "neighborhood cut off": kinds(Neighborhood((5, 9), (3, 7), border="cut"), seq=45, mask="random"),
    "neighborhood cut off with zeros": kinds(
        Neighborhood((4, 6), 3, (3, 2), border="cut"), tail="zeros", seq=24, kv_heads=2, sink="random"
    ),
    "neighborhood cut off once causal": kinds(
        Neighborhood((6, 8), 5, border="cut"), SlidingWindow(4), overlap="once", seq=48, is_causal=True
    ),
    "neighborhood cut off packed": kinds(Neighborhood((3, 8), 3, border="cut"), tail="zeros", batch=1, lengths=(24, 24), seq=48),
    "documents": kinds(Documents([13, 1, 20, 19]), seq=53, mask="random"),
    "documents causal": kinds(Documents([13, 30], heads=(1, 4)), SlidingWindow(5), is_causal=True, kv_heads=2),
    "prefix": kinds(Prefix(17), seq=43, mask="left"),
    "prefix beyond all": kinds(Prefix(100), seq=23, kv_heads=2),
    "prefix once": kinds(Prefix(9), GlobalTokens([2, 20]), overlap="once", seq=37, sink="random"),
    "prefix packed": kinds(Prefix(6), batch=1, lengths=(0, 13, 25, 1), seq=39, dropout_p=0.2),
    "intervals": kinds(_IN_TURN, seq=53, mask="random"),
    "intervals causal": kinds(_IN_TURN, DilatedSegment(16, 2), is_causal=True, seq=60),
    "intervals last rows": kinds(_IN_TURN, **_LAST, rows=4),
    "window and global": kinds(SlidingWindow(4), GlobalTokens(2), seq=59),
    "window and sinks": kinds(SlidingWindow(6), GlobalTokens(4, "read"), overlap="once", is_causal=True),
    "mixed": kinds(*_MIXED, seq=61, heads=6, kv_heads=3, mask="random"),
    "mixed once causal": kinds(*_MIXED, overlap="once", offset="block", seq=43, is_causal=True),
    "mixed tail sink": kinds(*_MIXED, tail="zeros", seq=43, sink="random"),
    "mixed shard": kinds(*_MIXED, head_shard=(3, 8), dropout_p=0.2),
    "mixed packed": kinds(*_MIXED, batch=1, lengths=(0, 13, 25, 1), seq=39, is_causal=True),
    "mixed last rows": kinds(*_MIXED, **_LAST, rows=4),
}
OTHER_KINDS = in_dtypes("kinds", _OTHER_KINDS)
"""Patterns with branches of other kinds than dilated segments, alone and in mixes."""

_GIVEN = BlockSparse(None, 8)
_GIVEN_BLOCKS: dict[str, Fields] = {
    "bools": kinds(_GIVEN, seq=53),
    "bools causal": kinds(_GIVEN, seq=53, is_causal=True, kv_heads=2, mask="random"),
    "bools by head": kinds(_GIVEN, seq=64, blocks="bools by head", kv_heads=2, layout="sliced"),
    "bools once": kinds(_GIVEN, overlap="once", seq=40, blocks="bools by head", sink="random"),
    "numbers": kinds(_GIVEN, seq=53, blocks="numbers", kv_heads=2),
    "numbers causal": kinds(_GIVEN, seq=61, blocks="numbers", is_causal=True, dropout_p=0.2),
    "numbers for all": kinds(_GIVEN, seq=37, blocks="numbers for all", values="large query"),
    "beside others": kinds(*_MIXED, _GIVEN, seq=61, heads=6, kv_heads=3, blocks="numbers", mask="left"),
    "some heads": kinds(BlockSparse(None, 17, heads=(1, 3)), SlidingWindow(5), seq=70, is_causal=True),
    "long blocks": kinds(BlockSparse(None, 300), seq=613, heads=2, head_dim=8, batch=1),
    "one block": kinds(BlockSparse(None, 100), seq=40, blocks="numbers"),
    "shard": kinds(_GIVEN, SlidingWindow(3), head_shard=(3, 8), seq=43, blocks="bools by head"),
    "bias": kinds(_GIVEN, seq=59, bias="alibi", softcap=2.0, kv_heads=2),
    "intervals": kinds(Intervals(None, most=1), seq=53),
    "intervals causal": kinds(Intervals(None, most=3), seq=53, is_causal=True, kv_heads=2, mask="random"),
    "intervals by head": kinds(Intervals(None, most=2), seq=64, blocks="bools by head", kv_heads=2, layout="sliced"),
    "intervals once": kinds(Intervals(None, most=5), overlap="once", seq=40, blocks="bools by head", sink="random"),
    "intervals for all": kinds(Intervals(None, most=2), seq=37, blocks="numbers for all", values="large query", dropout_p=0.2),
    "intervals beside others": kinds(*_MIXED, Intervals(None, most=2), seq=61, heads=6, kv_heads=3, mask="left"),
    "intervals of some heads": kinds(Intervals(None, most=2, heads=(1, 3)), SlidingWindow(5), seq=70, is_causal=True),
    "intervals long": kinds(Intervals(None, most=2), seq=613, heads=2, head_dim=8, batch=1),
    "intervals shard bias": kinds(
        Intervals(None, most=2), head_shard=(3, 8), seq=43, blocks="bools by head", bias="alibi", softcap=2.0
    ),
}
GIVEN_BLOCKS = in_dtypes("given blocks", _GIVEN_BLOCKS)

_SCORES: dict[str, Fields] = {
    "alibi": dict(bias="alibi"),
    "alibi causal": dict(bias="alibi", is_causal=True, pattern=RAGGED, seq=53),
    "alibi grouped mask": dict(bias="alibi", kv_heads=2, mask="random", layout="sliced"),
    "alibi mixed": kinds(*_MIXED, bias="alibi", seq=61, heads=6, kv_heads=3),
    "alibi strides packed": kinds(Strided(4), bias="alibi", batch=1, lengths=(0, 13, 1, 25), seq=39),
    "alibi one element": segments([8, 35], [1, 5], head_shard=(3, 8), bias="alibi", mask="element"),
    "coordinates": dict(bias="euclidean"),
    "coordinates causal dropout": dict(bias="euclidean", is_causal=True, dropout_p=0.2, pattern=RAGGED, seq=47),
    "coordinates packed": dict(bias="euclidean", batch=1, lengths=(0, 13, 25, 1), seq=39, kv_heads=2),
    "coordinates dense mask": dict(bias="euclidean", pattern=Pattern.dense(), mask="right", seq=67),
    "coordinates l1 in space": kinds(*_MIXED, tail="zeros", bias="l1", sink="random", seq=43),
    "coordinates max": dict(bias="max", is_causal=True, head_dim=32),
    "coordinates in a line": kinds(SlidingWindow(9, 2), bias="in a line", seq=50),
    "neutral": dict(bias="neutral", pattern=Pattern.dense(), seq=67, kv_heads=2),
    "neutral in space causal": dict(bias="neutral in space", is_causal=True, pattern=RAGGED, seq=47, mask="random"),
    "neutral packed": dict(bias="neutral", batch=1, lengths=(0, 13, 25, 1), seq=39),
    "clipped table": dict(bias="clipped", kv_heads=1),
    "clipped table causal": dict(bias="clipped", is_causal=True, pattern=FIVE, seq=70),
    "clipped table long": kinds(SlidingWindow(400), bias="clipped", seq=613, heads=2, head_dim=8, batch=1),
    "buckets": dict(bias="buckets", pattern=Pattern.dense(), seq=59),
    "buckets packed causal": dict(bias="buckets", batch=1, lengths=(0, 23, 25, 1), seq=49, is_causal=True),
    "grid": dict(bias="grid", pattern=Pattern.natten((6, 6), (3, 5)), seq=36),
    "grid dense grouped": dict(bias="grid", pattern=Pattern.dense(), seq=64, kv_heads=2, mask="left"),
    "grid in space once": segments([8, 16, 32], [1, 2, 4], overlap="once", bias="grid in space", seq=45),
    "axes": dict(bias="axes", pattern=Pattern.natten((6, 6), (3, 5)), seq=36),
    "axes in space causal": dict(bias="axes in space", pattern=RAGGED, seq=53, is_causal=True, kv_heads=2, mask="random"),
    "axes packed": dict(bias="axes", batch=1, lengths=(0, 23, 25, 1), seq=49),
    "rows": dict(bias="rows", pattern=Pattern.dense(), seq=67, kv_heads=2),
    "rows causal mask": dict(bias="rows", pattern=RAGGED, seq=53, is_causal=True, mask="random", kv_heads=1),
    "rows packed": dict(bias="rows", batch=1, lengths=(0, 23, 1, 25), seq=49, kv_heads=2, dropout_p=0.2),
    "rows strided classes": kinds(Strided(4), bias="rows", seq=61, softcap=2.0),
    "rows window": kinds(SlidingWindow(before=40, after=3), bias="rows", seq=313, heads=2, head_dim=8, batch=1),
    "rows in a line": kinds(*_MIXED, bias="rows in a line", seq=43, sink="random"),
    "rows on a grid": dict(bias="rows on a grid", pattern=Pattern.natten((6, 6), (3, 5)), seq=36),
    "rows on a grid dense": dict(bias="rows on a grid", pattern=Pattern.dense(), seq=64, kv_heads=2, layout="sliced"),
    "rows on a grid packed": dict(bias="rows on a grid", batch=1, lengths=(13, 0, 25, 1), seq=39),
    "rows in space once": segments([8, 16, 32], [1, 2, 4], overlap="once", bias="rows in space", seq=45),
    "alibi documents softcap": kinds(Documents([13, 1, 40]), Prefix(9), bias="alibi", softcap=2.0, seq=47, kv_heads=2),
    "alibi last rows": dict(bias="alibi", **_LAST, rows=4, kv_heads=2),
    "coordinates last rows": dict(bias="euclidean", **_LAST, rows=1),
    "buckets last rows softcap": kinds(Strided(4), bias="buckets", softcap=2.0, **_LAST, rows=3),
    "softcap": dict(softcap=0.7),
    "softcap causal sink": dict(softcap=2.0, is_causal=True, pattern=RAGGED, seq=47, sink="random", kv_heads=2),
    "softcap large": dict(softcap=5.0, values="large query"),
    "softcap alibi mask": dict(softcap=1.5, bias="alibi", mask="random", dropout_p=0.1),
    "softcap grid packed": dict(softcap=1.0, bias="buckets", batch=1, lengths=(13, 1, 25), seq=39, head_dim=24),
}
SCORES = in_dtypes("scores", _SCORES)

_LONG = Pattern([256, 1024, 2048], [1, 4, 16])
_DEFAULT: Fields = dict(pattern=_LONG, seq=2048, head_dim=64, batch=1)
_LARGE: dict[str, Fields] = {
    "nested": {},
    "causal": dict(is_causal=True),
    "head_dim 128": dict(head_dim=128),
    "head_dim 128 causal mask": dict(head_dim=128, is_causal=True, mask="random"),
    "head_dim 96 odd length": dict(head_dim=96, seq=2039),
    "head_dim 72 grouped": dict(head_dim=72, kv_heads=2, is_causal=True),
    "not nested": segments([600, 1000, 1900], [3, 5, 7], seq=2011, mask="right"),
    "once": segments([256, 1024, 2048], [2, 4, 8], overlap="once"),
    "batch": dict(batch=3, seq=1025, layout="sliced"),
    "dense causal": dict(pattern=Pattern.dense(), seq=1023, is_causal=True),
    "dropout": dict(dropout_p=0.2, head_dim=72, kv_heads=2, is_causal=True, seq=1023),
    "blocks by heads causal": kinds(BlockSparse.bigbird(32, 64, heads=4), seq=2039, is_causal=True),
    "documents and blocks": kinds(Documents([700, 32, 1316]), BlockSparse.local_global(64, 32), kv_heads=2, mask="random"),
}
LARGE = in_dtypes("large", {variant: _DEFAULT | fields for variant, fields in _LARGE.items()}, DTYPES[1:])
"""Cases of many tiles, for devices: on a CPU the oracle alone takes seconds for each."""

_ONE_PATTERN: dict[str, Fields] = {
    "plain": {},
    "causal": dict(is_causal=True),
    "mask": dict(mask="random"),
    "mask causal": dict(mask="left", is_causal=True),
    "grouped heads": dict(kv_heads=1),
    "sink": dict(sink="random"),
    "dropout": dict(dropout_p=0.2),
    "bias": dict(bias="alibi"),
    "softcap": dict(softcap=1.0),
    "sliced": dict(layout="sliced"),
}
"""Every feature of a call, for the cases of one pattern."""


def cases_of(pattern: Pattern, seq: int = 48, heads: int = 4) -> tuple[Case, ...]:
    """Make the cases that check one pattern: each feature of a call alone, packed sequences and last rows, in every dtype.

    Raises PatternError where `pattern` takes no sequence of `seq` tokens.

    >>> len(cases_of(Pattern([8, 16], [1, 2])))
    48
    """
    pattern.check_seq(seq)
    lengths = [seq]
    for shorter in (seq // 3, 1, 0):
        with suppress(PatternError):
            pattern.check_seq(shorter)
            lengths.append(shorter)
    packed: Fields = dict(lengths=(*lengths, seq), seq=sum(lengths) + seq, batch=1)
    last_rows: Fields = dict(lengths=(seq, seq), seq=seq, rows=min(seq, 3), is_causal=True, gradients=False)
    whole = {name: dict(seq=seq, **fields) for name, fields in _ONE_PATTERN.items()}
    features = whole | {"packed": packed, "last rows": last_rows}
    return tuple(
        Case(feature=feature, variant="pattern", pattern=pattern, heads=heads, dtype=dtype, **fields)
        for feature, fields in features.items()
        for dtype in DTYPES
    )
