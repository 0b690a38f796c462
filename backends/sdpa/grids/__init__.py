"""The branches of a pattern as grids of small attention problems, which library kernels compute on views.

    segments        dilated segments: one problem a segment and head
    tiles           windows, strides and global tokens: the tiles of the matrix of queries and keys that they see

A window or a stride of rate r is one of rate 1 among the tokens of each residue modulo r, whose row step is r.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache

from dilkit.backends.sdpa.grids.problem_grid import GridAxis, ProblemGrid, offset_runs, rectangles
from dilkit.backends.sdpa.grids.segments import segment_grids
from dilkit.backends.sdpa.grids.tiles import Interval, Tile, global_tiles, window_tiles
from dilkit.pattern import Branch, DilatedSegment, GlobalTokens, Pattern, SlidingWindow, Strided

BRANCH_KINDS = frozenset(cls.kind for cls in (DilatedSegment, SlidingWindow, GlobalTokens, Strided))
"""The kinds of branches that are made of views."""


@lru_cache(maxsize=256)
def branch_grids(
    pattern: Pattern, seq: int, heads: int, kv_heads: int, is_causal: bool = False
) -> tuple[tuple[ProblemGrid, ...], ...]:
    """The grids of every branch: each pair that a branch sees is in exactly one problem of one grid.

    Raises TypeError for a kind of branch that is not among `BRANCH_KINDS`.
    """
    return tuple(tuple(_grids(pattern, branch, seq, heads, kv_heads, is_causal)) for branch in pattern.branches)


def _grids(pattern: Pattern, branch: Branch, seq: int, heads: int, kv_heads: int, is_causal: bool) -> Iterator[ProblemGrid]:
    if isinstance(branch, DilatedSegment):
        return segment_grids(pattern, branch, seq, heads, kv_heads, is_causal)
    served, group = branch.heads or (0, heads), heads // kv_heads
    if isinstance(branch, GlobalTokens):
        tiles = global_tiles(token_runs(branch, seq), seq, branch.direction == "both", is_causal)
        return _tile_grids(tiles, 0, 1, 1, served, group)
    if isinstance(branch, SlidingWindow):
        return _window_grids(branch.dilation_rate, branch.reach // branch.dilation_rate + 1, seq, is_causal, served, group)
    if isinstance(branch, Strided):
        return _window_grids(branch.stride, seq, seq, is_causal, served, group)
    raise TypeError(f"branch {branch!r} is of kind {branch.kind!r}; backend sdpa computes {', '.join(sorted(BRANCH_KINDS))} only")


def _window_grids(
    rate: int, window: int, seq: int, is_causal: bool, served: tuple[int, int], group: int
) -> Iterator[ProblemGrid]:
    """Windows of so many tokens of each residue modulo `rate`."""
    rate = min(rate, seq)
    for first, residues, tokens in offset_runs(0, rate, seq, rate):
        yield from _tile_grids(window_tiles(tokens, min(window, tokens), is_causal), first, residues, rate, served, group)


def _tile_grids(
    tiles: Iterable[Tile], first: int, residues: int, rate: int, served: tuple[int, int], group: int
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


def token_runs(branch: GlobalTokens, seq: int) -> list[Interval]:
    """The global tokens of a sequence as intervals (start, stop), in ascending order."""
    if isinstance(branch.tokens, int):
        return [(0, min(branch.tokens, seq))]
    runs: list[Interval] = []
    for token in branch.tokens:
        if token < seq and runs and runs[-1][1] == token:
            runs[-1] = (runs[-1][0], token + 1)
        elif token < seq:
            runs.append((token, token + 1))
    return runs
