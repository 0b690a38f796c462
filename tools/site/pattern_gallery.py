"""Pictures of which token sees which, of 64 tokens: published patterns, and patterns over the ranks that hold the keys."""

from __future__ import annotations

from pathlib import Path

import torch

from dilkit.pattern import DilatedSegment, Documents, GlobalTokens, Intervals, Pattern, Prefix, SlidingWindow
from dilkit.tools.report.picture import new_figure, save
from dilkit.viz import draw_count

HEADS, SEQ, RANKS = 4, 64, 4


def draw_gallery(path: Path) -> None:
    """Draw the count of head 0 of each into a file."""
    longnet = [DilatedSegment(16, 1), DilatedSegment(32, 2), DilatedSegment(64, 4)]
    # A question of 16 tokens and three answers of 16, each of which sees the question and its own earlier tokens.
    first = [[0, i if i < 16 else i // 16 * 16] for i in range(SEQ)]
    answers = Intervals(first, [[min(i, 15), i] for i in range(SEQ)])
    patterns = {
        "LongNet": (Pattern.of(*longnet), True),
        "LongNet and a window": (Pattern.of(*longnet, SlidingWindow(4)), True),
        "Mistral": (Pattern.mistral(8), True),
        "StreamingLLM": (Pattern.streaming_llm(8), True),
        "Sparse Transformer": (Pattern.sparse_transformer(8), True),
        "Longformer": (Pattern.longformer(8, global_tokens=2), False),
        "NATTEN": (Pattern.natten((8, 8), 3), False),
        "BigBird": (Pattern.bigbird(SEQ, 2, random_blocks=2), False),
        "Packed documents": (Pattern.of(Documents([20, 8, 36])), True),
        "Prefix language model": (Pattern.of(Prefix(20)), False),
        "FlashMask": (Pattern.of(answers), False),
    }
    counts = [pattern.count(SEQ, HEADS, is_causal=is_causal)[0] for pattern, is_causal in patterns.values()]
    with new_figure() as figure:
        draw_count(figure, torch.stack(counts), f"{SEQ} tokens", names=tuple(patterns))
        save(figure, path, dpi=280)


def draw_received(path: Path) -> None:
    """Draw which pairs of three patterns are of one rank, and which of two."""
    kinds = {"A window": SlidingWindow(4), "A dilated segment": DilatedSegment(64, 4), "Global tokens": GlobalTokens(2)}
    rank = torch.arange(SEQ) * RANKS // SEQ
    counts = [(Pattern.of(branch).count(SEQ, 1)[0] > 0) * (1 + (rank[:, None] != rank).int()) for branch in kinds.values()]
    with new_figure() as figure:
        title = f"{SEQ} tokens on {RANKS} ranks; 1: the key is on the query's rank, 2: on another"
        draw_count(figure, torch.stack(counts), title, names=tuple(kinds))
        save(figure, path, dpi=140)
