"""`Bias`: the interface of what is added to scores."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from torch import Tensor

    from dilkit.bias.form import LoweredBias


class Bias(ABC):
    """A function of head and positions that is added to the scores: `score = scale * q_i . k_j + bias(h, i, j) + log count`.

    A value, made of a few numbers a head, its *weights*, which may require a gradient; never a tensor of `seq ** 2` numbers.
    """

    weights_name: ClassVar[str]
    """The field that holds the weights."""
    by_row: ClassVar[bool] = False
    """Whether it holds something of each row, which packed sequences have one after the other."""

    @property
    def most_rows(self) -> int | None:
        """The longest sequence that it is for; None for any."""
        return None

    @property
    def weights(self) -> Tensor:
        """The slopes or the table, of the model's heads in the first dimension."""
        weights: Tensor = getattr(self, self.weights_name)
        return weights

    def with_weights(self, weights: Tensor) -> Bias:
        """The same bias with other weights, such as a part of the heads'."""
        changed: Bias = replace(self, **{self.weights_name: weights})  # type: ignore[type-var]
        return changed

    def of_rows(self, rows: Tensor) -> Bias:
        """The bias of sequences made of these rows of one, int64 `(seq,)` or `(batch, seq)`, whose positions begin anew."""
        return self

    def of_sequence(self, number: int, length: int) -> Bias:
        """The bias of the first `length` rows of one sequence of a batch."""
        return self

    @abstractmethod
    def matrix(self, queries: Tensor, keys: Tensor) -> Tensor:
        """The definition: `(heads, len(queries), len(keys))`, or `(batch, heads, ...)`, of rows with these numbers, int64."""

    @abstractmethod
    def lowered(self, dtype: Any) -> LoweredBias:
        """What kernels compute it from, with weights and positions in `dtype`; positions from 0 in the order of the rows."""

    def check_rows(self, batch: int, seq: int) -> None:  # noqa: B027 (most fit every sequence)
        """Raise ValueError where this is no bias of `batch` sequences of `seq` rows."""
