"""Implementations of the suite of published settings, by the names of older ones, and the search for the longest sequence."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from dilkit.nn import DilatedAttention, MultiheadDilatedAttention
from dilkit.orders.token_order import TokenOrder, order
from dilkit.pattern import Pattern
from dilkit.problem import Problem
from dilkit.testing import memory
from dilkit.testing.tensors import Tensors
from dilkit.tools.measure.baselines import BASELINES
from dilkit.tools.measure.implementation import Implementation, backend_implementations

TWINS = ("float32", "bfloat16")
"""Implementations that are the automatic choice with tensors of another dtype than the setting's."""
SUMMARIES = {
    "auto": "the automatic choice of backend",
    "head-split": "the attention of each head in one branch alone, as in the older implementations",
    "multihead": "MultiheadDilatedAttention: with its four projections",
    "ordered": "with the order of a grid as nearly square as can be, along a Hilbert curve",
}


def implementation(name: str, heads: int) -> Implementation:
    """Return the implementation of this name for so many heads: one of `SUMMARIES` or `TWINS`, a peer or a backend.

    Raises KeyError for an unknown name.
    """
    if name in BASELINES:
        return BASELINES[name]
    if name not in (*SUMMARIES, *TWINS):
        return backend_implementations([name])[0]
    summary = SUMMARIES.get(name, f"the automatic choice in {name}")
    auto = Implementation(name, "way", summary, _attention, lambda problem: (), computes=summary)
    if name == "head-split":

        def split(pattern: Pattern) -> Pattern:
            return Pattern.head_split(pattern.segment_lengths, pattern.dilation_rates, heads)

        return replace(auto, attend=lambda inputs, problem: _attention(inputs, problem, split(problem.pattern)), computed=split)
    if name == "multihead":
        return replace(auto, attend=_multihead)
    if name == "ordered":
        return replace(auto, attend=_ordered, checked=replace(auto, attend=_out_of_order))
    return auto


def _attention(inputs: Tensors, problem: Problem, pattern: Pattern | None = None, order: TokenOrder | None = None) -> Tensor:
    module, mask = DilatedAttention(pattern or problem.pattern, order=order), inputs.mask
    out: Tensor = module(inputs.query, inputs.key, inputs.value, is_causal=problem.is_causal, key_padding_mask=mask)
    return out


def _ordered(inputs: Tensors, problem: Problem) -> Tensor:
    """Attention along the curve through the grid of the tokens, which are given and come back row by row."""
    return _attention(inputs, problem, order=grid_order(problem.seq))


def grid_order(seq: int) -> TokenOrder:
    """Return the Hilbert order of `seq` tokens as a grid that is as nearly square as can be."""
    rows = next(side for side in range(math.isqrt(seq), 0, -1) if seq % side == 0)
    return order((rows, seq // rows))


def _out_of_order(inputs: Tensors, problem: Problem) -> Tensor:
    """The same for tokens given along the curve: what comes back is attention as any other, which the oracle knows."""
    curve = grid_order(problem.seq)
    query, key, value = (curve.restore(x, 1) for x in (inputs.query, inputs.key, inputs.value))
    out: Tensor = curve.apply(_ordered(replace(inputs, query=query, key=key, value=value), problem), 1)
    return out


def _multihead(inputs: Tensors, problem: Problem) -> Tensor:
    """Projections that change nothing but take what any others take, so that the result is that of the attention alone."""
    module = _identity(problem.heads, problem.head_dim, problem.pattern, problem.dtype, problem.device.type)
    out: Tensor = module(*(x.flatten(2) for x in (inputs.query, inputs.key, inputs.value)), need_weights=False)[0]
    return out.view(*out.shape[:2], problem.heads, problem.head_dim)


@lru_cache(maxsize=4)
def _identity(heads: int, head_dim: int, pattern: Pattern, dtype: str, device: str) -> nn.Module:
    size, kind = heads * head_dim, getattr(torch, dtype)
    module = MultiheadDilatedAttention(size, heads, DilatedAttention(pattern), device=device, dtype=kind)
    one = torch.eye(size, device=device, dtype=kind)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(one.repeat(parameter.shape[0] // size, 1) if parameter.dim() == 2 else torch.zeros_like(parameter))
    return module


def longest(one: Implementation, problem: Problem, limit: int, grain: int, budget: float) -> dict[str, Any]:
    """Find the longest `seq` of `problem` of which a call fits into `limit` bytes, inputs counted, as a multiple of `grain`.

    No call is made that is expected to take more than `budget` seconds. Returns values of a row: `seq`, 0 if none fits; the
    lengths `tried`, with peak bytes and seconds; and why it `stopped` where there may be longer ones.
    """
    tried: list[dict[str, Any]] = []

    def fits(seq: int) -> bool:
        longer, start = replace(problem, seq=seq), time.perf_counter()
        try:
            peak = memory.peak_memory(lambda: called(longer, partial(one.once, problem=longer)), problem.device.type)
        except (MemoryError, torch.cuda.OutOfMemoryError):
            tried.append(dict(seq=seq, bytes=None, seconds=None))
            return False
        tried.append(dict(seq=seq, bytes=peak, seconds=time.perf_counter() - start))
        return peak <= limit

    def too_slow(seq: int) -> bool:
        last = tried[-1]
        return bool((last["seconds"] or 0.0) * (seq / last["seq"]) ** (2 if one.quadratic else 1) > budget)

    values = dict(limit_bytes=limit, seq=None, tried=tried, stopped=None)
    try:
        seq, slow = bisect(fits, grain, too_slow)
    except memory.MeasureError as error:
        return values | dict(tried=[], stopped=str(error))
    return values | dict(seq=seq, stopped=f"a call would take more than {budget:g} s (--budget)" if slow else None)


def bisect(fits: Callable[[int], bool], grain: int, too_slow: Callable[[int], bool]) -> tuple[int, bool]:
    """Find the largest multiple of `grain` that fits, 0 if none does, where what is longer than something too long does not fit.

    True beside it: it was `too_slow` to look further.
    """
    low, high = 0, grain
    while fits(high):
        low, high = high, 2 * high
        if too_slow(high):
            return low, True
    while high - low > grain:
        middle = (low + high) // (2 * grain) * grain
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low, False


def called(problem: Problem, call: Callable[[Tensors], Any]) -> Any:
    """Return the result of a call and its random inputs, without a gradient of the output where the problem asks for none."""
    inputs = Tensors.random(problem)
    if not problem.requires_grad:
        inputs = replace(inputs, dout=inputs.query.detach())
    return inputs, call(inputs)
