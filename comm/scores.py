"""The bias of attention over ranks: what each rank is given of it, what all must agree on, and the positions of its rows.

A bias of rows, such as `CoordinateAlibi`, is given to each rank for its own rows; any other is that of the whole sequence.
"""

from __future__ import annotations

from dataclasses import fields
from hashlib import sha256

import torch
from torch import Tensor

from dilkit.bias.base import Bias
from dilkit.bias.form import LoweredBias
from dilkit.op.scores import fitting, lowered, positions_along
from dilkit.pattern import Pattern


def check_rank_bias(bias: Bias, query: Tensor, pattern: Pattern, kv_heads: int) -> None:
    """Raise TypeError or ValueError for a bias that does not fit the rows of a rank, `(batch, rows, heads, head_dim)`."""
    fitted = fitting(bias, query, pattern, kv_heads)
    if fitted.by_row:
        fitted.check_rows(*query.shape[:2])
        lowered(fitted, query.dtype, slice(0, query.shape[1]))  # coordinates that this dtype cannot hold are refused by all ranks


def bias_fingerprint(bias: Bias) -> str:
    """What ranks compare to know that they have the same bias: all of it but its weights, and what it holds of rows."""
    form, weights, _ = lowered(bias, torch.float64)
    facts = [type(bias).__name__, str(form), tuple(weights.shape)]
    for field in fields(bias) if not bias.by_row else ():  # type: ignore[arg-type]
        value = getattr(bias, field.name)
        if field.name != bias.weights_name:
            is_tensor = isinstance(value, Tensor)
            facts.append(sha256(value.cpu().numpy().tobytes()).hexdigest()[:32] if is_tensor else value)
    return "; ".join(map(str, facts))


def rank_bias(bias: Bias, query: Tensor, pattern: Pattern, kv_heads: int, first: int, seq: int) -> LoweredBias:
    """The bias of a rank whose rows begin at `first` in a sequence of `seq`; positions are always given.

    The form is that of the whole: where it is not `placed`, rows that follow each other do without their positions. Raises
    ValueError where this is no bias of the whole sequence.
    """
    fitted, rows = fitting(bias, query, pattern, kv_heads), query.shape[1]
    if fitted.by_row:
        return lowered(fitted, query.dtype, slice(0, rows))
    fitted.check_rows(query.shape[0], seq)
    lowered_bias = lowered(fitted, query.dtype, slice(first, first + rows))
    if lowered_bias.positions is not None:
        return lowered_bias
    return lowered_bias._replace(positions=positions_along(lowered_bias.weights, first, rows))
