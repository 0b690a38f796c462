"""All curves through a grid side by side: their orders, with tiles that hold a segment, and a comparison of their figures."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from math import prod

from dilkit.orders.locality import LocalityReport
from dilkit.orders.token_order import TokenOrder, order

SIMPLEST_FIRST = ("row-major", "snake", "tile", "morton", "hilbert")
SAME_SHARE, SAME_DISTANCE = 0.005, 0.02
"""Shares of neighbours, and distances in cells, that differ by less than this are called equal."""


def curve_orders(
    shape: tuple[int, ...],
    segment_length: int,
    *,
    block: int | None = None,
    tile: tuple[int, ...] | None = None,
    extra_tokens: int = 0,
) -> dict[str, TokenOrder]:
    """Return the orders of a grid by curve; a tile holds one segment, unless `tile` is its shape.

    With `block`, also an order "block-tile", whose tiles hold one block of so many tokens each.

    Example:

        >>> from dilkit import locality_report
        >>> from dilkit.orders.comparison import curve_orders, reading
        >>> orders = curve_orders((64, 64), segment_length=256)
        >>> list(orders), orders["tile"].tile
        (['row-major', 'snake', 'tile', 'morton', 'hilbert'], (16, 16))
        >>> reading({curve: locality_report(one, 256) for curve, one in orders.items()})[:64]
        'Plain tiles are enough as long as segments stay aligned and undi'
    """
    orders = {}
    for curve in SIMPLEST_FIRST:
        one = (tile or segment_tile(shape, segment_length)) if curve == "tile" else None
        orders[curve] = order(shape, curve, tile=one, extra_tokens=extra_tokens)
        if curve == "tile" and block and not tile:
            orders["block-tile"] = order(shape, curve, tile=segment_tile(shape, block), extra_tokens=extra_tokens)
    return orders


def segment_tile(shape: tuple[int, ...], length: int) -> tuple[int, ...]:
    """Return the most compact tile of `length` cells, preferring one that divides the grid; about `length` if none fits."""
    length = min(length, prod(shape))
    sides = ([d for d in range(1, min(side, length) + 1) if length % d == 0] for side in shape)
    fitting = [tile for tile in product(*sides) if prod(tile) == length]
    if not fitting:
        edge = round(length ** (1 / len(shape)))
        return tuple(min(edge, side) for side in shape)

    def spread(tile: tuple[int, ...]) -> int:
        return sum(t * t for t in tile) * (1 + any(side % t for t, side in zip(tile, shape, strict=True)))

    return min(fitting, key=spread)


def reading(reports: Mapping[str, LocalityReport], chosen: str = "hilbert") -> str:
    """Compare plain tiles with the curve `chosen`, or Hilbert where that is "tile", in words, by reports for each curve."""
    if len(reports[chosen].shape) == 1:
        return "In one dimension the sequence's own order is the best there is: every curve is the identity."
    rival = "hilbert" if chosen == "tile" else chosen
    tiles, other, rows = (reports[curve] for curve in ("tile", rival, "row-major"))
    far = [report.kept[-1].mean or 0.0 for report in (tiles, other, rows)]
    aligned = _compared(tiles.aligned.near_48, other.aligned.near_48, SAME_SHARE)
    shifted = _compared(tiles.shifted.near_48, other.shifted.near_48, SAME_SHARE)
    dilated = _compared(far[1], far[0], SAME_DISTANCE)
    compact = {1: "more compact than", 0: "as compact as", -1: "less compact than"}
    distances = f"{far[0]:.2f}, {far[1]:.2f}" + f"; row-major: {far[2]:.2f}" * (rival != "row-major")
    return (
        f"{_verdict(aligned, shifted, dilated, rival)}: {tiles.name.replace('tile', 'tiles of')} are {compact[aligned]} {rival} "
        f"(near 48: {tiles.aligned.near_48:.3f}, {other.aligned.near_48:.3f}); with segments shifted {compact[shifted]} it "
        f"(near 48: {tiles.shifted.near_48:.3f}, {other.shifted.near_48:.3f}); at rate {tiles.kept[-1].rate} their nearest kept "
        f"key is {('as near', 'nearer', 'farther')[dilated]} (cells: {distances}){_blocks(reports, rival)}."
    )


def _blocks(reports: Mapping[str, LocalityReport], rival: str) -> str:
    if not reports[rival].window:
        return ""
    compared = (reports.get("block-tile", reports["tile"]), reports[rival], reports["row-major"])
    listed = dict.fromkeys(f"{report.active_blocks:.2f} for {report.name}" for report in compared)
    return f"; blocks for the window: {', '.join(listed)}"


def _compared(more: float, less: float, same: float) -> int:
    return 0 if abs(more - less) < same else 1 if more > less else -1


def _verdict(aligned: int, shifted: int, dilated: int, rival: str) -> str:
    if aligned < 0:
        return f"{rival.capitalize()} is the better choice here"
    if worse := [word for word, judged in (("aligned", shifted), ("undilated", dilated)) if judged < 0]:
        return f"Plain tiles are enough as long as segments stay {' and '.join(worse)}"
    if aligned or shifted or dilated:
        return f"Plain tiles are the better choice here, beside {rival}"
    return f"Plain tiles are enough here, {rival} brings nothing more"
