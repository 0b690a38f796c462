"""The bias of a rank's rows: positions travel with the rows, weights are there on every rank, and their gradient is added up.

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

    def of_range(self, rows: slice) -> LoweredBias:
        """The bias of rows that follow each other."""
        return LoweredBias(self.form, self.weights, self.positions[:, rows].contiguous() if self.form.placed else None)

    def by_head(self, batch: int, heads: int) -> Tensor:
        """The positions as rows of so many heads, `(batch, rows, heads, dims)`, which travel as those of queries or keys."""
        return self.positions[:, :, None].expand(batch, -1, heads, -1)

    def of_tables(self, queries: Tensor, keys: Tensor) -> TableBias:
        """The same bias of rows in tables, with their positions."""
        return TableBias(replace(self.form, placed=True, apart=True), self.weights, queries, keys, self.gradient)


@dataclass(frozen=True)
class TableBias:
    """The bias of rows in tables: `queries` and `keys` `(n, dims)` are their positions, by `results` and `flags` of stacks."""

    form: BiasForm
    weights: Tensor
    queries: Tensor
    keys: Tensor
    gradient: Tensor

    def of_stack(self, stack: ProblemStack) -> LoweredBias:
        """The bias of a stack, whose problems are all of the same heads."""
        queries = self.queries.index_select(0, stack.results).view(-1, stack.rows, stack.width, self.form.dims)[:, :, 0]
        keys = self.keys.index_select(0, stack.flags).view(-1, stack.rows, self.form.dims)
        return LoweredBias(self.form, self.weights[stack.heads], torch.cat((queries, keys), dim=2))

    def add_gradient(self, stack: ProblemStack, dweights: Tensor) -> None:
        """Add the gradient of the weights that a stack gives."""
        self.gradient[stack.heads] += dweights
