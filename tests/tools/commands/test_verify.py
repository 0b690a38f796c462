"""`dilkit verify`."""

import re
from dataclasses import replace

import pytest
from helpers.command_line import json_output, output
from helpers.fakes import Picky, registered

from dilkit.backends.native.backend import Native
from dilkit.backends.reference import Reference
from dilkit.testing import conformance
from dilkit.testing.problems import LARGE
from dilkit.tools.commands import verify


@pytest.fixture
def few_problems(monkeypatch):
    among = [case for case in verify.LISTED if case.dtype in ("float32", "float16")]
    few = [case for case in among if case.feature in ("causal", "scale") or case.variant in ("poisoned", "one row")]
    monkeypatch.setattr(verify, "LISTED", few)
    return len(few)


def test_verify_counts_passes_and_shows_worst_errors(capsys, few_problems, monkeypatch):
    report = json_output(capsys, "verify", "--backend", "reference")
    assert report["right"]
    judged = report["backends"]["reference"]
    assert judged["counts"] == dict(passed=few_problems, refused=0, failed=0, broken=0)
    assert 0 < judged["by_feature"]["causal"]["float32"]["worst"] <= 3
    assert judged["by_feature"]["causal"]["float64"]["worst"] is None
    text = output(capsys, "verify", "--backend", "reference")
    assert re.search(rf"\n  reference +{few_problems} +0 +0 +0 +- +0\.\d\d +- +0\.\d\d\n", text)
    assert "every result is right" in text
    assert "* cupy_raw: NOTHING was computed" in output(capsys, "verify", "--backend", "reference,cupy_raw", code=1)
    monkeypatch.setenv("DILKIT_BACKEND", "reference")
    assert list(json_output(capsys, "verify")["backends"]) == ["reference"]


def test_verify_exits_with_1_on_any_failure(capsys, few_problems, monkeypatch):
    with registered(Picky()) as picky:
        report = json_output(capsys, "verify", "--backend", f"reference,{picky}", code=1)
        judged = report["backends"][picky]
        assert judged["counts"]["refused"] == few_problems // 2
        assert judged["counts"]["failed"] == len(judged["failures"]) > 0
        assert list(judged["refusals"]) == ["dtype float32: computes float16"]
        text = output(capsys, "verify", "--backend", picky, code=1)
        assert "FAIL picky, causal-nested-float16: out: the error is" in text
        assert "NOT every result is right" in text
        monkeypatch.setattr(verify, "SHOWN", 1)
        text = output(capsys, "verify", "--backend", picky, code=1)
        more = f"FAIL {picky}: {len(judged['failures']) - 1} more, which --json lists; all by feature: "
        assert more in text.replace("\n", " ")
        assert text.count("FAIL") == 2


def test_verify_shows_each_place_that_raises_once(capsys, few_problems):
    class Raising(Reference):
        def forward(self, *inputs):
            raise AttributeError(f"no attribute 'rate' in {inputs[1].seq}")

        attend_stored = forward  # by which one row over a cache is computed

    with registered(Raising(name="raising")) as name:
        text = output(capsys, "verify", "--backend", name, code=1)
        (place,) = json_output(capsys, "verify", "--backend", name, code=1)["backends"][name]["raised"]
    assert text.count("AttributeError: no attribute 'rate' in ") == 1
    assert f" and {few_problems - 1} more: " in text
    assert f'{__file__}", line' in text
    assert (len(place["cases"]), place["traceback"].count("in forward")) == (few_problems, 1)


def test_verify_computes_large_cases_again_and_says_where_they_are_wrong(capsys, few_problems, monkeypatch):
    class WrongWhenLarge(Native):
        name = "wrong_when_large"

        def forward(self, inputs, problem):
            out, lse = super().forward(inputs, problem)
            return (out + 1 if inputs.query.shape[1] == 64 else out), lse

    monkeypatch.setattr(verify, "LARGE", (replace(LARGE[0], variant="causal", seq=64, head_dim=8, is_causal=True),))
    report = json_output(capsys, "verify", "--backend", "native,reference", "--large", "--repeats", "3")
    assert report["cases"] == few_problems + 1
    assert report["repeats"] == dict(times=3, differing=dict(native=0))
    with registered(WrongWhenLarge()) as name:
        report = json_output(capsys, "verify", "--backend", name, "--repeats", "2", code=1)
    assert [failure["case"] for failure in report["backends"]["wrong_when_large"]["failures"]] == ["large-causal-float32"]
    monkeypatch.setattr(conformance, "repeats_that_differ", lambda *_: 2)
    text = output(capsys, "verify", "--backend", "native", "--large", "--repeats", "3", code=1)
    assert "computed 3 times more: 2 DIFFER" in text
