"""The kernels in numba.cuda: run in numba's simulator, and compiled with no GPU at hand."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from helpers.project import ROOT, succeed

from dilkit.backend import missing_modules
from dilkit.backends.numba.tilings import TABLE

STATIC_BYTES = 48 * 1024
"""Shared memory that a kernel may declare on any GPU."""

needs_numba = pytest.mark.skipif(bool(missing_modules(("numba_cuda",))), reason="numba-cuda is not installed: make kernels")
needs_nvvm = pytest.mark.skipif(
    bool(missing_modules(("nvidia.cuda_nvcc",))),
    reason="nvidia-cuda-nvcc-cu12, with the compiler NVVM, is not installed: make kernels",
)


def simulate(*options: str) -> str:
    return succeed(sys.executable, str(ROOT / "tests/backends/numba/simulate.py"), *options, cwd=ROOT, OMP_NUM_THREADS="1")


@needs_numba
@pytest.mark.parametrize(
    "share",
    [
        pytest.param("1/20", marks=pytest.mark.slow),
        pytest.param("1/6", marks=pytest.mark.slow),
        *(pytest.param(f"{i}/6", marks=pytest.mark.kernels) for i in range(2, 7)),
    ],
)
def test_kernels_agree_with_the_oracle_in_the_simulator(share: str) -> None:
    """Cases of a few features, with `make kernels` of every one, forward and gradients; the run tells of each."""
    print(simulate("--share", share))


@needs_numba
def test_the_keys_that_tiles_list_are_the_count() -> None:
    simulate("--keys")


def compiled(capability: str, dtype: str, head_dim: int) -> dict[str, dict[str, Any]]:
    script = str(ROOT / "tests/helpers/numba_compile.py")
    return json.loads(succeed(sys.executable, script, capability, dtype, str(head_dim), cwd=ROOT))


def check_code(found: dict[str, dict[str, Any]]) -> None:
    """Registers hold what is summed, 16 bytes are read at once, and a block fits on any GPU."""
    assert sorted(found) == sorted(TABLE)
    for role, facts in found.items():
        assert facts["packed"] == facts["parameters"], f"{role}: a launch would pass the wrong arguments"
        assert facts["depots"] == 0, f"{role}: local arrays lie in local memory"
        assert role == "dots" or facts["vector_loads"] > 0, f"{role}: nothing is read four numbers at a time"
        assert facts.get("stack", 0) == facts.get("spills", 0) == 0, f"{role}: {facts}"
        assert facts.get("shared", 0) <= STATIC_BYTES, f"{role}: {facts}"
        assert facts.get("registers", 0) * facts["threads"] <= 65536, f"{role}: {facts}"


@needs_numba
@needs_nvvm
@pytest.mark.kernels
@pytest.mark.parametrize(("capability", "dtype", "head_dim"), [("6.1", "float32", 64)])
def test_kernels_compile_without_a_gpu(capability: str, dtype: str, head_dim: int) -> None:
    check_code(compiled(capability, dtype, head_dim))


@needs_numba
@needs_nvvm
@pytest.mark.kernels
@pytest.mark.parametrize("head_dim", [16, 32, 64, 96, 128])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("capability", ["6.1", "8.0", "9.0"])
def test_every_kernel_compiles_without_a_gpu(capability: str, dtype: str, head_dim: int) -> None:
    check_code(compiled(capability, dtype, head_dim))
