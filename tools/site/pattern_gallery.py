"""Pictures of which token sees which, of 64 tokens, and the calls that draw them."""

import shlex
from pathlib import Path
from typing import Any

import torch

from dilkit.pattern import DilatedSegment, GlobalTokens, Pattern, SlidingWindow
from dilkit.tools import cli
from dilkit.tools.console.arguments import pattern_of
from dilkit.tools.report.picture import new_figure, save
from dilkit.viz import draw_count

HEADS, SEQ, RANKS = 4, 64, 4
SEGMENTS = "DilatedSegment(16, 1), DilatedSegment(32, 2), DilatedSegment(64, 4)"
DRAWN = {
    "LongNet": f"--causal --pattern '{SEGMENTS}'",
    "LongNet and a window": f"--causal --pattern '{SEGMENTS}, SlidingWindow(4)'",
    "Mistral": "--causal --pattern 'mistral(8)'",
    "StreamingLLM": "--causal --pattern 'streaming_llm(8)'",
    "Sparse Transformer": "--causal --pattern 'sparse_transformer(8)'",
    "Longformer": "--pattern 'longformer(8, global_tokens=2)'",
    "NATTEN": "--pattern 'natten((8, 8), 3)'",
    "BigBird": f"--pattern 'bigbird({SEQ}, 2, random_blocks=2)'",
    "Packed documents": "--causal --pattern 'Documents([20, 8, 36])'",
    "Prefix language model": "--pattern 'Prefix(20)'",
}
"""Panels of the gallery that `dilkit draw` draws, with its options."""
COMPUTED = """from dilkit import Intervals, Pattern

# A question of 16 tokens and three answers of 16, each of which sees the question and its own earlier tokens.
first = [[0, i if i < 16 else i // 16 * 16] for i in range(64)]
answers = Pattern.of(Intervals(first, [[min(i, 15), i] for i in range(64)]))
count = answers.count(64, heads=4)
"""
"""FlashMask, the last panel of the gallery, whose lists are too long for a command."""


def draw_gallery(path: Path) -> None:
    """Draw the count of head 0 of each pattern into a file."""
    counts = []
    for options in DRAWN.values():
        args = cli.parser_of("draw").parse_args(shlex.split(options))
        counts.append(pattern_of(args).count(SEQ, HEADS, is_causal=args.causal)[0])
    computed: dict[str, Any] = {}
    exec(COMPUTED, computed)
    with new_figure() as figure:
        names = (*DRAWN, "FlashMask")
        draw_count(figure, torch.stack([*counts, computed["count"][0]]), f"{SEQ} tokens", names=names)
        save(figure, path, dpi=280)


def gallery_calls(root: Path) -> str:
    """Return the commands and the program that draw the panels of the gallery."""
    calls = "\n".join(f"$ dilkit draw {options}    # {name}" for name, options in DRAWN.items())
    return f"```console\n{calls}\n```\n\nFlashMask:\n\n```python\n{COMPUTED}```"


def draw_received(path: Path) -> None:
    """Draw which pairs of three patterns are of one rank, and which of two."""
    kinds = {"A window": SlidingWindow(4), "A dilated segment": DilatedSegment(64, 4), "Global tokens": GlobalTokens(2)}
    rank = torch.arange(SEQ) * RANKS // SEQ
    counts = [(Pattern.of(branch).count(SEQ, 1)[0] > 0) * (1 + (rank[:, None] != rank).int()) for branch in kinds.values()]
    with new_figure() as figure:
        title = f"{SEQ} tokens on {RANKS} ranks: pairs that are seen"
        labels = "query", "key", "0: not seen, 1: on one rank, 2: on two"
        draw_count(figure, torch.stack(counts), title, labels=labels, names=tuple(kinds))
        save(figure, path, dpi=140)
