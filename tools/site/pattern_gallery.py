"""The gallery of docs/choosing-a-pattern.md: published patterns drawn, and what they cost and reach, from their counts."""

from __future__ import annotations

from math import isqrt
from pathlib import Path
from typing import NamedTuple

import torch

from dilkit.pattern import DilatedSegment, Documents, Intervals, Pattern, Prefix, SlidingWindow
from dilkit.tools.report.markdown import rows_markdown
from dilkit.tools.report.picture import new_figure, save
from dilkit.viz import draw_count

HEADS = 4
DRAWN, COUNTED = 64, 256
"""Tokens in the picture and in the table."""


class GalleryEntry(NamedTuple):
    """A pattern, and whether it is used causally."""

    pattern: Pattern
    is_causal: bool


def gallery(seq: int) -> dict[str, GalleryEntry]:
    """Return the patterns for `seq` tokens, a multiple of 32; their sizes are the same parts of every length."""
    part, side = seq // 16, isqrt(seq)
    longnet = [DilatedSegment(4 * part, 1), DilatedSegment(8 * part, 2), DilatedSegment(16 * part, 4)]
    return {
        "LongNet": GalleryEntry(Pattern.of(*longnet), True),
        "LongNet and a window": GalleryEntry(Pattern.of(*longnet, SlidingWindow(part)), True),
        "Mistral": GalleryEntry(Pattern.mistral(2 * part), True),
        "StreamingLLM": GalleryEntry(Pattern.streaming_llm(2 * part), True),
        "Sparse Transformer": GalleryEntry(Pattern.sparse_transformer(side), True),
        "Longformer": GalleryEntry(Pattern.longformer(2 * part, global_tokens=2), False),
        "NATTEN": GalleryEntry(Pattern.natten((side, side), side // 4 * 2 - 1), False),
        "BigBird": GalleryEntry(Pattern.bigbird(seq, part // 2, random_blocks=2), False),
        "Packed documents": GalleryEntry(Pattern.of(Documents([5 * part, 2 * part, 9 * part])), True),
        "Prefix language model": GalleryEntry(Pattern.of(Prefix(5 * part)), False),
        "FlashMask": GalleryEntry(Pattern.of(_shared_question(part)), False),
    }


def _shared_question(part: int) -> Intervals:
    """Return a question of 4 parts and three answers of 4, each of which sees the question and its own earlier tokens."""
    question, rows = 4 * part, range(16 * part)
    first = [[0, i if i < question else i // question * question] for i in rows]
    return Intervals(first, [[min(i, question - 1), i] for i in rows])


def gallery_table(root: Path) -> str:
    """Return a row for each pattern: cost next to dense attention with the same causality, and reach."""
    rows = [("as in", f"of {COUNTED} tokens", "FLOPs, of dense", "layers to see all")]
    for name, (pattern, is_causal) in gallery(COUNTED).items():
        costs = [one.flops(COUNTED, HEADS, 1, is_causal=is_causal) for one in (pattern, Pattern.dense())]
        layers, missing = reach(pattern, COUNTED, HEADS, is_causal)
        branches = "; ".join(map(str, pattern.branches)) + ", causal" * is_causal
        shown = f"never: {missing} pairs are missing after {layers} and more" if missing else str(layers)
        rows.append((name, branches, f"{100 * costs[0] / costs[1]:.1f} %", shown))
    return rows_markdown(rows)


def reach(pattern: Pattern, seq: int, heads: int, is_causal: bool) -> tuple[int, int]:
    """Return the number of layers after which no token hears of further ones, and the pairs that are missing then.

    A token hears in layer n of what those that it sees heard of in layer n - 1, and itself goes on beside attention. Pairs that
    causality rules out are not missing.
    """
    step = pattern.count(seq, heads, is_causal=is_causal).any(0) | torch.eye(seq, dtype=torch.bool)
    heard, layers = step, 1
    while not torch.equal(more := (step.float() @ heard.float()) > 0, heard):
        heard, layers = more, layers + 1
    return layers, (seq * (seq + 1) // 2 if is_causal else seq * seq) - int(heard.sum())


def draw_gallery(path: Path) -> None:
    """Draw the count of head 0 of each into a file."""
    entries = gallery(DRAWN)
    counts = [pattern.count(DRAWN, HEADS, is_causal=is_causal)[0] for pattern, is_causal in entries.values()]
    with new_figure() as figure:
        draw_count(figure, torch.stack(counts), f"{DRAWN} tokens", names=tuple(entries))
        save(figure, path, dpi=280)
