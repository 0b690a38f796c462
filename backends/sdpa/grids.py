"""The forms of a pattern as grids of equal small attention problems, each a strided view of queries and of keys.

    query t of problem i:  row(i) + t * row_step,                t = 0 .. rows - 1
    key u of problem i:    row(i) + key_shift + u * row_step,    u = 0 .. keys - 1
    row(i)  = row + sum_a i_a * axes[a].row                      head(i) = head + sum_a i_a * axes[a].head     (kv_head alike)

An index `i` over the axes names one small problem, of one query head and one key/value head. The dilation rate is the row step;
segments, blocks of a window and offsets are axes. Segments are one problem a segment and head; all others are tiles of the
query-key matrix (`score_tiles`). A band of rate r is one of rate 1 among the tokens of each residue modulo r.

Grids are made of positions. Queries that are others than the keys are those at some of the positions, where tiles are cut off.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise, product
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from dilkit.backends.sdpa.score_tiles import Interval, Seen, Tile, band_tiles, inside, outside, run_tiles, visible
from dilkit.pattern import Pattern
from dilkit.pattern.lowering import Band, Form, Global, Runs, Segments, lower
from dilkit.pattern.runs import UNBOUNDED

if TYPE_CHECKING:
    from dilkit.problem import Problem

FORMS = frozenset({Segments.name, Band.name, Global.name, Runs.name})


class GridAxis(NamedTuple):
    """`size` problems side by side, and how far one step moves in rows, query heads, key/value heads and batch elements."""

    size: int
    row: int = 0
    head: int = 0
    kv_head: int = 0
    batch: int = 0


Queries = tuple[int, int] | None
"""Number of queries and position of the first, where query i is not key i."""


@dataclass(frozen=True)
class ProblemGrid:
    """Equal small problems of `rows` queries and `keys` keys; `row`, `head`, `kv_head` are where the first problem begins."""

    rows: int
    row_step: int
    row: int
    head: int
    kv_head: int
    axes: tuple[GridAxis, ...]
    keys: int
    key_shift: int = 0
    seen: Seen = "all"

    @property
    def problems(self) -> int:
        return prod(axis.size for axis in self.axes)

    @property
    def pairs(self) -> int:
        """The pairs that are seen, in all problems."""
        return self.problems * (self.rows * self.keys if self.seen == "all" else self.rows * (self.rows + 1) // 2)


def queries_of(problem: Problem) -> Queries:
    """Return how many queries there are and the position of the first; None where query i is key i."""
    return None if problem.queries is None else (problem.queries, problem.query_offset or 0)


@lru_cache(maxsize=256)
def form_grids(
    pattern: Pattern, seq: int, heads: int, kv_heads: int, is_causal: bool = False, queries: Queries = None
) -> tuple[tuple[ProblemGrid, ...], ...]:
    """Return the grids of every form: each pair that a form shows is in exactly one problem of one grid.

    The pattern is one that `overlap_refusals` lets through; `queries` as of `queries_of`. Raises TypeError for a form of no
    views.
    """
    count, offset = queries or (seq, 0)
    by_form, rows = [], (offset, offset + count)
    for form in lower(pattern, max(seq, rows[1]) - min(offset, 0), heads, kv_heads):
        by_distance = pattern.branches[form.branch].goes_by_distance
        positions = rows if by_distance else (max(offset, 0), max(*rows, 0))
        grids = _grids(form, pattern, positions, (0, seq), heads // kv_heads, is_causal)
        by_form.append(tuple(replace(grid, row=grid.row - offset, key_shift=grid.key_shift + offset) for grid in grids))
    return tuple(by_form)


def _grids(form: Form, pattern: Pattern, rows: Interval, keys: Interval, group: int, is_causal: bool) -> Iterator[ProblemGrid]:
    if rows[0] >= rows[1]:
        return
    if isinstance(form, Segments):
        yield from segment_grids(form, rows, keys, group, is_causal)
    elif isinstance(form, Global):
        tiles = [tile for seeing in inside(form.rows, rows) for tile in visible(seeing, keys, is_causal)]
        for read, others in product(inside(form.columns, keys), outside(form.rows, rows)):
            tiles += visible(others, read, is_causal)
        yield from _tile_grids(tiles, 0, 1, 1, form.heads, group)
    elif isinstance(form, Band):
        yield from _band_grids(form, rows, keys, is_causal, group)
    elif isinstance(form, Runs):
        yield from _tile_grids(run_tiles(form, rows, keys, is_causal), 0, 1, 1, form.heads, group)
    else:
        call = pattern.branches[form.branch].call()
        raise TypeError(f"branch {call} is lowered to {form.name}; backend sdpa computes segments, band, global and runs only")


def _band_grids(band: Band, rows: Interval, keys: Interval, is_causal: bool, group: int) -> Iterator[ProblemGrid]:
    """Yield the grids of a band: one for each residue class modulo its rate, among the tokens that take part."""
    begin = -(-band.first // band.rate)
    back, ahead = (min(reach, UNBOUNDED) // band.rate + 1 for reach in (band.back, band.ahead))
    for (row, stop), (key, end) in product(outside(band.without_rows, rows), outside(band.without_columns, keys)):
        if is_causal:
            row, end = max(row, key), min(end, stop)
        if row >= stop or key >= end:
            continue
        low, tokens = min(row, key), max(stop, end) - min(row, key)
        rate = min(band.rate, max(tokens, 1))
        inner = residue_runs(0, rate, rate, (row - low, stop - low), (key - low, end - low))
        for first, residues, own_rows, own_keys in inner:
            tiles = band_tiles(own_rows, own_keys, begin, back, back if is_causal else ahead, is_causal)
            yield from _tile_grids(tiles, low + first, residues, rate, band.heads, group)


def _tile_grids(
    tiles: Iterable[Tile], first: int, residues: int, rate: int, served: Interval, group: int
) -> Iterator[ProblemGrid]:
    """Yield the grids of a tile in the residue classes from `first` on, for every query head of `served`."""
    for tile in tiles:
        for kv_head, kv_heads, inner, inners in rectangles(*served, group):
            blocks, each = GridAxis(tile.number, row=tile.step * rate), GridAxis(residues, row=1)
            axes = (blocks, each, GridAxis(kv_heads, 0, group, 1), GridAxis(inners, head=1))
            yield _tile_grid(tile, rate, rate, (first, kv_head * group + inner, kv_head), axes)


def _tile_grid(tile: Tile, rate: int, row_step: int, begin: tuple[int, int, int], axes: tuple[GridAxis, ...]) -> ProblemGrid:
    """Make the grid of a tile of tokens `rate` apart; `begin`: its first row, query head and key/value head."""
    axes, key_shift = tuple(axis for axis in axes if axis.size > 1), (tile.key - tile.query) * rate
    row = begin[0] + tile.query * rate
    return ProblemGrid(tile.rows, row_step, row, *begin[1:], axes, tile.keys, key_shift, tile.seen)


def segment_grids(form: Segments, rows: Interval, keys: Interval, group: int, is_causal: bool) -> Iterator[ProblemGrid]:
    """Return grids that cover the segments of a form once, with `group` query heads to a key/value head."""
    seq = max(rows[1], keys[1])
    length, rate = min(form.length, seq), form.rate
    spans = _segments(length, rows, keys)
    for kv_first, kv_count, u_first, u_count in rectangles(*form.heads, group):
        heads = range(kv_first * group + u_first, (kv_first + kv_count) * group, group)
        offsets = list(map(form.offset_of, heads))
        for (first, (equals, equal), (ascends, ascending)), span in product(offset_blocks(offsets), spans):
            start, segments, own_rows, own_keys = span
            of_heads = GridAxis(equals, 0, equal * group, equal), GridAxis(u_count, head=1)
            for skip, count, kept_rows, kept_keys in residue_runs(offsets[first], ascends, rate, own_rows, own_keys):
                axes = segments, of_heads[0], GridAxis(count, 1, ascending * group, ascending), of_heads[1]
                passed = skip * ascending
                begin = start + offsets[first] + skip, heads[first] + passed * group, kv_first + first + passed
                for tile in visible(kept_rows, kept_keys, is_causal):
                    yield _tile_grid(tile, rate, min(rate, seq), begin, axes)  # no step is made beyond the sequence, as of 2**62


def _segments(length: int, rows: Interval, keys: Interval) -> list[tuple[int, GridAxis, Interval, Interval]]:
    """Return the segments that have queries and keys, whole ones together: start, number, and where both lie in each."""
    (row, stop), (key, end) = rows, keys
    first, last = max(row, key), min(stop, end)
    whole, segments = range(-(-first // length), last // length), []
    if whole:
        segments.append((whole.start * length, GridAxis(len(whole), row=length), (0, length), (0, length)))
    ends = first // length, (last - 1) // length
    for start in (number * length for number in sorted({*ends}) if number not in whole and ends[0] <= ends[1]):
        own_rows, own_keys = ((max(low - start, 0), min(high - start, length)) for low, high in (rows, keys))
        segments.append((start, GridAxis(1), own_rows, own_keys))
    return segments


def offset_blocks(offsets: Sequence[int]) -> Iterator[tuple[int, tuple[int, int], tuple[int, int]]]:
    """Cut `offsets` into blocks with two axes `(size, step)`: offsets are equal along one axis and ascend along the other.

        offsets[first + i * equal_step + j * ascending_step] == offsets[first] + j

    >>> list(offset_blocks([0, 1, 2, 0, 1, 2, 0]))
    [(0, (2, 3), (3, 1)), (6, (1, 1), (1, 1))]
    >>> list(offset_blocks([0, 0, 1, 1]))
    [(0, (2, 1), (2, 2))]
    """
    first = 0
    while first < len(offsets):
        ascending, equal = (_as_far_as(offsets, first, step) for step in (1, 0))
        size, step = (ascending, 1) if ascending >= equal else (equal, 0)
        chunks = 1
        while (at := first + chunks * size) + size <= len(offsets) and all(
            offsets[at + i] == offsets[first] + (i if step else chunks) for i in range(size)
        ):
            chunks += 1
        yield (first, (chunks, size), (size, 1)) if step else (first, (size, 1), (chunks, size))
        first += chunks * size


def _as_far_as(offsets: Sequence[int], first: int, step: int) -> int:
    count = 1
    while first + count < len(offsets) and offsets[first + count] == offsets[first] + count * step:
        count += 1
    return count


def rectangles(start: int, stop: int, period: int) -> Iterator[tuple[int, int, int, int]]:
    """Cut `start .. stop - 1` into up to three blocks (outer, outers, inner, inners) of `outer * period + inner`."""
    outer, inner = divmod(start, period)
    if inner and start < stop:
        end = min(stop, (outer + 1) * period)
        yield outer, 1, inner, end - start
        start = end
    whole, rest = divmod(stop - start, period)
    if whole:
        yield start // period, whole, 0, period
    if rest:
        yield start // period + whole, 1, 0, rest


def residue_runs(
    first: int, count: int, rate: int, rows: Interval, keys: Interval
) -> Iterator[tuple[int, int, Interval, Interval]]:
    """Yield residues modulo `rate` whose tokens lie alike in two intervals: skipped, their number, the intervals in tokens."""
    cuts = sorted({0, count, *(bound % rate - first for bound in (*rows, *keys))})
    for skip, end in pairwise(cut for cut in cuts if 0 <= cut <= count):
        own_rows, own_keys = ((-(-(low - first - skip) // rate), -(-(high - first - skip) // rate)) for low, high in (rows, keys))
        yield skip, end - skip, own_rows, own_keys
