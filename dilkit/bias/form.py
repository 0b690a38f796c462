"""The form of a bias that a kernel computes: a few numbers a head, and a function of the difference of two positions.

distance    bias[h, i, j] = -weights[h, 0] * |p_i - p_j|            in a metric; p has one to three dimensions
table       bias[h, i, j] = weights[h, index(p_i - p_j)]            each dimension's difference clipped to the table
by axis     bias[h, i, j] = sum_k weights[h, first_k + index_k]     a table for each dimension, one after the other
by query    a table for each query, weights[h, b, i, ...]           summed over the dimensions if there are several
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

METRICS = ("euclidean", "l1", "max")

ALIBI, COORDINATES, TABLE, GRID_TABLE = _KINDS = "alibi", "coordinates", "table", "grid table"
APART, NEUTRAL, BY_AXIS, BY_QUERY = VARIANTS = "apart", "neutral", "by axis", "by query"
BIASES = _KINDS + VARIANTS
"""Biases that a backend may take: distances and tables along the sequence and by coordinates, and the `VARIANTS` of forms."""


@dataclass(frozen=True)
class BiasForm:
    """The facts of a bias by which a backend is chosen and a kernel runs: hashable, no tensors.

    `dims`: numbers of a position. `sizes`: of a table, the differences of each dimension, odd; else empty. `metric`: of
    distances, one of `METRICS`. `placed`: positions are a tensor, else the numbers of rows in their sequence. `learned`: a
    backward pass returns the gradient of the weights. `apart`: a row has one position as a query and one as a key. `neutral`:
    positions of distances may be NaN, of rows that have distance 0 from all. `by_axis`: a table is the sum of one for each of
    several dimensions. `by_query`: each query has tables of its own. Raises ValueError for what is no such form.
    """

    dims: int = 1
    sizes: tuple[int, ...] = ()
    metric: str = "l1"
    placed: bool = False
    learned: bool = False
    apart: bool = False
    neutral: bool = False
    by_axis: bool = False
    by_query: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.dims <= 3 or (self.dims > 1 and not self.placed):
            raise ValueError(f"dims={self.dims} must be 1 to 3, and 1 where no positions are given (placed={self.placed})")
        if self.sizes and (len(self.sizes) != self.dims or any(size < 1 or size % 2 == 0 for size in self.sizes)):
            raise ValueError(f"sizes={self.sizes} must be an odd number for each of dims={self.dims} dimensions")
        if self.metric not in METRICS:
            raise ValueError(f"metric={self.metric!r} is not known; one of {', '.join(METRICS)} is needed")
        if self.apart and not self.placed:
            raise ValueError("apart=True needs given positions, placed=True")
        if self.neutral and (not self.placed or self.sizes):
            raise ValueError("neutral=True needs distances between given positions")
        if self.by_axis and len(self.sizes) < 2:
            raise ValueError(f"by_axis=True is of tables in several dimensions, but sizes={self.sizes}")
        if self.by_query and not (self.by_axis or len(self.sizes) == 1):
            raise ValueError(f"by_query=True is of a table in one dimension, or by axis, but sizes={self.sizes}")

    @property
    def name(self) -> str:
        """One of `BIASES`, without `VARIANTS`."""
        if self.sizes:
            return GRID_TABLE if self.placed else TABLE
        return COORDINATES if self.placed else ALIBI

    @property
    def names(self) -> tuple[str, ...]:
        """The names in `BIASES` that a backend must take."""
        return (self.name, *(name for name in VARIANTS if getattr(self, name.replace(" ", "_"))))

    @property
    def code(self) -> str:
        """The key of a kernel's code. In one dimension all metrics are the same, and tables have none."""
        metric = "" if self.sizes or self.dims == 1 else f", {self.metric}"
        return f"{self.name} in {self.dims}-D{metric}" + ", by axis" * self.by_axis + ", by query" * self.by_query

    @property
    def entries(self) -> int:
        """The weights of a head, or of a query of it."""
        return sum(self.sizes) if self.by_axis else math.prod(self.sizes)

    @property
    def columns(self) -> int:
        """The numbers of a row of `positions`: those of its position, or of both."""
        return self.dims * (1 + self.apart)

    def encode(self) -> str:
        """Encode the form as text without a semicolon or a comma."""
        sizes = "x".join([f"{size}" for size in self.sizes])  # not str, which torch.compile knows of no size
        flags = (self.placed, self.learned, self.apart, self.neutral, self.by_axis, self.by_query)
        return f"{self.dims}/{sizes}/{self.metric}/{''.join([f'{flag:d}' for flag in flags])}"

    @classmethod
    def decode(cls, text: str) -> BiasForm:
        """Decode a text that `encode` wrote. Raises ValueError for another."""
        parts = re.fullmatch(r"(\d)/([\dx]*)/(\w+)/([01]{6})", text)
        if parts is None:
            raise ValueError(f"bias={text!r} of a call is not of the form 'dims/sizes/metric/flags' that encode writes")
        dims, sizes, metric, flags = parts.groups()
        return cls(int(dims), tuple(map(int, sizes.split("x"))) if sizes else (), metric, *(flag == "1" for flag in flags))

    def __str__(self) -> str:
        joined = (" + " if self.by_axis else " x ").join(map(str, self.sizes))
        what = f"table of {joined}" if self.sizes else f"{self.metric} distance in {self.dims}-D"
        what += ", for each query" if self.by_query else ""
        placed = (" of given positions" if self.placed else "") + (", apart for queries and keys" if self.apart else "")
        placed += ", neutral rows" if self.neutral else ""
        return what + placed + (", learned" if self.learned else "")


class LoweredBias(NamedTuple):
    """The tensors of a bias beside its form, in the dtype of `lse`, contiguous.

    `weights` `(heads, entries)`: slopes, or a flattened table; `(heads, batch, rows, entries)` if the form is `by_query`, of the
    rows of the query. `positions` `(batch or 1, rows, dims)`, of all rows of the key, if
    the form is `placed`, whole numbers for a table; `2 * dims` where they are `apart`: that of the row as a query, then as a key.
    """

    form: BiasForm
    weights: Tensor
    positions: Tensor | None = None
