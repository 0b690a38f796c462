"""The form of a bias that a kernel computes: a few numbers a head, and a function of the difference of two positions.

distance    bias[h, i, j] = -weights[h, 0] * |p_i - p_j|            in a metric; p has one to three dimensions
table       bias[h, i, j] = weights[h, index(p_i - p_j)]            each dimension's difference clipped to the table
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

METRICS = ("euclidean", "l1", "max")

ALIBI, COORDINATES, TABLE, GRID_TABLE, APART, NEUTRAL = BIASES = "alibi", "coordinates", "table", "grid table", "apart", "neutral"
"""Biases that a backend may take: distances and tables along the sequence and by coordinates; `apart`, `neutral` of forms."""


@dataclass(frozen=True)
class BiasForm:
    """The facts of a bias by which a backend is chosen and a kernel runs: hashable, no tensors.

    `dims`: numbers of a position. `sizes`: of a table, the differences of each dimension, odd; else empty. `metric`: of
    distances, one of `METRICS`. `placed`: positions are a tensor, else the numbers of rows in their sequence. `learned`: a
    backward pass returns the gradient of the weights. `apart`: a row has one position as a query and one as a key. `neutral`:
    positions of distances may be NaN, of rows that have distance 0 from all. Raises ValueError for what is no such form.
    """

    dims: int = 1
    sizes: tuple[int, ...] = ()
    metric: str = "l1"
    placed: bool = False
    learned: bool = False
    apart: bool = False
    neutral: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.dims <= 3 or (self.dims > 1 and not self.placed):
            raise ValueError(f"dims={self.dims} must be 1 to 3, and 1 where no positions are given (placed={self.placed})")
        if self.sizes and (len(self.sizes) != self.dims or any(size < 1 or size % 2 == 0 for size in self.sizes)):
            raise ValueError(f"sizes={self.sizes} must be an odd number for each of dims={self.dims} dimensions")
        if self.metric not in METRICS:
            raise ValueError(f"metric={self.metric!r} is not known; one of {', '.join(METRICS)} is needed")
        if self.apart and not self.placed:
            raise ValueError("apart=True is of positions that are given, but placed=False")
        if self.neutral and (not self.placed or self.sizes):
            raise ValueError("neutral=True is of distances between positions that are given")

    @property
    def name(self) -> str:
        """One of `BIASES`, without `apart` and `neutral`."""
        if self.sizes:
            return GRID_TABLE if self.placed else TABLE
        return COORDINATES if self.placed else ALIBI

    @property
    def names(self) -> tuple[str, ...]:
        """The names in `BIASES` that a backend must take."""
        return (self.name, *((APART,) if self.apart else ()), *((NEUTRAL,) if self.neutral else ()))

    @property
    def code(self) -> str:
        """The key of a kernel's code. In one dimension all metrics are the same, and tables have none."""
        metric = "" if self.sizes or self.dims == 1 else f", {self.metric}"
        return f"{self.name} in {self.dims}-D{metric}"

    @property
    def entries(self) -> int:
        """The weights of a head."""
        return math.prod(self.sizes)

    @property
    def columns(self) -> int:
        """The numbers of a row of `positions`: those of its position, or of both."""
        return self.dims * (1 + self.apart)

    def encode(self) -> str:
        """Encode the form as text without a semicolon or a comma."""
        sizes = "x".join([f"{size}" for size in self.sizes])  # not str, which torch.compile knows of no size
        return f"{self.dims}/{sizes}/{self.metric}/{self.placed:d}{self.learned:d}{self.apart:d}{self.neutral:d}"

    @classmethod
    def decode(cls, text: str) -> BiasForm:
        """Decode a text that `encode` wrote. Raises ValueError for another."""
        parts = re.fullmatch(r"(\d)/([\dx]*)/(\w+)/([01]{4})", text)
        if parts is None:
            raise ValueError(f"bias={text!r} of a call is not of the form 'dims/sizes/metric/flags' that encode writes")
        dims, sizes, metric, flags = parts.groups()
        return cls(int(dims), tuple(map(int, sizes.split("x"))) if sizes else (), metric, *(flag == "1" for flag in flags))

    def __str__(self) -> str:
        what = f"table of {' x '.join(map(str, self.sizes))}" if self.sizes else f"{self.metric} distance in {self.dims}-D"
        placed = (" of given positions" if self.placed else "") + (", apart for queries and keys" if self.apart else "")
        placed += ", neutral rows" if self.neutral else ""
        return what + placed + (", learned" if self.learned else "")


class LoweredBias(NamedTuple):
    """The tensors of a bias beside its form, in the dtype of `lse`, contiguous.

    `weights` `(heads, entries)`: slopes, or a flattened table. `positions` `(batch or 1, rows, dims)`, of all rows of the key, if
    the form is `placed`, whole numbers for a table; `2 * dims` where they are `apart`: that of the row as a query, then as a key.
    """

    form: BiasForm
    weights: Tensor
    positions: Tensor | None = None
