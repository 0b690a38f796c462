"""What a bias is to a kernel: a few numbers a head, and a function of the difference of two positions.

distance    bias[h, i, j] = -weights[h, 0] * |p_i - p_j|            in a metric; p has one to three dimensions
table       bias[h, i, j] = weights[h, index(p_i - p_j)]            each dimension's difference clipped to the table
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

METRICS = ("euclidean", "l1", "max")

ALIBI, COORDINATES, TABLE, GRID_TABLE = BIASES = "alibi", "coordinates", "table", "grid table"
"""The names of `BiasForm.name`: distances along the sequence and of coordinates, tables by differences along the sequence and of
coordinates."""


@dataclass(frozen=True)
class BiasForm:
    """The facts of a bias by which a backend is chosen and a kernel runs: hashable, no tensors.

    `dims`: numbers of a position. `sizes`: of a table, how many differences each dimension has, an odd number; else empty.
    `metric`: of distances, one of `METRICS`. `placed`: positions are given as a tensor; otherwise a row's position is its number
    in its sequence. `learned`: a backward pass returns the gradient of the weights as well.
    """

    dims: int = 1
    sizes: tuple[int, ...] = ()
    metric: str = "l1"
    placed: bool = False
    learned: bool = False

    @property
    def name(self) -> str:
        """One of `BIASES`."""
        if self.sizes:
            return GRID_TABLE if self.placed else TABLE
        return COORDINATES if self.placed else ALIBI

    @property
    def code(self) -> str:
        """What the code of a kernel depends on. In one dimension all metrics are the same, and tables have none."""
        metric = "" if self.sizes or self.dims == 1 else f", {self.metric}"
        return f"{self.name} in {self.dims}-D{metric}"

    @property
    def entries(self) -> int:
        """The weights of a head."""
        return math.prod(self.sizes)

    def encode(self) -> str:
        """The form as text without a semicolon or a comma."""
        sizes = "x".join([f"{size}" for size in self.sizes])  # not str, which torch.compile knows of no size
        return f"{self.dims}/{sizes}/{self.metric}/{self.placed:d}{self.learned:d}"

    @classmethod
    def decode(cls, text: str) -> BiasForm:
        """The form of a text that `encode` wrote. Raises ValueError for another."""
        dims, sizes, metric, flags = text.split("/")
        return cls(int(dims), tuple(map(int, sizes.split("x"))) if sizes else (), metric, flags[0] == "1", flags[1] == "1")

    def __str__(self) -> str:
        what = f"table of {' x '.join(map(str, self.sizes))}" if self.sizes else f"{self.metric} distance in {self.dims}-D"
        return what + (" of given positions" if self.placed else "") + (", learned" if self.learned else "")


class LoweredBias(NamedTuple):
    """The tensors of a bias beside its form, in the dtype of `lse`, contiguous.

    `weights` `(heads, entries)`: slopes, or a flattened table. `positions` `(batch or 1, rows, dims)`, of all rows of the key, if
    the form is `placed`; those of a table are whole numbers.
    """

    form: BiasForm
    weights: Tensor
    positions: Tensor | None = None
