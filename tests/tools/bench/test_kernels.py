"""The table in the docs of what the compiler makes of every CUDA kernel."""

from __future__ import annotations

import pytest
from helpers.project import ROOT

from dilkit.backends.cuda.compile import compiler_version
from dilkit.device import probe
from dilkit.tools.bench.kernels.cases import builds, compiled
from dilkit.tools.bench.kernels.document import document, sentence
from dilkit.tools.bench.kernels.record import KernelsResult
from dilkit.tools.results.file import new_result, read_result

pytest.importorskip("cupy", reason="cupy is not installed: make kernels")


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_table_in_the_docs_is_of_these_kernels(every: bool) -> None:
    """Where the compiler is the same, its report of one build of each file, or of the smallest file, is what the table says."""
    result = read_result(ROOT / "docs" / "results" / "kernels.json", KernelsResult)
    if result.nvrtc != ".".join(map(str, compiler_version())):
        pytest.skip(f"the table was made with NVRTC {result.nvrtc}")
    kept = result.kernels()
    for build in builds([(8, 0)], [64], ["float32", "bfloat16"] if every else ["float32"], ["plain"]):
        if not every and build.names != ("row_dots",):
            continue
        assert all(kernel in kept for kernel in compiled(build)), "write the table anew with: make kernels"


def test_the_document_shows_registers_and_says_what_spills() -> None:
    start = "float16 64 plain ab12 128 2 128 0 25600"
    rows = (f"name sm_75 {start} 99 0 0", f"name sm_80 {start} 255 8 16")
    result = new_result(KernelsResult, probe("cpu"), nvrtc="12.9", quick=False, rows=rows)
    assert "2 CUDA kernels for 2 architectures, compiled by NVRTC 12.9: 1 SPILL registers" in sentence(result)
    assert document(result).tables[0].rows == (("name", "float16", "64", "128", "128", "2", "25 KiB", "99", "255"),)
