"""All curves through a grid side by side."""

from math import prod

import pytest

from dilkit import locality_report
from dilkit.orders.comparison import curve_orders, reading, segment_tile


def figures(shape, length, rates=(2, 8), **options):
    return {curve: locality_report(one, length, rates, **options) for curve, one in curve_orders(shape, length).items()}


@pytest.mark.parametrize(
    ("shape", "length", "rates", "chosen", "verdict"),
    [
        ((16, 16), 64, (1,), "morton", "Plain tiles are enough here, morton brings nothing more"),
        ((64, 64), 256, (1,), "hilbert", "Plain tiles are enough as long as segments stay aligned: "),
        ((64, 64), 256, (16,), "hilbert", "Plain tiles are enough as long as segments stay aligned and undilated: "),
        ((64, 64), 256, (16,), "tile", "Plain tiles are enough as long as segments stay aligned and undilated: "),
        ((64, 64), 100, (16,), "hilbert", "Hilbert is the better choice here: "),
        ((64, 64), 256, (1,), "row-major", "Plain tiles are the better choice here, beside row-major: "),
        ((500,), 100, (4,), "hilbert", "In one dimension the sequence's own order is the best there is"),
    ],
)
def test_the_reading_goes_by_the_figures(shape, length, rates, chosen, verdict):
    found = figures(shape, length, rates)
    sentence = reading(found, chosen)
    assert sentence.startswith(verdict)
    if len(shape) > 1:
        assert f"tiles of {'x'.join(map(str, found['tile'].tile or ()))} are " in sentence
        assert f"{found['tile'].shifted.near_48:.3f}" in sentence
        assert sentence.endswith(".")
        assert ". " not in sentence


def test_the_reading_names_the_blocks_of_a_window():
    found = figures((16, 16), 64, window=(5, 5), block=16)
    blocks = [f"{found[curve].active_blocks:.2f} for {found[curve].name}" for curve in ("tile", "hilbert", "row-major")]
    assert f"blocks for the window: {', '.join(blocks)}" in reading(found, "hilbert")


@pytest.mark.parametrize(
    ("shape", "length", "tile"),
    [
        ((64, 64), 256, (16, 16)),
        ((32, 64, 64), 4096, (16, 16, 16)),
        ((64, 64), 100, (10, 10)),  # 4 x 25 would fill the rows, but is too long for it
        ((48, 96), 96, (8, 12)),
        ((5, 7), 1000, (5, 7)),
        ((10, 10), 11, (3, 3)),  # no tile of 11 fits
    ],
)
def test_tiles_hold_a_segment(shape, length, tile):
    assert segment_tile(shape, length) == tile
    assert prod(tile) <= prod(shape)
