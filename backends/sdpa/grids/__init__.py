"""The branches of a pattern as grids of small attention problems, which library kernels compute on views.

    segments        dilated segments: one problem a segment and head
    tiles           windows, strides and global tokens: the tiles of the matrix of queries and keys that they see

A window or a stride of rate r is a band of rate 1 among the tokens of each residue modulo r, whose row step is r.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

from dilkit.backends.once import beyond, end_of, globals_before, rate_of
from dilkit.backends.sdpa.grids.problem_grid import GridAxis, ProblemGrid, offset_runs, rectangles
from dilkit.backends.sdpa.grids.segments import segment_grids
from dilkit.backends.sdpa.grids.tiles import Interval, Tile, band_tiles, global_tiles
from dilkit.pattern import DilatedSegment, GlobalTokens, Pattern, SlidingWindow, Strided
from dilkit.pattern.runs import complement, runs_of

BRANCH_KINDS = frozenset(cls.kind for cls in (DilatedSegment, SlidingWindow, GlobalTokens, Strided))
"""The kinds of branches that are made of views."""


@lru_cache(maxsize=256)
def branch_grids(
    pattern: Pattern, seq: int, heads: int, kv_heads: int, is_causal: bool = False
) -> tuple[tuple[ProblemGrid, ...], ...]:
    """The grids of every branch: each pair that a branch sees is in exactly one problem of one grid. With `overlap="once"`, of
    patterns that `overlap_refusals` lets through, pairs that branches before have shown are left out.

    Raises TypeError for a kind of branch that is not among `BRANCH_KINDS`.
    """
    return tuple(tuple(_grids(pattern, at, seq, heads, kv_heads, is_causal)) for at in range(len(pattern.branches)))


def _grids(pattern: Pattern, at: int, seq: int, heads: int, kv_heads: int, is_causal: bool) -> Iterator[ProblemGrid]:
    branch, group = pattern.branches[at], heads // kv_heads
    if isinstance(branch, DilatedSegment):
        yield from segment_grids(pattern, branch, seq, heads, kv_heads, is_causal)
    elif isinstance(branch, GlobalTokens):
        chosen, others = token_runs(branch, seq)
        tiles = global_tiles(chosen, others, seq, branch.direction == "both", is_causal)
        yield from _tile_grids(tiles, 0, 1, 1, branch.heads or (0, heads), group)
    elif isinstance(branch, (SlidingWindow, Strided)):
        for served, left_out in _left_out(pattern, at, seq, heads):
            yield from _band_grids(branch, left_out, seq, is_causal, served, group)
    else:
        known = ", ".join(sorted(BRANCH_KINDS))
        raise TypeError(f"branch {branch!r} is of kind {branch.kind!r}; backend sdpa computes {known} only")


class _LeftOut(NamedTuple):
    """What a band leaves out, for others have shown it: the first tokens, and pairs that are nearer to each other."""

    tokens: int = 0
    nearer: int = 0


def _left_out(pattern: Pattern, at: int, seq: int, heads: int) -> Iterator[tuple[Interval, _LeftOut]]:
    """The query heads that a band serves, as intervals of those that leave out the same."""
    branches, served = pattern.branches, range(*(pattern.branches[at].heads or (0, heads)))
    if pattern.overlap == "count":
        yield (served.start, served.stop), _LeftOut()
        return

    def of_head(head: int) -> _LeftOut:
        ends = [stop for one in globals_before(branches, at, head) for _, stop in token_runs(one, seq)[0]]
        return _LeftOut(max(ends, default=0), beyond(branches, at, head))

    for left_out, alike in groupby(served, of_head):
        first, *others = alike
        yield (first, first + 1 + len(others)), left_out


def _band_grids(
    band: SlidingWindow | Strided, left_out: _LeftOut, seq: int, is_causal: bool, served: Interval, group: int
) -> Iterator[ProblemGrid]:
    """A band among the tokens of each residue modulo its rate, from the first token that takes part on."""
    tokens = seq - left_out.tokens
    rate = min(rate_of(band), max(tokens, 1))
    begin, end = (-(-distance // rate_of(band)) for distance in (left_out.nearer, end_of(band)))
    for first, residues, length in offset_runs(0, rate, max(tokens, 0), rate):
        tiles = band_tiles(length, begin, end, is_causal)
        yield from _tile_grids(tiles, left_out.tokens + first, residues, rate, served, group)


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


def token_runs(branch: GlobalTokens, seq: int) -> tuple[list[Interval], list[Interval]]:
    """The global tokens of a sequence as intervals (start, stop), and those of all others; both in ascending order."""
    others = complement(runs_of(branch), seq)
    chosen = complement(others, seq)
    return [(start, stop) for start, stop in chosen.tolist()], [(start, stop) for start, stop in others.tolist()]
