"""`dilkit order`: curves through a grid, and how they keep neighbours together."""

import argparse
from math import prod
from pathlib import Path

from dilkit.orders.comparison import SIMPLEST_FIRST, curve_orders, reading
from dilkit.orders.locality import LocalityReport, locality_report
from dilkit.tools.console.arguments import numbers, picture_file, whole
from dilkit.tools.console.text import print_json
from dilkit.tools.report.document import Document, Table
from dilkit.tools.report.terminal import document_text
from dilkit.tools.results.decode import encode
from dilkit.viz import draw_orders

MAX_TOKENS, BLOCK = 2**24, 128
MAX_SIDE = 1024
"""The longest side of a picture: beyond it a cell is less than can be seen."""
HELP = """\
say what an order of a grid's tokens brings: row-major, snake, tiles, Morton, Hilbert

For each segment length: the share of neighbours that share a segment, the diameter of segments, the distance to the nearest key
that a dilation rate keeps and, with --window, the key blocks that a block of queries needs."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    png = "draw --curve and row-major, first of --segments, last of --rates: .png, .svg or .pdf (needs matplotlib)"
    window = f"count the active blocks of {BLOCK} tokens of a window; odd sides, or one for all"
    add("--shape", type=sides, metavar="HxW", default="64x64", help="the grid, N, HxW or DxHxW (default %(default)s)")
    add("--curve", choices=SIMPLEST_FIRST, default="hilbert", help="the curve to judge (default %(default)s)")
    add("--segments", type=numbers, default="256,1024", metavar="W,W", help="segment lengths (default %(default)s)")
    add("--rates", type=numbers, default="2,4,8,16", metavar="R,R", help="dilation rates (default %(default)s)")
    add("--window", type=sides, metavar="HxW", help=window)
    add("--png", type=Path, metavar="FILE", help=png)


def run(args: argparse.Namespace) -> int:
    """Print the report. Raises ValueError naming the argument that does not fit."""
    tokens, png = prod(args.shape), str(args.png) if args.png else None
    if tokens > MAX_TOKENS:
        raise ValueError(f"--shape: {tokens:,} tokens are more than this command measures; at most {MAX_TOKENS:,}")
    if args.png:
        picture_file("--png", args.png)
        if max(args.shape) > MAX_SIDE:
            raise ValueError(f"--shape: a side of {max(args.shape):,} is more than a picture can show; at most {MAX_SIDE:,}")
    window = args.window if args.window is None or len(args.window) > 1 else args.window[0]
    by_length: dict[int, Curves] = {}
    for length in args.segments:
        orders = curve_orders(args.shape, length, block=BLOCK if window else None)
        curves = {c: locality_report(one, length, args.rates, window=window, block=BLOCK) for c, one in orders.items()}
        if args.png and not by_length:
            from dilkit.tools.report.picture import new_figure, save

            with new_figure() as figure:
                draw_orders(figure, [(orders[c], curves[c]) for c in dict.fromkeys((args.curve, "row-major"))])
                save(figure, args.png, dpi=160)
        by_length[length] = curves
    if args.json:
        segments = [dict(segment_length=n, reading=reading(one, args.curve), curves=one) for n, one in by_length.items()]
        grid = dict(shape=args.shape, tokens=tokens, curve=args.curve)
        print_json("order", encode(dict(**grid, segments=segments, png=png)))
        return 0
    headline = f"{'x'.join(map(str, args.shape))} cells: {tokens:,} tokens; > marks {args.curve}"
    shown = tuple(_table(length, curves, args.curve) for length, curves in by_length.items())
    print(document_text(Document((headline,), shown, method=_LEGEND)))
    if png:
        print(f"\nwrote {png}")
    return 0


def sides(text: str) -> tuple[int, ...]:
    """Parse whole numbers of 1 or more, as 64x64."""
    try:
        parts = tuple(whole(1)(part) for part in text.lower().split("x"))
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}; write sides as 64x64") from None
    if len(parts) > 3:
        raise argparse.ArgumentTypeError(f"{text!r} has {len(parts)} sides; a grid has 1, 2 or 3")
    return parts


Curves = dict[str, LocalityReport]
MOST_RATES = 5
"""Rates in a table; --json has all."""
_LEGEND = (
    "near 48: share of a token's 48 nearest neighbours that are in its segment. diameter: of a segment's bounding box, in cells. "
    "shifted: the same with segments displaced by half. r=R: mean distance from a token to the nearest key of its segment that "
    "dilation rate R keeps, in cells. blocks: key blocks of 128 that a block of queries needs, mean. --json has more."
)


def _table(length: int, curves: Curves, chosen: str) -> Table:
    first, rows = curves[chosen], []
    for curve, one in curves.items():
        near = (x for part in (one.aligned, one.shifted) for x in (f"{part.near_48:.3f}", f"{part.diameter:.1f}"))
        distances = ("none" if one.mean is None else f"{one.mean:.2f}" for one in one.kept[:MOST_RATES])
        blocks = () if one.active_blocks is None else (f"{one.active_blocks:.2f}",)
        rows.append((f"{'>' if curve == chosen else ' '} {one.name}", *near, *distances, *blocks))
    sampled = [one for one in curves.values() if one.segments_measured < one.segments or one.blocks_measured < one.blocks]
    notes = [f"{one.name}: {one.segments_measured:,} segments and {one.blocks_measured:,} blocks are drawn" for one in sampled]
    rates, counted = (f"r={one.rate}" for one in first.kept[:MOST_RATES]), ("blocks",) if first.window else ()
    header = ("  curve", "near 48", "diameter", "shifted", "diameter", *rates, *counted)
    title = f"segments of {length:,} tokens: {first.segments:,}"
    return Table(title, header, tuple(rows), "\n".join([*notes, reading(curves, chosen)]))
