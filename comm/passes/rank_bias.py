"""The bias of a rank's own rows: positions travel with the rows, as queries and as keys, and each rank has the weights."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from hashlib import sha256
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dilkit.bias.base import Bias
from dilkit.bias.form import BiasForm, LoweredBias
from dilkit.op.scores import fitting, lowered, positions_along
from dilkit.pattern import Pattern

if TYPE_CHECKING:
    from dilkit.comm.passes.problem_stacks import ProblemStack


@dataclass(frozen=True)
class RankBias:
    """The bias of the rows that a rank holds, with positions; `gradient` `(heads, entries)`: that of the weights so far."""

    form: BiasForm
    weights: Tensor
    positions: Tensor
    gradient: Tensor

    @classmethod
    def of(cls, bias: LoweredBias) -> RankBias:
        assert bias.positions is not None
        return cls(bias.form, bias.weights, bias.positions, bias.weights.new_zeros(bias.weights.shape))

    def of_range(self, rows: slice) -> LoweredBias:
        return LoweredBias(self.form, self.weights, self.positions[:, rows].contiguous() if self.form.placed else None)

    def by_head(self, batch: int, heads: int) -> Tensor:
        """Return the positions as rows of so many heads, `(batch, rows, heads, dims)`: they travel as queries or keys do."""
        return self.positions[:, :, None].expand(batch, -1, heads, -1)

    def of_stack(self, stack: ProblemStack, queries: Tensor | None, keys: Tensor | None) -> LoweredBias:
        """Return the bias of a stack of equal problems; `queries`, `keys` `(n, dims)`: positions, by `results` and `flags`."""
        assert queries is not None
        assert keys is not None
        queries = queries.index_select(0, stack.results).view(-1, stack.rows, stack.width, self.form.dims)[:, :, 0]
        keys = keys.index_select(0, stack.flags).view(-1, stack.rows, self.form.dims)
        form = replace(self.form, placed=True, apart=True)
        return LoweredBias(form, self.weights[stack.heads], torch.cat((queries, keys), dim=2))


def check_rank_bias(bias: Bias, query: Tensor, pattern: Pattern, kv_heads: int) -> None:
    """Raise TypeError or ValueError for a bias that does not fit the rows of a rank, `(batch, rows, heads, head_dim)`."""
    fitted = fitting(bias, query, pattern, kv_heads)
    if fitted.by_query:
        limit = "has values for each query, which ranks do not exchange"
        raise ValueError(f"bias={type(bias).__name__} {limit}; compute it on one device")
    if fitted.by_row:
        fitted.check_rows(*query.shape[:2])
        lowered(fitted, query.dtype, slice(0, query.shape[1]))  # coordinates that this dtype cannot hold are refused by all ranks


def bias_fingerprint(bias: Bias) -> str:
    """Return the text by which ranks know that they have the same bias: all of it but its weights, and what it holds of rows."""
    form, weights, _ = lowered(bias, torch.float64)
    facts = [type(bias).__name__, str(form), tuple(weights.shape)]
    for field in fields(bias) if not bias.by_row else ():  # type: ignore[arg-type]
        value = getattr(bias, field.name)
        if field.name != bias.weights_name:
            is_tensor = isinstance(value, Tensor)
            facts.append(sha256(value.cpu().numpy().tobytes()).hexdigest()[:32] if is_tensor else value)
    return "; ".join(map(str, facts))


def rank_bias(bias: Bias, query: Tensor, pattern: Pattern, kv_heads: int, first: int, seq: int) -> LoweredBias:
    """Return a rank's bias with positions; its rows begin at `first` of `seq`. ValueError for a bias that does not fit."""
    fitted, rows = fitting(bias, query, pattern, kv_heads), query.shape[1]
    if fitted.by_row:
        return lowered(fitted, query.dtype, slice(0, rows))
    fitted.check_rows(query.shape[0], seq)
    lowered_bias = lowered(fitted, query.dtype, slice(first, first + rows))
    if lowered_bias.positions is not None:
        return lowered_bias
    return lowered_bias._replace(positions=positions_along(lowered_bias.weights, first, rows))
