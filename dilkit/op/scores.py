"""Changes to the scores of a call: the bias and the softcap, checked, and as the torch operators take them.

score = softcap(scale * q_i . k_j) + bias(h, i, j) + log count        softcap(s) = cap * tanh(s / cap)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from dilkit.bias.base import Bias
from dilkit.bias.checks import check_reach
from dilkit.bias.form import BiasForm, LoweredBias
from dilkit.checks import real, shown
from dilkit.op.boundary import check_device, check_memory, lse_dtype
from dilkit.op.sequences import places
from dilkit.pattern import Pattern


class Scores(NamedTuple):
    """The bias of a call, lowered, and its softcap; None and 0 where it has none."""

    bias: LoweredBias | None = None
    softcap: float = 0.0

    @property
    def tensors(self) -> tuple[Tensor | None, Tensor | None]:
        return (None, None) if self.bias is None else (self.bias.weights, self.bias.positions)

    def of_part(self, number: int, parts: int) -> Scores:
        """Return the scores of part `number` of `parts` equal parts of the heads."""
        if self.bias is None:
            return self
        return self._replace(bias=self.bias._replace(weights=self.bias.weights.tensor_split(parts)[number]))

    def of_rows(self, rows: slice | Tensor) -> Scores:
        """Return the scores of these rows by themselves."""
        if self.bias is None or self.bias.positions is None:
            return self
        return self._replace(bias=self.bias._replace(positions=self.bias.positions[:, rows].contiguous()))

    @property
    def form(self) -> BiasForm | None:
        return None if self.bias is None else self.bias.form


PLAIN = Scores()


def scores_of(
    bias: Bias | None, softcap: float | None, query: Tensor, pattern: Pattern, kv_heads: int, rows: int | None = None
) -> Scores:
    """Return bias and softcap of a call with `query`; `rows`: of the keys, if not of `query`. Raises TypeError or ValueError."""
    if bias is None and softcap is None:
        return PLAIN
    cap = check_softcap(softcap)
    if bias is None:
        return Scores(None, cap)
    fitted, rows = fitting(bias, query, pattern, kv_heads), query.shape[1] if rows is None else rows
    fitted.check_rows(query.shape[0], rows)
    return Scores(lowered(fitted, query.dtype, slice(0, rows)), cap)


def packed_scores(
    bias: Bias | None, softcap: float | None, query: Tensor, pattern: Pattern, kv_heads: int, cu_seqlens: Tensor, total: int
) -> Scores:
    """Return bias and softcap of a packed call with `total` keys; positions restart with each sequence of `cu_seqlens`."""
    if bias is None or (isinstance(bias, Bias) and bias.by_row):
        return scores_of(bias, softcap, query, pattern, kv_heads, total)
    fitted = fitting(bias, query, pattern, kv_heads)
    at_once = cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling()
    if at_once and len(cu_seqlens) > 1:
        fitted.check_rows(1, int(cu_seqlens.diff().max()))
    rows = places(cu_seqlens, total).long()
    scores = Scores(lowered(fitted, query.dtype, rows), check_softcap(softcap))
    if not at_once and (most := fitted.most_rows) is not None:
        torch._assert_async((rows < most).all(), f"a packed sequence has more rows than the {most} of the bias")
    return scores


def fitting(bias: object, query: Tensor, pattern: Pattern, kv_heads: int) -> Bias:
    """Return `bias` for the heads of `query`. Raises TypeError or ValueError for no bias, other heads or another device."""
    if not isinstance(bias, Bias):
        needed = "a value such as dilkit.Alibi or dilkit.RelativeTable is needed, never a tensor of all pairs"
        raise TypeError(f"bias={shown(bias)} is a {type(bias).__name__}; {needed}")
    bias = _of_heads(bias, query.shape[2], kv_heads, pattern)
    check_device(f"{bias.weights_name} of the bias", bias.weights, query)
    if bias.by_query and bias.weights.shape[1:3] != query.shape[:2]:
        shape, by_query = tuple(bias.weights.shape[1:3]), tuple(query.shape[:2])
        raise ValueError(f"{bias.weights_name} of the bias is of (batch, rows) = {shape}; those of query, {by_query}, are needed")
    return bias


def check_softcap(softcap: float | None) -> float:
    """Return the softcap as a number, 0 for None. Raises TypeError or ValueError for an invalid one."""
    if softcap is None:
        return 0.0
    cap = real("softcap", softcap)
    if cap <= 0:
        raise ValueError(f"softcap={cap:g} must be more than 0; use None for no cap")
    return cap


def _of_heads(bias: Bias, heads: int, kv_heads: int, pattern: Pattern) -> Bias:
    head_count, shard = len(bias.weights), pattern.head_shard
    if head_count == heads:
        return bias
    group = heads // kv_heads
    if shard is not None and head_count == shard[1] * group:
        return bias.with_weights(bias.weights[shard[0] * group :][:heads])
    whole = "" if shard is None else f", or of all {shard[1] * group} of the model"
    raise ValueError(f"{bias.weights_name} of the bias is of {head_count} heads; the {heads} heads of query are needed{whole}")


def lowered(bias: Bias, dtype: torch.dtype, rows: slice | Tensor = slice(None)) -> LoweredBias:
    """Lower a bias for queries of a dtype, with the positions of `rows` alone."""
    form, weights, positions = bias.lowered(lse_dtype(dtype))
    learned = torch.is_grad_enabled() and weights.requires_grad
    if positions is not None and positions.device != weights.device:
        raise ValueError(f"coordinates of the bias are on {positions.device} but its slopes on {weights.device}; move them there")
    if positions is not None:
        last = positions.shape[1] - 1
        taken = positions[:, rows if isinstance(rows, slice) else rows.clamp(0, last)]
        positions = taken.resolve_neg().contiguous()
    return LoweredBias(replace(form, learned=learned), weights.resolve_neg().contiguous(), positions)


def placed_along(scores: Scores, apply: Callable[[Tensor], Tensor], rows: int) -> Scores:
    """Return `scores` of so many rows that `apply` reorders, `(batch, rows, ...)`, with positions given from then on."""
    if scores.bias is None:
        return scores
    form, weights, positions = scores.bias
    if positions is None:
        positions = positions_along(weights, 0, rows)
    if form.by_query:
        weights = apply(weights.flatten(0, 1)).reshape(weights.shape).contiguous()
    return scores._replace(bias=LoweredBias(replace(form, placed=True), weights, apply(positions).contiguous()))


def positions_along(weights: Tensor, first: int, rows: int) -> Tensor:
    """Return the positions of rows, `(1, rows, 1)`. Raises ValueError for positions that the dtype does not have."""
    check_reach("positions of the bias", first + rows - 1, weights.dtype)
    return torch.arange(first, first + rows, dtype=weights.dtype, device=weights.device)[None, :, None]


def check_detached(positions: Tensor | None) -> None:
    """Raise ValueError for positions of a bias that require a gradient: they have none."""
    if positions is not None and positions.requires_grad:
        raise ValueError("coordinates of the bias require a gradient, which is not computed; pass coordinates.detach()")


def check_bias(form: BiasForm | None, weights: Tensor | None, positions: Tensor | None, query: Tensor, rows: int) -> None:
    """Raise TypeError or ValueError unless the tensors at the operator are those of the form, for `rows` of the key."""
    heads, dtype = query.shape[2], lse_dtype(query.dtype)
    wanted: dict[str, tuple[Tensor | None, tuple[tuple[int, ...], ...]]] = {"bias": (weights, ()), "positions": (positions, ())}
    if form is not None:
        wanted["bias"] = weights, ((heads, *(query.shape[:2] if form.by_query else ()), form.entries),)
        if form.placed:
            wanted["positions"] = positions, ((1, rows, form.columns), (query.shape[0], rows, form.columns))
    for name, (x, shapes) in wanted.items():
        if (x is None) != (not shapes):
            raise ValueError(f"{name} is {'missing' if shapes else 'given'}, unlike the text of the call: bias {form}")
        if x is None:
            continue
        if x.dtype != dtype or x.device != query.device or not x.is_contiguous():
            raise TypeError(f"{name} is {x.dtype} on {x.device}; {dtype} on {query.device}, contiguous, is needed beside query")
        if tuple(x.shape) not in shapes:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; {shapes[-1]} is needed")
        check_memory((name,), (x,))
