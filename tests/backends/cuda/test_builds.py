"""Every CUDA kernel compiles for every kind of GPU, and fits: no spilled registers, no stack, shared memory that there is."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from dilkit.backends.cuda.table import HEAD_DIMS, STORAGE, TABLE
from dilkit.tools.bench.kernels.cases import CAPABILITIES, FORMS, Build, builds, compiled, complaints, step_builds
from dilkit.tools.bench.kernels.record import KernelUse

pytest.importorskip("cupy", reason="cupy is not installed: make kernels")

EVERYWHERE = builds(head_dims=[64], dtypes=["float32"], forms=["plain"])
NEWER = [c for c in CAPABILITIES if c >= (8, 0)]
TENSOR_CORES = builds([(7, 5)], [64], ["float16"], ["plain"]) + builds(NEWER, [64], ["bfloat16"], ["plain"])
WIDE = builds([(6, 1)], [128], ["float32", "float16"], ["elements"]) + builds([(9, 0)], [128], ["float32", "float16"], ["plain"])
DROPPING = builds([(9, 0)], [64, 128], ["float16"], ["dropout", "packed-dropout"])
TIGHT = builds([(10, 0)], [64], ["float16"], ["plain"]) + builds([(12, 0)], [32, 64], ["bfloat16"], ["packed-dropout"])
SHORT = [build for build in TIGHT if "mma_dkeyvalue" in build.names and build.kernel.tile_rows == 128]
"""Where registers are shortest: some fragments are in shared memory."""
PAIRS = [build for build in builds(NEWER, [128], ["bfloat16"], ["plain"]) if "mma_dquery_pairs" in build.names]
STEPS = step_builds(head_dims=[64], dtypes=["float32"], groups=[1])
USUAL = list(dict.fromkeys([*EVERYWHERE, *TENSOR_CORES, *DROPPING, *PAIRS, *STEPS]))


def chosen(builds: list[Build]) -> list[Any]:
    """Of each file, the first and the last build are slow, and one between, of other files another; the rest is longer yet."""
    files = {names: [build for build in builds if build.names == names] for names in dict.fromkeys(b.names for b in builds)}
    usual = [one[i] for at, one in enumerate(files.values()) for i in {0, 1 + at % max(1, len(one) - 2), len(one) - 1}]
    return [pytest.param(build, marks=pytest.mark.slow if build in usual else pytest.mark.kernels) for build in builds]


AT_LENGTH = [pytest.param(build, marks=pytest.mark.kernels) for build in WIDE]


@pytest.mark.parametrize(
    "build",
    [*chosen(USUAL), *SHORT[:1], *(pytest.param(build, marks=pytest.mark.slow) for build in SHORT[1:]), *AT_LENGTH],
    ids=lambda build: build.name,
)
def test_a_kernel_compiles_and_fits(build: Build) -> None:
    """`make kernels` holds every size of every kernel to the same."""
    found = compiled(build)
    assert [kernel.name for kernel in found] == list(build.names)
    assert {kernel.architecture for kernel in found} == {"sm_{}{}".format(*build.capability)}
    assert [complaint for kernel in found for complaint in complaints(kernel)] == []


def test_what_does_not_fit_is_said() -> None:
    kernel = KernelUse.read("name sm_75 float16 64 plain - 128 2 64 40000 25000 99 0 0")
    start = "name sm_75 float16 64 plain:"
    assert complaints(kernel) == []
    (older,) = complaints(replace(kernel, architecture="sm_61"))
    assert older == "name sm_61 float16 64 plain: 25000 + 40000 bytes of shared memory, at most 48 KiB"
    assert complaints(replace(kernel, dynamic=41_000)) == [f"{start} 25000 + 41000 bytes of shared memory, at most 64 KiB"]
    assert complaints(replace(kernel, spills=8, stack=16)) == [f"{start} 8 bytes of spills", f"{start} 16 bytes of stack"]


def test_every_kernel_is_compiled_for_every_kind_of_gpu_that_it_is_for() -> None:
    for entry in TABLE:
        serves = {build.capability for build in USUAL if entry.name in build.names}
        first = min(entry.dtypes.values())
        asked = {c for c in CAPABILITIES if c >= first and any(size.since <= c < size.before for size in entry.configs)}
        assert serves >= asked, entry.name
    assert {(build.dtype, build.head_dim, build.form) for build in builds()} == set(product(STORAGE, HEAD_DIMS, FORMS))
    for form in ("packed", "dropout", "packed-dropout"):
        asked = {tuple(build.kernel.macros.get(name, 0) for name in ("PACKED", "DROPOUT")) for build in builds(forms=[form])}
        assert asked == {(int("packed" in form), int("dropout" in form))}
