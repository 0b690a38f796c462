"""What `dilkit order` finds, as a record and as a document; what the figures say, in one sentence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dilkit.orders.locality import Compactness, KeptDistance, LocalityReport
from dilkit.tools.report.document import Document, Table, tables

Curves = dict[str, LocalityReport]
SAME = 0.005
"""Shares of neighbours that differ by less than this are called equal."""
SAME_DISTANCE = 0.02
COMPACTNESS = ("  curve", "near 8", "near 48", "diameter", "shifted: near 8", "near 48", "diameter")
_PER_TABLE = 6
_LEGEND = (
    "near 8, near 48: share of a token's 8 or 48 nearest neighbours that are in its segment. diameter: of a segment's bounding "
    "box, in cells. shifted: the same with segments displaced by half. r=R: distance from a token to the nearest key of its "
    "segment that dilation rate R keeps, in cells, mean and largest."
)
_BLOCKS = " blocks: blocks of keys that a block of queries needs for the window, mean."


@dataclass(frozen=True)
class Segments:
    """All curves at one segment length, and what the figures say."""

    segment_length: int
    reading: str
    curves: Curves


@dataclass(frozen=True)
class Report:
    """The grid, the curve that is judged, and the figures by segment length."""

    shape: tuple[int, ...]
    tokens: int
    extra_tokens: int
    curve: str
    segments: tuple[Segments, ...]
    png: str | None


def document(report: Report) -> Document:
    """The report for people."""
    extra = f" and {report.extra_tokens} in front" * (report.extra_tokens > 0)
    headline = f"{_sides(report.shape)} cells{extra}: {report.tokens:,} tokens; > marks {report.curve}"
    legend = _LEGEND + _BLOCKS * bool(report.segments[0].curves[report.curve].window)
    made = tables(*(table for segments in report.segments for table in _tables(segments, report.curve)))
    return Document((headline,), made, method=legend)


def _tables(segments: Segments, chosen: str) -> Iterator[Table]:
    curves, first = segments.curves, segments.curves[chosen]
    title = f"segments of {segments.segment_length:,} tokens: {first.segments:,}"
    names = {curve: f"{'>' if curve == chosen else ' '} {label(found)}" for curve, found in curves.items()}
    blocks = (f"blocks, {_sides(first.window)}",) if first.window else ()
    yield Table(title, (*COMPACTNESS, *blocks), tuple((names[curve], *_compactness(found)) for curve, found in curves.items()))
    for start in range(0, len(first.kept), _PER_TABLE):
        part = slice(start, start + _PER_TABLE)
        rows = tuple((names[curve], *map(distance_cell, found.kept[part])) for curve, found in curves.items())
        note = "\n".join([*_sampled(curves), segments.reading]) if part.stop >= len(first.kept) else ""
        yield Table("distance to the nearest kept key", ("  curve", *(f"r={k.rate}" for k in first.kept[part])), rows, note)


def _compactness(found: LocalityReport) -> tuple[str, ...]:
    blocks = () if found.active_blocks is None else (f"{found.active_blocks:.2f}",)
    return *compactness_cells(found.aligned), *compactness_cells(found.shifted), *blocks


def compactness_cells(found: Compactness) -> tuple[str, ...]:
    """Shares of neighbours and diameter."""
    return f"{found.near_8:.3f}", f"{found.near_48:.3f}", f"{found.diameter:.1f}"


def distance_cell(kept: KeptDistance) -> str:
    """Mean and largest distance."""
    return "none" if kept.mean is None else f"{kept.mean:.2f} ({kept.max:.1f})"


def label(found: LocalityReport) -> str:
    """The curve, with its tile."""
    return f"{found.curve} {_sides(found.tile)}" if found.tile else found.curve


def reading(curves: Curves, chosen: str) -> str:
    """What the figures say about plain tiles beside the chosen curve, or beside Hilbert where tiles are the choice."""
    if len(curves[chosen].shape) == 1:
        return "In one dimension the sequence's own order is the best there is: every curve is the identity."
    rival = "hilbert" if chosen == "tile" else chosen
    tiles, other = curves["tile"], curves[rival]
    aligned, shifted = (tiles.aligned.near_48, other.aligned.near_48), (tiles.shifted.near_48, other.shifted.near_48)
    means = [found.kept[-1].mean or 0.0 for found in (tiles, other, curves["row-major"])]
    judged = _compared(*aligned, SAME), _compared(*shifted, SAME), _compared(means[1], means[0], SAME_DISTANCE)
    compact = {1: "more compact than", 0: "as compact as", -1: "less compact than"}
    far = {1: "nearer", 0: "as near", -1: "farther"}[judged[2]]
    distances = f"{means[0]:.2f}, {means[1]:.2f}" + f"; row-major: {means[2]:.2f}" * (rival != "row-major")
    return (
        f"{_verdict(*judged, rival)}: tiles of {_sides(tiles.tile or ())} are {compact[judged[0]]} {rival} "
        f"(near 48: {aligned[0]:.3f}, {aligned[1]:.3f}); with segments shifted {compact[judged[1]]} it "
        f"(near 48: {shifted[0]:.3f}, {shifted[1]:.3f}); at rate {tiles.kept[-1].rate} their nearest kept key is {far} "
        f"(cells: {distances}){_window(curves, rival)}."
    )


def _window(curves: Curves, rival: str) -> str:
    """The active blocks of a window, if one was asked for: of tiles, the rival and row-major."""
    if not curves[rival].window:
        return ""
    compared = (curves.get("block-tile", curves["tile"]), curves[rival], curves["row-major"])
    listed = dict.fromkeys(f"{found.active_blocks:.2f} for {label(found)}" for found in compared)
    return f"; blocks for the window: {', '.join(listed)}"


def _compared(more: float, less: float, same: float) -> int:
    """1 if the first is larger, -1 if the second is, 0 if there is next to no difference."""
    return 0 if abs(more - less) < same else 1 if more > less else -1


def _verdict(aligned: int, shifted: int, dilated: int, rival: str) -> str:
    if aligned < 0:
        return f"{rival.capitalize()} is the better choice here"
    if worse := [word for word, judged in (("aligned", shifted), ("undilated", dilated)) if judged < 0]:
        return f"Plain tiles are enough as long as segments stay {' and '.join(worse)}"
    if aligned or shifted or dilated:
        return f"Plain tiles are the better choice here, beside {rival}"
    return f"Plain tiles are enough here, {rival} brings nothing more"


def _sampled(curves: Curves) -> Iterator[str]:
    """What comes from a sample, if anything does."""
    for found in curves.values():
        if found.segments_measured < found.segments:
            yield f"{label(found)}: distances come from {found.segments_measured:,} segments drawn at random"
        if found.blocks_measured < found.blocks:
            yield f"{label(found)}: blocks come from {found.blocks_measured:,} blocks of queries drawn at random"


def _sides(sides: tuple[int, ...]) -> str:
    return "x".join(map(str, sides))
