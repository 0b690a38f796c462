"""The bias of a rank's own rows: positions travel with the rows, each rank has the weights.

weights (heads, entries)      -----> own heads of each problem
positions of own rows         -----> local attention, where rows lie next to each other
    |
    sent with the rows        -----> those of queries and of keys of a small problem, which differ (`BiasForm.apart`)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dilkit.bias.form import BiasForm, LoweredBias

if TYPE_CHECKING:
    from dilkit.comm.passes.problem_stacks import ProblemStack


@dataclass(frozen=True)
class RankBias:
    """The bias of the rows that a rank holds, as `dilkit.bias.form.LoweredBias` has it; `positions` are always given.

    `gradient` `(heads, entries)`: what a backward pass adds that of the weights to, from the problems that this rank computes.
    """

    form: BiasForm
    weights: Tensor
    positions: Tensor
    gradient: Tensor

    @classmethod
    def of(cls, bias: LoweredBias) -> RankBias:
        """Return the bias of a rank's rows, with no gradient yet."""
        assert bias.positions is not None
        return cls(bias.form, bias.weights, bias.positions, bias.weights.new_zeros(bias.weights.shape))

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
