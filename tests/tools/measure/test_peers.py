"""The peers of `dilkit bench`: each computes what it says it computes, is refused with a reason, and is marked."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dilkit import Pattern, Problem
from dilkit.testing.tensors import Tensors
from dilkit.tools.commands import bench
from dilkit.tools.measure import correctness
from dilkit.tools.measure.baselines import BASELINES
from dilkit.tools.measure.case import CaseRunner
from dilkit.tools.site import pages as docs

PATTERN = Pattern([16, 32], [1, 4])
SMALL = Problem(pattern=PATTERN, seq=64, heads=4, head_dim=8, batch=2, dtype="float64", requires_grad=True)
pytestmark = pytest.mark.usefixtures("tiny_yardsticks")


@pytest.mark.parametrize("offset", ["modulo", "block"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_longnet_computes_what_it_says(offset, is_causal) -> None:
    problem = replace(SMALL, pattern=Pattern([16, 32], [1, 4], offset), is_causal=is_causal)
    findings = correctness.check(BASELINES["longnet"], problem, Tensors.random(problem))
    assert {f.what for f in findings} == {"out", "dq", "dk", "dv", "out rows", "dq rows"}
    assert [f for f in findings if not f.passed] == []


def test_longnet_differs_in_its_gradients_alone() -> None:
    longnet = BASELINES["longnet"]
    assert not longnet.differs(replace(SMALL, requires_grad=False))
    found = correctness.difference(longnet, SMALL, Tensors.random(SMALL))
    assert found is not None
    assert found.out_relative < 1e-12
    assert found.dquery_relative > 1e-3


@pytest.mark.parametrize("seq", [64, 256])
def test_a_peer_that_computes_something_else_is_wrong(seq) -> None:
    peer, problem = BASELINES["longnet"], replace(SMALL, seq=seq, requires_grad=False)
    other = replace(peer, attend=lambda inputs, problem: 1.001 * peer.attend(inputs, problem))
    findings = correctness.check(other, problem, Tensors.random(problem))
    assert [f.what for f in findings if not f.passed] == ["out", "out rows"]


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("longnet", dict(kv_heads=2), "grouped heads"),
        ("longnet", dict(pattern=Pattern([16], [1], overlap="once")), "overlap 'once'"),
        ("longnet", dict(pattern=Pattern([16], [1], heads=[(0, 2)])), "head ranges"),
        ("dense", dict(is_causal=True, key_padding_mask=True), "torch takes one of them"),
        ("flex", dict(key_padding_mask=True), "key_padding_mask"),
        ("flex", dict(), "backward: FlexAttention has none on the CPU"),
        ("flex", dict(), "dtype float64"),
    ],
)
def test_what_a_peer_cannot_do_is_refused(name, change, reason) -> None:
    assert any(reason in refusal for refusal in BASELINES[name].refusals(replace(SMALL, **change)))


def test_without_a_compiler_flex_is_refused(monkeypatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert any("no-such-compiler" in reason for reason in BASELINES["flex"].refusals(replace(SMALL, dtype="float32")))


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        dict(),
        dict(is_causal=True, kv_heads=2, seq=300, pattern=Pattern([64, 200, 300], [1, 2, 4])),
        dict(pattern=Pattern([32], [4]), heads=2, kv_heads=2, dtype="bfloat16"),
    ],
    ids=["plain", "all at once", "rows that see nothing"],
)
@pytest.mark.filterwarnings("ignore")
def test_flex_computes_the_pattern(change, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # so that it compiles
    problem = replace(SMALL, **{**dict(dtype="float32", requires_grad=False), **change})
    peer = BASELINES["flex"]
    if why := "; ".join(peer.refusals(problem)):
        pytest.skip(why)
    findings = correctness.check(peer, problem, Tensors.random(problem))
    assert [f for f in findings if not f.passed] == []


def test_who_computes_another_function_is_marked_with_its_error() -> None:
    entries = CaseRunner([BASELINES["gather"], BASELINES["dense"]], repeats=1).run(SMALL).entries
    assert entries["gather"].differs is None
    found = entries["dense"].differs
    assert found is not None
    assert found.computes == "the attention of every token to every token"
    assert found.out_max_abs > 0.1
    assert found.dquery_relative > 0.1


def test_the_page_and_the_command_name_every_peer(pytestconfig) -> None:
    rows = docs.peer_table(pytestconfig.rootpath).splitlines()[2:]
    assert [row.split("`")[1] for row in rows] == list(bench.PEERS) == list(BASELINES)
    assert all(peer.computes in row for peer, row in zip(BASELINES.values(), rows, strict=True))
