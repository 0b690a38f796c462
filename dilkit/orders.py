"""Token orders: in which order the cells of a grid become the tokens of a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from torch import Tensor

from dilkit import _interim_curves
from dilkit.plan import Index, cached

CURVES = ("hilbert", "morton", "tile", "row-major", "snake")


@dataclass(frozen=True, eq=False)
class TokenOrder:
    """A permutation of the cells of a grid: token `extra_tokens + d` of the sequence is the cell `perm[d]`."""

    shape: tuple[int, ...]
    curve: str
    perm: Index
    """`(seq,)`: position along the curve -> row-major index, the extra tokens in front included."""
    rank: Index
    """`(seq,)`: row-major index -> position along the curve; the inverse of `perm`."""
    tile: tuple[int, ...] | None = None
    extra_tokens: int = 0
    is_generation_order: bool = False

    def __len__(self) -> int:
        return len(self.perm)

    @property
    def nbytes(self) -> int:
        return self.perm.nbytes + self.rank.nbytes

    def apply(self, x: Any, dim: int = 1) -> Any:
        """`x` with its tokens, row-major along `dim`, in this order: `out[d] = x[perm[d]]`."""
        return _take(x, self.perm, dim)

    def restore(self, x: Any, dim: int = 1) -> Any:
        """`x` with its tokens, in this order along `dim`, row-major again: the inverse of `apply`."""
        return _take(x, self.rank, dim)

    def coordinates(self) -> Index:
        """`(cells, len(shape))`: the cells along the curve, without the extra tokens."""
        cells = self.perm[self.extra_tokens :] - self.extra_tokens
        return np.stack(np.unravel_index(cells, self.shape), 1).astype(self.perm.dtype)

    def transposed(self) -> TokenOrder:
        """The same curve through the grid with its axes reversed."""
        flipped = order(self.shape[::-1], self.curve, extra_tokens=self.extra_tokens)
        cells = np.stack(np.unravel_index(flipped.perm[self.extra_tokens :] - self.extra_tokens, self.shape[::-1]))[::-1]
        return _made(self.shape, self.curve, np.ravel_multi_index(tuple(cells), self.shape), self.tile, self.extra_tokens)


def order(
    shape: Sequence[int],
    curve: str = "hilbert",
    *,
    tile: Sequence[int] | None = None,
    extra_tokens: int = 0,
    is_generation_order: bool = False,
    threads: int = 1,
) -> TokenOrder:
    """The order in which `curve` visits the cells of a grid."""
    shape = tuple(shape)
    key = ("order", shape, curve, tile, extra_tokens, is_generation_order)
    return cached(key, lambda: _made(shape, curve, _cells(shape, curve, tile), tile, extra_tokens, is_generation_order))


def _cells(shape: tuple[int, ...], curve: str, tile: Any) -> Any:
    if len(shape) == 1 or curve == "row-major":
        return np.arange(prod(shape))
    if curve == "tile":
        return _interim_curves.tiles(shape, tile or (8,) * len(shape))
    return getattr(_interim_curves, curve)(shape)


def _made(shape: Any, curve: str, cells: Any, tile: Any, extra: int, generation: bool = False) -> TokenOrder:
    perm = np.concatenate([np.arange(extra), np.asarray(cells) + extra]).astype(np.int32)
    rank = np.empty_like(perm)
    rank[perm] = np.arange(len(perm), dtype=perm.dtype)
    return TokenOrder(shape, curve, perm, rank, tile, extra, generation)


def _take(x: Any, index: Index, dim: int) -> Any:
    import torch

    if isinstance(x, Tensor):
        return x.index_select(dim, torch.tensor(index, device=x.device))
    return np.take(x, index, dim)
