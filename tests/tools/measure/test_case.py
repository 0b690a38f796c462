"""One benchmark case: the checks before timing, the baselines, and what becomes of each implementation."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from helpers.measuring import SMALL, reference, wrong_by

from dilkit import Pattern, Problem
from dilkit.testing import memory
from dilkit.testing.tensors import Tensors
from dilkit.tools.console.text import error_line
from dilkit.tools.measure import correctness
from dilkit.tools.measure.baselines import BASELINES
from dilkit.tools.measure.case import CaseRunner, _work, with_speed
from dilkit.tools.results.record import Entry, Samples

pytestmark = pytest.mark.usefixtures("tiny_yardsticks")


@pytest.mark.parametrize("name", ["reference", "gather", "dense"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_implementations_pass_their_checks(name, dtype, is_causal) -> None:
    problem = replace(SMALL, dtype=dtype, is_causal=is_causal)
    checks = correctness.check(BASELINES.get(name, reference()), problem, Tensors.random(problem))
    assert [check.what for check in checks] == ["out", "dq", "dk", "dv", "out rows", "dq rows"]
    assert [check for check in checks if not check.passed] == []


@pytest.mark.parametrize("error", [1e-4, math.nan])
def test_wrong_values_are_found_at_both_lengths(error) -> None:
    checks = correctness.check(wrong_by(error), SMALL, Tensors.random(SMALL))
    assert [check.what for check in checks if not check.passed] == ["out", "out rows"]


@pytest.mark.parametrize("offset", ["modulo", "block"])
@pytest.mark.parametrize("pattern", [([16, 32, 64], [1, 2, 4]), ([32], [4]), ([64], [1])])
def test_gather_computes_the_pattern_with_exact_gradients(pattern, offset) -> None:
    problem = replace(SMALL, pattern=Pattern(*pattern, offset=offset), batch=2, dtype="float64")
    assert BASELINES["gather"].refusals(problem) == ()
    assert [check for check in correctness.check_whole(BASELINES["gather"], problem) if not check.passed] == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(seq=65), "seq 65: must be a multiple"),
        (dict(pattern=Pattern([32], [3])), "dilation rate 3"),
        (dict(kv_heads=2), "grouped heads"),
        (dict(key_padding_mask=True), "key_padding_mask"),
        (dict(pattern=Pattern([32], [1], overlap="once")), "once"),
        (dict(pattern=Pattern([32], [1], heads=[(0, 2)])), "head ranges"),
    ],
)
def test_gather_refuses_what_it_cannot_do(change, reason) -> None:
    assert any(reason in refusal for refusal in BASELINES["gather"].refusals(replace(SMALL, **change)))


def test_dense_counts_its_own_flops() -> None:
    assert BASELINES["dense"].flops(SMALL) == 3.5 * Pattern.dense().flops(64, 4, 8)
    assert reference().flops(SMALL) == 3.5 * SMALL.flops()


def test_every_implementation_has_an_entry_that_says_what_became_of_it() -> None:
    def broken(inputs: Tensors, problem: Problem) -> torch.Tensor:
        raise RuntimeError("out of order")

    implementations = [
        reference(),
        wrong_by(1.0),
        replace(reference(), name="broken", attend=broken),
        replace(reference(), name="refusing", refusals=lambda problem: ("not today",)),
    ]
    entries = CaseRunner(implementations, repeats=2).run(SMALL).entries
    verdicts = dict(reference="measured", wrong="wrong", broken="failed", refusing="refused")
    assert {name: entry.verdict for name, entry in entries.items()} == verdicts
    assert entries["broken"].reasons == ("RuntimeError: out of order",)
    assert "allowed" in entries["wrong"].reasons[0]
    assert len(entries["reference"].seconds) == 2
    assert all(check.passed for check in entries["reference"].check)


def test_a_call_that_would_take_too_long_is_left_out_and_says_so() -> None:
    entry = CaseRunner([reference()], repeats=1, budget=1e-9).run(SMALL).entries["reference"]
    assert entry.verdict == "skipped"
    assert "--budget" in entry.reasons[0]


def test_the_next_length_is_expected_from_the_last_one() -> None:
    dense = BASELINES["dense"]
    runner = CaseRunner([dense], last={"dense": (_work(dense, replace(SMALL, seq=64)), 0.5)})
    assert runner._expected_seconds(dense, replace(SMALL, seq=256)) == pytest.approx(8.0)
    assert runner._expected_seconds(dense, replace(SMALL, seq=64, batch=3 * SMALL.batch)) == pytest.approx(1.5)


def test_memory_that_cannot_be_measured_is_none_and_says_why(monkeypatch) -> None:
    def unable(*_) -> int:
        raise memory.MeasureError("no such counter")

    monkeypatch.setattr(memory, "peak_memory", unable)
    entry = CaseRunner([reference()], repeats=1).run(SMALL).entries["reference"]
    assert (entry.peak_bytes, entry.kb_per_token, entry.memory_note) == (None, None, "no such counter")


def test_figures_follow_from_the_median() -> None:
    found = with_speed(Entry(), Samples.of((1e-3, 2e-3, 3e-3)), flops=3e9, tokens=64, matmul_gflops=3000.0)
    assert (found.gflops, found.matmul_fraction, found.tokens_per_s) == pytest.approx((1500.0, 0.5, 32000.0))


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "ValueError: "),
        ("one\ntwo", "ValueError: one"),
        ("\n raised:\n\n  because\nmore", "ValueError: raised: because"),
        ("raised:", "ValueError: raised:"),
    ],
)
def test_an_error_in_a_line_says_what_it_was(text, line) -> None:
    assert error_line(ValueError(text)) == line
