"""Figures about a token order: the compactness of segments, the distance of kept keys, the blocks that a window touches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dilkit.checks import integer
from dilkit.orders import _locality
from dilkit.orders.token_order import TokenOrder, check_order
from dilkit.pattern.checks import positive_integers

WORK = 2**29
"""The most cells that distances, and active blocks, may each visit. Beyond that a random sample of the groups is measured."""
_OFFSETS = 16
_REACH = {1: 24, 2: 4, 3: 3}
"""Largest distance, in cells, of the 48th neighbour on a line, in a plane and in space."""

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Compactness:
    """The compactness of segments in space."""

    near_8: float
    near_48: float
    """The share of the 8, and of the 48, nearest neighbours that are in the same segment."""
    diameter: float
    """The diagonal of a segment's bounding box, in cells: `sqrt(sum_a (max_a - min_a)^2)`; mean over the longest segments."""


@dataclass(frozen=True)
class KeptDistance:
    """The distance of a token from the nearest key that its segment keeps, in cells. None where nothing is kept."""

    rate: int
    mean: float | None
    max: float | None
    """`mean` and `max` are those of a head of offset 0."""
    mean_over_offsets: float | None
    """The mean over the heads' offsets 0 .. rate - 1; 16 of them, evenly spaced, where there are more."""


@dataclass(frozen=True)
class LocalityReport:
    """The result of `locality_report`. `dataclasses.asdict(report)` can be written as JSON.

    Example:

        >>> from dilkit import LocalityReport, locality_report, order
        >>> report = locality_report(order((16, 16)), segment_length=64, dilation_rates=[1, 2])
        >>> isinstance(report, LocalityReport), report.shape, report.segments
        (True, (16, 16), 4)
        >>> [kept.rate for kept in report.kept], report.kept[0].mean
        ([1, 2], 0.0)
    """

    shape: tuple[int, ...]
    curve: str
    tile: tuple[int, ...] | None
    extra_tokens: int
    segment_length: int
    segments: int
    """Segments that hold cells of the grid."""
    aligned: Compactness
    shifted: Compactness
    """The same with all segments displaced by half a segment, as for a layer or a window that starts elsewhere."""
    kept: tuple[KeptDistance, ...]
    """One for each dilation rate."""
    window: tuple[int, ...] | None
    block: int
    active_blocks: float | None
    """The number of key blocks that hold a key in the window of any query of a query block; mean over the query blocks."""
    blocks: int
    """Query blocks that hold cells; 0 without a window."""
    segments_measured: int
    """Segments that the distances come from: all of them, or a random sample with a fixed seed where they would take too long."""
    blocks_measured: int
    """Query blocks that `active_blocks` comes from, likewise."""

    @property
    def name(self) -> str:
        """The curve, with its tile."""
        return f"{self.curve} {'x'.join(map(str, self.tile))}" if self.tile else self.curve


@dataclass(frozen=True)
class _CellGroups:
    """The sequence in groups: group g has the cells `starts[g]` to `starts[g + 1]` of the curve, without the extra tokens."""

    starts: Ints
    lows: Ints
    sizes: Ints
    """`(groups, 3)`: the first cell and the sides of their bounding boxes."""

    @property
    def lengths(self) -> Ints:
        return np.diff(self.starts)


def locality_report(
    order: TokenOrder,
    segment_length: int,
    dilation_rates: Sequence[int] = (1, 2, 4, 8, 16),
    *,
    window: int | Sequence[int] | None = None,
    block: int = 128,
) -> LocalityReport:
    """Measure how compact the segments of `order` are, how evenly a stride covers them, and how many blocks a window needs.

        near_k     = share of the pairs of cells (x, y), y one of the k nearest to x, that share a segment
        diameter   = mean over segments of sqrt(sum over axes of (max x - min x)^2)
        kept.mean  = mean over x of min |x - y|, y kept in the segment of x: place of y in it % rate == offset
        active     = mean over query blocks of the number of blocks with a y in the window of any x of the query block

    Lengths and distances are in cells.

    - `segment_length`: segments are cut as `dilated_attention` cuts them, every `segment_length` tokens, extra tokens included.
      Only the cells are measured.
    - `dilation_rates`: the rates to measure the distance to a kept key for.
    - `window`: one odd length for all axes of the grid, or one for each. The report then has `active_blocks` for an exact window
      of that many cells around each query, cut off at the borders, with blocks of `block` tokens.

    The k nearest neighbours are the k shortest steps in a grid without borders, if they end inside this one; steps of equal
    length that are too many count in part. An axis of one cell is no dimension. Points have no grid: the report then measures the
    places that they came from.

    Measuring takes about a second for a million cells. Neighbours and diameters are exact. Distances and active blocks are exact
    too, unless they would take much longer; then they come from a sample (`segments_measured`, `blocks_measured`).

    Raises TypeError or ValueError naming the argument, its value and the limit.

    Example, segments of 64 tokens of an image, row by row and along the Hilbert curve:

        >>> from dilkit import locality_report, order
        >>> rows = locality_report(order((16, 16), "row-major"), segment_length=64)
        >>> hilbert = locality_report(order((16, 16)), segment_length=64)
        >>> round(rows.aligned.diameter, 2), round(hilbert.aligned.diameter, 2)
        (15.3, 9.9)
        >>> hilbert.aligned.near_8 > rows.aligned.near_8
        True
    """
    check_order(order)
    segment_length = integer("segment_length", segment_length, at_least=1)
    length = min(segment_length, len(order))
    rates, block = positive_integers("dilation_rates", dilation_rates), integer("block", block, at_least=1)
    sides = None if window is None else _window(window, len(order.shape))
    groups, half = _groups(order, length, length), _groups(order, length, length // 2 or length)
    distances, segments_measured = _kept_distances(order, groups, length, rates)
    active, blocks, blocks_measured = (None, 0, 0) if sides is None else _active(order, sides, min(block, len(order)))
    return LocalityReport(
        shape=order.shape,
        curve=order.curve,
        tile=order.tile,
        extra_tokens=order.extra_tokens,
        segment_length=segment_length,
        segments=len(groups.lengths),
        aligned=_compactness(order, groups),
        shifted=_compactness(order, half),
        kept=distances,
        window=sides,
        block=block,
        active_blocks=active,
        blocks=blocks,
        segments_measured=segments_measured,
        blocks_measured=blocks_measured,
    )


def _window(window: int | Sequence[int], axes: int) -> tuple[int, ...]:
    sides = positive_integers("window", window if isinstance(window, Sequence) else (window,) * axes)
    if len(sides) != axes:
        raise ValueError(f"window={window!r} has {len(sides)} sides; the grid has {axes}: give one for each, or one for all")
    if even := [side for side in sides if side % 2 == 0]:
        raise ValueError(
            f"window={window!r} has the even side {even[0]}, which has no middle cell; take {even[0] - 1} or {even[0] + 1}"
        )
    return sides


def _space(order: TokenOrder) -> tuple[int, int, int]:
    depth, rows, columns = (1, 1, 1, *order.shape)[-3:]
    return depth, rows, columns


def _groups(order: TokenOrder, length: int, first: int) -> _CellGroups:
    ends = np.arange(first, len(order), length, dtype=np.int64) - order.extra_tokens
    starts = np.concatenate([[0], ends[ends > 0], [len(order) - order.extra_tokens]])
    cells = order.perm[order.extra_tokens :] - order.extra_tokens
    lows, sizes = (np.empty((len(starts) - 1, 3), np.int64) for _ in range(2))
    for axis, side in enumerate(space := _space(order)):
        along = cells // prod(space[axis + 1 :]) % side
        lows[:, axis] = np.minimum.reduceat(along, starts[:-1])
        sizes[:, axis] = np.maximum.reduceat(along, starts[:-1]) - lows[:, axis] + 1
    return _CellGroups(starts, lows, sizes)


def _compactness(order: TokenOrder, groups: _CellGroups) -> Compactness:
    ids = np.repeat(np.arange(len(groups.lengths), dtype=np.int32), groups.lengths)
    near_8, near_48 = _neighbours_kept(ids[order.rank[order.extra_tokens :] - order.extra_tokens].reshape(order.shape).squeeze())
    longest = groups.lengths == groups.lengths.max()
    return Compactness(near_8, near_48, float(np.sqrt(((groups.sizes[longest] - 1) ** 2).sum(1)).mean()))


def _neighbours_kept(segment_of: NDArray[np.int32]) -> tuple[float, float]:
    pairs, same = np.zeros(2), np.zeros(2)
    for step, *weights in _neighbours(segment_of.ndim) if segment_of.ndim else ():
        spans = [(max(0, -s), min(n, n - s)) for s, n in zip(step, segment_of.shape, strict=True)]
        if all(start < stop for start, stop in spans):
            here = segment_of[tuple(slice(*span) for span in spans)]
            there = segment_of[tuple(slice(start + s, stop + s) for (start, stop), s in zip(spans, step, strict=True))]
            pairs += np.multiply(weights, here.size)
            same += np.multiply(weights, np.count_nonzero(here == there))
    near_8, near_48 = np.divide(same, pairs, out=np.ones(2), where=pairs > 0)
    return float(near_8), float(near_48)


def _neighbours(axes: int) -> Iterator[tuple[tuple[int, ...], float, float]]:
    """Return steps with their weights among the 8 and the 48 nearest, one of two opposite steps, which find the same pairs."""
    reach = _REACH[axes]
    steps = [step for step in product(range(-reach, reach + 1), repeat=axes) if any(step)]
    squares = [sum(s * s for s in step) for step in steps]
    for step, square in zip(steps, squares, strict=True):
        nearer, equal = sum(other < square for other in squares), squares.count(square)
        if nearer < 48 and step > (0,) * axes:
            yield step, min(max((8 - nearer) / equal, 0.0), 1.0), min((48 - nearer) / equal, 1.0)


def _kept_distances(
    order: TokenOrder, groups: _CellGroups, length: int, rates: tuple[int, ...]
) -> tuple[tuple[KeptDistance, ...], int]:
    offsets = [range(0, rate, -(-rate // _OFFSETS)) for rate in rates]
    chosen = _sampled(3 * groups.sizes.prod(1) * sum(map(len, offsets)))  # one pass over a box for each axis
    cells, starts = _cells(order, groups, chosen)
    places = np.where(chosen == 0, order.extra_tokens % length, 0)
    boxes = groups.lows[chosen], groups.sizes[chosen]
    distances = []
    for rate, some in zip(rates, offsets, strict=True):
        sums = [_locality.nearest_kept(cells, starts, places, *boxes, min(rate, length), o) for o in some if o < length]
        total, largest, tokens = sums[0]
        means = [total / tokens for total, _, tokens in sums if tokens]
        mean, most = (total / tokens, largest) if tokens else (None, None)
        distances.append(KeptDistance(rate, mean, most, sum(means) / len(means) if means else None))
    return tuple(distances), len(chosen)


def _active(order: TokenOrder, window: tuple[int, ...], block: int) -> tuple[float, int, int]:
    """Return the mean number of active key blocks of a query block, and the numbers of query blocks and of those averaged."""
    groups = _groups(order, block, block)
    sides = np.array((1, 1, 1, *window)[-3:], np.int64)
    chosen = _sampled(groups.lengths * int(np.minimum(sides, _space(order)).prod()))
    block_of = (order.rank[order.extra_tokens :] // block).astype(np.int64).reshape(_space(order))
    active = _locality.active_blocks(*_cells(order, groups, chosen), block_of, sides // 2, len(order) // block + 1)
    return active / len(chosen), len(groups.lengths), len(chosen)


def _sampled(costs: Ints) -> Ints:
    if costs.sum() <= WORK:
        return np.arange(len(costs))
    shuffled = np.random.default_rng(0).permutation(len(costs))
    return np.sort(shuffled[: max(1, int(np.searchsorted(np.cumsum(costs[shuffled]), WORK)))])


def _cells(order: TokenOrder, groups: _CellGroups, chosen: Ints) -> tuple[Ints, Ints]:
    lengths = groups.lengths[chosen]
    starts = np.concatenate([[0], np.cumsum(lengths)])
    places: Any = np.arange(starts[-1]) + np.repeat(groups.starts[chosen] - starts[:-1], lengths)
    cells = np.unravel_index(order.perm[order.extra_tokens :][places] - order.extra_tokens, _space(order))
    return np.stack(cells, 1).astype(np.int64), starts
