"""`dilkit order`: what the curves through a grid do to segments, strides and blocks, side by side."""

from __future__ import annotations

import argparse
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

from dilkit.orders.locality import locality_report
from dilkit.orders.token_order import TokenOrder, order
from dilkit.tools.commands.order.report import Report, Segments, document, reading
from dilkit.tools.console.arguments import numbers, picture_file, whole
from dilkit.tools.console.text import print_json
from dilkit.tools.report.terminal import document_text
from dilkit.tools.results.decode import encode

CURVES = ("row-major", "snake", "tile", "morton", "hilbert")
MAX_TOKENS = 2**24
MAX_SIDE, MAX_CELLS_3D = 1024, 2**15
"""Of pictures: beyond these a cell is less than can be seen."""
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
    parser.add_argument("--shape", **grid, default="64x64", help="the grid, N, HxW or DxHxW (default %(default)s)")
    parser.add_argument("--curve", choices=CURVES, default="hilbert", help="the curve to judge (default %(default)s)")
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
    block = args.block if args.window else None
    orders = {length: orders_of(args.shape, length, block, args.tile, args.extra_tokens) for length in args.segments}
    report = collect(args, orders)
    if args.png:
        from dilkit.tools.commands.order.picture import save_picture

        first, by_curve = report.segments[0], orders[args.segments[0]]
        pictured = {curve: (by_curve[curve], first.curves[curve]) for curve in (args.curve, "row-major")}
        save_picture(list(pictured.values()), first.segment_length, args.rates[-1], args.png)
    if args.json:
        print_json("order", encode(report))
    else:
        print(document_text(document(report)), *[f"wrote {report.png}"] * bool(report.png), sep="\n\n")
    return 0


def collect(args: argparse.Namespace, orders: dict[int, dict[str, TokenOrder]]) -> Report:
    """The figures of all orders."""
    window = args.window if args.window is None or len(args.window) > 1 else args.window[0]
    segments = []
    for length, by_curve in orders.items():
        curves = {c: locality_report(o, length, args.rates, window=window, block=args.block) for c, o in by_curve.items()}
        segments.append(Segments(length, reading(curves, args.curve), curves))
    tokens, png = args.extra_tokens + prod(args.shape), str(args.png) if args.png else None
    return Report(args.shape, tokens, args.extra_tokens, args.curve, tuple(segments), png)


def orders_of(
    shape: tuple[int, ...], length: int, block: int | None = None, tile: tuple[int, ...] | None = None, extra_tokens: int = 0
) -> dict[str, TokenOrder]:
    """The grid's orders by curve; tiles hold one segment of `length` each, unless `tile` says otherwise.

    With `block`, also an order "block-tile", whose tiles hold one block of so many tokens each.
    """
    orders = {}
    for curve in CURVES:
        one = tile or segment_tile(shape, length)
        orders[curve] = order(shape, curve, tile=one if curve == "tile" else None, extra_tokens=extra_tokens)
        if curve == "tile" and block and not tile:
            orders["block-tile"] = order(shape, curve, tile=segment_tile(shape, block), extra_tokens=extra_tokens)
    return orders


def segment_tile(shape: tuple[int, ...], length: int) -> tuple[int, ...]:
    """The most compact tile of `length` cells that fits the grid; about `length` where none does.

    Where whole tiles fill the grid, they may be less compact: by up to the square root of 2 in their diagonal.
    """
    length = min(length, prod(shape))
    divisors = sorted({d for low in range(1, int(length**0.5) + 1) if length % low == 0 for d in (low, length // low)})
    tiles = [(*front, length // prod(front)) for front in product(divisors, repeat=len(shape) - 1) if length % prod(front) == 0]
    fitting = [tile for tile in tiles if all(t <= side for t, side in zip(tile, shape, strict=True))]
    if not fitting:
        edge = round(length ** (1 / len(shape)))
        return tuple(min(edge, side) for side in shape)
    cut = {tile: any(side % t for t, side in zip(tile, shape, strict=True)) for tile in fitting}
    return min(fitting, key=lambda tile: sum(t * t for t in tile) * (1 + cut[tile]))


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
    tokens, axes = args.extra_tokens + prod(args.shape), len(args.shape)
    if tokens > MAX_TOKENS:
        raise ValueError(f"--shape: {tokens:,} tokens are more than this command measures; at most {MAX_TOKENS:,}")
    for option, given, one_for_all in (("--tile", args.tile, False), ("--window", args.window, True)):
        if given and len(given) != axes and not (one_for_all and len(given) == 1):
            raise ValueError(f"{option}: {'x'.join(map(str, given))} has {len(given)} sides, the grid {axes}; give one for each")
    if args.window and any(side % 2 == 0 for side in args.window):
        window = "x".join(map(str, args.window))
        raise ValueError(f"--window: {window} has an even side, which has no middle cell; odd ones are needed")
    if args.png:
        picture_file("--png", args.png)
        if axes < 3 and max(args.shape) > MAX_SIDE:
            raise ValueError(f"--shape: a side of {max(args.shape):,} is more than a picture can show; at most {MAX_SIDE:,}")
        if axes == 3 and prod(args.shape) > MAX_CELLS_3D:
            cells = f"{prod(args.shape):,} cells in space"
            raise ValueError(f"--shape: {cells} are more than a picture can show; at most {MAX_CELLS_3D:,}")
