"""Ways to compute attention with a bias or a softcap: native, and torch with a matrix of all pairs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dilkit import CoordinateAlibi, dilated_attention
from dilkit.bias.base import Bias
from dilkit.problem import Problem
from dilkit.testing.accuracy import Check, Results, differentiated, expected, expected_rows, shortened
from dilkit.testing.tensors import Tensors
from dilkit.tools.bench.serving.entries import checked, timed
from dilkit.tools.measure.case import CaseFields, failed
from dilkit.tools.measure.correctness import some_rows
from dilkit.tools.measure.single_call import call_once
from dilkit.tools.results.record import Entries, Entry

BACKEND = "native"


@dataclass(frozen=True)
class Way:
    """A way to compute `problem` on `inputs`; `held_bytes` are those of what it needs beside them, such as a matrix."""

    problem: Problem
    inputs: Tensors
    attend: Callable[..., Any]
    held_bytes: int = 0

    def __call__(self) -> Results:
        with torch.set_grad_enabled(self.problem.requires_grad):
            return differentiated(self.attend, self.inputs, self.problem.requires_grad)


MakeWay = Callable[[Problem, Tensors], Way]


def native(problem: Problem, inputs: Tensors) -> Way:
    """The CPU kernel."""
    options: dict[str, Any] = dict(is_causal=problem.is_causal, softcap=problem.softcap or None, backend=BACKEND, return_lse=True)

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: None, **bias: Any) -> Any:
        return dilated_attention(q, k, v, problem.pattern, **bias, **options)

    return Way(problem, inputs, attend)


def with_matrix(problem: Problem, inputs: Tensors) -> Way:
    """torch's attention with the bias of all pairs, which the call makes; the pattern is dense, not causal."""

    def attend(*rows: Tensor, bias: Bias) -> Any:
        return masked(rows, _matrix(bias))

    return Way(problem, inputs, attend)


def with_given_matrix(problem: Problem, inputs: Tensors) -> Way:
    """The same with a matrix that was made before, as for further layers of a model."""
    assert inputs.bias is not None
    matrix = _matrix(inputs.bias)

    def attend(*rows: Tensor, bias: Bias) -> Any:
        return masked(rows, matrix)

    return Way(problem, inputs, attend, held_bytes=matrix.nbytes)


def _matrix(bias: Bias) -> Tensor:
    """`(batch, heads, seq, seq)`, of distances by torch's own function for them."""
    assert isinstance(bias, CoordinateAlibi)
    exact = "donot_use_mm_for_euclid_dist"  # by its products distances have half the digits
    apart = torch.cdist(bias.coordinates, bias.coordinates, compute_mode=exact)
    return -bias.slopes[:, None, None] * apart.unsqueeze(1)


def masked(rows: Sequence[Any], matrix: Tensor) -> Any:
    """torch's attention with a matrix that is added to the scores, or a mask of the pairs that are seen."""
    q, k, v = (x.transpose(1, 2) for x in rows[:3])
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, matrix).transpose(1, 2)
    return out, out.new_empty(0)


def eager(problem: Problem, inputs: Tensors) -> Way:
    """Causal attention with a softcap, operator by operator, as models write it out."""
    group = problem.heads // problem.kv_heads

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: None) -> Any:
        q, k, v = (x.transpose(1, 2) for x in (query, key.repeat_interleave(group, 2), value.repeat_interleave(group, 2)))
        scores = torch.tanh(q @ k.mT * problem.scale / problem.softcap) * problem.softcap
        later = torch.full((problem.seq, problem.seq), -math.inf, dtype=scores.dtype).triu(1)
        out = ((scores + later).softmax(-1) @ v).transpose(1, 2)
        return out, out.new_empty(0)

    return Way(problem, inputs, attend)


def compared(ways: Mapping[str, tuple[MakeWay, Problem]], repeats: int) -> CaseFields:
    """Each way is checked against the definition; those that are right are timed in turns."""
    made = {name: make(problem, Tensors.random(problem)) for name, (make, problem) in ways.items()}
    entries: Entries = {name: _admitted(way, ways[name][0]) for name, way in made.items()}
    return timed(entries, made, repeats)


def _admitted(way: Way, make: MakeWay) -> Entry:
    """The beginning of an entry: its verdict; and if it is right the memory of a call."""
    try:
        checks = (*_of_whole(make, shortened(way.problem)), *_of_rows(way))
        if wrong := next((check for check in checks if not check.passed), None):
            return checked(wrong)
        one = call_once(partial(way.__call__))
    except Exception as error:  # out of memory: the others go on
        return failed(error)
    peak = None if one.peak_bytes is None else one.peak_bytes + way.held_bytes
    return replace(checked(checks[-1], one), check=checks, flops=float(way.problem.flops()), peak_bytes=peak)


def _of_whole(make: MakeWay, problem: Problem) -> tuple[Check, ...]:
    """Of all results that the way has, at a length at which the oracle has room."""
    inputs = Tensors.random(problem, seed=1)
    way = make(problem, inputs)
    results = way()
    return expected(problem, way.inputs).checks({name: x for name, x in results.items() if x.numel()}, problem.seq)


def _of_rows(way: Way) -> tuple[Check, ...]:
    """Of some rows at full length."""
    rows, results = some_rows(way.inputs, way.problem), way()
    own = {name: x[:, rows] for name, x in results.items() if name in ("out", "dq")}
    return expected_rows(way.problem, way.inputs, rows).checks(own, way.problem.seq, " rows")
