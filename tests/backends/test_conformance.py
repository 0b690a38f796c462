"""Every backend there is, on every case of the problem list; and proof that the suite can fail."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.backends_here import BACKENDS_AND_DEVICES

from dilkit import register_backend, unregister_backend
from dilkit.backend import Limits
from dilkit.backends.reference import Reference
from dilkit.op import rules
from dilkit.op.zero_keys import sink_gradient
from dilkit.registry import Broken, backends
from dilkit.testing.conformance import check
from dilkit.testing.packings import SEQUENCES
from dilkit.testing.problems import DROPPING, GIVEN_BLOCKS, OTHER_KINDS, PROBLEMS, SCORES, Case

SIMPLE = Case(feature="plain", variant="nested")


def test_no_backend_is_broken() -> None:
    broken = [f"{b.name} ({b.origin}): {b.error}" for b in backends().values() if isinstance(b, Broken)]
    assert not broken


LISTED = (*PROBLEMS, *SEQUENCES, *DROPPING, *OTHER_KINDS, *GIVEN_BLOCKS, *SCORES)
SHARES = {"sdpa": 2, "reference": 6}
"""A backend that is not here has every variant of a feature by default, these have one of so many."""


def usual() -> set[tuple[str, Case]]:
    """What is not slow: each variant in one dtype, the next in the next, and on the next backend in another one."""
    chosen, names = set(), list(dict.fromkeys(name for name, _ in BACKENDS_AND_DEVICES))
    features: dict[str, dict[str, list[Case]]] = {}
    for case in LISTED:
        features.setdefault(case.feature, {}).setdefault(case.variant, []).append(case)
    for at, name in enumerate(names):
        for variants in features.values():
            for number, cases in enumerate(variants.values()):
                if number % SHARES.get(name, 1) == 0:
                    chosen.add((name, cases[(number // SHARES.get(name, 1) + at) % len(cases)]))
    return chosen


def listed() -> list[Any]:
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
def test_backend_agrees_with_the_oracle(backend: str, case: Case, device: str, into_matrix: Any) -> None:
    result = check(backend, case, device)
    into_matrix(result)
    if result.verdict == "refused":
        pytest.skip("; ".join(result.reasons))
    assert result.verdict == "passed", "; ".join(result.reasons)


def test_case_names_are_unique() -> None:
    names = [case.name for case in LISTED]
    assert len(set(names)) == len(names)


def test_by_default_each_backend_meets_every_feature_and_every_dtype() -> None:
    chosen = usual()
    for name, _ in BACKENDS_AND_DEVICES:
        own = [case for backend, case in chosen if backend == name]
        assert {case.feature for case in own} == {case.feature for case in LISTED}
        assert {case.dtype for case in own} == {case.dtype for case in LISTED}
    assert {(case.feature, case.variant) for _, case in chosen} == {(case.feature, case.variant) for case in LISTED}


class Faulty(Reference):
    """The reference with one fault at a time."""

    def __init__(self, fault: str, limits: Limits = Reference.limits) -> None:
        super().__init__(name="faulty")
        self.fault = fault
        self.limits = limits

    def forward(self, inputs: Any, problem: Any) -> Any:
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

    def backward(self, *inputs: Any) -> Any:
        dq, dk, dv = super().backward(*inputs)
        return dq, dk * 1.0001 if self.fault == "wrong gradient" else dk, dv


@pytest.fixture
def register() -> Iterator[Any]:
    yield register_backend
    unregister_backend("faulty")


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("raises", "RuntimeError: out of luck"),
        ("ignores is_causal", "out: the error"),
        ("ignores the mask", "out: the error"),
        ("leaves rows unwritten", "out: the error is not finite"),
        ("wrong in the fifth digit", "out: the error"),
        ("wrong gradient", "dk: the error"),
    ],
)
def test_suite_finds_a_fault(register: Any, fault: str, reason: str) -> None:
    register(Faulty(fault))
    result = check("faulty", replace(SIMPLE, is_causal=True, mask="random"))
    assert result.verdict == "failed"
    assert any(reason in text for text in result.reasons), result.reasons


def test_suite_finds_an_input_that_was_changed_though_all_results_are_right(register: Any) -> None:
    register(Faulty("changes an input"))
    result = check("faulty", replace(SIMPLE, gradients=False))
    assert (result.verdict, result.reasons) == ("failed", ("an input was changed; they are read-only",))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_suite_finds_a_wrong_gradient_of_sinks(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    monkeypatch.setattr(rules, "sink_gradient", lambda *given: 1.05 * sink_gradient(*given))
    result = check("reference", replace(SIMPLE, sink="random", dtype=dtype))
    assert result.verdict == "failed"
    assert [reason for reason in result.reasons if reason.startswith("dsink: the error")] == [*result.reasons]


def test_a_faultless_backend_passes(register: Any) -> None:
    register(Faulty("none"))
    assert check("faulty", SIMPLE).verdict == "passed"


def test_a_refusal_carries_its_reasons(register: Any) -> None:
    register(Faulty("raises", Limits(dtypes=frozenset({"float16"}), max_head_dim=8)))
    result = check("faulty", SIMPLE)
    assert result.verdict == "refused"
    assert len(result.reasons) == 2


def test_a_backend_without_gradients_is_checked_forward_only(register: Any) -> None:
    register(Faulty("wrong gradient", Limits(gradients=False)))
    result = check("faulty", SIMPLE)
    assert result.verdict == "passed"
    assert sorted(result.ratios) == ["lse", "out"]
    assert result.reasons[0] == "forward only"
