"""`dilkit bench --suite gpu` on the CPU."""

import json
import weakref
from dataclasses import replace
from functools import partial

import pytest
import torch
from helpers import small_suites
from helpers.cuda_clock import Graph
from helpers.measuring import reference
from helpers.result_files import FOLDER
from helpers.small_suites import SIZES

from dilkit import register_backend, unregister_backend
from dilkit.backends.native.backend import Native
from dilkit.device import probe
from dilkit.testing import memory
from dilkit.testing.memory import MIB
from dilkit.testing.tensors import Tensors
from dilkit.tools.bench.suites import gpu
from dilkit.tools.measure.ceilings import Ceilings
from dilkit.tools.measure.timing import time_interleaved
from dilkit.tools.report import registry
from dilkit.tools.results.decode import encode
from dilkit.tools.results.rows import YARDSTICKS, ResultRow
from dilkit.tools.site import figures


class StandIn(Native):
    name = "cupy_raw"


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch, tiny_yardsticks):
    monkeypatch.setattr(memory, "peak_memory", lambda call, device: 3 * MIB)  # of a CUDA device it is the allocator's own figure
    register_backend(StandIn(), replace=True)
    yield
    unregister_backend("cupy_raw")


SMALL = dict(sizes=SIZES["gpu"], device="cpu")


def run(out, *arguments, **fields):
    return small_suites.run("gpu", out, "--repeats", "1", *arguments, **SMALL | fields)


@pytest.mark.slow
def test_the_suite_measures_and_judges_everything(tmp_path, capsys):
    code, result = run(tmp_path, "--json")
    assert code == 0
    assert json.loads(capsys.readouterr().out) == encode(result)
    cases = result.cases(gpu.FORMS)
    assert len(cases) == 3 * 2 * 2 * 2
    for case in cases:
        measured = {name for name in case.rows if case.timed(name)} - {*YARDSTICKS}
        assert measured == {"automatic", "cupy_raw", "sdpa:cpu-flash"}, case
        assert all(check.passed for row in case.rows.values() for check in row.checks)
    assert [figure.name for figure in result.figures] == [target.name for target in gpu.TARGETS]
    assert all(0 < case.rows["cupy_raw"].values["scratch_bytes"] < 3 * MIB for case in result.cases("memory"))
    empty = {figure.name for figure in result.figures if not figure.values}
    assert {name for name in empty if not ("efficient" in name or "cudnn" in name or name.endswith("the same"))} == set()
    assert (tmp_path / "suite.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "suite.json").rename(tmp_path / "gpu-test.json")
    page = figures.gpu_suites(tmp_path)
    assert page.startswith("## gpu-test")
    assert "## Time of calls\n" in page
    assert "## With launches" in page


def compared(monkeypatch, calls, timed_call=None):
    """Return the suite with the rows of a small case, the calls standing in for implementations that were right."""
    monkeypatch.setattr(gpu, "probe", lambda name: probe("cpu"))
    monkeypatch.setattr(gpu, "admit", lambda *facts: ResultRow())
    monkeypatch.setattr(gpu, "Ceilings", lambda *facts, **more: Ceilings(device="none"))
    monkeypatch.setattr(gpu, "timed_call", timed_call or (lambda one, inputs, problem: calls[one.name]))
    monkeypatch.setattr(gpu.GpuSuite, "implementations", lambda suite: [replace(reference(), name=name) for name in calls])
    suite = gpu.GpuSuite(quick=True, repeats=2, sizes=SIZES["gpu"])
    return suite, suite.configuration("B", "float32", 64, False, True)


class TestOnTheDevice:
    @pytest.mark.parametrize("short", [False, True])
    def test_gpu_time_is_of_replays_and_what_cannot_be_captured_is_timed_with_launches_alone(self, cuda, monkeypatch, short):
        monkeypatch.setattr(gpu, "EAGER_UP_TO", 5.0 if short else 0.5)
        pools = []

        def attend(name):
            if cuda.graph is not None:
                pools.append(cuda.graph.shared)
                if name == "bad":
                    raise RuntimeError("no waiting in a capture")
            out = torch.zeros(2)
            for _ in range(2):
                cuda.launch(name, lambda: out.fill_(2.0))
            return out

        suite, rows = compared(monkeypatch, {name: partial(attend, name) for name in ("first", "bad", "second")})
        times = {(row.table, row.who): row.samples for row in rows}
        replayed, launched = (1.0, 1.0), (2.0, 2.0)
        eager = {(gpu.EAGER, name): launched for name in ("first", "bad", "second") if short or name == "bad"}
        assert times == {(gpu.FORMS, "first"): replayed, (gpu.FORMS, "bad"): (), (gpu.FORMS, "second"): replayed} | eager
        (bad,) = (row for row in rows if row.reasons)
        assert (bad.who, bad.verdict) == ("bad", "failed")
        assert bad.reasons == ("timed with launches alone, without a CUDA graph: RuntimeError: no waiting in a capture",)
        first, *others = pools
        assert first is None
        assert [type(pool) for pool in others] == [Graph, Graph], "graphs share their memory"
        work = reference().flops(suite.problem("B", 64, requires_grad=True))
        assert {row.values["flops"] for row in rows if row.samples} == {work * 2.5 / 3.5}, "of the backward pass alone"
        assert suite.rates == dict.fromkeys(
            [("first", "float32", True), ("second", "float32", True)], pytest.approx(work * 2.5 / 3.5)
        )

    def test_what_a_graph_reads_is_kept_while_replays_are_timed(self, cuda, monkeypatch):
        left, kept = list[weakref.ref[torch.Tensor]](), list[bool]()

        def timed(implementation, *_):
            forward = torch.zeros(2)
            left.append(weakref.ref(forward))

            def call():
                out = torch.zeros_like(forward)
                cuda.launch("kernel", lambda: out.fill_(2.0))
                return out

            return call

        def looked(*facts, **more):
            kept.extend(x() is not None for x in left)
            return time_interleaved(*facts, **more)

        monkeypatch.setattr(gpu, "time_interleaved", looked)
        compared(monkeypatch, dict.fromkeys(("first", "second"), lambda: None), timed)
        assert kept[:2] == [True, True]

    def test_a_backward_pass_makes_its_forward_pass_in_its_first_call(self):
        problem = gpu.GpuSuite(quick=True, **SMALL).problem("B", 64, requires_grad=True)
        passes = []

        def attend(inputs, problem):
            passes.append(all(x.is_leaf for x in inputs.qkv))
            return reference().attend(inputs, problem)

        inputs = Tensors.random(problem)
        call = gpu.timed_call(replace(reference(), attend=attend), inputs, problem)
        assert passes == []
        results = [call(), call()]
        assert passes == [True]
        for grads in results:
            torch.testing.assert_close(grads, reference().once(inputs, problem))


def test_seconds_are_expected_by_the_rate_of_a_shorter_call_then_of_the_last_case(monkeypatch):
    monkeypatch.setattr(gpu, "clock_of", lambda device: lambda call, calls: 2.0)
    suite, one = gpu.GpuSuite(device="cpu"), replace(reference(), attend=lambda inputs, problem: inputs.query)
    problem = suite.problem("B", 64, dtype="bfloat16")
    assert suite.expected_seconds(one, problem) == pytest.approx(2.0 * 16)
    suite.rates[one.name, "bfloat16", False] = one.flops(problem) / 3
    assert suite.expected_seconds(one, problem) == pytest.approx(3.0)


def test_results_from_before_graph_replays_are_shown_as_what_they_are():
    document = registry.document_of(FOLDER / "gpu-h200.json")
    assert (gpu.ONE_BY_ONE.capitalize(), gpu.COLD) in [(table.title, table.note) for table in document.tables]
    assert gpu.ONE_BY_ONE in registry.sentence_of(FOLDER / "gpu-h200.json")
