"""`dilkit order`: what the curves through a grid do to segments, strides and blocks, side by side."""

from __future__ import annotations

import argparse
from math import prod
from pathlib import Path
from typing import Any

from dilkit.orders.comparison import SIMPLEST_FIRST, curve_orders, reading
from dilkit.orders.locality import locality_report
from dilkit.tools.commands.order.report import Report, Segments, document
from dilkit.tools.console.arguments import numbers, picture_file, whole
from dilkit.tools.console.text import print_json
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
