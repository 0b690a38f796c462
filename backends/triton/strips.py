"""Lists of strips that the tiles of a launch see: runs of equally spaced positions, cut to the columns of a score tile."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
MOST_BYTES = 2**30
"""Of the tables of a group, at most."""


@dataclass(frozen=True, eq=False)
class Strips:
    """`strips`, `(strips, 5)`, by list and first position: list, first, step, count, and where its biases begin in `biases`.

    `of_tile`: of each tile and query head of it, the list that it sees. `bases`: of each tile, what positions are relative to.
    """

    strips: Ints
    biases: NDArray[np.float32]
    of_tile: Ints
    bases: Ints


def cut(count: Ints, columns: int) -> tuple[Ints, Ints]:
    """Runs of `count` positions in pieces of at most `columns`: of each piece its run, and how many positions are before it.

    Raises ValueError where the strips would need more than `MOST_BYTES`.
    """
    pieces = -(-count // columns)
    if 16 * pieces.sum() > MOST_BYTES:
        raise ValueError(f"tables of {pieces.sum()} strips need more than {MOST_BYTES} bytes; use another backend")
    run = np.repeat(np.arange(len(count)), pieces)
    return run, (np.arange(len(run)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * columns


def in_order(strips: Ints) -> Ints:
    """The strips by list and first position."""
    return strips[np.lexsort((strips[:, 1], strips[:, 0]))]
