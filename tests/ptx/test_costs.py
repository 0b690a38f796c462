"""The page of costs is of these kernels."""

from __future__ import annotations

import shutil

import pytest
from helpers.project import ROOT
from ptx.costs import costs

from dilkit.backends.cuda.compile import compiler_version
from dilkit.tools.bench.costs.record import CostsResult
from dilkit.tools.results.file import read_result

pytest.importorskip("cupy", reason="cupy is not installed: make kernels")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")
def test_what_the_kernels_issue_is_what_the_page_says() -> None:
    result = read_result(ROOT / "docs/results/costs.json", CostsResult)
    if result.nvrtc != ".".join(map(str, compiler_version())):
        pytest.skip(f"the page was made with NVRTC {result.nvrtc}")
    kept = result.costs()
    assert all(cost in kept for cost in costs("B", 64, "bfloat16", (8, 0))), "write the page anew with: make costs"
