"""Metrics of token orders against their definitions."""

import json
from dataclasses import asdict
from itertools import product
from math import dist, prod

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from dilkit import locality_report, order
from dilkit.orders import locality

CURVES = ("row-major", "snake", "tile", "morton", "hilbert")
BLOCKS = [
    ((128, 128), (17, 17), "row-major", None, 16.44),
    ((128, 128), (17, 17), "tile", (8, 16), 7.91),
    ((128, 128), (17, 17), "hilbert", None, 7.55),
    ((16, 32, 32), (7, 7, 7), "row-major", None, 17.19),
    ((16, 32, 32), (7, 7, 7), "tile", (4, 4, 8), 17.19),
]


@pytest.mark.parametrize(("shape", "window", "curve", "tile", "printed"), BLOCKS)
def test_how_many_blocks_a_window_needs(shape, window, curve, tile, printed):
    report = locality_report(order(shape, curve, tile=tile), 1024, (1,), window=window)
    assert report.active_blocks == pytest.approx(printed, abs=0.0051)
    assert (report.blocks, report.blocks_measured) == (prod(shape) // 128, prod(shape) // 128)


def tokens_of(given):
    """(place in the sequence, cell) of every token of the grid."""
    cells = [int(i) - given.extra_tokens for i in given.perm[given.extra_tokens :]]
    return [(given.extra_tokens + d, tuple(int(x) for x in np.unravel_index(cell, given.shape))) for d, cell in enumerate(cells)]


def segments_of(given, length, first):
    """(place in its segment, cell) of the tokens of each segment; a segment ends before token `first`, and every `length` on."""
    found = {}
    for place, cell in tokens_of(given):
        found.setdefault((place + length - first) // length, []).append(((place + length - first) % length, cell))
    return list(found.values())


def weights(axes, k):
    reach = {1: 24, 2: 5, 3: 3}[axes]
    steps = sorted((s for s in product(range(-reach, reach + 1), repeat=axes) if any(s)), key=lambda s: sum(x * x for x in s))
    squares = [sum(x * x for x in s) for s in steps]
    last = squares[k - 1]
    share = (k - sum(s < last for s in squares)) / squares.count(last)
    return {step: 1.0 if square < last else share for step, square in zip(steps, squares, strict=True) if square <= last}


WEIGHTS = {(axes, k): weights(axes, k) for axes in (1, 2, 3) for k in (8, 48)}


def near(segments, shape, k):
    """The share of pairs of neighbours in one segment. Sides of one cell are no dimension."""
    wide = [axis for axis, side in enumerate(shape) if side > 1]
    segment = {tuple(cell[a] for a in wide): s for s, cells in enumerate(segments) for _, cell in cells}
    pairs = same = 0.0
    for cell, step in product(segment, WEIGHTS.get((len(wide), k), ())):
        other = tuple(c + s for c, s in zip(cell, step, strict=True))
        if other in segment:
            pairs += WEIGHTS[len(wide), k][step]
            same += WEIGHTS[len(wide), k][step] * (segment[cell] == segment[other])
    return same / pairs if pairs else 1.0


def diameter(segments):
    longest = max(map(len, segments))
    boxes = [np.ptp([cell for _, cell in cells], 0) for cells in segments if len(cells) == longest]
    return float(np.mean([np.sqrt((box**2).sum()) for box in boxes]))


def distances(segments, rate, offset):
    found = []
    for cells in segments:
        kept = [cell for place, cell in cells if place % rate == offset]
        found += [min(dist(cell, other) for other in kept) for _, cell in cells if kept]
    return found


def active(given, window, block):
    needed = {}
    everything = tokens_of(given)
    for (place, cell), (there, other) in product(everything, everything):
        if all(abs(a - b) <= side // 2 for a, b, side in zip(cell, other, window, strict=True)):
            needed.setdefault(place // block, set()).add(there // block)
    return sum(map(len, needed.values())) / len(needed)


def shapes():
    sides = {1: 40, 2: 8, 3: 4}
    return st.integers(1, 3).flatmap(lambda axes: st.tuples(*[st.integers(1, sides[axes])] * axes))


@st.composite
def orders(draw):
    shape, curve = draw(shapes()), draw(st.sampled_from(CURVES))
    tile = tuple(draw(st.integers(1, side)) for side in shape) if curve == "tile" else None
    return order(shape, curve, tile=tile, extra_tokens=draw(st.sampled_from([0, 0, 1, 5])))


@settings(max_examples=25, deadline=None)
@given(orders(), st.integers(1, 70), st.lists(st.integers(1, 20), min_size=1, max_size=3), st.data())
def test_every_metric_is_its_definition(given, length, rates, data):
    window = tuple(data.draw(st.sampled_from([1, 3, 5])) for _ in given.shape)
    block = data.draw(st.integers(1, 9))
    report = locality_report(given, length, rates, window=window, block=block)
    length = min(length, len(given))
    aligned, half = segments_of(given, length, length), segments_of(given, length, length // 2 or length)
    assert report.segments == report.segments_measured == len(aligned)
    for found, segments in ((report.aligned, aligned), (report.shifted, half)):
        assert found.near_8 == pytest.approx(near(segments, given.shape, 8))
        assert found.near_48 == pytest.approx(near(segments, given.shape, 48))
        assert found.diameter == pytest.approx(diameter(segments))
    for rate, kept in zip(rates, report.kept, strict=True):
        expected = distances(aligned, rate, 0)
        assert kept.rate == rate
        assert kept.mean == (pytest.approx(np.mean(expected)) if expected else None)
        assert kept.max == (pytest.approx(max(expected)) if expected else None)
        if rate <= 16:
            means = [np.mean(found) for found in (distances(aligned, rate, o) for o in range(rate)) if found]
            assert kept.mean_over_offsets == (pytest.approx(np.mean(means)) if means else None)
    assert report.active_blocks == pytest.approx(active(given, window, block))


def test_a_report_is_plain_data():
    report = locality_report(order((8, 12), "tile", tile=(4, 4), extra_tokens=1), 24, (2, 3), window=3, block=16)
    found = json.loads(json.dumps(asdict(report)))
    assert found["shape"] == [8, 12]
    assert (found["curve"], found["tile"], found["window"], found["extra_tokens"]) == ("tile", [4, 4], [3, 3], 1)
    assert (found["segment_length"], found["segments"], found["blocks"]) == (24, 5, 7)
    assert [kept["rate"] for kept in found["kept"]] == [2, 3]
    with pytest.raises(AttributeError):
        report.curve = "hilbert"


def test_what_takes_too_long_is_sampled(monkeypatch):
    whole = locality_report(order((64, 64), "morton"), 64, (4,), window=5)
    assert (whole.segments_measured, whole.blocks_measured) == (64, 32)
    monkeypatch.setattr(locality, "WORK", 20_000)
    some = locality_report(order((64, 64), "morton"), 64, (4,), window=5)
    assert (some.segments_measured, some.blocks_measured) == (26, 6)
    assert (some.segments, some.blocks, some.aligned, some.shifted) == (64, 32, whole.aligned, whole.shifted)
    assert some.kept[0].mean == pytest.approx(whole.kept[0].mean)  # all segments are alike
    assert some.active_blocks == pytest.approx(whole.active_blocks, rel=0.2)
    assert some == locality_report(order((64, 64), "morton"), 64, (4,), window=5)
    monkeypatch.setattr(locality, "WORK", 1)
    assert locality_report(order((64, 64), "morton"), 64, (4,)).segments_measured == 1
