"""Tiles of the query-key matrix, rectangles and triangles of positions: each pair that is seen is in exactly one.

A query sees

    all      every key                    [####]
    earlier  the keys u <= t              [#   ]  as many keys as queries: what kernels call causal
                                          [####]
    later    the keys u >= t              [####]  the same with queries and keys in reverse order
                                          [   #]

        keys                                                                           keys
      [A C    ]   A  within a block every key is seen (causal: the earlier ones)     [R R R R]   R  their rows, every key
    q [B A C  ]   B  of the block before, those later than the query's own place   q [K      ]   K  all other rows, their keys
      [  B A C]   C  of the block after, those earlier than it (not causal)          [K      ]
      [    B A]

A window that begins at a distance, beyond a narrower one, is a causal one of queries that lie so much further on; and its
transpose. Where queries are others than the keys, tiles are `clipped`: what is left of a triangle is a triangle and rectangles.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from dilkit.pattern.lowering import Runs
from dilkit.pattern.runs import progressions

if TYPE_CHECKING:
    from dilkit.pattern.runs import Positions

Interval = tuple[int, int]
Seen = Literal["all", "earlier", "later"]


class Tile(NamedTuple):
    """A series of `number` tiles of `rows` x `keys` scores, the first at `(query, key)`, each `step` after the one before."""

    query: int
    key: int
    rows: int
    keys: int
    seen: Seen = "all"
    number: int = 1
    step: int = 0

    @property
    def transposed(self) -> Tile:
        others: dict[Seen, Seen] = {"earlier": "later", "later": "earlier", "all": "all"}
        return Tile(self.key, self.query, self.keys, self.rows, others[self.seen], self.number, self.step)

    def moved(self, query: int, key: int) -> Tile:
        return self._replace(query=self.query + query, key=self.key + key)

    def clipped(self, rows: Interval, keys: Interval) -> Iterator[Tile]:
        """Yield the parts of the tiles within these queries and keys. Tiles that are not cut stay one series."""
        if self.seen == "later":
            yield from (tile.transposed for tile in self.transposed.clipped(keys, rows))
            return
        step, sides = self.step or 1, ((rows, self.query, self.rows), (keys, self.key, self.keys))
        first = max(0, *(-(-(low - start) // step) for (low, _), start, _ in sides))
        stop = min(self.number, *((end - start - size) // step + 1 for (_, end), start, size in sides))
        if first < stop:
            yield self.moved(first * step, first * step)._replace(number=stop - first)
        touched = range(
            max(0, *((low - start - size) // step + 1 for (low, _), start, size in sides)),
            min(self.number, *(-(-(end - start) // step) for (_, end), start, _ in sides)),
        )
        for place in (number * step for number in touched if not first <= number < stop):
            query, key = self.query + place, self.key + place
            own_rows = max(rows[0] - query, 0), min(rows[1] - query, self.rows)
            own_keys = max(keys[0] - key, 0), min(keys[1] - key, self.keys)
            yield from (tile.moved(query, key) for tile in visible(own_rows, own_keys, self.seen == "earlier"))


def visible(rows: Interval, keys: Interval, is_causal: bool) -> Iterator[Tile]:
    """Yield the pairs of these queries and keys, under causality those with `key <= query`."""
    (row, stop), (key, end) = rows, keys
    if is_causal:
        first, last = max(row, key), min(stop, end)
        if first < last:
            yield Tile(first, first, last - first, last - first, "earlier")
            if key < first:
                yield Tile(first, key, last - first, first - key)
        row = max(row, end)
    if row < stop and key < end:
        yield Tile(row, key, stop - row, end - key)


def inside(positions: Positions, interval: Interval) -> list[Interval]:
    """Return the runs of positions in an interval, ascending."""
    return [(start, stop) for start, stop in positions.clip(*interval).tolist() if start < stop]


def outside(positions: Positions | None, interval: Interval) -> list[Interval]:
    """Return the runs of all other positions in an interval, ascending."""
    ends = [] if positions is None else positions.clip(*interval).reshape(-1).tolist()
    ends = [interval[0], *ends, interval[1]]
    return [(start, stop) for start, stop in zip(ends[::2], ends[1::2], strict=True) if start < stop]


def window_tiles(tokens: int, window: int, is_causal: bool) -> Iterator[Tile]:
    """Tile a window: `i sees j if |i - j| < window`, causal: `0 <= i - j < window`."""
    blocks, rest = divmod(tokens, window)
    own: Seen = "earlier" if is_causal else "all"
    if blocks:
        yield Tile(0, 0, window, window, own, blocks, window)
    if rest:
        yield Tile(blocks * window, blocks * window, rest, rest, own)
    for tile in _keys_before(blocks, rest, window):
        yield tile
        if not is_causal:
            yield tile.transposed


def band_tiles(rows: Interval, keys: Interval, begin: int, back: int, ahead: int, is_causal: bool) -> Iterator[Tile]:
    """Tile a band: `begin <= |i - j| and -ahead < i - j < back`, causal: `begin <= i - j < back`, of these queries and keys."""
    low, stop = min(rows[0], keys[0]), max(rows[1], keys[1])
    first = _block_start(low, stop, rows[0] - begin, begin, back)
    if not begin and back == ahead:
        tiles = window_tiles(stop - first, min(back, stop - first), is_causal)
    else:
        tiles = _tiles_behind(stop - first, begin, back)
    yield from _among(tiles, first, rows, keys)
    if not is_causal and (begin or back != ahead):
        begin = max(begin, 1)
        first = _block_start(low, stop, rows[0], begin, ahead)
        yield from _among((tile.transposed for tile in _tiles_behind(stop - first, begin, ahead)), first, rows, keys)


def _among(tiles: Iterable[Tile], first: int, rows: Interval, keys: Interval) -> Iterator[Tile]:
    for tile in tiles:
        yield from tile.moved(first, first).clipped(rows, keys)


def _block_start(low: int, stop: int, query: int, begin: int, reach: int) -> int:
    """Return where blocks of `reach - begin` tokens start at `low` or before, so that one starts at `query`."""
    return low - (low - query) % (reach - begin) if begin < reach < stop - low and query > low else low


def _tiles_behind(tokens: int, begin: int, back: int) -> Iterator[Tile]:
    """Tile the pairs with `begin <= i - j < back`."""
    if begin < min(back, tokens):
        for tile in window_tiles(tokens - begin, min(back, tokens) - begin, is_causal=True):
            yield tile._replace(query=tile.query + begin)


def _keys_before(blocks: int, rest: int, window: int) -> Iterator[Tile]:
    """Tile the keys in the previous block of `window` tokens: a query at place p sees the last `window - 1 - p` of them."""
    reach, last = window - 1, blocks * window
    if blocks > 1 and reach:
        yield Tile(window, 1, reach, reach, "later", blocks - 1, window)
    if blocks and rest:  # a short block at the end sees a triangle, and the keys beside it
        yield Tile(last, last - reach, rest, rest, "later")
        if reach > rest:
            yield Tile(last, last - reach + rest, rest, reach - rest)


MOST_CELLS = 2**14
"""Pairs of a run of queries and a run of keys, at most, that are made tiles of."""


def run_cells(form: Runs, rows: Interval, keys: Interval, is_causal: bool) -> Positions:
    """Return the rectangles that hold what is seen `(n, 4)`: the start and stop of queries, and of keys."""
    table = form.queries
    row = np.repeat(np.arange(len(table.runs)), table.runs)
    starts, stops = (np.append(0, table.stop[:-1])[row], table.stop[row])
    cells = np.stack((starts.clip(*rows), stops.clip(*rows), *table.columns.T.clip(*keys)), axis=1)
    seen = (cells[:, 0] < cells[:, 1]) & (cells[:, 2] < cells[:, 3])
    return cells[seen & (cells[:, 2] < cells[:, 1])] if is_causal else cells[seen]


def run_tiles(form: Runs, rows: Interval, keys: Interval, is_causal: bool) -> Iterator[Tile]:
    """Tile runs of queries that see runs of keys. Equal tiles at equal distances with disjoint keys form one series."""
    places: dict[tuple[int, int, Seen, int], list[int]] = {}
    for own_rows, own_keys in product(outside(form.without_rows, rows), outside(form.without_columns, keys)):
        for start, stop, first, last in run_cells(form, own_rows, own_keys, is_causal).tolist():
            for tile in visible((start, stop), (first, last), is_causal):
                places.setdefault((tile.rows, tile.keys, tile.seen, tile.key - tile.query), []).append(tile.query)
    for (count, width, seen, shift), queries in places.items():
        single = np.array(sorted(queries), np.int64)[:, None] + np.arange(2)
        for query, step, number in progressions(single).tolist():
            turns = min(-(-width // step), number)
            for turn in range(turns):
                place, alike = query + turn * step, -(-(number - turn) // turns)
                yield Tile(place, place + shift, count, width, seen, alike, turns * step)
