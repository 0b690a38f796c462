"""The table in the docs of what the compiler makes of every CUDA kernel."""

import pytest
from helpers.project import ROOT

from dilkit.backends.cuda.compile import compiler_version
from dilkit.tools.bench.suites.kernels import KernelsResult
from dilkit.tools.bench.workloads.kernels_compiled import builds, compiled
from dilkit.tools.results.file import read_result

pytest.importorskip("cupy", reason="cupy is not installed: make kernels")


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_table_in_the_docs_is_of_these_kernels(every):
    """With the same compiler, a new report of each file, or of the smallest, equals the table."""
    result = read_result(ROOT / "docs" / "results" / "kernels.json", KernelsResult)
    if result.nvrtc != ".".join(map(str, compiler_version())):
        pytest.skip(f"the table was made with NVRTC {result.nvrtc}")
    kept = result.kernels()
    for build in builds([(8, 0)], [64], ["float32", "bfloat16"] if every else ["float32"], ["plain"]):
        if not every and build.names != ("row_dots",):
            continue
        assert all(kernel in kept for kernel in compiled(build)), "write the table anew with: make kernels"
