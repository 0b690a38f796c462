"""Timing in interleaved rounds, beside what the machine can do at most."""

from functools import partial

import pytest
import torch

from dilkit import Pattern, Problem
from dilkit.comm import run_threads
from dilkit.tools.measure import ceilings, timing
from dilkit.tools.measure.rank_times import rank_speed
from dilkit.tools.measure.timing import time_interleaved
from dilkit.tools.results.rows import ResultRow


def test_rounds_are_interleaved_and_every_sample_is_kept():
    calls = []
    samples = time_interleaved({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, repeats=3, warmup=1)
    assert "".join(calls) == "ab" + "ababab"
    assert [len(s.samples) for s in samples.values()] == [3, 3]
    assert samples["a"].calls == 1


def test_short_functions_are_called_often_and_a_sample_is_the_time_of_one_call():
    samples = time_interleaved({"a": lambda: None}, repeats=2, min_time=1.0, clock=lambda function, calls: 0.25 * calls)["a"]
    assert samples.calls > 1
    assert samples.samples == (0.25, 0.25)


def test_median_and_quartiles():
    row = ResultRow(samples=(5.0, 1.0, 2.0, 4.0, 3.0))
    assert (row.median_s, row.quartiles_s) == (3.0, (2.0, 4.0))


@pytest.mark.usefixtures("tiny_yardsticks")
class TestCeilings:
    def test_ceilings_are_amounts_over_medians(self, monkeypatch):
        found = ceilings.Ceilings("float32")
        rates = found.rates({name: ResultRow(samples=(0.5, 0.25, 1.0)) for name in found.calls})
        assert rates["matmul"].values == dict(gflops=1e-9 * 2 * 64**3 / 0.5, size=64, dtype="float32")
        assert rates["matmul"].samples == (0.5, 0.25, 1.0)
        monkeypatch.setattr(ceilings, "_MATMUL_BUDGET", 0.0)
        monkeypatch.setitem(ceilings.MATMUL_SIZE, "cpu", 2048)
        assert ceilings.square_matmuls("float32", "cpu")[0] == 256, "it would take too long"

    def test_on_cuda_many_matmuls_follow_one_another(self, monkeypatch):
        for name in ("ones", "randn"):
            make = getattr(torch, name)
            monkeypatch.setattr(torch, name, lambda *size, make=make, device, **how: make(*size, **how))
        monkeypatch.setattr(torch, "Generator", lambda device: None)
        monkeypatch.setitem(ceilings.MATMUL_SIZE, "cuda", 64)
        monkeypatch.setattr(ceilings, "clock_of", lambda device: lambda call, calls: 0.0025 * calls)
        found = ceilings.Ceilings("float32", "cuda")
        assert len(found.calls["ceiling matmul"]()) == 4
        row = found.rates({name: ResultRow(samples=(0.5,), calls=3) for name in found.calls})["matmul"]
        assert row.values["gflops"] == pytest.approx(1e-9 * 4 * 2 * 64**3 / 0.5)
        assert (row.samples, row.calls) == ((0.125,), 12)


def test_speeds_measured_between_ranks_are_of_all_ranks():
    problem = Problem(pattern=Pattern([16, 64], [1, 4]), seq=256, heads=2, head_dim=8)
    first, second = run_threads(2, lambda comm: rank_speed(comm, problem, repeats=1))
    assert first == second
    assert min(first.bandwidth, first.flops, first.latency) > 0
    assert first.backward >= 1


class TestGraphReplays:
    @staticmethod
    def doubled(cuda, kernel="kernel"):
        out = torch.full((3,), 0.5)
        cuda.launch(kernel, lambda: out.fill_(2.0))
        return out

    def test_the_timed_region_holds_a_replay_alone_behind_a_flush(self, cuda):
        assert timing.cold_cuda_seconds(timing.captured(partial(self.doubled, cuda)).replay, 2) == 2.0
        warm_up = ["side waits for default", "kernel", "kernel", "capture", "default waits for side", "replay"]
        assert cuda.log == [*warm_up, *(2 * ["synchronize", "flush", "event", "replay", "event"])]
        assert timing._ABANDONED == []

    def test_a_sample_is_taken_again_where_the_device_did_not_wait(self, cuda):
        graph = timing.captured(partial(self.doubled, cuda))
        cuda.log.clear()
        cuda.behind = 3
        assert timing.cold_cuda_seconds(graph.replay, 1) == 1.0
        assert "".join(what[0] for what in cuda.log) == "sfere" + "sffere" + "sffffere"

    @pytest.mark.parametrize("broken", [False, True])
    def test_a_call_that_cannot_be_captured_raises_and_the_stream_is_the_former_one(self, cuda, broken):
        def waits():
            if cuda.graph is not None:
                cuda.broken = broken
                raise RuntimeError("no waiting in a capture")
            return self.doubled(cuda)

        with pytest.raises(RuntimeError, match="previous error" if broken else "no waiting"):
            timing.captured(waits)
        assert [stream.name for stream in cuda.streams] == ["default"]
        assert len(timing._ABANDONED) == broken

    def test_a_graph_that_lacks_work_of_the_call_is_refused(self, cuda):
        def elsewhere():
            graph, cuda.graph = cuda.graph, None  # a stream of its own, which is not captured
            out = self.doubled(cuda)
            cuda.graph = graph
            return out

        with pytest.raises(RuntimeError, match="does not compute"):
            timing.captured(elsewhere)
