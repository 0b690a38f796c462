"""Packed sequences one by one, for backends that compute them as calls of their own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

from dilkit.backend import Backend
from dilkit.inputs import Inputs
from dilkit.problem import Problem

if TYPE_CHECKING:
    from torch import Tensor


def forward_each(backend: Backend, inputs: Inputs, problem: Problem) -> tuple[Tensor, Tensor]:
    """`backend.forward` of each sequence, as `out` and `lse` of all."""
    from dilkit.op.boundary import empty_outputs

    out, lse = empty_outputs(inputs.query)
    for rows, one, own in _sequences(problem, inputs):
        out[:, rows], lse[..., rows] = backend.forward(own, one)
    return out, lse


def backward_each(
    backend: Backend, dout: Tensor, inputs: Inputs, out: Tensor, lse: Tensor, problem: Problem
) -> tuple[Tensor, ...]:
    """`backend.backward` of each sequence; the gradient of a learned bias is the sum of theirs."""
    import torch

    whole, bias = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs[:3]], inputs.bias
    dbias = [] if bias is None or not bias.form.learned else [torch.zeros_like(bias.weights)]
    for rows, one, own in _sequences(problem, inputs):
        dq, dk, dv, *of_bias = backend.backward(dout[:, rows], own, out[:, rows], lse[..., rows], one)
        for x, part in zip(whole, (dq, dk, dv), strict=True):
            x[:, rows] = part
        dbias = [total + part for total, part in zip(dbias, of_bias, strict=True)]
    return *whole, *dbias


def _sequences(problem: Problem, inputs: Inputs) -> Iterator[tuple[slice, Problem, Inputs]]:
    """The rows of each packed sequence that has any, with problem and inputs of that sequence alone."""
    assert inputs.cu_seqlens is not None
    for number, (start, stop) in enumerate(pairwise(inputs.cu_seqlens.tolist())):
        if start < stop:
            rows, bias = slice(start, stop), inputs.bias
            dropout = None if inputs.dropout is None else inputs.dropout.of_sequence(number)
            if bias is not None and bias.positions is not None:
                bias = bias._replace(positions=bias.positions[:, rows])
            query, key, value = (x[:, rows] for x in inputs[:3])
            yield rows, replace(problem, seq=stop - start, varlen=False), Inputs(query, key, value, dropout=dropout, bias=bias)
