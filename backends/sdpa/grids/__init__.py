"""The forms of a pattern as grids of small attention problems, which library kernels compute on views.

    segments        one problem a segment and head
    tiles           bands and global tokens: the tiles of the matrix of queries and keys that they see

A band of rate r is one of rate 1 among the tokens of each residue modulo r, whose row step is r.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING

from dilkit.backends.sdpa.grids.problem_grid import GridAxis, ProblemGrid, offset_runs, rectangles
from dilkit.backends.sdpa.grids.segments import segment_grids
from dilkit.backends.sdpa.grids.tiles import Interval, Tile, band_tiles, global_tiles
from dilkit.pattern import Pattern
from dilkit.pattern.lowering import Band, Form, Global, Segments, lower
from dilkit.pattern.runs import UNBOUNDED, complement

if TYPE_CHECKING:
    from dilkit.pattern.runs import Positions

FORMS = frozenset({Segments.name, Band.name, Global.name})
"""The forms that are made of views."""


@lru_cache(maxsize=256)
def form_grids(
    pattern: Pattern, seq: int, heads: int, kv_heads: int, is_causal: bool = False
) -> tuple[tuple[ProblemGrid, ...], ...]:
    """The grids of every form: each pair that a form shows is in exactly one problem of one grid.

    The pattern is one that `overlap_refusals` lets through. Raises TypeError for a form that is made of no views.
    """
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


def _band_grids(band: Band, seq: int, is_causal: bool, group: int) -> Iterator[ProblemGrid]:
    """A band among the tokens of each residue modulo its rate, from the first token that takes part on."""
    left_out = [] if band.without_columns is None else token_runs(band.without_columns, seq)[0]
    first_tokens = max((stop for _, stop in left_out), default=0)
    tokens = seq - first_tokens
    rate = min(band.rate, max(tokens, 1))
    begin, end = -(-band.first // band.rate), min(band.back, UNBOUNDED) // band.rate + 1
    for first, residues, length in offset_runs(0, rate, max(tokens, 0), rate):
        tiles = band_tiles(length, begin, end, is_causal)
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
