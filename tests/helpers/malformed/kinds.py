"""Malformed branches of every kind, and what patterns with other branches than dilated segments are refused for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from helpers.malformed.case import MASK, Case, Q

from dilkit import (
    BlockSparse,
    DilatedCache,
    DilatedSegment,
    GlobalTokens,
    Neighborhood,
    Pattern,
    PatternError,
    SlidingWindow,
    Strided,
    dilated_attention,
)
from dilkit.comm import PlanMismatch, exchange_plan, ring_dilated_attention, run_threads
from dilkit.decoding.kept import kept_count
from dilkit.pattern import BlockLayout
from dilkit.selector import NoBackendError

WINDOW, GRID = Pattern.of(SlidingWindow(3)), Pattern.of(Neighborhood((2, 4), (1, 3)))


def branch(kind: Callable[..., Any], *args: Any, **options: Any) -> Callable[[], Any]:
    return lambda: kind(*args, **options)


def of(*branches: Any, **options: Any) -> Callable[[], Any]:
    return lambda: Pattern.of(*branches, **options)


def read(text: str) -> Callable[[], Any]:
    return lambda: Pattern.from_json(text)


KINDS = {
    "a window of nothing": Case(branch(SlidingWindow, 0), PatternError, ("window=0", "from 1")),
    "a negative window": Case(branch(SlidingWindow, -4), PatternError, ("window=-4", "from 1")),
    "a window of a fraction": Case(branch(SlidingWindow, 4.0), TypeError, ("window=4.0", "float", "integer")),
    "a window of a bool": Case(branch(SlidingWindow, True), TypeError, ("window=True", "bool", "integer")),
    "a window of a pair": Case(branch(SlidingWindow, (2, 2)), TypeError, ("window=(2, 2)", "tuple", "integer")),
    "a window beyond 64 bits": Case(branch(SlidingWindow, 2**63), PatternError, ("window=", "2**63 - 1")),
    "a window of rate 0": Case(branch(SlidingWindow, 4, 0), PatternError, ("dilation_rate=0", "from 1")),
    "a window below its rate": Case(branch(SlidingWindow, 4, 5), PatternError, ("dilation_rate=5", "window=4", "at most")),
    "a window of one head": Case(branch(SlidingWindow, 4, heads=1), TypeError, ("heads=1", "(start, stop)")),
    "a window of no heads": Case(branch(SlidingWindow, 4, heads=(2, 2)), PatternError, ("heads=(2, 2)", "start < stop")),
    "a window of every other head": Case(branch(SlidingWindow, 4, heads=range(0, 4, 2)), PatternError, ("heads=", "step 2")),
    "a stride of 0": Case(branch(Strided, 0), PatternError, ("stride=0", "from 1")),
    "a stride of a text": Case(branch(Strided, "4"), TypeError, ("stride='4'", "str", "integer")),
    "a stride of negative heads": Case(branch(Strided, 4, heads=(-1, 2)), PatternError, ("heads=(-1, 2)", "0 <= start")),
    "no global tokens": Case(branch(GlobalTokens, 0), PatternError, ("tokens=0", "positions")),
    "global tokens nowhere": Case(branch(GlobalTokens, []), PatternError, ("tokens is empty", "at least one")),
    "global tokens of a fraction": Case(branch(GlobalTokens, 1.5), TypeError, ("tokens=1.5", "float", "integer")),
    "global tokens of a text": Case(branch(GlobalTokens, "12"), TypeError, ("tokens='12'", "integer")),
    "global tokens of fractions": Case(branch(GlobalTokens, np.ones(2)), TypeError, ("tokens[0]", "float", "integer")),
    "global tokens as a mask": Case(branch(GlobalTokens, [True, False]), TypeError, ("tokens[0]=True", "bool")),
    "global tokens of torch as a mask": Case(branch(GlobalTokens, MASK[0]), TypeError, ("tokens[0]", "bool")),
    "a global token before the first": Case(branch(GlobalTokens, [3, -1]), PatternError, ("position -1", "from 0")),
    "a global token beyond 64 bits": Case(branch(GlobalTokens, [2**63 - 1]), PatternError, ("position", "2**63 - 2")),
    "a global token twice": Case(branch(GlobalTokens, [3, 1, 3]), PatternError, ("position 3 twice", "once")),
    "global tokens that write": Case(branch(GlobalTokens, 2, "write"), PatternError, ("direction='write'", "'both'", "'read'")),
    "a global token after the last": Case(
        lambda: dilated_attention(Q, Q, Q, Pattern.of(SlidingWindow(2), GlobalTokens([2, 6]))),
        PatternError,
        ("seq=6", "position 6", "0 to 5", "is_causal=True"),
    ),
    "a global token after the last of all ranks": Case(
        lambda: run_threads(2, lambda comm: ring_dilated_attention(Q, Q, Q, Pattern.of(GlobalTokens([12])), comm)),
        (PatternError, PlanMismatch),
        ("seq=12", "position 12", "0 to 11"),
    ),
    "a layout of numbers": Case(branch(BlockSparse, [[1, 0], [0, 1]], 4), TypeError, ("layout", "int64", "bools", "astype")),
    "a layout that is no square": Case(branch(BlockSparse, [[True, False]], 4), PatternError, ("shape (1, 1, 2)", "blocks")),
    "a layout with a batch": Case(branch(BlockSparse, torch.ones(1, 1, 2, 2).bool(), 4), PatternError, ("shape (1, 1, 2, 2)",)),
    "a layout of nothing": Case(branch(BlockSparse, np.ones((0, 0), bool), 4), PatternError, ("shape (1, 0, 0)", "one block")),
    "a ragged layout": Case(branch(BlockSparse, [[True], [True, False]], 4), PatternError, ("layout", "equally long")),
    "blocks of no tokens": Case(branch(BlockSparse, [[True]], 0), PatternError, ("block_size=0", "from 1")),
    "blocks of a fraction": Case(branch(BlockSparse, [[True]], 4.0), TypeError, ("block_size=4.0", "integer")),
    "a layout of too many heads": Case(
        lambda: Pattern.of(BlockSparse(np.ones((3, 2, 2), bool), 4)).count(8, 2),
        PatternError,
        ("3 heads", "2 query heads", "one for all"),
    ),
    "a layout for fewer tokens": Case(
        lambda: dilated_attention(Q, Q, Q, Pattern.of(BlockSparse([[True]], 5))),
        PatternError,
        ("seq=6", "1 blocks of 5", "more blocks"),
    ),
    "bits that are too few": Case(branch(BlockLayout, 1, 4, b"1"), PatternError, ("1 bytes", "1 x 4 x 4")),
    "bits beyond the last block": Case(branch(BlockLayout, 1, 1, b"\xff"), PatternError, ("beyond its last block", "to_json")),
    "an even window of blocks": Case(branch(BlockSparse.bigbird, 8, 4, window=2), PatternError, ("window=2", "odd")),
    "random blocks below none": Case(branch(BlockSparse.bigbird, 8, 4, random_blocks=-1), ValueError, ("random_blocks=-1",)),
    "no blocks at all": Case(branch(BlockSparse.local_global, 0, 4), ValueError, ("blocks=0", "at least 1")),
    "JSON of a layout that is no base64": Case(
        read('{"branches": [{"kind": "block_sparse", "layout": "?", "layout_heads": 1, "blocks": 1, "block_size": 4}]}'),
        PatternError,
        ("layout is not base64", "to_json"),
    ),
    "JSON of a layout without an end": Case(
        read('{"branches": [{"kind": "block_sparse", "layout": "gA==", "layout_heads": 1, "blocks": 1e9, "block_size": 4}]}'),
        TypeError,
        ("blocks=1000000000.0", "integer"),
    ),
    "JSON of a huge layout": Case(
        read('{"branches": [{"kind": "block_sparse", "layout": "gA==", "layout_heads": 1, "blocks": 99999, "block_size": 4}]}'),
        PatternError,
        ("99999", "at most"),
    ),
    "a grid of nothing": Case(branch(Neighborhood, (0, 4), 1), PatternError, ("shape=(0, 4)", "from 1")),
    "a grid of no dimensions": Case(branch(Neighborhood, (), 1), PatternError, ("shape=()", "1 to 3")),
    "a grid of four dimensions": Case(branch(Neighborhood, (4, 4, 4, 4), 1), PatternError, ("4 dimensions", "1 to 3")),
    "a grid of a text": Case(branch(Neighborhood, "4x4", 3), TypeError, ("shape='4x4'", "integer")),
    "an even neighborhood": Case(branch(Neighborhood, (8, 8), (3, 4)), PatternError, ("kernel_size=(3, 4)", "even", "odd")),
    "a neighborhood of one dimension more": Case(
        branch(Neighborhood, (8, 8), (3, 3, 3)), PatternError, ("kernel_size", "2 are needed")
    ),
    "a neighborhood beyond the grid": Case(
        branch(Neighborhood, (8, 4), 5), PatternError, ("kernel_size=(5, 5)", "(8, 4)", "at most 4")
    ),
    "a dilation beyond the grid": Case(branch(Neighborhood, 8, 3, 3), PatternError, ("dilation=(3,)", "9", "at most 8")),
    "a border of no kind": Case(branch(Neighborhood, 8, 3, border="zeros"), PatternError, ("border='zeros'", "'move', 'cut'")),
    "a window of too many cells": Case(
        branch(Neighborhood, (8, 8), (2**11 + 1, 2**11 + 1), border="cut"), PatternError, ("4,198,401 cells", "at most 1,048,576")
    ),
    "a dilation of 0": Case(branch(Neighborhood, 8, 3, 0), PatternError, ("dilation=(0,)", "from 1")),
    "a neighborhood of a fraction": Case(branch(Neighborhood, 8, 3.0), TypeError, ("kernel_size=3.0", "integer")),
    "a grid of other tokens": Case(
        lambda: dilated_attention(Q, Q, Q, Pattern.natten((2, 2), 1)), PatternError, ("seq=6", "2 x 2", "4 tokens")
    ),
    "no branches of any kind": Case(of(), PatternError, ("branches is empty", "at least one")),
    "a list of branches": Case(of([SlidingWindow(2)]), TypeError, ("branches[0]", "list", "a branch is needed")),
    "a pattern as a branch": Case(of(SlidingWindow(2), WINDOW), TypeError, ("branches[1]", "Pattern", "a branch is needed")),
    "a class as a branch": Case(of(SlidingWindow), TypeError, ("branches[0]", "a branch is needed")),
    "an unknown overlap of branches": Case(of(SlidingWindow(2), overlap="sum"), PatternError, ("overlap='sum'", "'once'")),
    "a tail that counts once": Case(of(Strided(2), tail="zeros", overlap="once"), PatternError, ("tail='zeros'", "overlap")),
    "a shard as a number": Case(of(Strided(2), head_shard=4), TypeError, ("head_shard=4", "pair")),
    "heads that are not there": Case(
        lambda: Pattern.of(Strided(2), SlidingWindow(2, heads=(3, 5))).count(4, 4), PatternError, ("heads[1]=(3, 5)", "4 heads")
    ),
    "JSON of an unknown kind": Case(read('{"branches": [{"kind": "round"}]}'), PatternError, ("round", "sliding_window")),
    "JSON of no kind": Case(read('{"branches": [{"window": 3}]}'), PatternError, ("{'window': 3}", "kind")),
    "JSON of a kind that is a list": Case(read('{"branches": [{"kind": []}]}'), PatternError, ("kind",)),
    "JSON of a branch as a text": Case(read('{"branches": ["sliding_window"]}'), PatternError, ("sliding_window", "object")),
    "JSON of branches as an object": Case(read('{"branches": {}}'), PatternError, ("branches", "list")),
    "JSON of no branches": Case(read('{"branches": []}'), PatternError, ("branches is empty",)),
    "JSON of a window without one": Case(read('{"branches": [{"kind": "sliding_window"}]}'), PatternError, ("no window",)),
    "JSON of a window of a text": Case(
        read('{"branches": [{"kind": "sliding_window", "window": "3"}]}'), TypeError, ("window='3'", "integer")
    ),
    "JSON of a stride with a window": Case(
        read('{"branches": [{"kind": "strided", "stride": 2, "window": 3}]}'), PatternError, ("'window'", "stride, heads")
    ),
    "JSON of branches and lists": Case(
        read('{"branches": [{"kind": "strided", "stride": 2}], "segment_lengths": [4]}'), PatternError, ("'segment_lengths'",)
    ),
    "segment lengths of a window": Case(
        lambda: WINDOW.segment_lengths, (PatternError, AttributeError), ("segment_lengths", "sliding_window", "Pattern.branches")
    ),
    "dilation rates of a mix": Case(
        lambda: Pattern.of(DilatedSegment(4, 2), Strided(3)).dilation_rates,
        (PatternError, AttributeError),
        ("dilation_rates", "strided", "Pattern.branches"),
    ),
    "segments of a window": Case(lambda: WINDOW.segments, PatternError, ("sliding_window", "Pattern.branches")),
    "a cache of a neighborhood": Case(
        lambda: DilatedCache(GRID, kv_heads=2), PatternError, ("Neighborhood((2, 4), (1, 3))", "grows")
    ),
    "what a cache keeps of a neighborhood": Case(lambda: kept_count(GRID, 8, 2), PatternError, ("Neighborhood", "DilatedCache")),
    "a ring for a window": Case(
        lambda: exchange_plan(WINDOW, (0, 4, 8), 2, schedule="ring"),
        ValueError,
        ("schedule='ring'", "segments or strides", "'auto'"),
    ),
    "a plan of too many residue classes": Case(
        lambda: exchange_plan(Pattern.of(Strided(2**26)), (0, 2**29, 2**30), 2),
        ValueError,
        ("stride=67,108,864", "at most", "fewer"),
    ),
    "a ring for a window over ranks": Case(
        lambda: run_threads(2, lambda comm: ring_dilated_attention(Q, Q, Q, WINDOW, comm, schedule="ring")),
        ValueError,
        ("schedule='ring'", "segments or strides"),
    ),
    "a neighborhood of torch's kernels": Case(
        lambda: dilated_attention(Q, Q, Q, Pattern.of(Neighborhood((Q.shape[1],), 3)), backend="sdpa"),
        NoBackendError,
        ("branch kind neighborhood", "shown as grid", "reference"),
    ),
    "windows of torch's kernels, once": Case(
        lambda: dilated_attention(Q, Q, Q, Pattern.of(SlidingWindow(4, 2), SlidingWindow(6, 3), overlap="once"), backend="sdpa"),
        NoBackendError,
        ("overlap once", 'overlap="count"'),
    ),
    "a tensor as a window": Case(branch(SlidingWindow, torch.ones(2)), TypeError, ("window=", "integer")),
}
