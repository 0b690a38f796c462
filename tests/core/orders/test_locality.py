"""What a token order does to segments, strides and blocks: known figures, and each metric beside its definition, cell by cell."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import product
from math import dist, prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dilkit import LocalityReport, TokenOrder, locality_report, order
from dilkit.orders import locality

CURVES = ("row-major", "snake", "tile", "morton", "hilbert")
SQUARE, CUBOID = (256, 256), (32, 64, 64)


def known(shape: tuple[int, ...], curve: str, length: int, **options: Any) -> LocalityReport:
    return locality_report(order(shape, curve, **options), length)


# Known figures: (near_8, near_48, diameter) of segments where they are, and displaced by half

COMPACT = [
    ((SQUARE, "row-major", 1024, None), (0.815, 0.587, 255), (0.812, 0.582, 255)),
    ((SQUARE, "morton", 1024, None), (0.959, 0.910, 43.8), (0.936, 0.860, 81.7)),
    ((SQUARE, "hilbert", 1024, None), (0.959, 0.910, 43.8), (0.951, 0.891, 53.5)),
    ((SQUARE, "tile", 1024, (32, 32)), (0.959, 0.910, 43.8), (0.936, 0.860, 91.0)),
    ((SQUARE, "hilbert", 1500, None), (0.955, 0.902, 66.8), None),
    ((SQUARE, "tile", 1500, (30, 50)), (0.943, 0.874, 128), None),
    ((CUBOID, "row-major", 1024, None), (0.572, 0.349, 64.8), (0.567, 0.343, 70.7)),
    ((CUBOID, "morton", 4096, None), (0.947, 0.901, 26.0), (0.921, 0.853, 43.3)),
    ((CUBOID, "hilbert", 4096, None), (0.947, 0.901, 26.0), (0.937, 0.882, 31.2)),
    ((CUBOID, "tile", 4096, (16, 16, 16)), (0.947, 0.901, 26.0), (0.921, 0.854, 45.9)),
]


@pytest.mark.parametrize(("grid", "aligned", "shifted"), COMPACT, ids=[f"{g[0]}-{g[1]}-{g[2]}" for g, *_ in COMPACT])
def test_how_compact_segments_are(grid: Any, aligned: tuple[float, ...], shifted: tuple[float, ...] | None) -> None:
    shape, curve, length, tile = grid
    report = known(shape, curve, length, tile=tile)
    for found, printed in ((report.aligned, aligned), (report.shifted, shifted)):
        if printed:
            assert (found.near_8, found.near_48) == pytest.approx(printed[:2], abs=0.0006)
            assert found.diameter == pytest.approx(printed[2], abs=0.6 if printed[2] >= 100 else 0.06)


DISTANCES = {
    "row-major": [(0.50, 1), (1.01, 3), (2.05, 7), (4.22, 15)],
    "tile": [(0.50, 1), (1.03, 3), (2.19, 7), (4.88, 15)],
    "morton": [(0.50, 1), (0.85, 1.4), (1.29, 3.2), (1.64, 4.2)],
    "hilbert": [(0.50, 1), (0.85, 1.4), (1.10, 2.2), (1.77, 4.0)],
}


@pytest.mark.parametrize("curve", DISTANCES)
def test_how_far_the_nearest_kept_key_is(curve: str) -> None:
    first, *kept = known(SQUARE, curve, 4096, tile=(64, 64) if curve == "tile" else None).kept
    assert (first.rate, first.mean, first.max, first.mean_over_offsets) == (1, 0.0, 0.0, 0.0)
    assert [one.rate for one in kept] == [2, 4, 8, 16]
    for one, (mean, largest) in zip(kept, DISTANCES[curve], strict=True):
        assert one.mean == pytest.approx(mean, abs=0.0051)
        assert one.max == pytest.approx(largest, abs=0.051)


BLOCKS = [
    ((128, 128), (17, 17), "row-major", None, 16.44),
    ((128, 128), (17, 17), "tile", (8, 16), 7.91),
    ((128, 128), (17, 17), "hilbert", None, 7.55),
    ((16, 32, 32), (7, 7, 7), "row-major", None, 17.19),
    ((16, 32, 32), (7, 7, 7), "tile", (4, 4, 8), 17.19),
]


@pytest.mark.parametrize(("shape", "window", "curve", "tile", "printed"), BLOCKS)
def test_how_many_blocks_a_window_needs(shape: Any, window: Any, curve: str, tile: Any, printed: float) -> None:
    report = locality_report(order(shape, curve, tile=tile), 1024, (1,), window=window)
    assert report.active_blocks == pytest.approx(printed, abs=0.0051)
    assert (report.blocks, report.blocks_measured) == (prod(shape) // 128, prod(shape) // 128)


# Every metric from its definition, cell by cell


def tokens_of(given: TokenOrder) -> list[tuple[int, tuple[int, ...]]]:
    """(place in the sequence, cell) of every token of the grid."""
    cells = [int(i) - given.extra_tokens for i in given.perm[given.extra_tokens :]]
    return [(given.extra_tokens + d, tuple(int(x) for x in np.unravel_index(cell, given.shape))) for d, cell in enumerate(cells)]


def segments_of(given: TokenOrder, length: int, first: int) -> list[list[tuple[int, tuple[int, ...]]]]:
    """(place in its segment, cell) of the tokens of each segment; a segment ends before token `first`, and every `length` on."""
    found: dict[int, list[Any]] = {}
    for place, cell in tokens_of(given):
        found.setdefault((place + length - first) // length, []).append(((place + length - first) % length, cell))
    return list(found.values())


def weights(axes: int, k: int) -> dict[tuple[int, ...], float]:
    """The k shortest steps; those of the last length share what is left of k."""
    reach = {1: 24, 2: 5, 3: 3}[axes]
    steps = sorted((s for s in product(range(-reach, reach + 1), repeat=axes) if any(s)), key=lambda s: sum(x * x for x in s))
    squares = [sum(x * x for x in s) for s in steps]
    last = squares[k - 1]
    share = (k - sum(s < last for s in squares)) / squares.count(last)
    return {step: 1.0 if square < last else share for step, square in zip(steps, squares, strict=True) if square <= last}


WEIGHTS = {(axes, k): weights(axes, k) for axes in (1, 2, 3) for k in (8, 48)}


def near(segments: list[list[Any]], shape: tuple[int, ...], k: int) -> float:
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


def diameter(segments: list[list[Any]]) -> float:
    longest = max(map(len, segments))
    boxes = [np.ptp([cell for _, cell in cells], 0) for cells in segments if len(cells) == longest]
    return float(np.mean([np.sqrt((box**2).sum()) for box in boxes]))


def distances(segments: list[list[Any]], rate: int, offset: int) -> list[float]:
    found = []
    for cells in segments:
        kept = [cell for place, cell in cells if place % rate == offset]
        found += [min(dist(cell, other) for other in kept) for _, cell in cells if kept]
    return found


def active(given: TokenOrder, window: tuple[int, ...], block: int) -> float:
    needed: dict[int, set[int]] = {}
    everything = tokens_of(given)
    for (place, cell), (there, other) in product(everything, everything):
        if all(abs(a - b) <= side // 2 for a, b, side in zip(cell, other, window, strict=True)):
            needed.setdefault(place // block, set()).add(there // block)
    return sum(map(len, needed.values())) / len(needed)


def shapes() -> st.SearchStrategy[tuple[int, ...]]:
    sides = {1: 40, 2: 8, 3: 4}
    return st.integers(1, 3).flatmap(lambda axes: st.tuples(*[st.integers(1, sides[axes])] * axes))


@st.composite
def orders(draw: st.DrawFn) -> TokenOrder:
    shape, curve = draw(shapes()), draw(st.sampled_from(CURVES))
    tile = tuple(draw(st.integers(1, side)) for side in shape) if curve == "tile" else None
    return order(shape, curve, tile=tile, extra_tokens=draw(st.sampled_from([0, 0, 1, 5])))


@settings(max_examples=25, deadline=None)
@given(orders(), st.integers(1, 70), st.lists(st.integers(1, 20), min_size=1, max_size=3), st.data())
def test_every_metric_is_its_definition(given: TokenOrder, length: int, rates: list[int], data: st.DataObject) -> None:
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


def test_the_nearest_neighbours() -> None:
    assert {step[0]: weight for step, weight in WEIGHTS[1, 8].items()} == dict.fromkeys((-4, -3, -2, -1, 1, 2, 3, 4), 1.0)
    assert WEIGHTS[2, 8] == {s: 1.0 for s in product((-1, 0, 1), repeat=2) if any(s)}
    assert len(WEIGHTS[2, 48]) == 48
    assert sorted(WEIGHTS[3, 8].values()) == [2 / 12] * 12 + [1.0] * 6  # faces, and edges for what is left
    assert sorted(WEIGHTS[3, 48].values()) == [16 / 24] * 24 + [1.0] * 32


# What the report is


def test_a_report_is_plain_data() -> None:
    report = locality_report(order((8, 12), "tile", tile=(4, 4), extra_tokens=1), 24, (2, 3), window=3, block=16)
    found = json.loads(json.dumps(asdict(report)))
    assert found["shape"] == [8, 12]
    assert (found["curve"], found["tile"], found["window"], found["extra_tokens"]) == ("tile", [4, 4], [3, 3], 1)
    assert (found["segment_length"], found["segments"], found["blocks"]) == (24, 5, 7)
    assert [kept["rate"] for kept in found["kept"]] == [2, 3]
    with pytest.raises(AttributeError):
        report.curve = "hilbert"  # type: ignore[misc]


def test_one_cell() -> None:
    report = locality_report(order((1, 1)), 5, window=1)
    assert (report.aligned.near_8, report.aligned.diameter, report.active_blocks) == (1.0, 0.0, 1.0)


def test_a_segment_that_keeps_nothing_but_an_extra_token_has_no_distance() -> None:
    (kept,) = locality_report(order((3, 3), extra_tokens=1), 10, (10,)).kept
    assert (kept.mean, kept.max) == (None, None)
    assert kept.mean_over_offsets is not None


def test_what_takes_too_long_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
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
