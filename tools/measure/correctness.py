"""Is an implementation right? Checked just before it is timed: on a shortened problem, and in some rows at the real length."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from dilkit.problem import Problem
from dilkit.testing.accuracy import Check, Expected, Results, differentiated, exact_rows, expected, expected_rows, shortened
from dilkit.testing.poison import poisoned_memory
from dilkit.testing.tensors import Tensors
from dilkit.tools.measure.implementation import Implementation
from dilkit.tools.results.record import Difference

ROWS = 16


def check(implementation: Implementation, problem: Problem, inputs: Tensors) -> tuple[Check, ...]:
    """Everything that is checked before timing, in memory full of NaN: `out`, and gradients where the problem asks for them.

    The shortened problem is left out where the implementation refuses it.
    """
    short = shortened(problem)
    whole = () if implementation.refusals(short) else check_whole(implementation, short)
    rows = some_rows(inputs, problem)
    at_length = _expected(implementation, problem, inputs, rows).checks(
        _rows_of(implementation, inputs, problem, rows), problem.seq, " rows"
    )
    return (*whole, *at_length)


def check_whole(implementation: Implementation, problem: Problem) -> tuple[Check, ...]:
    """All results, against the oracle of what it computes."""
    inputs = Tensors.random(problem, seed=1)
    return _expected(implementation, problem, inputs).checks(_results(implementation, inputs, problem), problem.seq)


def difference(implementation: Implementation, problem: Problem, inputs: Tensors) -> Difference | None:
    """How far its result is from the attention of the problem's pattern, in `ROWS` random rows at the real length; None where
    that is what it computes."""
    if not implementation.differs(problem):
        return None
    rows = some_rows(inputs, problem)
    differences: dict[str, float] = {}
    truth = exact_rows(problem, inputs, rows)
    for name, computed in _rows_of(implementation, inputs, problem, rows).items():
        what, exact = {"dq": "dquery"}.get(name, name), truth[name]
        error = (computed.double() - exact).abs().max().item()
        differences |= {f"{what}_max_abs": error, f"{what}_relative": error / max(exact.abs().max().item(), 1e-300)}
    return Difference(computes=implementation.computes, **differences)


def some_rows(inputs: Tensors, problem: Problem) -> Tensor:
    """`ROWS` random rows, the same for every implementation."""
    chosen = torch.randperm(problem.seq, generator=torch.Generator().manual_seed(2))[:ROWS]
    return chosen.sort().values.to(inputs.query.device)


def _results(implementation: Implementation, inputs: Tensors, problem: Problem) -> Results:
    with poisoned_memory(), torch.set_grad_enabled(problem.requires_grad):
        out = implementation.attend(inputs, problem)
        results = dict(out=out.detach())
        if problem.requires_grad:
            results |= zip(("dq", "dk", "dv"), torch.autograd.grad(out, inputs.qkv, inputs.dout), strict=True)
    return results


def _rows_of(implementation: Implementation, inputs: Tensors, problem: Problem, rows: Tensor) -> Results:
    """Of its results, `out` and the gradient of the query: those that a row has for itself."""
    results = _results(implementation, inputs, problem)
    return {name: results[name][:, rows] for name in ("out", "dq") if name in results}


def _expected(implementation: Implementation, problem: Problem, inputs: Tensors, rows: Tensor | None = None) -> Expected:
    """The exact results of what it computes, whole or in some rows."""
    own = implementation.own_gradients
    if own is not None and problem.requires_grad:
        every = torch.arange(problem.seq, device=inputs.query.device)

        def compute(dtype: str) -> Results:
            chosen = every if rows is None else rows
            given = replace(inputs.to(dtype), dout=inputs.dout[:, chosen].to(getattr(torch, dtype)))
            results = differentiated(lambda q, k, v, _: own(q, k, v, problem, chosen), given, gradients=True)
            return results if rows is None else dict(results, dq=results["dq"][:, rows])

        return Expected.of(compute, problem, inputs)
    computed = replace(problem, pattern=implementation.computed(problem.pattern))
    return expected(computed, inputs) if rows is None else expected_rows(computed, inputs, rows)
