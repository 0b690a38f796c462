"""Every CUDA kernel compiles for every kind of GPU without spills, within its shared memory."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from dilkit import Pattern
from dilkit.backends.cuda import compile as cuda_compile, scores
from dilkit.backends.cuda.hopper import CAPABILITY, HEAD_DIMS as HOPPER_DIMS, hopper_kernel
from dilkit.backends.cuda.report import usages
from dilkit.backends.cuda.table import HEAD_DIMS, STORAGE, TABLE, kernel_for
from dilkit.bias.form import BiasForm
from dilkit.problem import Problem
from dilkit.tools.bench.suites.kernels import KernelUse
from dilkit.tools.bench.workloads.kernels_compiled import CAPABILITIES, FORMS, builds, compiled, step_builds

pytest.importorskip("cupy", reason="cupy is not installed: make kernels")

TENSOR_CORES = [c for c in CAPABILITIES if c >= (8, 0)]
USUAL = builds(head_dims=[64], dtypes=["float32"], forms=["plain"]) + builds([(7, 5)], [64], ["float16"], ["plain"])
USUAL += builds(TENSOR_CORES, [64, 128], ["bfloat16"], ["plain"]) + builds([(9, 0)], [128], ["float16"], ["packed-dropout"])
USUAL += step_builds(head_dims=[64], dtypes=["float32"], groups=[1])
TIGHT = builds([(10, 0)], [64], ["float16"], ["plain"]) + builds([(12, 0)], [32, 64], ["bfloat16"], ["packed-dropout"])
SHORT = [build for build in TIGHT if "mma_dkeyvalue" in build.names and build.kernel.tile_rows == 128]
"""Builds with the fewest registers: some fragments are in shared memory."""


def chosen() -> list[Any]:
    files = {names: [build for build in USUAL if build.names == names] for names in dict.fromkeys(b.names for b in USUAL)}
    usual = [one[i] for at, one in enumerate(files.values()) for i in {0, 1 + at % max(1, len(one) - 2), len(one) - 1}]
    marks = dict.fromkeys((*usual, *SHORT[1:]), pytest.mark.slow)
    return [pytest.param(build, marks=marks.get(build, []), id="-".join(map(str, build.keys[0]))) for build in (SHORT[0], *marks)]


@pytest.mark.parametrize("build", chosen())
def test_a_kernel_compiles_and_fits(build):
    found = compiled(build)
    assert [kernel.name for kernel in found] == list(build.names)
    assert {kernel.architecture for kernel in found} == {"sm_{}{}".format(*build.capability)}
    assert [complaint for kernel in found for complaint in kernel.complaints] == []


@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [
        pytest.param(*row, marks=pytest.mark.slow if row[1] == "float16" else [])
        for row in product(HOPPER_DIMS, ("bfloat16", "float16"))
    ],
)
def test_the_kernel_for_hopper_compiles_and_its_products_run_beside_its_threads(head_dim, dtype):
    kernel = hopper_kernel(Problem(pattern=Pattern([64], [1]), seq=64, heads=1, head_dim=head_dim, dtype=dtype), CAPABILITY, True)
    code, log = cuda_compile.compiled(kernel.source, cuda_compile.options_of(kernel, CAPABILITY))
    usage = usages(log)[kernel.name]
    assert (usage.architecture, usage.spills, usage.stack) == ("sm_90a", 0, 0)
    assert usage.registers * kernel.threads <= 2**16
    assert usage.shared + kernel.shared_bytes <= 227 * 1024
    assert "Performance Loss" not in log, "products are serialized (C7510, C7514), or setmaxnreg is ignored (C7508)"
    assert code


def test_what_does_not_fit_is_said():
    kernel = KernelUse.read("name sm_75 float16 64 plain - 128 2 64 40000 25000 99 0 0")
    start = "name sm_75 float16 64 plain:"
    assert kernel.complaints == []
    (older,) = replace(kernel, architecture="sm_61").complaints
    assert older == "name sm_61 float16 64 plain: 25000 + 40000 bytes of shared memory, at most 48 KiB"
    assert replace(kernel, dynamic=41_000).complaints == [f"{start} 25000 + 41000 bytes of shared memory, at most 64 KiB"]
    assert replace(kernel, spills=8, stack=16).complaints == [f"{start} 8 bytes of spills", f"{start} 16 bytes of stack"]


def test_every_kernel_is_compiled_for_every_kind_of_gpu_that_it_is_for():
    every = builds() + step_builds()
    for entry in TABLE:
        serves = {build.capability for build in every if entry.name in build.names}
        first = min(entry.dtypes.values())
        asked = {c for c in CAPABILITIES if c >= first and any(size.since <= c < size.before for size in entry.configs)}
        assert serves >= asked, entry.name
    assert {(build.dtype, build.head_dim, build.form) for build in builds()} == set(product(STORAGE, HEAD_DIMS, FORMS))
    for form in ("packed", "dropout", "packed-dropout"):
        asked = {tuple(build.kernel.macros.get(name, 0) for name in ("PACKED", "DROPOUT")) for build in builds(forms=[form])}
        assert asked == {(int("packed" in form), int("dropout" in form))}


PLANE = BiasForm(dims=2, metric="max", placed=True, learned=True)
SCORES = (
    None,
    BiasForm(),
    BiasForm(sizes=(9,)),
    PLANE,
    replace(PLANE, metric="euclidean", dims=3),
    BiasForm(2, (3, 5), placed=True),
)


@pytest.mark.parametrize(
    ("dtype", "capability", "form", "head_dims"),
    [
        *(
            pytest.param(dtype, (9, 0), form, (64,), marks=pytest.mark.slow)
            for dtype in ("float32", "float16")
            for form in SCORES[::3]
        ),
        *(pytest.param(*row, HEAD_DIMS, marks=pytest.mark.kernels) for row in product(STORAGE, CAPABILITIES, SCORES)),
    ],
    ids=str,
)
def test_no_kernel_spills(dtype, capability, form, head_dims):
    changed = form and replace(form, learned=True)
    kernels = {
        kernel_for(role, dtype, head_dim, capability, True, rows, flag, flag, scores.macros(role, True, changed)): None
        for role in ("forward", "dquery", "dkeyvalue")
        for head_dim in head_dims
        for rows in (128, 64)
        for flag in (False, True)
    }
    for kernel in kernels:
        code, log = cuda_compile.compiled(kernel.source, cuda_compile.options_of(kernel, capability))
        usage = usages(log)[kernel.name]
        assert code
        assert (usage.spills, usage.stack) == (0, 0), f"{kernel} on {capability}: {usage}"
