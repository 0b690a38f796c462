"""The oracle: the definition in plain torch in double precision, which every backend and transport is tested against."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from dilkit.bias.base import Bias
from dilkit.inputs import Inputs
from dilkit.op.dropout import Dropout
from dilkit.op.given import counted
from dilkit.pattern import Pattern
from dilkit.pattern.pattern import check_entries
from dilkit.problem import default_offset


def oracle_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern,
    *,
    is_causal: bool = False,
    key_padding_mask: Tensor | None = None,
    sink: Tensor | None = None,
    scale: float | None = None,
    dropout: Dropout | None = None,
    bias: Bias | None = None,
    softcap: float | None = None,
    block_layout: Tensor | None = None,
    intervals: Tensor | None = None,
    query_offset: int | None = None,
    dtype: str = "float64",
) -> tuple[Tensor, Tensor]:
    """Compute one softmax over the count matrix, as a matrix, differentiable by autograd.

        out[i] = softmax_j(scale * q_i . k_j + log count[h, i, j]) . v        lse[i] = logsumexp of the same row

    With `tail="zeros"` a key and value of zeros counts as often as rows see padding (`Pattern.zero_keys`); `sink` `(heads,)` is
    the logit of one more. Weights that `dropout` drops are 0 in `out`, and the others multiplied by its factor. With `softcap`
    and `bias` the score is

        softcap * tanh(scale * q_i . k_j / softcap) + bias(h, i, j) + log count[h, i, j]

    that of the key of zeros is the logarithm of its count alone. `block_layout` and `intervals` are counted as the pattern's
    branch for them. Query i has the position `query_offset + i` among the keys (`dilkit.op.offsets`).

    Shapes as in `dilkit.dilated_attention`; returns `out` `(batch, seq, heads, head_dim)` and `lse` `(batch, heads, seq)`,
    both in `dtype`, in which all of the arithmetic happens. Memory is O(heads * seq**2): for small problems.
    """
    q, k, v = (x.to(getattr(torch, dtype)).transpose(1, 2) for x in (query, key, value))
    batch, heads, queries, head_dim = q.shape
    group, seq = heads // k.shape[1], k.shape[2]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    offset = default_offset(queries, seq, is_causal) if query_offset is None else query_offset
    check_entries(queries, heads, seq)
    rows, keys = offset + torch.arange(queries, device=q.device), torch.arange(seq, device=q.device)
    span = range(offset, offset + queries)
    inputs = Inputs(query, key, value, block_layout=block_layout, intervals=intervals)
    count = counted(inputs, pattern, rows, kv_heads=heads // group, is_causal=is_causal, span=span)
    if key_padding_mask is not None:
        count = count * ~key_padding_mask[:, None, None, :]
        k, v = (x.masked_fill(key_padding_mask[:, None, :, None], 0.0) for x in (k, v))  # which may be NaN there
    k, v, count = with_zero_keys(k, v, count, zero_keys(pattern, rows, seq, heads, heads // group, is_causal))
    added = None if bias is None else bias_of_rows(bias, rows, keys, batch, q.dtype)
    places = rows - min(offset, 0)
    factors = None if dropout is None else dropout.kept(heads, places, keys, batch).to(q.dtype) * dropout.factor
    out, lse = softmax_of_count(q, k, v, count, head_dim**-0.5 if scale is None else scale, sink, factors, added, softcap)
    return out.transpose(1, 2), lse.expand(batch, heads, queries)


def oracle_attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern,
    lengths: Sequence[int],
    dropout: Dropout | None = None,
    bias: Bias | None = None,
    key_lengths: Sequence[int] = (),
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Compute `oracle_attention` of each sequence of these `lengths`, packed one after the other in a batch of 1.

    `key_lengths`: those of the keys, if they are others.
    """
    of_keys = key_lengths or lengths
    row_starts, key_starts = ([0, *accumulate(some)] for some in (lengths, of_keys))
    alike: dict[tuple[int, int, int], list[int]] = {}
    for number, sizes in enumerate(zip(lengths, of_keys, strict=True)):
        alike.setdefault((*sizes, 0 if dropout is None else number), []).append(number)
    parts, places = [], []
    for (length, seq, _), numbers in alike.items():  # sequences of equal length are a batch: there may be thousands of short ones
        rows, keys = (
            torch.tensor([starts[n] for n in numbers], device=query.device)[:, None] + torch.arange(count, device=query.device)
            for starts, count in ((row_starts, length), (key_starts, seq))
        )
        options["dropout"] = None if dropout is None else dropout.of_sequence(numbers[0])
        options["bias"] = None if bias is None else bias.of_rows(keys)
        out, lse = oracle_attention(query[0, rows], key[0, keys], value[0, keys], pattern, **options)
        parts.append((out.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)))
        places.append(rows.flatten())
    order = torch.cat(places).argsort()
    out, lse = (torch.cat(rows)[order] for rows in zip(*parts, strict=True))
    return out[None], lse.T[None]


def oracle_attention_last(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern,
    lengths: Sequence[int],
    last: int,
    bias: Bias | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Compute the `last` rows of `oracle_attention` of each sequence of a batch; sequence b has `lengths[b]` rows."""
    parts = []
    for b, length in enumerate(lengths):
        q, (k, v) = query[b : b + 1, length - last : length], (x[b : b + 1, :length] for x in (key, value))
        options["bias"] = None if bias is None else bias.of_sequence(b, length)
        parts.append(oracle_attention(q, k, v, pattern, query_offset=length - last, **options))
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])


def softmax_of_count(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    count: Tensor,
    scale: float,
    sink: Tensor | None = None,
    factors: Tensor | None = None,
    bias: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the oracle's softmax, for any rows of a count.

    `q` is `(..., rows, head_dim)`, `k` and `v` are `(..., seq, head_dim)`, `count` is `(..., rows, seq)`; returns `out` like `q`
    and `lse` `(..., rows)`. `sink` `(heads,)`: the logit of a further key, for `q` `(..., heads, rows, head_dim)`.
    `factors` `(..., rows, keys)` multiply the weights of the first keys in `out`, and `bias` is added to their capped scores; the
    values of other keys are zeros.
    """
    scores = scale * (q @ k.mT)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + torch.nn.functional.pad(bias, (0, scores.shape[-1] - bias.shape[-1]))
    scores = scores + count.to(q.dtype).log()
    if sink is not None:
        column = sink.to(q.dtype)[:, None, None]
        scores, v = torch.cat([scores, column.expand(*scores.shape[:-1], 1)], -1), torch.nn.functional.pad(v, (0, 0, 0, 1))
        seen = (column > -math.inf).to(count.dtype)
        count = torch.cat([count, seen.expand(*count.shape[:-1], 1)], -1)
    sees_none = (count == 0).all(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(sees_none, 0.0), dim=-1).masked_fill(sees_none, 0.0)
    # logsumexp of a row of -inf has NaN gradients, so such rows are filled before and after it.
    lse = torch.logsumexp(scores.masked_fill(sees_none, 0.0), dim=-1).masked_fill(sees_none.squeeze(-1), -math.inf)
    if factors is not None:
        weights, v = weights[..., : factors.shape[-1]] * factors, v[..., : factors.shape[-1], :]
    return weights @ v, lse


def bias_of_rows(bias: Bias, queries: Tensor, keys: Tensor, batch: int, dtype: torch.dtype) -> Tensor:
    """Compute the bias of rows and keys, `(batch, heads, queries, keys)`."""
    wide = torch.promote_types(dtype, torch.float32)
    matrix = bias.with_weights(bias.weights.to(wide)).matrix(queries, keys).to(dtype)
    return matrix.expand(batch, *matrix.shape[-3:])


def zero_keys(pattern: Pattern, rows: Tensor, seq: int, heads: int, kv_heads: int, is_causal: bool) -> Tensor | None:
    """Count the keys of zeros that the queries `rows` see beside the others, `(heads, len(rows))`; None without padding."""
    if is_causal or pattern.tail == "exact":
        return None
    return pattern.zero_keys(seq, heads, kv_heads=kv_heads, rows=rows)


def with_zero_keys(key: Tensor, value: Tensor, count: Tensor, zeros: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Append one key of zeros to `key`, `value` and `count` of `softmax_of_count`, which counts as often as `zeros` says."""
    if zeros is None:
        return key, value, count
    key, value = (torch.nn.functional.pad(x, (0, 0, 0, 1)) for x in (key, value))
    return key, value, torch.cat([count, zeros.to(count.dtype)[..., None].expand(*count.shape[:-1], 1)], -1)
