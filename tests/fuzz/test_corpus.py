"""The corpus of the fuzzer, and planted faults."""

import json
from pathlib import Path

import pytest
import torch
from fuzz import run, session
from fuzz.calls import Call
from fuzz.checks import Wrong
from fuzz.journal import CORPUS, Journal, read
from fuzz.rounding import within_rounding
from fuzz.world import STEPS

import dilkit.attention
from dilkit import Pattern, SlidingWindow, plan
from dilkit.backends.native.backend import Native
from dilkit.comm.plan.kinds.windows import WindowExchange
from dilkit.op.boundary import lse_dtype
from dilkit.problem import DTYPES
from dilkit.testing import accuracy
from dilkit.testing.problems import Case
from dilkit.testing.tensors import make_tensors

CALL = Call(case=Case(feature="fuzz", variant="0", pattern=Pattern([4, 9], [1, 2]), seq=20)).to_data()
WINDOW = Call(case=Case(feature="fuzz", variant="0", pattern=Pattern.of(SlidingWindow(6)), seq=20)).to_data()
CASES = sorted(CORPUS.glob("*.jsonl"))


@pytest.mark.parametrize("path", CASES, ids=[path.stem for path in CASES])
def test_a_case_of_the_corpus(path):
    session.perform(read(path))


def test_the_corpus_has_every_step():
    assert set(STEPS) == {step["do"] for path in CASES for step in read(path)}


def off_by_a_little(*arguments):
    out, lse = FORWARD(*arguments)
    return out + 1e-3, lse


FORWARD = Native.forward
FAULTS = {
    "a wrong result": (Native, "forward", off_by_a_little, dict(do="call", call=CALL)),
    "a mask that nobody checks": (
        dilkit.op.arguments,
        "_check_mask",
        lambda *_: None,
        dict(do="wrong", call=CALL, argument="key_padding_mask", how="text"),
    ),
    "a halo that is too short": (
        WindowExchange,
        "back",
        property(lambda exchange: 2),
        dict(do="ranks", call=WINDOW, cuts=[0, 7, 20], schedule="auto", fuse_branches=True),
    ),
    "a cache that keeps": (plan, "cache_info", lambda: plan.CacheInfo(0, 0, 1, 10, 100), dict(do="clear")),
}


@pytest.mark.parametrize(("owner", "name", "fault", "step"), FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_found(owner, name, fault, step, monkeypatch):
    session.perform([step])
    monkeypatch.setattr(owner, name, fault)
    with pytest.raises(Wrong):
        session.perform([step])


@pytest.mark.parametrize("dtype_name", DTYPES)
@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("mask", ["none", "random"])
def test_rounding_explains_roundings_only(dtype_name, kv_heads, mask):
    case = Case(feature="fuzz", variant="rounding", dtype=dtype_name, kv_heads=kv_heads, mask=mask, sink="random")
    problem, tensors = case.problem(), make_tensors(case)
    dtype = getattr(torch, case.dtype)
    exact = accuracy.expected(problem, tensors).exact
    for name, x in exact.items():
        rounded = x.to(lse_dtype(dtype) if name == "lse" else dtype)
        assert within_rounding(problem, tensors, {name: rounded}, exact)
        wrong = x + 1000 * torch.finfo(dtype).eps * x[x.isfinite()].abs().max()
        assert not within_rounding(problem, tensors, {name: wrong}, exact)
        assert not within_rounding(problem, tensors, {name: torch.full_like(x, torch.nan)}, exact)


def test_the_steps_of_a_process_that_died_are_kept(tmp_path, monkeypatch):
    """A substitute for a session writes a step and dies: by a signal, a sanitizer, and a signal after its end."""
    seeds = []

    def dies(home, variables, *options):
        given = dict(zip(options[::2], options[1::2], strict=True))
        seeds.append(int(given["--seed"]))
        Journal(Path(given["--journal"])).write(dict(do="clear"))
        ended = dict(next=seeds[-1] + 1, counts=dict(runs=1), failures=[], ended=True)
        if len(seeds) >= 3:
            Path(given["--counts"]).write_text(json.dumps(ended))
        return [-11, 1, -6, 0][len(seeds) - 1]

    monkeypatch.setattr(run, "start", dies)
    monkeypatch.setattr(run, "CORPUS", tmp_path / "corpus")
    report = run.sessions(tmp_path, {}, tmp_path, minutes=1, seed=3)
    assert seeds == [3, 4, 5, 7]
    assert len(report["failures"]) == 3
    assert "ended with -11 at seed 3" in report["failures"][0]
    assert [read(path) for path in (tmp_path / "corpus").iterdir()] == [[dict(do="clear")]]
