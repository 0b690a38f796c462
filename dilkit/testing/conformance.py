"""The conformance suite: one backend on one case of the problem list, judged against the fp64 oracle.

    ratio = max|backend - oracle| / (max|plain - oracle| + atol)        passed: ratio <= 2, gradients <= 3

`plain` is the definition in plain torch math, all of it in the case's dtype. `atol` is a few roundings: plain torch math may hit
a value exactly where others round.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from math import inf, isfinite
from typing import Any

import torch
from torch import Tensor

from dilkit import dilated_attention
from dilkit.device import probe
from dilkit.op.boundary import lse_dtype
from dilkit.oracle import oracle_attention
from dilkit.selector import Decision, explain
from dilkit.testing.poison import poisoned_memory
from dilkit.testing.problems import Case
from dilkit.testing.tensors import Tensors, make_tensors

LIMITS = {"out": 2.0, "lse": 2.0, "dq": 3.0, "dk": 3.0, "dv": 3.0}
"""How many times the error of plain torch math is still right."""

Results = dict[str, Tensor]


@dataclass(frozen=True)
class Result:
    """What became of a backend on a case: "passed", "failed", "refused" or "broken", with error ratios and reasons."""

    backend: str
    case: Case
    verdict: str
    ratios: dict[str, float] = field(default_factory=dict)
    reasons: tuple[str, ...] = ()

    @property
    def worst(self) -> float:
        """The largest error ratio; NaN when nothing was computed."""
        return max(self.ratios.values(), default=float("nan"))


def check(backend: str, case: Case, device: str = "cpu") -> Result:
    """Run `backend` on `case`, forward and, where both have them, gradients. Whatever it raises is a failure, not an error."""
    requires_grad = case.gradients
    decision = _decide(backend, case, device, requires_grad)
    notes: tuple[str, ...] = ()
    if decision.verdict == "refused" and requires_grad:
        without = _decide(backend, case, device, requires_grad=False)
        if without.verdict == "picked":
            decision, requires_grad, notes = without, False, ("forward only", *decision.reasons)
    if decision.verdict != "picked":
        return Result(backend, case, decision.verdict, reasons=decision.reasons)
    try:
        tensors = make_tensors(case, device)
        with poisoned_memory():
            found = _differentiated(partial(_call, case, backend), tensors, requires_grad)
    except Exception as error:
        return Result(backend, case, "failed", reasons=(f"{type(error).__name__}: {error}",))
    complaints = _malformed(found, tensors)
    ratios, wrong = _judge(found, expected(case))
    return Result(backend, case, "failed" if complaints or wrong else "passed", ratios, (*complaints, *wrong, *notes))


def repeats_that_differ(backend: str, case: Case, device: str, repeats: int) -> int:
    """How many of `repeats` further computations of `case`, forward and gradients, differ in a bit from the first."""
    tensors = make_tensors(case, device)
    compute = partial(_differentiated, partial(_call, case, backend), tensors, case.gradients)
    first = compute()
    return sum(any(not torch.equal(x, first[name]) for name, x in compute().items()) for _ in range(repeats))


@dataclass(frozen=True)
class Expected:
    """The oracle's results for a case, fp64 on the CPU, and the error that plain torch math in the case's dtype makes."""

    exact: Results
    error: dict[str, float]


@lru_cache(maxsize=1024)
def expected(case: Case) -> Expected:
    """What every backend is compared with on `case`; computed once a process."""
    tensors = make_tensors(case)
    exact = _differentiated(partial(_oracle, case, "float64"), _in(tensors, torch.float64), case.gradients)
    if case.dtype == "float64":  # the oracle's own dtype: its error is that of fp32, scaled down
        shrink = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
        single = expected(replace(case, dtype="float32"))
        return Expected(exact, {name: shrink * error for name, error in single.error.items()})
    plain = _differentiated(partial(_oracle, case, case.dtype), tensors, case.gradients)
    tiny = _few_roundings(case, tensors, exact)
    return Expected(exact, {name: _distance(plain[name], x) + tiny[name] for name, x in exact.items()})


def _decide(backend: str, case: Case, device: str, requires_grad: bool) -> Decision:
    kind, _, index = device.partition(":")
    trace = explain(case.problem(probe(kind, int(index or 0)), requires_grad), backend)
    return next(d for d in trace.decisions if d.name == backend)


def _call(case: Case, backend: str, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Any:
    options: dict[str, Any] = dict(is_causal=case.is_causal, key_padding_mask=mask, scale=case.scale)
    return dilated_attention(q, k, v, case.pattern, backend=backend, return_lse=True, **options)


def _oracle(case: Case, dtype: str, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Any:
    return oracle_attention(q, k, v, case.pattern, is_causal=case.is_causal, key_padding_mask=mask, scale=case.scale, dtype=dtype)


def _differentiated(attend: Callable[..., Any], tensors: Tensors, gradients: bool) -> Results:
    """`attend(q, k, v, mask) -> (out, lse)` and, with `gradients`, its gradients through both outputs."""
    qkv = [x.detach().requires_grad_(gradients) for x in tensors.qkv]
    out, lse = attend(*qkv, tensors.mask)
    found = dict(out=out.detach(), lse=lse.detach())
    if gradients:
        gradients_of = torch.autograd.grad((out, lse), qkv, (tensors.dout, tensors.dlse.to(lse.dtype)))
        found |= zip(("dq", "dk", "dv"), gradients_of, strict=True)
    return found


def _in(tensors: Tensors, dtype: torch.dtype) -> Tensors:
    q, k, v, dout, dlse = (x.to(dtype) for x in (*tensors.qkv, tensors.dout, tensors.dlse))
    return Tensors(q, k, v, tensors.mask, dout, dlse)


def _few_roundings(case: Case, tensors: Tensors, exact: Results) -> dict[str, float]:
    """An absolute error that stands for a rounding or two in the accumulating dtype and one half in the result's.

    The accumulating dtype is fp32 for half types. A gradient of scores is a difference of terms as large as |dout| . |v|.
    Large scores are themselves rounded, and with them `exp(score - lse)`: by which partial results merge, and gradients start.
    """
    q, k, v = (x.double().abs() for x in tensors.qkv)
    largest = {name: x[x.isfinite()].abs().max().item() if x.isfinite().any() else 0.0 for name, x in exact.items()}
    scale = abs(case.problem().scale)
    difference = scale * (tensors.dout.double().abs().mean() * v.mean()).item() * case.head_dim
    most_q, most_k, most_v, most_dout = (x.max().item() for x in (q, k, v, tensors.dout.double().abs()))
    natural = dict(out=most_v, lse=1.0, dq=difference * most_k, dk=difference * most_q, dv=most_dout)
    accumulating, result = torch.finfo(torch.float32).eps, torch.finfo(getattr(torch, case.dtype)).eps
    accumulating *= max(1.0, largest["lse"] / 8)
    return {name: accumulating * natural[name] + result / 2 * size for name, size in largest.items()}


def _distance(found: Tensor, exact: Tensor) -> float:
    """The largest |found - exact|; infinite where one is finite and the other not, or of another sign of infinity."""
    found = found.detach().double().cpu()
    return torch.where(found == exact, 0.0, (found - exact).abs()).nan_to_num(nan=inf).max().item()


def _malformed(found: Results, tensors: Tensors) -> list[str]:
    """What is wrong with the form of the results, whatever their values."""
    wrong = []
    query, key = tuple(tensors.query.shape), tuple(tensors.key.shape)
    shapes = dict(out=query, lse=(query[0], query[2], query[1]), dq=query, dk=key, dv=key)
    for name, x in found.items():
        dtype = lse_dtype(tensors.query.dtype) if name == "lse" else tensors.query.dtype
        if x.dtype != dtype or tuple(x.shape) != shapes[name]:
            wrong.append(f"{name} is {x.dtype} {tuple(x.shape)}; {dtype} {shapes[name]} is right")
    if not found["out"].is_contiguous():
        wrong.append(f"out has strides {found['out'].stride()}; it must be contiguous")
    unseen = found["lse"] == -torch.inf
    if found["out"].transpose(1, 2)[unseen].any():
        wrong.append("out is not 0 in rows that see nothing")
    return wrong


def _judge(found: Results, want: Expected) -> tuple[dict[str, float], list[str]]:
    """The error ratios of all results, and a text for each that exceeds its limit."""
    ratios = {name: _ratio(_distance(x, want.exact[name]), want.error[name]) for name, x in found.items()}
    wrong = []
    for name, ratio in ratios.items():
        if not ratio <= LIMITS[name]:
            size = f"{ratio:.1f}x that of plain torch math" if isfinite(ratio) else "not finite"
            wrong.append(f"{name}: the error is {size}, at most {LIMITS[name]:.0f}x is right")
    return ratios, wrong


def _ratio(error: float, plain: float) -> float:
    return error / plain if plain else inf if error else 0.0
