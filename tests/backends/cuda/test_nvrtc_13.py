"""The kernels compiled by NVRTC of CUDA 13, in a process of its own, for the GPUs that it and that of CUDA 12 know."""

from __future__ import annotations

import multiprocessing
import site
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
from helpers.nvrtc import nvrtc_13, use_nvrtc_13

from dilkit.backends.cuda.compile import compiler_build, compiler_version, options_of
from dilkit.backends.cuda.nvrtc import installed
from dilkit.backends.cuda.table import kernel_for
from dilkit.backends.tiles.schedule import MOST_ROWS
from dilkit.tools.bench.kernels.cases import CAPABILITIES, Build, builds, compiled, complaints

pytestmark = pytest.mark.skipif(nvrtc_13() is None, reason="NVRTC of CUDA 13 is not installed: make kernels")

KNOWN = [capability for capability in CAPABILITIES if capability >= (7, 5)]
ALL = [build for dtype in ("float32", "bfloat16") for build in builds(KNOWN, [64, 128], [dtype], ["plain"])]
USUAL = [build for build in builds([(9, 0)], [64], ["bfloat16"], ["plain"]) if build.kernel.tile_rows == MOST_ROWS]


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=use_nvrtc_13) as found:
        yield found


def chosen() -> list[Any]:
    first, *others = USUAL
    marks = {build: [pytest.mark.slow] for build in others} | {first: []}
    return [pytest.param(build, marks=marks.get(build, [pytest.mark.kernels])) for build in ALL]


@pytest.mark.parametrize("build", chosen(), ids=lambda build: build.name)
def test_a_kernel_compiles_and_fits(process: ProcessPoolExecutor, build: Build) -> None:
    found = process.submit(compiled, build).result()
    assert [kernel.name for kernel in found] == list(build.names)
    assert {kernel.architecture for kernel in found} == {"sm_{}{}".format(*build.capability)}
    assert [complaint for kernel in found for complaint in complaints(kernel)] == []


def test_it_says_which_it_is(process: ProcessPoolExecutor) -> None:
    major, minor = process.submit(compiler_version).result()
    assert major == 13
    assert process.submit(compiler_build).result().startswith(f"{major}.{minor}.")


def test_gpus_that_it_no_longer_knows_are_refused_with_the_way_out(process: ProcessPoolExecutor) -> None:
    with pytest.raises(RuntimeError, match=r"NVRTC 13\.\d compiles for sm_75.*runs on sm_61: .*'dilkit\[cuda12\]'"):
        process.submit(options_of, kernel_for("forward", "float32", 64, (6, 1)), (6, 1)).result()


def install_beside() -> None:
    """Have this process find the package of NVRTC 13 before all others."""
    path = nvrtc_13()
    assert path is not None
    found = [str(path.parents[3]), *site.getsitepackages()]
    site.getsitepackages = lambda prefixes=None: found


def test_one_that_is_installed_beside_does_not_take_the_place_of_that_of_cupy() -> None:
    """CuPy alone would take NVRTC 13, also where CuPy is for CUDA 12."""
    cupy = pytest.importorskip("cupy", reason="cupy is not installed: make kernels")
    own = cupy.cuda.driver.get_build_version() // 1000
    if installed(own) is None:
        pytest.skip(f"NVRTC {own} is not installed as a package of its own")
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=install_beside) as process:
        assert process.submit(compiler_version).result()[0] == own
