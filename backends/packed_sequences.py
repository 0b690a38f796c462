"""Packed sequences one by one, for backends that compute them as calls of their own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from dilkit.inputs import Inputs
from dilkit.problem import Problem


def sequences(problem: Problem, inputs: Inputs) -> Iterator[tuple[slice, Problem, Inputs]]:
    """The rows of each packed sequence that has any, with problem and inputs of that sequence alone."""
    assert inputs.cu_seqlens is not None
    for number, (start, stop) in enumerate(pairwise(inputs.cu_seqlens.tolist())):
        if start < stop:
            rows, (query, key, value) = slice(start, stop), inputs[:3]
            dropout = None if inputs.dropout is None else inputs.dropout.of_sequence(number)
            bias = inputs.bias
            if bias is not None and bias.positions is not None:
                bias = bias._replace(positions=bias.positions[:, rows])
            inputs_alone = Inputs(query[:, rows], key[:, rows], value[:, rows], dropout=dropout, bias=bias)
            yield rows, replace(problem, seq=stop - start, varlen=False), inputs_alone
