"""A call of FlexAttention: tensors padded to one of a few lengths, what a pair sees and what its score becomes.

mask_mod(b, h, i, j)       the count is not 0, j is a token that is not ignored, and lies in the sequence of i
score_mod(s, b, h, i, j)   softcap(s) + bias + log count
block mask                 `blocks.py`, of the padded length, without what lies beyond the end
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn import functional as F
from torch.nn.attention import flex_attention

from dilkit import plan
from dilkit.bias.form import LoweredBias
from dilkit.inputs import Inputs
from dilkit.op.given import as_bools
from dilkit.pattern.flex.blocks import BLOCK, blocks_of, ended, listed, of_queries
from dilkit.pattern.flex.pairs import Shows, counter, shown_by_several
from dilkit.pattern.lowering import Band, Given, GivenBlocks
from dilkit.problem import Problem

if TYPE_CHECKING:
    from torch import Tensor

STEPS = 8
"""Padded lengths between a power of two and the next: a call computes at most an eighth more rows than it has."""

Mod = Callable[..., Any]


class FlexCall(NamedTuple):
    """Arguments of `flex_attention`; tensors `(batch, heads, padded, head_dim)`.

    `score_mod` makes the change of scores of the weights of a bias, through which they have their gradient.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    score_mod: Callable[[Tensor | None], Mod] | None
    weights: Tensor | None
    block_mask: Any
    scale: float


@dataclass(frozen=True)
class Prepared:
    """Tables shared by the calls of a pattern: the count of a pair, and the blocks that may hold one."""

    count: Shows
    some: Tensor
    whole: Tensor
    nbytes: int


def padded(seq: int) -> int:
    step = max(BLOCK, (1 << max(seq - 1, 1).bit_length()) // (2 * STEPS))
    return -(-seq // step) * step


def prepare(problem: Problem, rows: int, device: torch.device) -> Prepared:
    """Return the pair count and the blocks for calls of so many `rows`, cached by padded length."""
    length = padded(rows) if not problem.varlen else 0
    heads = problem.heads, problem.kv_heads
    key = "flex", problem.pattern.to_json(), heads, problem.is_causal, length, problem.seq if problem.varlen else 0, str(device)
    return plan.cached(key, _prepare, problem, length, device)


def _prepare(problem: Problem, length: int, device: torch.device) -> Prepared:
    forms = problem.forms
    count = counter(forms, max(length, problem.seq), device)
    some, whole = (x.to(device) for x in blocks_of(forms, length, problem.heads, problem.is_causal))
    return Prepared(count, some, whole, 2 * some.nbytes + forms.nbytes + plan.ENTRY_BYTES)


def flex_call(inputs: Inputs, problem: Problem) -> FlexCall:
    rows, keys, offset = inputs.query.shape[1], inputs.key.shape[1], problem.query_offset or 0
    query, key, value = map(_padded_rows, inputs[:3])
    prepared = prepare(problem, rows if problem.queries is None else problem.span, query.device)
    numbers = (torch.tensor(x, dtype=torch.int32, device=query.device) for x in (rows, keys, offset, padded(problem.span) - 1))
    sizes = CallSizes(*numbers)  # as tensors: one compiled kernel serves all lengths and offsets that are padded alike
    packed = None if inputs.cu_seqlens is None else _places(inputs.cu_seqlens, padded(rows), problem.seq)
    some, whole = (prepared.some, prepared.whole) if packed is None else _packed_blocks(problem, packed[0])
    if problem.queries is not None:
        some, whole = of_queries(some, whole, offset, padded(rows), padded(keys))
    given_count = None if inputs.given is None else given_pairs(inputs, problem, padded(rows))

    def count(b: Any, h: Any, i: Any, j: Any) -> Any:
        shown = prepared.count(h, i, j)
        return shown if given_count is None else shown + given_count(b, h, i, j)

    if inputs.given is not None:
        some = some | given_blocks(inputs, problem, padded(rows) // BLOCK)
    mask_mod = _mask_mod(count, sizes, inputs, problem, packed)
    weights = None if inputs.bias is None else inputs.bias.weights
    if inputs.bias is not None and inputs.bias.form.by_query:
        weights = F.pad(inputs.bias.weights, (0, 0, 0, padded(rows) - inputs.bias.weights.shape[2]))
    if inputs.key_padding_mask is not None:  # of whole blocks FlexAttention asks for no pair, and would see ignored keys
        whole = torch.zeros_like(whole)
    return FlexCall(
        *(query, key, value),
        _score_mod(count, sizes, inputs, problem, packed),
        weights,
        _block_mask(ended(some, whole, rows, keys), mask_mod, (query.shape[2], key.shape[2])),
        problem.scale,
    )


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Any,
    weights: Tensor | None,
    block_mask: Any,
    scale: float,
    grouped: bool,
    kernel: str,
) -> tuple[Tensor, Tensor]:
    """Compute `(out, lse)`; to be compiled."""
    options: Any = {"BACKEND": kernel}
    out, aux = flex_attention.flex_attention(
        *(query, key, value, None if score_mod is None else score_mod(weights), block_mask, scale, grouped),
        kernel_options=options,
        return_aux=flex_attention.AuxRequest(lse=True),
    )
    return out, aux.lse


def _padded_rows(x: Tensor) -> Tensor:
    """Return `(batch, heads, padded, head_dim)`, a view where no row is missing."""
    x, missing = x.transpose(1, 2), padded(x.shape[1]) - x.shape[1]
    return F.pad(x, (0, 0, 0, missing)) if missing else x


class GivenOrder:
    """A call along the tokens as they are given: its arguments, and the way back of its results."""

    all_see = False

    def __init__(self, inputs: Inputs, problem: Problem) -> None:
        self.inputs, self.problem = inputs, problem

    def arguments(self) -> FlexCall:
        return flex_call(self.inputs, self.problem)

    def results(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Return out `(batch, rows, heads, head_dim)` and lse `(batch, heads, rows)`."""
        rows = self.inputs.query.shape[1]
        return out[:, :, :rows].transpose(1, 2), lse[:, :, :rows]

    def gradients(self, query: Tensor, key: Tensor, value: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of the tensors of the call from those of its arguments; `weights`: if they have one."""
        padded_gradients = zip((query, key, value), self.inputs[:3], strict=True)
        gradients = (x[:, :, : original.shape[1]].transpose(1, 2) for x, original in padded_gradients)
        by_query = self.problem.bias is not None and self.problem.bias.by_query
        return *gradients, *(x[:, :, : self.inputs.query.shape[1]] if by_query else x for x in weights)


def _places(cu_seqlens: Tensor, length: int, longest: int) -> tuple[Tensor, Tensor]:
    """Return each row's sequence number and position in the sequence, int32; rows after the last get one number more."""
    rows = torch.arange(length, dtype=torch.int32, device=cu_seqlens.device)
    number = torch.searchsorted(cu_seqlens, rows, right=True).to(torch.int32) - 1
    return number, (rows - cu_seqlens[number.long()]).clamp(max=longest - 1)  # tables have no place for rows after the last


class CallSizes(NamedTuple):
    """The numbers of rows and keys, the position of the first query, and the last one that tables have: int32 `()`."""

    rows: Tensor
    keys: Tensor
    offset: Tensor
    last: Tensor

    def position(self, i: Any, problem: Problem) -> Any:
        return i if problem.queries is None else (i + self.offset).minimum(self.last)


def _mask_mod(count: Shown, sizes: CallSizes, inputs: Inputs, problem: Problem, packed: tuple[Tensor, Tensor] | None) -> Mod:
    mask, is_causal = inputs.key_padding_mask, problem.is_causal
    ignored = None if mask is None else F.pad(mask, (0, padded(mask.shape[1]) - mask.shape[1]))

    def mask_mod(b: Any, h: Any, i: Any, j: Any) -> Any:
        seen, position = (j < sizes.keys) & (i < sizes.rows), sizes.position(i, problem)
        if is_causal:
            seen = seen & (j <= position)
        if ignored is not None:
            seen = seen & ~ignored[b, j]
        if packed is None:
            return seen & (count(b, h, position, j) > 0)
        number, place = packed
        return seen & (number[i] == number[j]) & (count(b, h, place[i], place[j]) > 0)

    return mask_mod


def _score_mod(
    count: Shown, sizes: CallSizes, inputs: Inputs, problem: Problem, packed: tuple[Tensor, Tensor] | None
) -> Callable[[Tensor | None], Mod] | None:
    several = shown_by_several(problem.forms, problem.pattern.overlap)
    if not (problem.softcap or several or inputs.bias):
        return None
    softcap, bias = problem.softcap, inputs.bias
    if bias is not None and bias.positions is not None:
        positions, length = bias.positions, padded(problem.span if packed is None else inputs.query.shape[1])
        bias = bias._replace(positions=F.pad(positions, (0, 0, 0, length - positions.shape[1])))
    place = None if packed is None else packed[1]

    def of_weights(weights: Tensor | None) -> Mod:
        added_bias = None if bias is None or weights is None else bias_of(bias._replace(weights=weights))

        def score_mod(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            i = sizes.position(i, problem)
            query_at, key_at = (i, j) if place is None else (place[i], place[j])
            if softcap:
                score = softcap * torch.tanh(score / softcap)
            if added_bias is not None and bias is not None:
                placed = (query_at, key_at) if bias.positions is None else (i, j)
                score = score + added_bias(b, h, *placed, i)
            return score + torch.log(count(b, h, query_at, key_at).clamp(min=1).to(torch.float32)) if several else score

        return score_mod

    return of_weights


def _packed_blocks(problem: Problem, number: Tensor) -> tuple[Tensor, Tensor]:
    """Return the blocks that share a sequence and, if all forms are bands, lie within their reach."""
    ends = number.view(-1, BLOCK)
    first, last = ends[:, 0], ends[:, -1]
    some = (first[:, None] <= last) & (first <= last[:, None])
    if all(isinstance(form, Band) for form in problem.forms):
        near, _ = blocks_of(problem.forms, len(number), problem.heads, problem.is_causal)
        some = some & near.any(0).to(some.device)
    elif problem.is_causal:
        some = some.tril()
    some = some.expand(problem.heads, *some.shape)
    return some, torch.zeros_like(some)


def _block_mask(blocks: tuple[Tensor, Tensor], mask_mod: Mod, lengths: tuple[int, int]) -> Any:
    some, whole = (x if x.dim() == 4 else x[None] for x in blocks)
    whole = whole.expand_as(some)  # kernels stride over both alike
    return flex_attention.BlockMask.from_kv_blocks(
        *listed(some & ~whole), *listed(whole), BLOCK_SIZE=BLOCK, mask_mod=mask_mod, seq_lengths=lengths
    )


Shown = Callable[[Any, Any, Any, Any], Any]


def given_pairs(inputs: Inputs, problem: Problem, length: int) -> Shown:
    """Make `shows(b, h, i, j)`, int32: what the call gives shows this pair, of `length` rows at most."""
    (form,) = (one for one in problem.forms if isinstance(one, Given))
    layout, (first, stop) = _layout(inputs, problem), form.heads
    batches, heads = layout.shape[:2]
    if isinstance(form, GivenBlocks):
        missing = -(-length // form.block) - layout.shape[2]
        layout = F.pad(layout, (0, missing, 0, missing))
    else:
        layout = F.pad(layout, (0, 0, 0, 0, 0, length - layout.shape[2]))

    def shows(b: Any, h: Any, i: Any, j: Any) -> Any:
        table = b if batches > 1 else b * 0, h if heads > 1 else h * 0
        if isinstance(form, GivenBlocks):
            seen = layout[(*table, i // form.block, j // form.block)]
        else:
            seen = i != i
            for n in range(layout.shape[3]):
                seen = seen | ((j >= layout[(*table, i, n, 0)]) & (j < layout[(*table, i, n, 1)]))
        return ((h >= first) & (h < stop) & seen).to(torch.int32)

    return shows


def given_blocks(inputs: Inputs, problem: Problem, count: int) -> Tensor:
    """Mark the blocks, `count` a side, that hold a pair: bool `(batch or 1, heads, count, count)`."""
    (form,) = (one for one in problem.forms if isinstance(one, Given))
    layout = _layout(inputs, problem)
    if isinstance(form, GivenBlocks):
        edges = torch.arange(count, device=layout.device) * BLOCK
        first = torch.arange(layout.shape[2], device=layout.device)[:, None] * form.block
        overlap = ((first < edges + BLOCK) & (edges < first + form.block)).float()
        some = overlap.T @ layout.float() @ overlap > 0
    else:
        intervals = F.pad(layout, (0, 0, 0, 0, 0, count * BLOCK - layout.shape[2]))
        rows = intervals.view(*layout.shape[:2], count, BLOCK * layout.shape[3], 2)
        seen = (rows[..., 0] < rows[..., 1]).int()
        steps = seen.new_zeros(*seen.shape[:3], count + 1)  # one more block begins, or has ended, to hold an interval
        for ends, sign in ((rows[..., 0] // BLOCK, 1), ((rows[..., 1] - 1) // BLOCK + 1, -1)):
            steps.scatter_add_(3, ends.long().clamp(0, count), sign * seen)
        some = steps.cumsum(3)[..., :count] > 0
    some = some.expand(-1, problem.heads, -1, -1).clone()
    some[:, : form.heads[0]] = some[:, form.heads[1] :] = False
    return some.tril() if problem.is_causal else some


def _layout(inputs: Inputs, problem: Problem) -> Tensor:
    if inputs.intervals is not None:
        return inputs.intervals
    assert inputs.block_layout is not None
    return as_bools(inputs.block_layout, problem.heads)


def bias_of(bias: LoweredBias) -> Mod:
    """Make `bias(b, h, i, j, row)`, added to the score of query i and key j: of their numbers where positions are not given.

    `row`: the query's row of the tensors, for weights by query.
    """
    form, weights, positions = bias

    def apart(b: Any, i: Any, j: Any) -> list[Any]:
        if positions is None:
            return [i - j]
        batch = b if len(positions) > 1 else b * 0
        return [positions[batch, i, k] - positions[batch, j, k - form.dims] for k in range(form.dims)]

    def distance(b: Any, h: Any, i: Any, j: Any, row: Any) -> Any:
        parts = apart(b, i, j)
        if form.metric == "euclidean":
            measured = sum(part * part for part in parts) ** 0.5
        elif form.metric == "l1":
            measured = sum(part.abs() for part in parts)
        else:
            measured = reduce(torch.maximum, (part.abs() for part in parts))
        if form.neutral:
            measured = measured.nan_to_num(nan=0.0)
        return -weights[h, 0] * measured

    def entry(b: Any, h: Any, i: Any, j: Any, row: Any) -> Any:
        indices: list[Any] = []
        for size, part in zip(form.sizes, apart(b, i, j), strict=True):
            index = part.clamp(-(size // 2), size // 2) + size // 2
            if form.by_axis:
                indices.append(index + sum(form.sizes[: len(indices)]))
            else:
                indices = [indices[0] * size + index if indices else index]
        table = (h, b, row) if form.by_query else (h,)
        return sum(weights[(*table, index if positions is None else index.int())] for index in indices)

    return entry if form.sizes else distance
