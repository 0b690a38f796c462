"""What `dilkit order` finds, as a record and as a document."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dilkit.orders.locality import Compactness, KeptDistance, LocalityReport
from dilkit.tools.report.document import Document, Table, tables

Curves = dict[str, LocalityReport]
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
    names = {curve: f"{'>' if curve == chosen else ' '} {found.name}" for curve, found in curves.items()}
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


def _sampled(curves: Curves) -> Iterator[str]:
    """What comes from a sample, if anything does."""
    for found in curves.values():
        if found.segments_measured < found.segments:
            yield f"{found.name}: distances come from {found.segments_measured:,} segments drawn at random"
        if found.blocks_measured < found.blocks:
            yield f"{found.name}: blocks come from {found.blocks_measured:,} blocks of queries drawn at random"


def _sides(sides: tuple[int, ...]) -> str:
    return "x".join(map(str, sides))
