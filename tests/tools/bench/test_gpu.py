"""`dilkit bench --suite gpu` from end to end at a tiny size on the CPU, other backends standing in for the CUDA kernels."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import small_suites
from helpers.small_suites import SIZES

from dilkit import register_backend, unregister_backend
from dilkit.backends.native.backend import Native
from dilkit.testing import memory
from dilkit.testing.memory import MIB
from dilkit.tools.bench.suites import gpu
from dilkit.tools.results.decode import encode
from dilkit.tools.results.rows import YARDSTICKS
from dilkit.tools.site import figures


class StandIn(Native):
    """Computes on the CPU under the name of the CUDA kernels."""

    name = "cupy_raw"


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch, tiny_yardsticks: None) -> Iterator[None]:
    monkeypatch.setattr(memory, "peak_memory", lambda call, device: 3 * MIB)  # of a CUDA device it is the allocator's own figure
    register_backend(StandIn(), replace=True)
    yield
    unregister_backend("cupy_raw")


SMALL = dict(sizes=SIZES["gpu"], device="cpu")


def run(out: Path, *arguments: str, **fields: Any) -> tuple[int, Any]:
    return small_suites.run("gpu", out, "--repeats", "1", *arguments, **SMALL | fields)


@pytest.mark.slow
def test_the_suite_measures_and_judges_everything(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
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
    assert "## All times" in page
