"""`Bias`: the interface of position biases."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from torch import Tensor

    from dilkit.bias.form import LoweredBias


class Bias(ABC):
    """A function of head and positions that is added to the scores: `score = scale * q_i . k_j + bias(h, i, j) + log count`.

    A value of a few numbers a head, its *weights*, which may require a gradient; never a tensor of `seq ** 2` numbers.
    """

    weights_name: ClassVar[str]
    """The field that holds the weights."""
    by_row: ClassVar[bool] = False
    """True if it holds values for each row, which packed sequences have one after the other."""

    by_query: ClassVar[bool] = False
    """True if each query has weights of its own, `(heads, batch, rows, entries)`."""

    @property
    def most_rows(self) -> int | None:
        """The longest sequence that it fits; None for any."""
        return None

    @property
    def weights(self) -> Tensor:
        """The slopes or the table, of the model's heads in the first dimension."""
        weights: Tensor = getattr(self, self.weights_name)
        return weights

    def with_weights(self, weights: Tensor) -> Bias:
        """Return the bias with other weights, such as those of a part of the heads."""
        changed: Bias = replace(self, **{self.weights_name: weights})  # type: ignore[type-var]
        return changed

    def of_rows(self, rows: Tensor) -> Bias:
        """Return the bias of sequences made of these rows, int64 `(seq,)` or `(batch, seq)`; positions restart."""
        return self

    def of_sequence(self, number: int, length: int) -> Bias:
        """Return the bias of the first `length` rows of one sequence of a batch."""
        return self

    @abstractmethod
    def matrix(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Compute the definition, `(heads, len(queries), len(keys))` or `(batch, heads, ...)`, for row numbers, int64."""

    @abstractmethod
    def lowered(self, dtype: Any) -> LoweredBias:
        """Lower the bias for kernels, with weights and positions in `dtype`; positions count the rows from 0."""

    def check_rows(self, batch: int, seq: int) -> None:  # noqa: B027 (most fit every sequence)
        """Raise ValueError where this is no bias of `batch` sequences of `seq` rows."""


class PlacedBias(Bias):
    """The base of biases of `coordinates`: `(batch, seq, 1 to 3)`, `(seq, 1 to 3)`, or of packed sequences `(total, 1 to 3)`."""

    by_row: ClassVar[bool] = True
    coordinates: Tensor

    @property
    def _batched(self) -> dict[str, Tensor]:
        """The fields with values for each row, of a batch, perhaps of one."""
        fields = {name: getattr(self, name, None) for name in ("coordinates", "neutral")}
        whole = self.coordinates.dim() == 3
        return {name: x if whole else x[None] for name, x in fields.items() if x is not None}

    def of_rows(self, rows: Tensor) -> PlacedBias:
        return replace(self, **{name: x.squeeze(0)[rows] for name, x in self._batched.items()})  # type: ignore[type-var]

    def of_sequence(self, number: int, length: int) -> PlacedBias:
        parts = {name: x[number if len(x) > 1 else 0, :length] for name, x in self._batched.items()}
        return replace(self, **parts)  # type: ignore[type-var]

    def check_rows(self, batch: int, seq: int) -> None:
        shape = self.coordinates.shape
        if shape[-2] != seq or (len(shape) == 3 and shape[0] not in (1, batch)):
            needed = f"({batch}, {seq}, 1 to 3) or ({seq}, 1 to 3) is needed"
            raise ValueError(f"coordinates of the bias have shape {tuple(shape)}; {needed}")
