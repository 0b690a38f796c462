"""One benchmark case."""

import math
from dataclasses import replace

import pytest
from helpers.measuring import SMALL, reference, wrong_by
from helpers.pairwise import every_pair
from helpers.slide_encoder import LENGTHS as SEGMENTS, embeddings, slide, small

from dilkit import Pattern
from dilkit.testing import memory
from dilkit.testing.tensors import Tensors
from dilkit.tools.bench.suites.slides import published_embedding
from dilkit.tools.console.text import error_line
from dilkit.tools.measure import case
from dilkit.tools.measure.baselines import BASELINES
from dilkit.tools.measure.case import CaseRunner, _work, check
from dilkit.tools.results.rows import ResultRow

pytestmark = pytest.mark.usefixtures("tiny_yardsticks")
IN_FP64 = replace(SMALL, dtype="float64", batch=2)
DTYPES = "float64", "float32", "bfloat16"
LENGTHS = ([16, 32, 64], [1, 2, 4]), ([32], [4]), ([64], [1])
ROWS = every_pair(["reference", "gather", "dense"], DTYPES, [False, True], ["modulo", "block"], LENGTHS)


@pytest.mark.parametrize(("name", "dtype", "is_causal", "offset", "lengths"), [row for row in ROWS if not row.marks])
def test_implementations_compute_what_they_say(name, dtype, is_causal, offset, lengths):
    problem = replace(SMALL, pattern=Pattern(*lengths, offset=offset), batch=2, dtype=dtype, is_causal=is_causal)
    implementation = BASELINES.get(name, reference())
    assert implementation.refusals(problem) == ()
    checks = check(implementation, problem, Tensors.random(problem))
    assert {check.what for check in checks} == {"out", "dq", "dk", "dv", "out rows", "dq rows"}
    assert [check for check in checks if not check.passed] == []


@pytest.mark.parametrize("error", [1e-4, math.nan])
@pytest.mark.parametrize("seq", [64, 256])
def test_wrong_values_are_found_at_both_lengths(error, seq):
    problem = replace(SMALL, seq=seq)
    checks = check(wrong_by(error), problem, Tensors.random(problem))
    assert [check.what for check in checks if not check.passed] == ["out", "out rows"]


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("gather", dict(seq=65), "seq 65: must be a multiple"),
        ("gather", dict(kv_heads=2), "grouped heads"),
        ("gather", dict(key_padding_mask=True), "key_padding_mask"),
        ("gather", dict(pattern=Pattern([16], [1], overlap="once")), "overlap 'once'"),
        ("dense", dict(is_causal=True, key_padding_mask=True), "torch takes one of them"),
        ("flex", dict(key_padding_mask=True), "key_padding_mask"),
        ("flex", dict(), "backward: FlexAttention has none on the CPU"),
        ("flex", dict(dtype="float32"), "no-such-compiler"),
    ],
)
def test_what_a_baseline_cannot_do_is_refused(name, change, reason, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert any(reason in refusal for refusal in BASELINES[name].refusals(replace(IN_FP64, **change)))


def test_who_computes_another_function_is_marked_with_its_error():
    problem = replace(IN_FP64, pattern=Pattern([16, 32], [1, 4]))
    entries = CaseRunner([BASELINES["gather"], BASELINES["dense"]], repeats=1).run(problem)["entries"]
    assert "differs" not in entries["gather"].values
    found = entries["dense"].values["differs"]
    assert min(found["out_max_abs"], found["dquery_relative"]) > 0.1


def test_every_implementation_has_an_entry_that_says_what_became_of_it(monkeypatch):
    def broken(inputs, problem):
        raise RuntimeError("out of order")

    def unable(*_):
        raise memory.MeasureError("no such counter")

    monkeypatch.setattr(memory, "peak_memory", unable)
    implementations = [
        reference(),
        wrong_by(1.0),
        replace(reference(), name="broken", attend=broken),
        replace(reference(), name="refusing", refusals=lambda problem: ("not today",)),
    ]
    entries = CaseRunner(implementations, repeats=2).run(SMALL)["entries"]
    verdicts = dict(reference="measured", wrong="wrong", broken="failed", refusing="refused")
    assert {name: entry.verdict for name, entry in entries.items()} == verdicts
    assert entries["broken"].reasons == ("RuntimeError: out of order",)
    assert "allowed" in entries["wrong"].reasons[0]
    right = entries["reference"]
    assert len(right.samples) == 2
    assert all(check.passed for check in right.checks)
    assert right.values == dict(flops=reference().flops(SMALL), memory_note="no such counter")


def test_a_call_that_would_take_too_long_is_left_out_and_says_so():
    entry = CaseRunner([reference()], repeats=1, budget=1e-9).run(SMALL)["entries"]["reference"]
    assert entry.verdict == "skipped"
    assert "--budget" in entry.reasons[0]
    dense = BASELINES["dense"]
    runner = CaseRunner([dense], last={"dense": (_work(dense, replace(SMALL, seq=64)), 0.5)})
    assert runner._expected_seconds(dense, replace(SMALL, seq=256)) == pytest.approx(8.0)
    assert runner._expected_seconds(dense, replace(SMALL, seq=64, batch=3 * SMALL.batch)) == pytest.approx(1.5)


def test_a_first_call_that_took_too_long_by_the_clock_of_its_device_is_not_repeated(monkeypatch):
    monkeypatch.setattr(case, "clock_of", {"cpu": lambda call, calls: 9.0}.get)
    entry = CaseRunner([replace(reference(), quadratic=False)], budget=5.0).run(SMALL)["entries"]["reference"]
    assert (entry.verdict, entry.samples) == ("skipped", ())
    assert entry.reasons[0].startswith("one call took about 9 s")


def test_figures_follow_from_the_median_and_from_the_flops_that_are_done():
    row = ResultRow(table="", samples=(1e-3, 2e-3, 3e-3), values=dict(flops=3e9))
    assert row.gflops == pytest.approx(1500.0)
    assert BASELINES["dense"].flops(SMALL) == 3.5 * Pattern.dense().flops(64, 4, 8)
    assert reference().flops(SMALL) == 3.5 * SMALL.flops()


def test_an_error_in_a_line_says_what_it_was():
    lines = {"": "", "one\ntwo": "one", "\n raised:\n\n  because\nmore": "raised: because", "raised:": "raised:"}
    assert {text: error_line(ValueError(text)) for text in lines} == {text: f"ValueError: {line}" for text, line in lines.items()}


@pytest.mark.parametrize("lengths", [SEGMENTS, (5, 13, 30)], ids=["multiples of the rates", "others"])
@pytest.mark.parametrize("n", [2, 31, 45, 70])
def test_the_published_procedure_is_that_of_the_paper(n, lengths):
    model, (tiles, coords) = small(segment_lengths=lengths), slide(n)
    *_, exact = embeddings(model.state_dict(), model.config, tiles[0], coords[0])
    assert (published_embedding(model, tiles, coords)[0] - exact).abs().max() <= 1e-12
