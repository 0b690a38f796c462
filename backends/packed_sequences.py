"""Packed sequences one by one, for backends that compute them as calls of their own."""

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
    """`backend.forward` of each sequence, as `out` and `lse` of all."""
    from dilkit.op.boundary import empty_outputs

    out, lse = empty_outputs(inputs.query)
    for rows, keys, one, own in _sequences(problem, inputs):
        if keys.start < keys.stop:
            out[:, rows], lse[..., rows] = backend.forward(own, one)
        else:
            out[:, rows], lse[..., rows] = 0.0, -math.inf
    return out, lse


def backward_each(
    backend: Backend, dout: Tensor, inputs: Inputs, out: Tensor, lse: Tensor, problem: Problem
) -> tuple[Tensor, ...]:
    """`backend.backward` of each sequence; the gradient of a learned bias is the sum of theirs."""
    import torch

    whole, bias = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in inputs[:3]], inputs.bias
    dbias = [] if bias is None or not bias.form.learned else [torch.zeros_like(bias.weights)]
    for rows, keys, one, own in _sequences(problem, inputs):
        if keys.start == keys.stop:
            continue
        dq, dk, dv, *of_bias = backend.backward(dout[:, rows], own, out[:, rows], lse[..., rows], one)
        for x, places, part in zip(whole, (rows, keys, keys), (dq, dk, dv), strict=True):
            x[:, places] = part
        dbias = [total + part for total, part in zip(dbias, of_bias, strict=True)]
    return *whole, *dbias


def each_of_batch(inputs: Inputs, problem: Problem) -> Iterator[tuple[slice, Inputs, Problem]]:
    """Each element of a batch by itself, with the offset of its queries."""
    assert inputs.query_offset is not None
    for b, offset in enumerate(inputs.query_offset.tolist()):
        rows, bias = slice(b, b + 1), inputs.bias
        mask = None if inputs.key_padding_mask is None else inputs.key_padding_mask[rows]
        dropout = None if inputs.dropout is None else inputs.dropout.of_sequence(b)
        query, key, value = (x[rows] for x in inputs[:3])
        one = replace(problem, batch=1, queries=query.shape[1], query_offset=offset)
        yield rows, Inputs(query, key, value, mask, dropout=dropout, bias=bias), one


def _sequences(problem: Problem, inputs: Inputs) -> Iterator[tuple[slice, slice, Problem, Inputs]]:
    """The queries and keys of each packed sequence that has queries, with problem and inputs of that sequence alone."""
    starts, starts_k = inputs.cu_seqlens, inputs.cu_seqlens if inputs.cu_seqlens_k is None else inputs.cu_seqlens_k
    assert starts is not None
    assert starts_k is not None
    offsets = None if inputs.query_offset is None else inputs.query_offset.tolist()
    for number, (row_ends, key_ends) in enumerate(zip(pairwise(starts.tolist()), pairwise(starts_k.tolist()), strict=True)):
        rows, keys, bias = slice(*row_ends), slice(*key_ends), inputs.bias
        queries, seq = rows.stop - rows.start, keys.stop - keys.start
        if not queries:
            continue
        dropout = None if inputs.dropout is None else inputs.dropout.of_sequence(number)
        if bias is not None and bias.positions is not None:
            bias = bias._replace(positions=bias.positions[:, rows])
        one = replace(problem, seq=seq, varlen=False, queries=None, query_offset=0)
        if problem.queries is not None:
            offset = default_offset(queries, seq, problem.is_causal) if offsets is None else offsets[number]
            one = replace(one, queries=queries, query_offset=offset)
        query, key, value = inputs.query[:, rows], inputs.key[:, keys], inputs.value[:, keys]
        yield rows, keys, one, Inputs(query, key, value, dropout=dropout, bias=bias)
