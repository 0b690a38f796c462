"""`dilkit order`: curves through a grid, and how they keep neighbours together."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from dilkit.orders.comparison import SIMPLEST_FIRST, curve_orders, reading
from dilkit.orders.locality import Compactness, KeptDistance, LocalityReport, locality_report
from dilkit.tools.console.arguments import numbers, picture_file, whole
from dilkit.tools.console.text import print_json
from dilkit.tools.report.document import Document, Table, tables
from dilkit.tools.report.terminal import document_text
from dilkit.tools.results.decode import encode
from dilkit.viz import draw_orders

MAX_TOKENS = 2**24
MAX_SIDE = 1024
"""Of pictures: beyond it a cell is less than can be seen."""
HELP = """\
say what an order of a grid's tokens brings: row-major, snake, tiles, Morton, Hilbert

For each segment length: the share of neighbours that share a segment, the diameter of segments, the distance to the nearest key
that a dilation rate keeps and, with --window, the key blocks that a block of queries needs. Reordering neither changes nor speeds
up attention over a fixed set of keys: it changes which tokens share a segment, a block or a stride."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the grid's and the segments' arguments, and --png."""
    segments = "segment lengths, each reported (default %(default)s)"
    tokens = "tokens in front of the grid's, as a class token (default 0)"
    window = "count the active blocks of a window; odd sides, or one for all"
    tile = "of the tiles (default: one segment, with --window also one block; compact ones)"
    png = "draw --curve and row-major, first of --segments, last of --rates: .png, .svg or .pdf (needs matplotlib)"
    grid: dict[str, Any] = dict(type=sides, metavar="HxW")
    curves: dict[str, Any] = dict(choices=SIMPLEST_FIRST, default="hilbert")
    parser.add_argument("--shape", **grid, default="64x64", help="the grid, N, HxW or DxHxW (default %(default)s)")
    parser.add_argument("--curve", **curves, help="the curve to judge (default %(default)s)")
    parser.add_argument("--segments", type=numbers, default="256,1024", metavar="W,W", help=segments)
    parser.add_argument("--rates", type=numbers, default="2,4,8,16", metavar="R,R", help="dilation rates (default %(default)s)")
    parser.add_argument("--window", **grid, help=window)
    parser.add_argument("--block", type=whole(1), default=128, metavar="B", help="tokens in a block (default %(default)s)")
    parser.add_argument("--tile", **grid, help=tile)
    parser.add_argument("--extra-tokens", type=whole(0), default=0, metavar="N", help=tokens)
    parser.add_argument("--png", type=Path, metavar="FILE", help=png)


def run(args: argparse.Namespace) -> int:
    """Print the report. Raises ValueError naming the argument that does not fit."""
    _check(args)
    window = args.window if args.window is None or len(args.window) > 1 else args.window[0]
    segments: list[Segments] = []
    for length in args.segments:
        orders = curve_orders(
            args.shape, length, block=args.block if window else None, tile=args.tile, extra_tokens=args.extra_tokens
        )
        curves = {c: locality_report(one, length, args.rates, window=window, block=args.block) for c, one in orders.items()}
        if args.png and not segments:
            from dilkit.tools.report.picture import new_figure, save

            with new_figure() as figure:
                draw_orders(figure, [(orders[c], curves[c]) for c in dict.fromkeys((args.curve, "row-major"))])
                save(figure, args.png, dpi=160)
        segments.append(Segments(length, reading(curves, args.curve), curves))
    tokens, png = args.extra_tokens + prod(args.shape), str(args.png) if args.png else None
    report = Report(args.shape, tokens, args.extra_tokens, args.curve, tuple(segments), png)
    if args.json:
        print_json("order", encode(report))
    else:
        print(document_text(document(report)), *[f"wrote {png}"] * bool(png), sep="\n\n")
    return 0


def sides(text: str) -> tuple[int, ...]:
    """An argument type: whole numbers of 1 or more, as 64x64."""
    try:
        parts = tuple(whole(1)(part) for part in text.lower().split("x"))
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}; write sides as 64x64") from None
    if len(parts) > 3:
        raise argparse.ArgumentTypeError(f"{text!r} has {len(parts)} sides; a grid has 1, 2 or 3")
    return parts


def _check(args: argparse.Namespace) -> None:
    tokens = args.extra_tokens + prod(args.shape)
    if tokens > MAX_TOKENS:
        raise ValueError(f"--shape: {tokens:,} tokens are more than this command measures; at most {MAX_TOKENS:,}")
    if args.png:
        picture_file("--png", args.png)
        if max(args.shape) > MAX_SIDE:
            raise ValueError(f"--shape: a side of {max(args.shape):,} is more than a picture can show; at most {MAX_SIDE:,}")


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
