"""Packed sequences, or elements of a batch, one by one, for backends that compute them as calls of their own."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

from dilkit.backend import Backend
from dilkit.inputs import Inputs
from dilkit.problem import Problem, default_offset

if TYPE_CHECKING:
    from torch import Tensor


def forward_each(backend: Backend, inputs: Inputs, problem: Problem) -> tuple[Tensor, Tensor]:
    """Run `backend.forward` for each sequence; return `out` and `lse` of all."""
    from dilkit.op.boundary import empty_outputs

    out, lse = empty_outputs(inputs.query)
    for (b, rows), (_, keys), one, own in _sequences(problem, inputs):
        if keys.start < keys.stop:
            out[b, rows], lse[b, :, rows] = backend.forward(own, one)
        else:
            out[b, rows], lse[b, :, rows] = 0.0, -math.inf
    return out, lse


def backward_each(
    backend: Backend, dout: Tensor, inputs: Inputs, out: Tensor, lse: Tensor, problem: Problem
) -> tuple[Tensor, ...]:
    """Run `backend.backward` for each sequence, and sum the gradients of a learned bias."""
    import torch

    whole, bias = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in inputs[:3]], inputs.bias
    dbias = [] if bias is None or not bias.form.learned else [torch.zeros_like(bias.weights)]
    for rows, keys, one, own in _sequences(problem, inputs):
        if keys[1].start == keys[1].stop:
            continue
        dq, dk, dv, *of_bias = backend.backward(dout[rows], own, out[rows], lse[rows[0], :, rows[1]], one)
        for x, places, part in zip(whole, (rows, keys, keys), (dq, dk, dv), strict=True):
            x[places] = part
        for total, part in zip(dbias, of_bias, strict=True):
            total[(slice(None), *rows) if bias is not None and bias.form.by_query else slice(None)] += part
    return *whole, *dbias


Rows = tuple[slice, slice]
"""Elements of a batch, and rows of each."""


def _sequences(problem: Problem, inputs: Inputs) -> Iterator[tuple[Rows, Rows, Problem, Inputs]]:
    """Yield the queries and keys of each sequence that has queries, with problem and inputs of that sequence alone."""
    starts, starts_k = inputs.cu_seqlens, inputs.cu_seqlens if inputs.cu_seqlens_k is None else inputs.cu_seqlens_k
    offsets = None if inputs.query_offset is None else inputs.query_offset.tolist()
    if starts is None or starts_k is None:
        every = slice(0, inputs.query.shape[1]), slice(0, inputs.key.shape[1])
        places = [tuple((slice(b, b + 1), rows) for rows in every) for b in range(problem.batch)]
    else:
        ends = zip(pairwise(starts.tolist()), pairwise(starts_k.tolist()), strict=True)
        places = [tuple((slice(0, 1), slice(*rows)) for rows in both) for both in ends]
    for number, ((b, rows), (_, keys)) in enumerate(places):
        queries, seq = rows.stop - rows.start, keys.stop - keys.start
        if not queries:
            continue
        bias, mask = inputs.bias, inputs.key_padding_mask
        dropout = None if inputs.dropout is None else inputs.dropout.of_sequence(number)
        if bias is not None and bias.positions is not None:
            bias = bias._replace(positions=bias.positions[:, rows])
        if bias is not None and bias.form.by_query:
            bias = bias._replace(weights=bias.weights[:, b, rows])
        one = replace(problem, batch=1, seq=seq, varlen=False, queries=None, query_offset=0)
        if problem.queries is not None:
            offset = default_offset(queries, seq, problem.is_causal) if offsets is None else offsets[number]
            one = replace(one, queries=queries, query_offset=offset)
        query, key, value = inputs.query[b, rows], inputs.key[b, keys], inputs.value[b, keys]
        of_one = Inputs(query, key, value, None if mask is None else mask[b], dropout=dropout, bias=bias)
        yield (b, rows), (b, keys), one, of_one
