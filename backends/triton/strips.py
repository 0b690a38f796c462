"""Lists of strips that the tiles of a launch see: runs of equally spaced positions, cut to the columns of a score tile."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
MOST_BYTES = 2**30
"""Most bytes of the tables of a group."""


@dataclass(frozen=True, eq=False)
class Strips:
    """Strips, sorted by list and first position: `(n, 5)` of list, first position, step, count and start in `biases`.

    `of_tile`: the list that each tile and query head sees. `bases`: the position that a tile's positions are relative to.
    """

    strips: Ints
    biases: NDArray[np.float32]
    of_tile: Ints
    bases: Ints


def cut(count: Ints, columns: int) -> tuple[Ints, Ints]:
    """Cut runs of `count` positions into pieces of at most `columns`; return the run of each piece and its place in the run.

    Raises ValueError where the strips would need more than `MOST_BYTES`.
    """
    pieces = -(-count // columns)
    if 16 * pieces.sum() > MOST_BYTES:
        raise ValueError(f"tables of {pieces.sum()} strips need more than {MOST_BYTES} bytes; use another backend")
    run = np.repeat(np.arange(len(count)), pieces)
    return run, (np.arange(len(run)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * columns


def in_order(strips: Ints) -> Ints:
    """Sort the strips by list and first position."""
    return strips[np.lexsort((strips[:, 1], strips[:, 0]))]
