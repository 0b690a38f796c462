"""The tensors of a rank's own rows, and their bias: positions travel with the rows, each rank has the weights.

weights (heads, entries)      -----> own heads of each problem
positions of own rows         -----> local attention, where rows lie next to each other
    |
    sent with the rows        -----> those of queries and of keys of a small problem, which differ (`BiasForm.apart`)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from dilkit.bias.form import BiasForm, LoweredBias
from dilkit.op.scores import check_bias

if TYPE_CHECKING:
    from dilkit.comm.passes.problem_stacks import ProblemStack


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


@dataclass(frozen=True)
class RankBias:
    """The bias of the rows that a rank holds, as `dilkit.bias.form.LoweredBias` has it; `positions` are always given.

    `gradient` `(heads, entries)`: what a backward pass adds that of the weights to, from the problems that this rank computes.
    """

    form: BiasForm
    weights: Tensor
    positions: Tensor
    gradient: Tensor

    def of_range(self, rows: slice) -> LoweredBias:
        """Return the bias of rows that follow each other."""
        return LoweredBias(self.form, self.weights, self.positions[:, rows].contiguous() if self.form.placed else None)

    def by_head(self, batch: int, heads: int) -> Tensor:
        """Return the positions as rows of so many heads, `(batch, rows, heads, dims)`: they travel as queries or keys do."""
        return self.positions[:, :, None].expand(batch, -1, heads, -1)

    def of_stack(self, stack: ProblemStack, queries: Tensor | None, keys: Tensor | None) -> LoweredBias:
        """Return the bias of a stack, whose problems are all of the same heads; queries and keys have positions of their own.

        `queries` and `keys` `(n, dims)` are positions, by `results` and `flags` of stacks.
        """
        assert queries is not None
        assert keys is not None
        queries = queries.index_select(0, stack.results).view(-1, stack.rows, stack.width, self.form.dims)[:, :, 0]
        keys = keys.index_select(0, stack.flags).view(-1, stack.rows, self.form.dims)
        form = replace(self.form, placed=True, apart=True)
        return LoweredBias(form, self.weights[stack.heads], torch.cat((queries, keys), dim=2))
