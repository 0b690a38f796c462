"""Kernels are used on a GPU after they have computed small problems rightly there, and refused after they have not."""

import json
import os
import re
import sys
from dataclasses import replace

import pytest
import torch
from helpers.fakes import Fake, registered
from helpers.pairwise import all_but

from dilkit import Device, GlobalTokens, Limits, Pattern, Problem, SlidingWindow, explain
from dilkit.backends.native.backend import Native
from dilkit.backends.reference import Reference
from dilkit.bias.form import BiasForm
from dilkit.inputs import Inputs
from dilkit.selection import proof, proving
from dilkit.selector import NoBackendError, select
from dilkit.testing.conformance import check
from dilkit.tools import cli

GPU = Device("cuda", "Some GPU", (9, 0), torch_code=True)
ON_CUDA = Limits(devices=frozenset({"cuda"}))


class Proven(Fake):
    def __init__(self, name="proven", priority=100, driver="driver 1"):
        super().__init__(name, priority, ON_CUDA)
        self.driver = driver

    def proof_facts(self, problem):
        return self.name, problem.device.name, self.driver, problem.dtype


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("DILKIT_CUDA_CACHE", str(tmp_path / "cuda"))
    monkeypatch.setattr(proof, "_proofs", {})
    return tmp_path / "cuda"


@pytest.fixture
def asked(monkeypatch):
    """The requests of proofs that were made; they find the entry of `wrong` for the backend's name."""
    requests = []

    def outcome(command):
        requests.append(json.loads(command[-1]))
        return "computed wrongly: out" if requests[-1]["backend"].startswith("wrong") else ""

    monkeypatch.setattr(proof, "outcome", outcome)
    return requests


def problem(**options):
    sizes = dict(pattern=Pattern([64], [1]), seq=256, heads=2, head_dim=32, dtype="float16", device=GPU)
    return Problem(**sizes | options)


def in_a_new_process():
    proof._proofs.clear()


def test_a_proof_is_made_once_for_all_processes(asked):
    with registered(Proven()):
        for seq in (256, 512):
            assert select(problem(seq=seq)).name == "proven"
    flags = dict(gradients=False, varlen=False, dropout=False, kinds=False, softcap=False, bias="", stored="", group=1)
    assert asked == [dict(backend="proven", device="cuda:0", dtype="float16", head_dim=32, **flags)]
    in_a_new_process()
    with registered(Proven()):
        select(problem(seq=1024))
        assert len(asked) == 1
        select(problem(dtype="float32"))  # other kernels
    assert [(x.verdict, x.facts) for x in proof.recorded()] == [
        ("passed", ("proven", "Some GPU", "driver 1", "float16")),
        ("passed", ("proven", "Some GPU", "driver 1", "float32")),
    ]


@pytest.mark.parametrize(("mode", "proofs"), [("once", 1), ("always", 2), ("off", 0)])
def test_whether_proofs_are_made_is_an_environment_variable(asked, monkeypatch, mode, proofs):
    monkeypatch.setenv("DILKIT_GPU_PROOF", f" {mode} ")
    for _ in range(2):
        in_a_new_process()
        with registered(Proven()):
            select(problem()), select(problem(seq=300))
    assert len(asked) == proofs
    monkeypatch.setenv("DILKIT_GPU_PROOF", "twice")
    with pytest.raises(ValueError, match="DILKIT_GPU_PROOF='twice' must be one of once, always, off"):
        select(problem(seq=301))


def test_what_failed_is_refused_with_the_reason_and_the_next_one_is_used(asked):
    with registered(Proven("wrong", 101)), registered(Proven("right", 100)):
        with pytest.warns(
            UserWarning, match=r"backend wrong is not used on cuda:0 .*: computed wrongly: out\. .*DILKIT_GPU_PROOF=off"
        ):
            assert select(problem()).name == "right"
        assert select(problem(seq=999)).name == "right"  # and no second warning
        assert [x["backend"] for x in asked] == ["wrong", "right"]
        in_a_new_process()
        decided = {d.name: d for d in explain(problem()).decisions}
        assert (decided["wrong"].verdict, decided["right"].verdict) == ("broken", "picked")
        assert "computed wrongly: out" in str(decided["wrong"].reasons)
        with pytest.raises(NoBackendError, match=r"on cuda:0 .*computed wrongly: out"):
            select(problem(), ("wrong",))


def test_an_explanation_proves_nothing(asked):
    with registered(Proven("wrong")):
        assert explain(problem()).picked == "wrong"
        assert explain(problem(device=Device.assume("sm_90"))).picked == "wrong"
        select(problem(device=Device.assume("sm_90")))
    assert asked == []


def test_what_cannot_name_its_facts_is_not_used():
    class NoCompiler(Proven):
        def proof_facts(self, problem):
            raise RuntimeError("NVRTC cannot be loaded")

    with registered(NoCompiler("lame", 101)), registered(Fake("next", 100, ON_CUDA)):
        assert select(problem()).name == "next"
        assert "NVRTC cannot be loaded" in str(explain(problem()))


def test_nothing_is_proven_while_a_graph_is_captured(asked, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(proof, "capturing", lambda device: device == torch.device("cuda", 0))
    with registered(Proven()):
        with pytest.raises(RuntimeError, match=r"not been proven on cuda:0 .*make the same call once before"):
            select(problem())
        monkeypatch.setattr(proof, "capturing", lambda device: False)
        select(problem())
        monkeypatch.setattr(proof, "capturing", lambda device: device == torch.device("cuda", 0))
        assert select(problem(seq=300)).name == "proven"
    assert len(asked) == 1


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"facts": 3, "reason": ""}', b'{"facts": ["other"], "reason": ""}'])
def test_a_record_that_is_not_its_own_is_none(asked, folder, content):
    with registered(Proven()):
        select(problem())
        [path] = folder.iterdir()
        path.write_bytes(content)
        in_a_new_process()
        select(problem(seq=300))
    assert len(asked) == 2


def test_what_another_user_may_have_written_is_not_believed(asked, folder):
    with registered(Proven()):
        select(problem())
        folder.chmod(0o777)
        in_a_new_process()
        select(problem(seq=300))
    assert (len(asked), proof.recorded()) == (2, [])


@pytest.mark.parametrize(
    ("code", "right"),
    [
        ("pass", ""),
        ("print('computed wrongly: x')", "computed wrongly: x"),
        ("import os; os.write(2, b'illegal address'); os.abort()", "its proof crashed with exit status .*illegal address"),
        ("import time; time.sleep(60)", "its proof had not ended after 2 seconds"),
    ],
)  # fmt: skip
def test_a_process_of_its_own_takes_no_other_along(code, right):
    command = [sys.executable, "-c", code]
    found = proof.outcome(command, 2.0) if "sleep" in code else proof.outcome(command)
    assert re.fullmatch(right, found)


def test_a_program_that_is_not_there():
    assert proof.outcome(["/no/such/program"]).startswith("its proof could not be started")


REQUEST = dict(backend="reference", device="cpu:0", dtype="float32", gradients=True, head_dim=20)
REQUEST |= dict(varlen=False, dropout=False, kinds=False, softcap=False, bias="", stored="", group=1)


@pytest.fixture
def few_tiles(monkeypatch):
    """Without the problem of so many tiles that it takes the CPU ten times as long as all others."""
    every = proving.cases
    assert [case.variant for case in every("float32", 20, gradients=False)].count("many tiles") == 1
    monkeypatch.setattr(
        proving, "cases", lambda *asked, **features: (case for case in every(*asked, **features) if case.variant != "many tiles")
    )


@pytest.mark.usefixtures("few_tiles")
def test_the_whole_way_on_a_backend_that_is_right():
    packed = json.dumps(REQUEST | dict(varlen=True, gradients=False))
    assert proof.outcome([sys.executable, "-m", "dilkit.selection.proving", packed]) == ""


def test_a_bias_is_proven_with_one_of_the_same_code():
    asked = {"grid": BiasForm(2, (27, 27), placed=True), "max in space": BiasForm(3, metric="max", placed=True, learned=True)}
    for name, form in asked.items():
        for varlen in (False, True):
            listed = list(proving.cases("float32", 16, gradients=True, varlen=varlen, bias=form))
            assert {case.bias for case in listed} == {name}
            assert {case.problem().bias.code for case in listed} == {form.code}


def test_kernels_that_computed_nothing_are_not_proven(capsys):
    backend = Proven("elsewhere")
    backend.limits = Limits(devices=frozenset({"cuda"}))
    with registered(backend):
        proving.main(json.dumps(REQUEST | dict(backend="elsewhere")))
    assert capsys.readouterr().out.startswith("computed nothing: device cpu: runs on cuda")


def test_kernels_under_check_need_no_proof(asked, monkeypatch):
    """They would be refused before their check, and each dtype and size would wait for a process."""

    backend = Proven("wrong")
    backend.limits = Limits(gradients=False)
    with registered(backend):
        monkeypatch.setenv("DILKIT_GPU_PROOF", "always")
        proving.main(json.dumps(REQUEST | dict(backend="wrong")))
        assert cli.main(["verify", "--backend", "wrong", "--pattern", "DilatedSegment(8, 2)"]) == 1
    assert asked == []
    assert os.environ["DILKIT_GPU_PROOF"] == "always"


FAULTS = {
    "keys one late": lambda q, k, v, problem, mask: (q, k.roll(1, 1), v, problem, mask),
    "no mask": lambda q, k, v, problem, mask: (q, k, v, problem, None),
    "another scale": lambda q, k, v, problem, mask: (1.01 * q, k, v, problem, mask),
    "heads mixed up": lambda q, k, v, problem, mask: (q, k.flip(2), v, problem, mask),
    "the last key lost": lambda q, k, v, problem, mask: (q, k, torch.cat((v[:, :-1], 0 * v[:, -1:]), 1), problem, mask),
}


@pytest.mark.usefixtures("few_tiles")
@pytest.mark.parametrize("fault", all_but(["no mask", "heads mixed up"], FAULTS))
def test_kernels_that_are_wrong_on_purpose_fail(fault, capsys):
    class Wrong(Reference):
        def forward(self, inputs, problem):
            *tensors, changed, mask = FAULTS[fault](*inputs[:3], problem, inputs.key_padding_mask)
            return super().forward(Inputs(*tensors, mask), changed)

    with registered(Wrong(name="wrong")):
        proving.main(json.dumps(REQUEST | dict(backend="wrong")))
    assert capsys.readouterr().out.startswith("computed wrongly: ")


@pytest.mark.usefixtures("few_tiles")
def test_gradients_that_are_wrong_on_purpose_fail(capsys):
    class Wrong(Reference):
        def backward(self, *arguments):
            dquery, dkey, dvalue = super().backward(*arguments)
            return dquery, dkey, 1.01 * dvalue

    with registered(Wrong(name="wrong")):
        proving.main(json.dumps(REQUEST | dict(backend="wrong")))
        assert "dv: the error is" in capsys.readouterr().out
        proving.main(json.dumps(REQUEST | dict(backend="wrong", gradients=False)))
        assert capsys.readouterr().out.strip() == ""


@pytest.mark.parametrize(("factor", "complaints"), [(1.0, 0), (1.001, 6)])
def test_steps_are_proven_with_each_pattern_and_kind_of_cache(factor, complaints, capsys):
    class Steps(Native):
        name = "steps"

        def attend_stored(self, step, problem):
            out, lse = super().attend_stored(step, problem)
            return factor * out, lse

    with registered(Steps()):
        proving.main(json.dumps(REQUEST | dict(backend="steps", stored="float32", device="cpu")))
    assert capsys.readouterr().out.count("off by") == complaints


def wider(branch):
    return replace(branch, window=branch.window + branch.dilation_rate) if isinstance(branch, SlidingWindow) else branch


def without_reading(branch):
    return GlobalTokens(branch.tokens, "read") if isinstance(branch, GlobalTokens) else branch


@pytest.mark.parametrize("fault", [wider, without_reading])
def test_other_kinds_are_proven_where_they_are_asked_for(fault):
    class Wrong(Reference):
        def forward(self, inputs, problem):
            return super().forward(inputs, replace(problem, pattern=faulty(problem.pattern)))

    def faulty(pattern):
        return pattern.with_branches(*map(fault, pattern.branches))

    every, segments = (set(proving.cases("float32", 20, gradients=False, kinds=kinds)) for kinds in (True, False))
    assert segments < every
    with registered(Wrong(name="wrong")):
        assert {check("wrong", case).verdict for case in every - segments if faulty(case.pattern) != case.pattern} == {"failed"}
