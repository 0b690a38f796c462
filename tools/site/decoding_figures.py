"""The figures of docs/decoding.md: how many rows a cache keeps, counted anew whenever the page is written."""

from __future__ import annotations

from pathlib import Path

import torch

from dilkit import Pattern
from dilkit.decoding.branch import Layout
from dilkit.decoding.segment import open_segments
from dilkit.tools.report.markdown import rows_markdown

PATTERNS = (
    Pattern([2048, 8192, 32768], [1, 4, 16]),
    Pattern([2048, 4096, 8192, 16384, 32768], [1, 2, 4, 6, 12]),
    Pattern([1024, 5792, 32768, 185363, 1048576], [1, 2, 4, 8, 16]),
)
SEEN = (1_000, 100_000, 1_000_000, 10_000_000)
KV_HEADS = 8


def kept_table(root: Path) -> str:
    """One row a pattern: the bound, and the rows a key/value head that are kept after so many tokens, as means over the heads."""
    layout = Layout(batch=1, heads=KV_HEADS, kv_heads=KV_HEADS, head_dim=1, dtype=torch.float32, device=torch.device("cpu"))
    rows: list[tuple[str, ...]] = [("pattern", "bound", *(f"{seen:,} tokens" for seen in SEEN))]
    for pattern in PATTERNS:
        segments = open_segments(pattern, layout, 0)
        bound = sum(-(-branch.segment_length // branch.dilation_rate) for branch in pattern.segments)
        kept = (sum(segment.needed(seen) for segment in segments) / KV_HEADS for seen in SEEN)
        rows.append((f"`{pattern}`", f"{bound:,}", *(f"{mean:,.0f}" for mean in kept)))
    return rows_markdown(rows)
