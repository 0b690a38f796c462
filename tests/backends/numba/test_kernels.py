"""The kernels in numba.cuda."""

import json
import sys

import pytest
from helpers.project import ROOT, succeed

from dilkit.backend import missing_modules
from dilkit.backends.numba.backend import TABLE

FOLDER = ROOT / "tests/backends/numba"
STATIC_BYTES = 48 * 1024
"""Shared memory that a kernel may declare on any GPU."""

kernels = pytest.mark.kernels
needs_numba = pytest.mark.skipif(bool(missing_modules(("numba_cuda",))), reason="numba-cuda is not installed: make kernels")
needs_nvvm = pytest.mark.skipif(
    bool(missing_modules(("nvidia.cuda_nvcc",))),
    reason="nvidia-cuda-nvcc-cu12, with the compiler NVVM, is not installed: make kernels",
)


@needs_numba
@pytest.mark.parametrize(
    "options",
    [
        ["--keys"],
        *(pytest.param(["--share", share], marks=pytest.mark.slow) for share in ("1/20", "1/6")),
        *(pytest.param(["--share", f"{i}/6"], marks=kernels) for i in range(2, 7)),
    ],
    ids=" ".join,
)
def test_kernels_agree_with_the_oracle_in_the_simulator(options):
    """Tiles list the keys of the count; `make kernels` runs cases of every feature."""
    print(succeed(sys.executable, str(FOLDER / "simulate.py"), *options, cwd=ROOT, OMP_NUM_THREADS="1"))


@needs_numba
@needs_nvvm
@kernels
@pytest.mark.parametrize("head_dim", [16, 32, 64, 96, 128])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("capability", ["6.1", "8.0", "9.0"])
def test_every_kernel_compiles_without_a_gpu(capability, dtype, head_dim):
    found = json.loads(succeed(sys.executable, str(FOLDER / "compile.py"), capability, dtype, str(head_dim), cwd=ROOT))
    assert sorted(found) == sorted(TABLE)
    for role, facts in found.items():
        assert facts["depots"] == 0, f"{role}: local arrays lie in local memory"
        assert role == "dots" or facts["vector_loads"] > 0, f"{role}: nothing is read four numbers at a time"
        assert facts.get("stack", 0) == facts.get("spills", 0) == 0, f"{role}: {facts}"
        assert facts.get("shared", 0) <= STATIC_BYTES, f"{role}: {facts}"
        assert facts.get("registers", 0) * facts["threads"] <= 65536, f"{role}: {facts}"
