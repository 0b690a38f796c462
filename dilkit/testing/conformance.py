"""The conformance suite: one backend on one case of the problem list, judged against the fp64 oracle as `accuracy` says."""

from __future__ import annotations

import traceback
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import accumulate
from math import inf, isfinite
from typing import Any

import torch
from torch import Tensor

from dilkit import dilated_attention, dilated_attention_varlen, dilated_attention_with_kvcache
from dilkit.checks import visible
from dilkit.device import device_named
from dilkit.op import attend, kvcache
from dilkit.op.boundary import lse_dtype
from dilkit.selector import Decision, explain
from dilkit.testing import accuracy
from dilkit.testing.accuracy import LIMITS, Expected, Results, differentiated, distance, seeded
from dilkit.testing.poison import clean_rows, poisoned_memory
from dilkit.testing.problems import Case
from dilkit.testing.tensors import Tensors, make_tensors

_CALLERS = attend.__file__, kvcache.__file__
"""The files in which operators call backends."""


@dataclass(frozen=True)
class CaseResult:
    """The verdict on a backend and a case: "passed", "failed", "refused" or "broken", with error ratios and reasons."""

    backend: str
    case: Case
    verdict: str
    ratios: dict[str, float] = field(default_factory=dict)
    reasons: tuple[str, ...] = ()
    raised_in: tuple[str, ...] = ()
    """The frames of the backend in which it raised, as Python shows them, the innermost last."""

    @property
    def worst(self) -> float:
        """The largest error ratio; NaN when nothing was computed."""
        return max(self.ratios.values(), default=float("nan"))


def check(backend: str, case: Case, device: str = "cpu") -> CaseResult:
    """Run `backend` on `case`, forward and, where both have them, gradients. Whatever it raises is a failure, but Ctrl-C."""
    requires_grad = case.gradients
    decision = _decide(backend, case, device, requires_grad)
    notes: tuple[str, ...] = ()
    if decision.verdict == "refused" and requires_grad:
        without = _decide(backend, case, device, requires_grad=False)
        if without.verdict == "picked":
            decision, requires_grad, notes = without, False, ("forward only", *decision.reasons)
    if decision.verdict != "picked":
        return CaseResult(backend, case, decision.verdict, reasons=decision.reasons)
    try:
        tensors = make_tensors(case, device)
        before = [x.clone() for x in _inputs(tensors)]
        with poisoned_memory():
            results = differentiated(partial(_call, case, backend), tensors, requires_grad)
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # the backend may be another package's
        frames = traceback.extract_tb(error.__traceback__)
        called = [i for i, frame in enumerate(frames) if frame.filename in _CALLERS]
        of_backend = traceback.format_list(frames[called[-1] + 1 :] if called else frames)
        reasons = (visible(f"{type(error).__name__}: {error}"),)
        return CaseResult(backend, case, "failed", reasons=reasons, raised_in=tuple(of_backend))
    complaints = _malformed(results, tensors, case)
    if any(not torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(before, _inputs(tensors), strict=True)):
        complaints.append("an input was changed; they are read-only")
    ratios, wrong = _judge(_clean(results, case), expected(case))
    return CaseResult(backend, case, "failed" if complaints or wrong else "passed", ratios, (*complaints, *wrong, *notes))


def repeats_that_differ(backend: str, case: Case, device: str, repeats: int) -> int:
    """Count the repeats of `case`, forward and gradients, that differ in a bit from the first computation, or fail."""
    tensors = make_tensors(case, device)

    def computed() -> Results:
        with suppress(Exception):
            return differentiated(partial(_call, case, backend), tensors, case.gradients)
        return {}

    first = computed()
    again = (computed() for _ in range(repeats if first else 0))
    equal = sum(all(name in results and torch.equal(x, results[name]) for name, x in first.items()) for results in again)
    return repeats - equal


def _inputs(tensors: Tensors) -> list[Tensor]:
    bias = tensors.bias
    of_bias = () if bias is None else (bias.weights, getattr(bias, "coordinates", None))
    return [x for x in (*tensors.qkv, tensors.mask, tensors.sink, *of_bias) if x is not None]


@lru_cache(maxsize=1024)
def expected(case: Case) -> Expected:
    """Compute the expected results of `case`, once a process, on the CPU, and without poisoned sequences."""
    tensors = make_tensors(replace(case, poisoned=False))
    exact = accuracy.expected(case.problem(), tensors, case.lengths, case.rows, case.key_lengths)
    return replace(exact, exact=_clean(exact.exact, case))


def _decide(backend: str, case: Case, device: str, requires_grad: bool) -> Decision:
    trace = explain(case.problem(device_named(device), requires_grad), backend)
    return next(d for d in trace.decisions if d.name == backend)


def _call(case: Case, backend: str, q: Tensor, k: Tensor, v: Tensor, mask: Any = None, sink: Any = None, bias: Any = None) -> Any:
    options: dict[str, Any] = dict(scale=case.scale, sink=sink, bias=bias, softcap=case.softcap or None, backend=backend)
    options["return_lse"] = True
    if case.rows:
        return _last_rows(case, q, k, v, options)
    options |= dict(is_causal=case.is_causal, dropout_p=case.dropout_p)
    with seeded():
        if case.pattern.given_branch is not None:
            options |= make_tensors(case, q.device.type).given
        if not case.lengths:
            options["query_offset"] = case.query_offset
            return dilated_attention(q, k, v, case.pattern, key_padding_mask=mask, **options)
        cu_seqlens, of_keys = (
            torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=q.device)
            for lengths in (case.lengths, case.key_lengths)
        )
        if case.key_lengths:
            options["cu_seqlens_k"] = of_keys
        return tuple(x.unsqueeze(0) for x in dilated_attention_varlen(q[0], k[0], v[0], case.pattern, cu_seqlens, **options))


def _last_rows(case: Case, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Any:
    before = torch.tensor(case.lengths, device=q.device) - case.rows
    places = before[:, None] + torch.arange(case.rows, device=q.device)
    query, key, value = (torch.stack([one[rows] for one, rows in zip(x, places, strict=True)]) for x in (q, k, v))
    unwritten = torch.arange(case.seq, device=q.device) >= before[:, None]
    k_cache, v_cache = (x.masked_fill(unwritten[:, :, None, None], torch.nan) for x in (k, v))
    rows: dict[str, Any] = dict(key=key, value=value, cache_seqlens=before.int())
    return dilated_attention_with_kvcache(query, k_cache, v_cache, case.pattern, **rows, **options)


def _clean(results: Results, case: Case) -> Results:
    """Return the results of rows that are not poisoned; gradients of sinks and biases, which are of all rows, are left out."""
    if not case.poisoned:
        return results
    rows, by_row = clean_rows(case).to(results["out"].device), {"lse": 2}
    return {
        name: x[(slice(None),) * by_row.get(name, 1) + (rows,)] for name, x in results.items() if name not in ("dsink", "dbias")
    }


def _malformed(results: Results, tensors: Tensors, case: Case) -> list[str]:
    wrong = []
    batch, seq, heads, head_dim = tensors.query.shape
    query, key = (batch, case.rows or seq, heads, head_dim), tuple(tensors.key.shape)
    shapes = dict(out=query, lse=(query[0], query[2], query[1]), dq=query, dk=key, dv=key, dsink=query[2:3])
    if tensors.bias is not None:
        shapes["dbias"] = tuple(tensors.bias.weights.shape)
    for name, x in results.items():
        dtype = lse_dtype(tensors.query.dtype) if name in ("lse", "dbias") else tensors.query.dtype
        if x.dtype != dtype or tuple(x.shape) != shapes[name]:
            wrong.append(f"{name} is {x.dtype} {tuple(x.shape)}; {dtype} {shapes[name]} is right")
    clean = _clean(results, case)
    unseen = clean["lse"] == -torch.inf
    if clean["out"].transpose(1, 2)[unseen].any():
        wrong.append("out is not 0 in rows that see nothing")
    return wrong


def _judge(results: Results, want: Expected) -> tuple[dict[str, float], list[str]]:
    ratios, wrong = {}, []
    for name, x in results.items():
        error, plain = distance(x, want.exact[name]), want.error[name]
        ratios[name] = ratio = error / plain if plain else inf if error else 0.0
        if not ratio <= LIMITS[name]:
            size = f"{ratio:.1f}x that of plain torch math" if isfinite(ratio) else "not finite"
            wrong.append(f"{name}: the error is {size}, at most {LIMITS[name]:.0f}x is right")
    return ratios, wrong
