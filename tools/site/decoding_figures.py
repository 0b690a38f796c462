"""The figures of docs/decoding.md: how many rows a cache keeps, counted anew whenever the page is written."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import torch

from dilkit import DilatedSegment, GlobalTokens, Pattern, SlidingWindow
from dilkit.decoding.layout import Layout
from dilkit.decoding.stores import open_stores
from dilkit.pattern import Branch
from dilkit.tools.report.markdown import rows_markdown

PATTERNS = (
    Pattern([2048, 8192, 32768], [1, 4, 16]),
    Pattern([2048, 4096, 8192, 16384, 32768], [1, 2, 4, 6, 12]),
    Pattern([1024, 5792, 32768, 185363, 1048576], [1, 2, 4, 8, 16]),
    Pattern.mistral(4096),
    Pattern.streaming_llm(1020, sinks=4),
    Pattern.of(DilatedSegment(8192, 4), SlidingWindow(512), GlobalTokens(16)),
)
SEEN = (1_000, 100_000, 1_000_000, 10_000_000)
KV_HEADS = 8


def kept_table(root: Path) -> str:
    """One row a pattern: the bound, and the rows a key/value head that are kept after so many tokens, as means over the heads."""
    dtypes = dict(dtype=torch.float32, stored=torch.float32)
    layout = Layout(batch=1, heads=KV_HEADS, kv_heads=KV_HEADS, head_dim=1, device=torch.device("cpu"), **dtypes)
    rows: list[tuple[str, ...]] = [("pattern", "bound", *(f"{seen:,} tokens" for seen in SEEN))]
    for pattern in PATTERNS:
        stores = open_stores(pattern, layout, 0)
        bound = sum(map(_bound, pattern.branches))
        kept = (sum(store.needed(seen) for store in stores) / KV_HEADS for seen in SEEN)
        rows.append((f"`{pattern}`", f"{bound:,}", *(f"{mean:,.0f}" for mean in kept)))
    return rows_markdown(rows)


def _bound(branch: Branch) -> int:
    """The most rows a key/value head that are kept of a branch."""
    if isinstance(branch, DilatedSegment):
        return -(-branch.segment_length // branch.dilation_rate)
    return branch.window if isinstance(branch, SlidingWindow) else cast(GlobalTokens, branch).count(SEEN[-1])
