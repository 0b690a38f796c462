"""A step of decoding in plain torch: what `DecodingBackend.attend_stored` computes, by definition.

columns of the scores of a row    | its first span | its second span | ...     -inf up to the row that sees the most
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dilkit.backends.ignored_keys import weighted
from dilkit.bias.evaluated import evaluate
from dilkit.decoding.layout import decoded, encoded, width_of
from dilkit.decoding.protocol import Span, Step, Write, check
from dilkit.op.boundary import lse_dtype

if TYPE_CHECKING:
    from dilkit.problem import Problem


_KEY, _VALUE = Span._fields.index("key"), Span._fields.index("value")


class _Seen(NamedTuple):
    """A span: its stored rows `(rows, heads, count, head_dim)`, and its query rows, heads and columns of scores."""

    span: Span
    keys: Tensor
    values: Tensor
    rows: slice
    heads: slice
    columns: slice


def attend(step: Step, problem: Problem, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Compute `(out, lse)` of a step in `dtype`."""
    check(step, problem)
    _write(step, problem)
    batch, seq = step.query.shape[:2]
    kv_heads, group = problem.kv_heads, problem.heads // problem.kv_heads
    query = step.query.reshape(batch * seq, kv_heads, group, problem.head_dim).to(dtype)
    spans = list(_seen(step, problem, dtype))
    width = max((seen.columns.stop for seen in spans), default=0)
    scores = query.new_full((*query.shape[:3], width + (step.sink is not None)), -math.inf)
    if step.sink is not None:
        scores[..., -1] = step.sink.to(dtype).view(kv_heads, -1)
    for seen in spans:
        scores[seen.rows, seen.heads, :, seen.columns] = _scores(step, problem, seen, query)
    lse = scores.logsumexp(-1) if scores.shape[-1] else query.new_full(query.shape[:3], -math.inf)
    weights = (scores - lse.masked_fill(lse == -math.inf, math.inf).unsqueeze(-1)).exp().masked_fill(scores == -math.inf, 0.0)
    out = torch.zeros_like(query)
    for seen in spans:
        shares = weights[seen.rows, seen.heads, :, seen.columns]
        out[seen.rows, seen.heads] += weighted(shares, seen.values) if seen.span.unseen >= 0 else shares @ seen.values
    lse = lse.view(batch, seq, problem.heads).mT.to(lse_dtype(step.query.dtype)).contiguous()
    return out.view(step.query.shape).to(step.query.dtype), lse


def _seen(step: Step, problem: Problem, dtype: torch.dtype) -> Iterator[_Seen]:
    """Yield the nonempty spans, each with its columns of scores, which follow those of earlier spans of the same rows."""
    filled = [0] * step.query.shape[:2].numel()
    for line in step.spans.tolist():
        span = Span(*line)
        if not (span.rows and span.heads and span.seen):
            continue
        rows = range(span.row, span.row + span.rows)
        column = max(filled[row] for row in rows)
        for row in rows:
            filled[row] = column + span.seen
        keys, values = (_rows_of(step, problem, span, *span[at : at + 5]) for at in (_KEY, _VALUE))
        places = slice(span.row, span.row + span.rows), _heads(span), slice(column, column + span.seen)
        yield _Seen(span, decoded(keys, dtype), decoded(values, dtype), *places)


def _rows_of(step: Step, problem: Problem, span: Span, at: int, offset: int, sequence: int, head: int, row: int) -> Tensor:
    stored, sizes = step.stored[at], (span.rows, span.heads)
    if span.pages < 0:
        return _rows(stored, (*sizes, span.seen), offset, (sequence, head, row), problem)
    assert step.pages is not None
    number, place = np.divmod(span.page_first + np.arange(span.seen) * span.page_step, span.page_rows)
    pages = step.pages[span.pages + number]
    whole = int(pages.max()) + 1, *sizes, span.page_rows
    rows = _rows(stored, whole, offset, (span.page, sequence, head, row), problem)
    return rows[torch.from_numpy(pages), :, :, torch.from_numpy(place)].permute(1, 2, 0, 3)


def _scores(step: Step, problem: Problem, seen: _Seen, query: Tensor) -> Tensor:
    """Compute scores `(rows, heads, group, count)`; -inf where a query head does not see a row."""
    span = seen.span
    scores = problem.scale * (query[seen.rows, seen.heads] @ seen.keys.mT)
    if problem.softcap:
        scores = problem.softcap * torch.tanh(scores / problem.softcap)
    if step.bias is not None:
        scores = scores + _bias(step, problem, seen, scores)
    return scores if span.unseen < 0 else scores.masked_fill(step.unseen[span.unseen], -math.inf)


def _bias(step: Step, problem: Problem, seen: _Seen, scores: Tensor) -> Tensor:
    span, bias = seen.span, step.bias
    assert bias is not None
    if bias.positions is not None and len(bias.positions) > 1:
        sequences = torch.arange(span.row, span.row + span.rows, device=scores.device) // step.query.shape[1]
        bias = bias._replace(positions=bias.positions[sequences])
    positions = None if bias.positions is None else bias.positions.to(scores.dtype)
    keys = torch.arange(span.seen, device=scores.device) * span.position_step + span.position
    keys = step.positions[span.positions] if span.positions >= 0 else keys
    query = torch.tensor([span.query_position], device=scores.device)
    added = evaluate(bias._replace(weights=bias.weights.to(scores.dtype), positions=positions), query, keys)[:, :, 0]
    return added.view(len(added), problem.kv_heads, -1, span.seen)[:, seen.heads]


def _write(step: Step, problem: Problem) -> None:
    for line in step.writes.tolist():
        write = Write(*line)
        if not (write.rows and write.heads):
            continue
        assert step.key is not None
        assert step.value is not None
        rows, size = slice(write.row, write.row + write.rows), (write.rows, write.heads)
        for new, at, offset, sequence, head in (
            (step.key, write.key, write.key_offset, write.key_sequence, write.key_head),
            (step.value, write.value, write.value_offset, write.value_sequence, write.value_head),
        ):
            to = _rows(step.stored[at], size, offset, (sequence, head), problem)
            to.copy_(encoded(new.flatten(0, 1)[rows, _heads(write)], to.dtype))


def _heads(of: Span | Write) -> slice:
    return slice(of.first_head, of.first_head + (of.heads - 1) * of.head_step + 1, max(1, of.head_step))


def _rows(stored: Tensor, size: tuple[int, ...], offset: int, strides: tuple[int, ...], problem: Problem) -> Tensor:
    width = width_of(problem.head_dim, stored.dtype)
    return stored.as_strided((*size, width), (*strides, 1), int(stored.storage_offset()) + offset)
