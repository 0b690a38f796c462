"""Windows and global tokens as tiles of the query-key matrix: rectangles, and triangles with their diagonal.

A window of w tokens, cut into blocks of w, both ways; causal, without C:          the first g tokens, global:

        keys                                                                           keys
      [A C    ]   A  within a block every key is seen (causal: the earlier ones)     [R R R R]   R  their rows, every key
    q [B A C  ]   B  of the block before, those later than the query's own place   q [K      ]   K  all other rows, their keys
      [  B A C]   C  of the block after, those earlier than it: B transposed         [K      ]
      [    B A]

Every pair that is seen is in exactly one tile, and no pair that is not is in any: nothing is masked out. A window that begins at
a distance, beyond a narrower one, is a causal one of queries that lie so much further on; and its transpose.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from dilkit.backends.sdpa.grids.problem_grid import Seen

Interval = tuple[int, int]


class Tile(NamedTuple):
    """`rows` queries from `query` on and `keys` keys from `key` on; `number` of these tiles, each `step` further on in both."""

    query: int
    key: int
    rows: int
    keys: int
    seen: Seen = "all"
    number: int = 1
    step: int = 0

    @property
    def transposed(self) -> Tile:
        """The tile with queries and keys exchanged."""
        others: dict[Seen, Seen] = {"earlier": "later", "later": "earlier", "all": "all"}
        return Tile(self.key, self.query, self.keys, self.rows, others[self.seen], self.number, self.step)


def window_tiles(tokens: int, window: int, is_causal: bool) -> Iterator[Tile]:
    """`i sees j if |i - j| < window`, causal: `0 <= i - j < window`."""
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


def band_tiles(tokens: int, begin: int, end: int, is_causal: bool) -> Iterator[Tile]:
    """`i sees j if begin <= |i - j| < end`, causal: `begin <= i - j < end`."""
    if not begin:
        yield from window_tiles(tokens, min(end, tokens), is_causal)
    elif begin < min(end, tokens):
        for tile in window_tiles(tokens - begin, min(end, tokens) - begin, is_causal=True):
            moved = tile._replace(query=tile.query + begin)
            yield moved
            if not is_causal:
                yield moved.transposed


def _keys_before(blocks: int, rest: int, window: int) -> Iterator[Tile]:
    """The keys that lie in the block before: all but its first, so many fewer as the query lies further on in its own."""
    reach, last = window - 1, blocks * window
    if blocks > 1 and reach:
        yield Tile(window, 1, reach, reach, "later", blocks - 1, window)
    if blocks and rest:  # a short block at the end sees a triangle, and the keys beside it
        yield Tile(last, last - reach, rest, rest, "later")
        if reach > rest:
            yield Tile(last, last - reach + rest, rest, reach - rest)


def global_tiles(
    chosen: Sequence[Interval], others: Sequence[Interval], tokens: int, both: bool, is_causal: bool
) -> Iterator[Tile]:
    """`i sees j if j is chosen`, and with `both` if i is; tokens are `chosen` or `others`, intervals in ascending order."""
    for start, stop in chosen:
        if both:
            yield from _seeing_all(start, stop, tokens, is_causal)
        elif is_causal:
            yield Tile(start, start, stop - start, stop - start, "earlier")
        for first, end in others if both else [(0, tokens)]:
            first = max(first, stop) if is_causal else first
            if first < end:
                yield Tile(first, start, end - first, stop - start)


def _seeing_all(start: int, stop: int, tokens: int, is_causal: bool) -> Iterator[Tile]:
    """The rows of tokens that see every key."""
    if not is_causal:
        yield Tile(start, 0, stop - start, tokens)
        return
    yield Tile(start, start, stop - start, stop - start, "earlier")
    if start:
        yield Tile(start, 0, stop - start, start)
