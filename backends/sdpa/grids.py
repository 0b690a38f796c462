"""The forms of a pattern as grids of equal small attention problems, each a strided view of the sequence.

    query t of problem i:  row(i) + t * row_step,                t = 0 .. rows - 1
    key u of problem i:    row(i) + key_shift + u * row_step,    u = 0 .. keys - 1
    row(i)  = row + sum_a i_a * axes[a].row                      head(i) = head + sum_a i_a * axes[a].head     (kv_head alike)

An index `i` over the axes names one small problem, of one query head and one key/value head. The dilation rate is the row step;
segments, blocks of a window and offsets are axes. A query sees

    all      every key                    [####]
    earlier  the keys u <= t              [#   ]  as many keys as queries: what kernels call causal
                                          [####]
    later    the keys u >= t              [####]  the same with queries and keys in reverse order
                                          [   #]

Segments are one problem a segment and head. Windows and global tokens are tiles of the query-key matrix: every pair that is seen
is in exactly one tile, and no other pair is in any.

        keys                                                                           keys
      [A C    ]   A  within a block every key is seen (causal: the earlier ones)     [R R R R]   R  their rows, every key
    q [B A C  ]   B  of the block before, those later than the query's own place   q [K      ]   K  all other rows, their keys
      [  B A C]   C  of the block after, those earlier than it (not causal)          [K      ]
      [    B A]

A band of rate r is one of rate 1 among the tokens of each residue modulo r. A window that begins at a distance, beyond a narrower
one, is a causal one of queries that lie so much further on; and its transpose.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Literal, NamedTuple

from dilkit.pattern import Pattern
from dilkit.pattern.lowering import Band, Form, Global, Segments, lower
from dilkit.pattern.runs import UNBOUNDED, complement

if TYPE_CHECKING:
    from dilkit.pattern.runs import Positions
    from dilkit.problem import Problem

FORMS = frozenset({Segments.name, Band.name, Global.name})

Interval = tuple[int, int]
Seen = Literal["all", "earlier", "later"]


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
        """The number of small problems."""
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
    """The grids of every form: each pair that a form shows is in exactly one problem of one grid.

    The pattern is one that `overlap_refusals` lets through. `queries`: how many there are and the position of the first, if they
    are others than the `seq` keys; then the pattern is dense. Raises TypeError for a form that is made of no views.
    """
    if queries is not None:
        return (tuple(_dense_grids(*queries, seq, heads, heads // kv_heads, is_causal)),)
    forms = lower(pattern, seq, heads, kv_heads)
    return tuple(tuple(_grids(form, pattern, seq, heads // kv_heads, is_causal)) for form in forms)


def _grids(form: Form, pattern: Pattern, seq: int, group: int, is_causal: bool) -> Iterator[ProblemGrid]:
    if isinstance(form, Segments):
        yield from segment_grids(form, seq, group, is_causal)
    elif isinstance(form, Global):
        see_all = bool(token_runs(form.rows, seq)[0])
        tiles = global_tiles(*token_runs(form.columns, seq), seq, see_all, is_causal)
        yield from _tile_grids(tiles, 0, 1, 1, form.heads, group)
    elif isinstance(form, Band):
        yield from _band_grids(form, seq, is_causal, group)
    else:
        call = pattern.branches[form.branch].call()
        raise TypeError(f"branch {call} is lowered to {form.name}; backend sdpa computes segments, band and global only")


def _dense_grids(queries: int, offset: int, seq: int, heads: int, group: int, is_causal: bool) -> Iterator[ProblemGrid]:
    """All keys for all queries; under causality the keys before the first query, and then as many keys as queries."""
    tiles = [Tile(0, offset, queries, queries, "earlier")] if is_causal else [Tile(0, 0, queries, seq)]
    if is_causal and offset:
        tiles.append(Tile(0, 0, queries, offset))
    yield from _tile_grids(tiles, 0, 1, 1, (0, heads), group)


def _band_grids(band: Band, seq: int, is_causal: bool, group: int) -> Iterator[ProblemGrid]:
    """A band among the tokens of each residue modulo its rate, from the first token that takes part on."""
    left_out = [] if band.without_columns is None else token_runs(band.without_columns, seq)[0]
    first_tokens = max((stop for _, stop in left_out), default=0)
    tokens = seq - first_tokens
    rate = min(band.rate, max(tokens, 1))
    begin = -(-band.first // band.rate)
    back, ahead = (min(reach, UNBOUNDED) // band.rate + 1 for reach in (band.back, band.ahead))
    for first, residues, length in offset_runs(0, rate, max(tokens, 0), rate):
        tiles = band_tiles(length, begin, back, back if is_causal else ahead, is_causal)
        yield from _tile_grids(tiles, first_tokens + first, residues, rate, band.heads, group)


def _tile_grids(
    tiles: Iterable[Tile], first: int, residues: int, rate: int, served: Interval, group: int
) -> Iterator[ProblemGrid]:
    """Tiles of the tokens of residues `first`, `first + 1` and so on, for every query head of `served`."""
    for tile in tiles:
        for kv_head, kv_heads, inner, inners in rectangles(*served, group):
            blocks, each = GridAxis(tile.number, row=tile.step * rate), GridAxis(residues, row=1)
            axes = (blocks, each, GridAxis(kv_heads, 0, group, 1), GridAxis(inners, head=1))
            yield ProblemGrid(
                rows=tile.rows,
                row_step=rate,
                row=first + tile.query * rate,
                head=kv_head * group + inner,
                kv_head=kv_head,
                axes=tuple(axis for axis in axes if axis.size > 1),
                keys=tile.keys,
                key_shift=(tile.key - tile.query) * rate,
                seen=tile.seen,
            )


def token_runs(positions: Positions, seq: int) -> tuple[list[Interval], list[Interval]]:
    """These tokens of a sequence as intervals (start, stop), and those of all others; both in ascending order."""
    others = complement(positions, seq)
    chosen = complement(others, seq)
    return [(start, stop) for start, stop in chosen.tolist()], [(start, stop) for start, stop in others.tolist()]


def segment_grids(form: Segments, seq: int, group: int, is_causal: bool) -> Iterator[ProblemGrid]:
    """The segments of a form, with `group` query heads to a key/value head: each row that a head keeps is in one problem."""
    length, rate = min(form.length, seq), form.rate
    whole, tail = divmod(seq, length)
    spans = [(0, GridAxis(whole, row=length), length)]
    if tail:
        spans.append((whole * length, GridAxis(1), tail))
    for kv_first, kv_count, u_first, u_count in rectangles(*form.heads, group):
        heads = range(kv_first * group + u_first, (kv_first + kv_count) * group, group)
        offsets = [form.offsets[head - form.heads[0]] for head in heads]
        for (first, (equals, equal), (ascends, ascending)), (start, segments, span) in product(offset_blocks(offsets), spans):
            of_heads = GridAxis(equals, 0, equal * group, equal), GridAxis(u_count, head=1)
            for skip, count, rows in offset_runs(offsets[first], ascends, span, rate):
                axes = segments, of_heads[0], GridAxis(count, 1, ascending * group, ascending), of_heads[1]
                yield ProblemGrid(
                    rows=rows,
                    row_step=min(rate, seq),  # a step beyond the sequence is never made, and 2**62 is no stride
                    row=start + offsets[first] + skip,
                    head=heads[first] + skip * ascending * group,
                    kv_head=kv_first + first + skip * ascending,
                    axes=tuple(axis for axis in axes if axis.size > 1),
                    keys=rows,
                    seen="earlier" if is_causal else "all",
                )


def offset_blocks(offsets: Sequence[int]) -> Iterator[tuple[int, tuple[int, int], tuple[int, int]]]:
    """Blocks of `offsets` by their first place, with two axes `(size, step)`: along one they are equal, along the other ascend.

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


def band_tiles(tokens: int, begin: int, back: int, ahead: int, is_causal: bool) -> Iterator[Tile]:
    """`i sees j if begin <= |i - j| and -ahead < i - j < back`, causal: `begin <= i - j < back`."""
    if not begin and back == ahead:
        yield from window_tiles(tokens, min(back, tokens), is_causal)
        return
    yield from _tiles_behind(tokens, begin, back)
    if not is_causal:
        yield from (tile.transposed for tile in _tiles_behind(tokens, max(begin, 1), ahead))


def _tiles_behind(tokens: int, begin: int, back: int) -> Iterator[Tile]:
    """`i sees j if begin <= i - j < back`."""
    if begin < min(back, tokens):
        for tile in window_tiles(tokens - begin, min(back, tokens) - begin, is_causal=True):
            yield tile._replace(query=tile.query + begin)


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
    if not is_causal:
        yield Tile(start, 0, stop - start, tokens)
        return
    yield Tile(start, start, stop - start, stop - start, "earlier")
    if start:
        yield Tile(start, 0, stop - start, start)


def rectangles(start: int, stop: int, period: int) -> Iterator[tuple[int, int, int, int]]:
    """`start .. stop - 1` written as `outer * period + inner`: up to three blocks (outer, outers, inner, inners)."""
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


def offset_runs(first: int, count: int, span: int, rate: int) -> Iterator[tuple[int, int, int]]:
    """Offsets `first .. first + count - 1` by the rows that they keep of a segment: (offsets skipped, offsets, rows)."""
    rows, longer = divmod(span, rate)
    cut = min(max(longer - first, 0), count)
    if cut:
        yield 0, cut, rows + 1
    if rows and cut < count:
        yield cut, count - cut, rows
