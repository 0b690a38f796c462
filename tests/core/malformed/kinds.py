"""Malformed branches of every kind."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
from core.malformed.case import MASK, Case, Q, attend, made

from dilkit import (
    BlockSparse,
    GlobalTokens,
    Neighborhood,
    Pattern,
    PatternError,
    SlidingWindow,
    Strided,
)
from dilkit.comm import PlanMismatch, exchange_plan, ring_dilated_attention, run_threads
from dilkit.decoding.stores import kept_count
from dilkit.pattern import BlockLayout
from dilkit.selector import NoBackendError

WINDOW, GRID = Pattern.of(SlidingWindow(3)), Pattern.of(Neighborhood((2, 4), (1, 3)))
HEADS_3 = Pattern.of(BlockSparse(np.ones((3, 2, 2), bool), 4))
CLASSES, ONCE = Pattern.of(Strided(2**26)), Pattern.of(SlidingWindow(4, 2), SlidingWindow(6, 3), overlap="once")
BY_RANKS, NO_LISTS = (PatternError, PlanMismatch), (PatternError, AttributeError)
NO_GRID = "branch kind neighborhood", "shown as grid", "reference"


def of(*branches, **options) -> Callable[[], Any]:
    return made(Pattern.of, *branches, **options)


def called(*branches, **options) -> Callable[[], Any]:
    return attend(pattern=Pattern.of(*branches), **options)


def over_ranks(*branches, **options) -> Callable[[], Any]:
    pattern = Pattern.of(*branches)
    return lambda: run_threads(2, lambda comm: ring_dilated_attention(Q, Q, Q, pattern, comm, **options))


def planned(pattern: Pattern, seq: int, **options) -> Callable[[], Any]:
    return made(exchange_plan, pattern, (0, seq // 2, seq), 2, **options)


def read(text: str) -> Callable[[], Any]:
    return made(Pattern.from_json, text)


def written(kind: str, **fields) -> Callable[[], Any]:
    return read(json.dumps({"branches": [{"kind": kind, **fields}]}))


def of_layout(**fields) -> Callable[[], Any]:
    return written("block_sparse", **dict(layout="gA==", layout_heads=1, blocks=1, block_size=4) | fields)


KINDS = {
    "dilateformer": Case(made(Pattern.dilateformer, (8, 8), heads=4), PatternError, "into equal groups", "dilations=(1, 2, 3)"),
    "an odd window of longformer": Case(made(Pattern.longformer, 7, 1), PatternError, "window=7 is odd"),
    "a window of nothing": Case(made(SlidingWindow, 0), PatternError, "window=0", "from 1"),
    "a window beyond 64 bits": Case(made(SlidingWindow, 2**63), PatternError, "window=", "2**63 - 1"),
    "a window below its rate": Case(made(SlidingWindow, 4, 5), PatternError, "dilation_rate=5", "window=4", "at most"),
    "a window of no heads": Case(made(SlidingWindow, 4, heads=(2, 2)), PatternError, "heads=(2, 2)", "start < stop"),
    "a window of every other head": Case(made(SlidingWindow, 4, heads=range(0, 4, 2)), PatternError, "heads=", "step 2"),
    "a stride of a text": Case(made(Strided, "4"), TypeError, "stride='4'", "str", "integer"),
    "a stride of negative heads": Case(made(Strided, 4, heads=(-1, 2)), PatternError, "heads=(-1, 2)", "0 <= start"),
    "no global tokens": Case(made(GlobalTokens, 0), PatternError, "tokens=0", "positions"),
    "global tokens nowhere": Case(made(GlobalTokens, []), PatternError, "tokens is empty", "at least one"),
    "global tokens of a text": Case(made(GlobalTokens, "12"), TypeError, "tokens='12'", "integer"),
    "global tokens of torch as a mask": Case(made(GlobalTokens, MASK[0]), TypeError, "tokens[0]", "bool"),
    "a global token beyond 64 bits": Case(made(GlobalTokens, [2**63 - 1]), PatternError, "position", "2**63 - 2"),
    "a global token twice": Case(made(GlobalTokens, [3, 1, 3]), PatternError, "position 3 twice", "once"),
    "global tokens that write": Case(made(GlobalTokens, 2, "write"), PatternError, "direction='write'", "'both'", "'read'"),
    "a token after the last of all ranks": Case(over_ranks(GlobalTokens([12])), BY_RANKS, "seq=12", "position 12", "0 to 11"),
    "a layout of numbers": Case(made(BlockSparse, [[1, 0], [0, 1]], 4), TypeError, "layout", "int64", "bools", "astype"),
    "a layout that is no square": Case(made(BlockSparse, [[True, False]], 4), PatternError, "shape (1, 1, 2)", "blocks"),
    "a layout of nothing": Case(made(BlockSparse, np.ones((0, 0), bool), 4), PatternError, "shape (1, 0, 0)", "one block"),
    "a ragged layout": Case(made(BlockSparse, [[True], [True, False]], 4), PatternError, "layout", "need one length"),
    "blocks of no tokens": Case(made(BlockSparse, [[True]], 0), PatternError, "block_size=0", "from 1"),
    "blocks of a fraction": Case(made(BlockSparse, [[True]], 4.0), TypeError, "block_size=4.0", "integer"),
    "a layout of too many heads": Case(made(HEADS_3.count, 8, 2), PatternError, "3 heads", "2 query heads", "as many or 1"),
    "bits that are too few": Case(made(BlockLayout, 1, 4, b"1"), PatternError, "1 bytes", "1 x 4 x 4"),
    "bits beyond the last block": Case(made(BlockLayout, 1, 1, b"\xff"), PatternError, "beyond its last block", "to_json"),
    "an even window of blocks": Case(made(BlockSparse.bigbird, 8, 4, window=2), PatternError, "window=2", "odd"),
    "random blocks below none": Case(made(BlockSparse.bigbird, 8, 4, random_blocks=-1), ValueError, "random_blocks=-1"),
    "no blocks at all": Case(made(BlockSparse.local_global, 0, 4), ValueError, "blocks=0", "at least 1"),
    "JSON of a layout that is no base64": Case(of_layout(layout="?"), PatternError, "layout is not base64", "to_json"),
    "JSON of a layout without an end": Case(of_layout(blocks=1e9), TypeError, "blocks=1000000000.0", "integer"),
    "JSON of half a layout": Case(of_layout(layout_heads=None), PatternError, "belong together", "all three or none"),
    "JSON of a huge layout": Case(of_layout(blocks=99999), PatternError, "99999", "at most"),
    "a grid of four dimensions": Case(made(Neighborhood, (4, 4, 4, 4), 1), PatternError, "4 dimensions", "1 to 3"),
    "a grid of a text": Case(made(Neighborhood, "4x4", 3), TypeError, "shape='4x4'", "integer"),
    "a stride beyond the neighborhood": Case(
        made(Neighborhood, 8, 3, stride=4), PatternError, "stride=(4,)", "(3,)", "at most 3"
    ),
    "causality of a number": Case(made(Neighborhood, (8, 8), 3, causal=(True, 1)), TypeError, "causal[1]=1", "True or False"),
    "one dimension too many": Case(made(Neighborhood, (8, 8), (3, 3, 3)), PatternError, "kernel_size", "2 are needed"),
    "a dilation beyond the grid": Case(made(Neighborhood, 8, 3, 3), PatternError, "dilation=(3,)", "9", "at most 8"),
    "a border of no kind": Case(made(Neighborhood, 8, 3, border="zeros"), PatternError, "border='zeros'", "'move', 'cut'"),
    "too many cells": Case(made(Neighborhood, 8, 2**20 + 1, border="cut"), PatternError, "1,048,577 cells", "at most 1,048,576"),
    "a dilation of 0": Case(made(Neighborhood, 8, 3, 0), PatternError, "dilation=0", "from 1"),
    "a neighborhood of a fraction": Case(made(Neighborhood, 8, 3.0), TypeError, "kernel_size=3.0", "integer"),
    "a grid of other tokens": Case(called(Neighborhood((2, 2), 1)), PatternError, "seq=6", "2 x 2", "4 tokens"),
    "a list of branches": Case(of([SlidingWindow(2)]), TypeError, "branches[0]", "list", "a branch is needed"),
    "an unknown overlap of branches": Case(of(SlidingWindow(2), overlap="sum"), PatternError, "overlap='sum'", "'once'"),
    "JSON of an unknown kind": Case(read('{"branches": [{"kind": "round"}]}'), PatternError, "round", "sliding_window"),
    "JSON of a kind that is a list": Case(read('{"branches": [{"kind": []}]}'), PatternError, "kind"),
    "JSON of a branch as a text": Case(read('{"branches": ["sliding_window"]}'), PatternError, "sliding_window", "object"),
    "JSON of branches as an object": Case(read('{"branches": {}}'), PatternError, "branches", "list"),
    "JSON of no branches": Case(read('{"branches": []}'), PatternError, "branches is empty"),
    "JSON of a window without one": Case(read('{"branches": [{"kind": "sliding_window"}]}'), PatternError, "no window"),
    "JSON of a window of a text": Case(written("sliding_window", window="3"), TypeError, "window='3'", "integer"),
    "JSON of a stride with a window": Case(written("strided", stride=2, window=3), PatternError, "'window'", "stride, heads"),
    "JSON of branches and lists": Case(read('{"branches": [], "segment_lengths": [4]}'), PatternError, "'segment_lengths'"),
    "lengths in vain": Case(lambda: WINDOW.segment_lengths, NO_LISTS, "segment_lengths", "sliding_window", "Pattern.branches"),
    "segments of a window": Case(lambda: WINDOW.segments, PatternError, "sliding_window", "Pattern.branches"),
    "what a cache keeps of a neighborhood": Case(lambda: kept_count(GRID, 8, 2), PatternError, "Neighborhood", "DilatedCache"),
    "too many residue classes": Case(planned(CLASSES, 2**30), ValueError, "stride=67,108,864", "at most", "fewer"),
    "a neighborhood of torch's kernels": Case(called(Neighborhood(6, 3), backend="sdpa"), NoBackendError, *NO_GRID),
    "windows by torch, once": Case(attend(pattern=ONCE, backend="sdpa"), NoBackendError, "overlap once", 'overlap="count"'),
}
