"""Problems of many sequences in one call: packed one after the other, or in a cache, of which the last rows are computed."""

from __future__ import annotations

import random
from collections.abc import Iterator

from dilkit.pattern import BlockSparse, Branch, DilatedSegment, Documents, GlobalTokens, Pattern, Prefix, SlidingWindow, Strided
from dilkit.problem import DTYPES
from dilkit.testing.problems import RAGGED, SPARSE, Case, Fields, in_dtypes, kinds, segments

LENGTHS: dict[str, tuple[int, ...]] = {
    "two": (23, 17),
    "one": (40,),
    "some empty": (0, 13, 0, 0, 25, 1, 0),
    "one token each": (1,) * 11,
    "many short": tuple(i * 7 % 6 for i in range(60)),
    "one long": (3, 150, 2, 1),
}

RANDOM = 16

_FIELDS: dict[str, Fields] = {
    "causal": dict(is_causal=True),
    "grouped heads": dict(kv_heads=2),
    "block once": segments([8, 16, 32], [1, 2, 4], offset="block", overlap="once"),
    "ragged causal": dict(pattern=RAGGED, is_causal=True),
    "head split": dict(pattern=Pattern([8, 16], [1, 2], heads=[(0, 2), (1, 3)])),
    "tail zeros": segments([8, 16, 32], [1, 2, 4], tail="zeros"),
    "sink": segments([8, 24], [2, 4], tail="zeros", sink="random"),
    "dense": dict(pattern=Pattern.dense()),
    "sparse": dict(pattern=SPARSE),
    "sliced": dict(layout="sliced"),
    "poisoned": dict(poisoned=True),
    "poisoned causal": dict(poisoned=True, is_causal=True, kv_heads=1, pattern=RAGGED),
    "poisoned sparse": dict(poisoned=True, pattern=SPARSE),
}


def _packed(variant: str, lengths: tuple[int, ...], **fields: object) -> Case:
    return Case(feature="packed", variant=variant, lengths=lengths, seq=sum(lengths), batch=1, **fields)  # type: ignore[arg-type]


def _random(count: int) -> Iterator[Case]:
    draw = random.Random(20261122)
    for i in range(count):
        heads, kv_heads = draw.choice([(1, 1), (3, 3), (4, 4), (4, 2), (4, 1), (6, 2)])
        branches = draw.randint(1, 3)
        segments = [draw.randint(1, 40) for _ in range(branches)]
        rates = [min(length, draw.choice([1, 1, 2, 3, 4, 8])) for length in segments]
        ranges = [sorted(draw.sample(range(heads + 1), 2)) for _ in segments]
        longest = draw.choice([1, 5, 30, 90])
        lengths = [draw.choice([0, 1, draw.randint(0, longest), longest]) for _ in range(draw.randint(0, 200 // longest))]
        yield _packed(
            f"random {i:02}",
            (*lengths, longest),
            pattern=Pattern(
                segments,
                rates,
                offset=draw.choice(["modulo", "block"]),
                tail=draw.choice(["exact", "zeros"]),
                heads=[draw.choice([None, None, (start, stop)]) for start, stop in ranges],
            ),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=draw.choice([8, 16, 24]),
            dtype=draw.choice(DTYPES),
            is_causal=draw.random() < 0.5,
            poisoned=draw.random() < 0.3,
            sink=draw.choice(["none", "none", "random"]),
            layout=draw.choice(["contiguous", "sliced", "transposed"]),
        )


PACKED = (
    *(_packed(name, lengths, dtype=dtype) for name, lengths in LENGTHS.items() for dtype in DTYPES),
    *(_packed(name, LENGTHS["some empty"], dtype=dtype, **fields) for name, fields in _FIELDS.items() for dtype in DTYPES),
    _packed("thousands", tuple(i * 7 % 4 for i in range(2000)), heads=2, head_dim=8),
    _packed("one huge", (1, 700, 0, 2), heads=2, head_dim=8, is_causal=True),
    *_random(RANDOM),
)

_CACHED: dict[str, Fields] = {
    "one row": dict(rows=1),
    "a chunk": dict(rows=9),
    "grouped heads": dict(rows=3, kv_heads=2),
    "ragged": dict(rows=2, pattern=RAGGED),
    "head split": dict(rows=5, pattern=Pattern([8, 16], [1, 2], heads=[(0, 2), (1, 3)])),
    "block": segments([8, 16, 32], [1, 2, 4], offset="block", rows=4),
    "dense": dict(rows=2, pattern=Pattern.dense()),
    "sparse": dict(rows=6, pattern=SPARSE),
    "sink": dict(rows=3, sink="random"),
}


def _cached(variant: str, dtype: str, fields: Fields) -> Case:
    sizes = dict(lengths=(40, 9, 17), seq=43, batch=3, is_causal=True, gradients=False)
    return Case(feature="cached", variant=variant, dtype=dtype, **sizes, **fields)  # type: ignore[arg-type]


CACHED = tuple(_cached(name, dtype, fields) for name, fields in _CACHED.items() for dtype in DTYPES)
"""The last rows of sequences of different lengths, against a cache of which the rest is NaN."""

_WIDTHS = ("float32", "bfloat16")
_WINDOW_AND_TOKENS = Pattern.of(SlidingWindow(5), GlobalTokens([0, 14, 24]))  # of which shorter sequences have the first alone
_KINDS_PACKED: dict[str, Fields] = {
    "windows": kinds(SlidingWindow(7), SlidingWindow(30, 3), is_causal=True, kv_heads=2),
    "window on both sides": kinds(SlidingWindow(5)),
    "window of two sides": kinds(SlidingWindow(before=1, after=6)),
    "global tokens": dict(pattern=_WINDOW_AND_TOKENS),
    "sinks": dict(pattern=Pattern.streaming_llm(6, sinks=4), is_causal=True),
    "strides": kinds(Strided(6), sink="random"),
    "blocks": kinds(BlockSparse.bigbird(7, 4, heads=4)),
    "poisoned mix": kinds(SlidingWindow(9, 2), GlobalTokens(2), Strided(5), DilatedSegment(8, 2), poisoned=True),
}
_KINDS_CACHED: dict[str, Fields] = {
    "window": kinds(SlidingWindow(7), rows=1),
    "windows of a chunk": kinds(SlidingWindow(12, 4), SlidingWindow(3), rows=6, kv_heads=2),
    "global tokens": kinds(SlidingWindow(5), GlobalTokens([2, 12, 39]), rows=9),
    "sinks": dict(rows=2, pattern=Pattern.streaming_llm(6, sinks=4), sink="random"),
    "strides": kinds(Strided(6), DilatedSegment(16, 2), rows=3),
    "blocks": kinds(BlockSparse.bigbird(11, 4), rows=5),
}


def _random_kinds(count: int) -> Iterator[Case]:
    draw = random.Random(20261123)
    for i in range(count):
        size, tokens = draw.randint(1, 30), sorted(draw.sample(range(25), draw.randint(1, 4)))
        branches: list[Branch] = [
            SlidingWindow(size, draw.randint(1, min(size, 4))),
            GlobalTokens(tokens, draw.choice(["both", "read"])),
            Strided(draw.randint(1, 9)),
            DilatedSegment(size, draw.randint(1, min(size, 3))),
            BlockSparse.bigbird(10, 4, seed=i),
        ]
        heads, kv_heads = draw.choice([(2, 2), (4, 2), (3, 1)])
        yield _packed(
            f"kinds random {i:02}",
            tuple(draw.choice([0, 1, draw.randint(2, 40)]) for _ in range(6)),
            pattern=Pattern.of(*draw.sample(branches, draw.randint(1, 4)), offset=draw.choice(["modulo", "block"])),
            **dict(heads=heads, kv_heads=kv_heads, head_dim=8, dtype=draw.choice(DTYPES), is_causal=draw.random() < 0.5),
        )


KINDS_OF_SEQUENCES = (
    *(
        _packed(f"kinds {name}", LENGTHS["some empty"], dtype=dtype, **f)
        for name, f in _KINDS_PACKED.items()
        for dtype in _WIDTHS
    ),
    *(_cached(f"kinds {name}", dtype, fields) for name, fields in _KINDS_CACHED.items() for dtype in _WIDTHS),
    *_random_kinds(RANDOM // 2),
)
"""The same with branches of other kinds than segments: their windows, positions, strides and blocks begin with each sequence."""

_OTHER_KEYS: Fields = dict(lengths=(0, 13, 7, 4, 0, 19), queries=43, key_lengths=(5, 31, 0, 3, 0, 20), seq=59, batch=1)
_QUERIES: dict[str, Fields] = {
    "cross": dict(pattern=Pattern.dense(), seq=37, queries=11, mask="random"),
    "lower right": dict(pattern=Pattern.dense(), seq=61, queries=20, is_causal=True, kv_heads=2),
    "fewer keys causal": dict(pattern=Pattern.dense(), seq=9, queries=30, is_causal=True, sink="random"),
    "segments": dict(seq=53, queries=14, query_offset=23, layout="sliced"),
    "segments causal": dict(pattern=RAGGED, seq=47, queries=17, is_causal=True, bias="alibi"),
    "beyond the keys": dict(pattern=RAGGED, seq=29, queries=40, query_offset=8, softcap=1.5),
    "windows": kinds(SlidingWindow(before=9, after=3), seq=50, queries=12, query_offset=20, kv_heads=2),
    "windows with dropout": kinds(SlidingWindow(before=2, after=7), seq=33, queries=24, query_offset=17, dropout_p=0.2),
    "windows before the keys": kinds(SlidingWindow(before=2, after=8), Strided(5), seq=33, queries=41, query_offset=-6),
    "runs": kinds(Documents([20, 30]), Prefix(9), BlockSparse.local_global(10, 5), seq=50, queries=13, query_offset=11),
    "all kinds": kinds(SlidingWindow(5), GlobalTokens(3), Documents([20, 30]), seq=50, queries=22, query_offset=25, head_dim=8),
    "blocks once": kinds(BlockSparse.local_global(10, 5), GlobalTokens(2), overlap="once", seq=50, queries=9, query_offset=31),
    "coordinates": dict(pattern=Pattern.dense(), seq=40, queries=15, query_offset=12, bias="euclidean"),
    "packed": dict(pattern=Pattern.dense(), **_OTHER_KEYS),
    "packed causal": kinds(SlidingWindow(6), GlobalTokens(1), **_OTHER_KEYS, is_causal=True, kv_heads=2),
    "packed with dropout": kinds(SlidingWindow(6), Documents([3, 30]), **_OTHER_KEYS, dropout_p=0.2),
    "packed windows": kinds(SlidingWindow(before=4, after=2), **_OTHER_KEYS, bias="alibi"),
}
QUERIES = in_dtypes("queries", _QUERIES)
"""Queries that are others than the keys, at their positions among these."""

SEQUENCES = (*PACKED, *CACHED, *KINDS_OF_SEQUENCES, *QUERIES)
