"""`dilkit bench --suite gpu` from end to end at a tiny size on the CPU, other backends standing in for the CUDA kernels."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import small_suites
from helpers.small_suites import SIZES

from dilkit import register_backend, unregister_backend
from dilkit.backends.native.backend import Native
from dilkit.backends.reference import Reference
from dilkit.testing import memory
from dilkit.testing.memory import MIB
from dilkit.tools.bench.suites import gpu
from dilkit.tools.results.decode import encode
from dilkit.tools.results.rows import YARDSTICKS
from dilkit.tools.site import figures

STAND_INS = ("cupy_raw", "numba_cuda")


class StandIn(Native):
    """Computes on the CPU under the name of the CUDA kernels."""

    name = "cupy_raw"


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch, tiny_yardsticks: None) -> Iterator[None]:
    monkeypatch.setattr(memory, "peak_memory", lambda call, device: 3 * MIB)  # of a CUDA device it is the allocator's own figure
    monkeypatch.setattr(gpu, "SEQS", (32, 64))
    register_backend(StandIn(), replace=True)
    register_backend(Reference(name="numba_cuda"), replace=True)
    yield
    unregister_backend("cupy_raw")
    unregister_backend("numba_cuda")


SMALL = dict(sizes=SIZES["gpu"], device="cpu")


def run(out: Path, *arguments: str, **fields: Any) -> tuple[int, Any]:
    return small_suites.run("gpu", out, "--repeats", "1", *arguments, **SMALL | fields)


def quick() -> gpu.GpuSuite:
    return gpu.GpuSuite(quick=True, repeats=1, **SMALL)


@pytest.mark.slow
def test_the_suite_measures_and_judges_everything(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    code, result = run(tmp_path, "--json")
    assert code == 0
    assert json.loads(capsys.readouterr().out) == encode(result)
    cases = result.cases(gpu.FORMS)
    assert len(cases) == 3 * 2 * 2 * 2
    for case in cases:
        measured = {name for name in case.rows if case.timed(name)} - {*YARDSTICKS}
        assert measured == {"automatic", *STAND_INS, "sdpa:cpu-flash"}, case
        assert all(check.passed for row in case.rows.values() for check in row.checks)
    assert [case.rows["cupy_raw"].verdict for case in result.cases("long")] == ["measured"]
    assert [figure.name for figure in result.figures] == [target.name for target in gpu.TARGETS]
    assert all(0 < case.rows["cupy_raw"].values["scratch_bytes"] < 3 * MIB for case in result.cases("memory"))
    empty = {figure.name for figure in result.figures if not figure.values}
    assert {name for name in empty if not ("efficient" in name or "cudnn" in name or name.endswith("the same"))} == set()
    assert (tmp_path / "suite.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "suite.json").rename(tmp_path / "gpu-test.json")
    page = figures.gpu_suites(tmp_path)
    assert page.startswith("## gpu-test")
    assert "## All times" in page


def test_both_ends_of_the_longest_sequence_are_checked_and_half_of_it_is_tried_where_it_does_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class LosesTheEnd(StandIn):
        def forward(self, *arguments):
            out, lse = super().forward(*arguments)
            if out.shape[1] > 256:
                out[:, -1] = 0
            return out, lse

    def inputs_that_do_not_fit(problem):
        tried.append(problem.seq)
        raise torch.cuda.OutOfMemoryError("no room")

    register_backend(LosesTheEnd(), replace=True)
    (long,) = quick().long()
    assert (long.verdict, long.reasons) == ("wrong", ("the last tokens: 512 results differ",))
    tried = list[int]()
    monkeypatch.setattr(gpu, "long_inputs", inputs_that_do_not_fit)
    assert [row.verdict for row in quick().long()] == ["failed"]
    assert tried == [4096, 2048]
