"""What a rank computes with: its rows, and what goes with them."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from dilkit.bias.form import BiasForm
from dilkit.comm.passes.rank_bias import RankBias
from dilkit.op.scores import check_bias


class RankInputs(NamedTuple):
    """Tensors of a rank's own rows: `query`, `key` and `value` `(batch, rows, heads, head_dim)`, `mask` `(batch, rows)`.

    `weights` `(heads, entries)` and `positions` `(batch or 1, rows, dims)` are those of a bias, `sink` `(heads,)`.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None = None
    sink: Tensor | None = None
    weights: Tensor | None = None
    positions: Tensor | None = None

    @property
    def without_values(self) -> RankInputs:
        """The same, with values that are 0."""
        return self._replace(value=self.value.new_zeros(()).expand(self.value.shape))

    def bias(self, form: BiasForm | None) -> RankBias | None:
        """The bias of this form, with no gradient yet."""
        if form is None or self.weights is None or self.positions is None:
            return None
        return RankBias(form, self.weights, self.positions, self.weights.new_zeros(self.weights.shape))

    def check_bias(self, form: BiasForm | None) -> None:
        """Raise TypeError or ValueError where weights and positions are not those of a bias of this form."""
        given = None if form is None else replace(form, placed=True)
        check_bias(given, self.weights, self.positions, self.query, self.query.shape[1])

    def of_range(self, rows: slice) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Query, key, value and mask of rows that follow each other."""
        mask = None if self.mask is None else self.mask[:, rows]
        return self.query[:, rows], self.key[:, rows], self.value[:, rows], mask
