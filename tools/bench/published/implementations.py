"""The implementations that the suite of published settings compares: what older ones called by other names, as it is here."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING

from dilkit.pattern import Pattern
from dilkit.problem import Problem
from dilkit.tools.bench.published.record import TWINS
from dilkit.tools.measure.implementation import Implementation, backend_implementations

if TYPE_CHECKING:
    from torch import Tensor, nn

    from dilkit.orders.token_order import TokenOrder
    from dilkit.testing.tensors import Tensors

SUMMARIES = {
    "auto": "the automatic choice of backend",
    "head-split": "the attention of each head in one branch alone, as in the older implementations",
    "multihead": "MultiheadDilatedAttention: with its four projections",
    "ordered": "with the order of a grid as nearly square as can be, along a Hilbert curve",
}


def implementation(name: str, heads: int) -> Implementation:
    """The implementation of this name for so many heads: one of `SUMMARIES` or `TWINS`, a peer or a backend. KeyError else."""
    from dilkit.tools.measure.baselines import BASELINES

    if name in BASELINES:
        return BASELINES[name]
    if name not in (*SUMMARIES, *TWINS):
        return backend_implementations([name])[0]
    summary = SUMMARIES.get(name, f"the automatic choice in {name}")
    made = Implementation(name, "way", summary, _attention, lambda problem: (), computes=summary)
    if name == "head-split":
        split = partial(_split, heads=heads)
        return replace(made, attend=lambda inputs, problem: _attention(inputs, problem, split(problem.pattern)), computed=split)
    if name == "multihead":
        return replace(made, attend=_multihead)
    if name == "ordered":
        return replace(made, attend=_ordered, checked=replace(made, attend=_out_of_order))
    return made


def _split(pattern: Pattern, heads: int) -> Pattern:
    return Pattern.head_split(pattern.segment_lengths, pattern.dilation_rates, heads)


def _attention(inputs: Tensors, problem: Problem, pattern: Pattern | None = None, order: TokenOrder | None = None) -> Tensor:
    from dilkit.nn import DilatedAttention

    module = DilatedAttention(pattern or problem.pattern, order=order)
    mask = inputs.mask
    out: Tensor = module(inputs.query, inputs.key, inputs.value, is_causal=problem.is_causal, key_padding_mask=mask)
    return out


def _ordered(inputs: Tensors, problem: Problem) -> Tensor:
    """Attention along the curve through the grid of the tokens, which are given and come back row by row."""
    return _attention(inputs, problem, order=grid_order(problem.seq))


def grid_order(seq: int) -> TokenOrder:
    """The Hilbert order of `seq` tokens as a grid that is as nearly square as can be."""
    from dilkit.orders.token_order import order

    rows = next(side for side in range(math.isqrt(seq), 0, -1) if seq % side == 0)
    return order((rows, seq // rows))


def _out_of_order(inputs: Tensors, problem: Problem) -> Tensor:
    """The same for tokens given along the curve: what comes back is attention as any other, which the oracle knows."""
    order = grid_order(problem.seq)
    query, key, value = (order.restore(x, 1) for x in (inputs.query, inputs.key, inputs.value))
    out: Tensor = order.apply(_ordered(replace(inputs, query=query, key=key, value=value), problem), 1)
    return out


def _multihead(inputs: Tensors, problem: Problem) -> Tensor:
    """Projections that change nothing but take what any others take, so that the result is that of the attention alone."""
    module = _identity(problem.heads, problem.head_dim, problem.pattern, problem.dtype, problem.device.type)
    out: Tensor = module(*(x.flatten(2) for x in (inputs.query, inputs.key, inputs.value)), need_weights=False)[0]
    return out.view(*out.shape[:2], problem.heads, problem.head_dim)


@lru_cache(maxsize=4)
def _identity(heads: int, head_dim: int, pattern: Pattern, dtype: str, device: str) -> nn.Module:
    import torch

    from dilkit.nn import DilatedAttention, MultiheadDilatedAttention

    size, kind = heads * head_dim, getattr(torch, dtype)
    module = MultiheadDilatedAttention(size, heads, DilatedAttention(pattern), device=device, dtype=kind)
    one = torch.eye(size, device=device, dtype=kind)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(one.repeat(parameter.shape[0] // size, 1) if parameter.dim() == 2 else torch.zeros_like(parameter))
    return module
