"""Tables that are counted anew whenever a page is written: rows of caches, curves through grids, classes of models."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import cast

import torch

from dilkit import DilatedSegment, GlobalTokens, Pattern, SlidingWindow
from dilkit.decoding.layout import Layout
from dilkit.decoding.stores import open_stores
from dilkit.orders.comparison import curve_orders
from dilkit.orders.locality import locality_report
from dilkit.pattern import Branch
from dilkit.tools.commands.order import compactness_cells, distance_cell
from dilkit.tools.report.markdown import rows_markdown

CACHED = (
    Pattern([2048, 8192, 32768], [1, 4, 16]),
    Pattern([2048, 4096, 8192, 16384, 32768], [1, 2, 4, 6, 12]),
    Pattern([1024, 5792, 32768, 185363, 1048576], [1, 2, 4, 8, 16]),
    Pattern.mistral(4096),
    Pattern.streaming_llm(1020, sinks=4),
    Pattern.of(DilatedSegment(8192, 4), SlidingWindow(512), GlobalTokens(16)),
)
SEEN = (1_000, 100_000, 1_000_000, 10_000_000)
KV_HEADS = 8
GRIDS = (
    ((256, 256), 4096),
    ((256, 256), 1500),
    ((250, 250), 1024),
    ((90, 160), 1024),
    ((32, 64, 64), 4096),
    ((33, 45, 80), 1024),
)
"""Grid and segment length: whole blocks; a length that is no tile; rows that no rate divides; a film's; two in space."""
RATES, WINDOWS, BLOCK = (4, 8, 16), {2: 17, 3: 7}, 128
EXAMINED = Path("tests", "families", "examined.json")
OTHER_LAYERS = "beside attention, layers of it mix tokens by convolution, recurrence or linear attention"


def cache_table(root: Path) -> str:
    """Return a row for each pattern: the bound, and the rows that a key/value head's cache holds after so many tokens."""
    dtypes = dict(dtype=torch.float32, stored=torch.float32)
    layout = Layout(batch=1, heads=KV_HEADS, kv_heads=KV_HEADS, head_dim=1, device=torch.device("cpu"), **dtypes)
    rows: list[tuple[str, ...]] = [("pattern", "bound", *(f"{seen:,} tokens" for seen in SEEN))]
    for pattern in CACHED:
        stores = open_stores(pattern, layout, 0)
        bound = sum(map(_bound, pattern.branches))
        means = (sum(store.needed(seen) for store in stores) / KV_HEADS for seen in SEEN)
        rows.append((f"`{pattern}`", f"{bound:,}", *(f"{mean:,.0f}" for mean in means)))
    return rows_markdown(rows)


def _bound(branch: Branch) -> int:
    """Return the most rows of a branch that a key/value head's cache holds."""
    if isinstance(branch, DilatedSegment):
        return -(-branch.segment_length // branch.dilation_rate)
    return branch.window if isinstance(branch, SlidingWindow) else cast(GlobalTokens, branch).count(SEEN[-1])


def curve_table(root: Path) -> str:
    """Return a row for each grid, segment length and curve, with the locality of its segments."""
    names = ("near 48", "diameter", "near 48, shifted", "diameter, shifted", *(f"r={rate}" for rate in RATES), "blocks")
    rows: list[tuple[str, ...]] = [("grid, segment", "curve", *names)]
    for shape, length in GRIDS:
        case = f"{' x '.join(map(str, shape))}, {length:,}"
        for order in curve_orders(shape, length, block=BLOCK).values():
            report = locality_report(order, length, RATES, window=WINDOWS[len(shape)], block=BLOCK)
            compact = [cell for part in (report.aligned, report.shifted) for cell in compactness_cells(part)[1:]]
            rows.append((case, report.name, *compact, *map(distance_cell, report.kept), f"{report.active_blocks:.2f}"))
            case = ""
    return rows_markdown(rows)


def family_table(root: Path) -> str:
    """Return a row for each verdict and reason: the classes of models that `tests/families/run.py` tried, and their families."""
    tried = json.loads((root / EXAMINED).read_text())
    groups: dict[str, dict[str, list[dict[str, str]]]] = {}
    for one in tried["classes"]:
        reason = OTHER_LAYERS if one["every_layer_asks"] is False else _reason(one["verdict"], one["reason"])
        groups.setdefault(one["verdict"], {}).setdefault(reason, []).append(one)
    rows = [("", "reason", "classes", "families")]
    for verdict, by_reason in sorted(groups.items(), key=lambda group: (-sum(map(len, group[1].values())), group[0])):
        for reason, classes in sorted(by_reason.items(), key=lambda pair: -len(pair[1])):
            families = sorted({f"`{one['family']}`" for one in classes})
            rows.append((verdict, reason, str(len(classes)), ", ".join(families)))
    versions = ", ".join(f"{name} {version}" for name, version in tried["versions"].items())
    return f"{len(tried['classes'])} classes, with {versions}:\n\n{rows_markdown(rows)}"


def _reason(verdict: str, reason: str) -> str:
    """Return a reason without names and numbers that differ from class to class."""
    if verdict == "not tried":
        return "a package is missing" if reason.startswith("ImportError") else "no tiny model of it ran with `eager` attention"
    words = re.sub(r"\b(a )?tensor \([\d, ]*\)", "a tensor", reason.partition(";")[0])
    return re.sub(r"\d[\d,]*", "n", re.sub(r"\b\w+(Attention|Config|Model)\b", "it", words)).strip()
