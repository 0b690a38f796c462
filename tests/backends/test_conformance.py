"""Every backend on the problem list, and proof that the suite can fail."""

from dataclasses import replace

import pytest
import torch
from helpers.backends_here import BACKENDS_AND_DEVICES
from helpers.fakes import registered

from dilkit.backend import Limits
from dilkit.backends.reference import Reference
from dilkit.op import attend
from dilkit.op.zero_keys import sink_gradient
from dilkit.registry import Broken, backends
from dilkit.testing.conformance import check
from dilkit.testing.packings import SEQUENCES
from dilkit.testing.problems import DROPPING, GIVEN_BLOCKS, OTHER_KINDS, PROBLEMS, SCORES, Case

SIMPLE = Case(feature="plain", variant="nested")


def test_no_backend_is_broken():
    broken = [f"{b.name} ({b.origin}): {b.error}" for b in backends().values() if isinstance(b, Broken)]
    assert not broken


LISTED = (*PROBLEMS, *SEQUENCES, *DROPPING, *OTHER_KINDS, *GIVEN_BLOCKS, *SCORES)
SHARES = {"sdpa": 2, "reference": 6}
"""A backend that is not here has every variant of a feature by default, these have one of so many."""


def usual():
    """Choose each variant in one dtype, in turn, and in another on the next backend."""
    chosen, names = set(), list(dict.fromkeys(name for name, _ in BACKENDS_AND_DEVICES))
    features = {}
    for case in LISTED:
        features.setdefault(case.feature, {}).setdefault(case.variant, []).append(case)
    for at, name in enumerate(names):
        for variants in features.values():
            for number, cases in enumerate(variants.values()):
                if number % SHARES.get(name, 1) == 0:
                    chosen.add((name, cases[(number // SHARES.get(name, 1) + at) % len(cases)]))
    return chosen


def listed():
    chosen = usual()
    return [
        pytest.param(
            name,
            case,
            device,
            marks=[pytest.mark.smoke] * (case.dtype == "float32") + [pytest.mark.slow] * ((name, case) not in chosen),
            id=f"{name}-{device}-{case.name}",
        )
        for name, device in BACKENDS_AND_DEVICES
        for case in LISTED
    ]


@pytest.mark.parametrize(("backend", "case", "device"), listed())
def test_backend_agrees_with_the_oracle(backend, case, device, into_matrix):
    result = check(backend, case, device)
    into_matrix(result)
    if result.verdict == "refused":
        pytest.skip("; ".join(result.reasons))
    assert result.verdict == "passed", "; ".join(result.reasons)


def test_case_names_are_unique():
    names = [case.name for case in LISTED]
    assert len(set(names)) == len(names)


def test_by_default_each_backend_meets_every_feature_and_every_dtype():
    chosen = usual()
    for name, _ in BACKENDS_AND_DEVICES:
        own = [case for backend, case in chosen if backend == name]
        assert {case.feature for case in own} == {case.feature for case in LISTED}
        assert {case.dtype for case in own} == {case.dtype for case in LISTED}
    assert {(case.feature, case.variant) for _, case in chosen} == {(case.feature, case.variant) for case in LISTED}


HALVES = frozenset({"float16"})


class Faulty(Reference):
    def __init__(self, fault, limits=Reference.limits):
        super().__init__(name="faulty")
        self.fault = fault
        self.limits = limits

    def forward(self, inputs, problem):
        if self.fault == "raises":
            raise RuntimeError("out of luck")
        if self.fault == "ignores is_causal":
            problem = replace(problem, is_causal=False)
        if self.fault == "ignores the mask":
            inputs = inputs._replace(key_padding_mask=None)
        out, lse = super().forward(inputs, problem)
        if self.fault == "leaves rows unwritten":
            unwritten = torch.empty_like(out)
            unwritten[:, :-1] = out[:, :-1]
            out = unwritten
        if self.fault == "wrong in the fifth digit":
            out = out * (1 + 1e-5)
        if self.fault == "changes an input":
            inputs.query.add_(1)
        return out, lse

    def backward(self, *inputs):
        dq, dk, dv = super().backward(*inputs)
        return dq, dk * 1.0001 if self.fault == "wrong gradient" else dk, dv


FAULTS = {
    "raises": (Faulty("raises"), {}, "failed", ("RuntimeError: out of luck",)),
    "causal": (Faulty("ignores is_causal"), dict(is_causal=True), "failed", ("out: the error",)),
    "mask": (Faulty("ignores the mask"), dict(mask="random"), "failed", ("out: the error",)),
    "unwritten": (Faulty("leaves rows unwritten"), {}, "failed", ("out: the error is not finite",)),
    "digits": (Faulty("wrong in the fifth digit"), {}, "failed", ("out: the error",)),
    "gradient": (Faulty("wrong gradient"), {}, "failed", ("dk: the error",)),
    "input": (Faulty("changes an input"), dict(gradients=False), "failed", ("an input was changed; they are read-only",)),
    "none": (Faulty("none"), {}, "passed", ()),
    "refuses": (Faulty("raises", Limits(dtypes=HALVES, max_head_dim=8)), {}, "refused", ("dtype", "head_dim")),
    "forward only": (Faulty("wrong gradient", Limits(gradients=False)), {}, "passed", ("forward only", "requires_grad")),
}


@pytest.mark.parametrize(("backend", "fields", "verdict", "reasons"), FAULTS.values(), ids=FAULTS)
def test_suite_finds_a_fault_and_says_what_it_is(backend, fields, verdict, reasons):
    with registered(backend) as name:
        result = check(name, replace(SIMPLE, **fields))
    assert result.verdict == verdict
    wrong_results = verdict == "failed" and bool(result.ratios) and max(result.ratios.values()) > 1
    assert all(reason in text for reason, text in zip(reasons, result.reasons, strict=not wrong_results)), result.reasons
    if verdict == "passed":
        assert sorted(result.ratios) == (["lse", "out"] if reasons else ["dk", "dq", "dv", "lse", "out"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_suite_finds_a_wrong_gradient_of_sinks(monkeypatch, dtype):
    monkeypatch.setattr(attend, "sink_gradient", lambda *given: 1.05 * sink_gradient(*given))
    result = check("reference", replace(SIMPLE, sink="random", dtype=dtype))
    assert result.verdict == "failed"
    assert [reason for reason in result.reasons if reason.startswith("dsink: the error")] == [*result.reasons]
