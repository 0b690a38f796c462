"""The kernels in Triton."""

import re
import sys
from itertools import product

import pytest
from helpers.project import ROOT, succeed

pytest.importorskip("triton", reason="triton is not installed: make stages, on Linux")

from helpers.steps import StepCase
from helpers.triton_compile import compile_kernel, compile_step

from dilkit import Device, Pattern, Problem
from dilkit.backends.triton.backend import HIP_ARCHITECTURES, TunedLauncher
from dilkit.backends.triton.sizes import HEAD_DIMS, beside_bias, sizes_for
from dilkit.bias.form import BiasForm

slow, kernels = pytest.mark.slow, pytest.mark.kernels
STEPS = {
    "as many": StepCase("float32", heads=2, kv_heads=2, head_dim=128),
    "halves": StepCase("bfloat16", heads=16, kv_heads=2, head_dim=128),
    "grouped": StepCase("float16", "int8", heads=8, kv_heads=1, head_dim=64, sink=True),
    "biased": StepCase("float32", "bfloat16", heads=8, kv_heads=2, head_dim=128, bias="coordinates", softcap=30.0),
    "odd": StepCase("float32", heads=3, kv_heads=1, head_dim=33, bias="table"),
}
ROLES = ("forward", "dquery", "dkeyvalue")
HALVES = ("float16", "bfloat16")
CAPABILITIES = (80, 90, 100, 120)
PRODUCTS = {80: r"mma\.sync", 90: r"wgmma\.mma_async", 100: r"tcgen05\.mma", 120: r"mma\.sync"}
"""The instruction in PTX that multiplies halves on tensor cores, by capability."""
SHARED_BYTES = {80: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
"""The shared memory that a block may have by capability: there, and on 8.6 and 8.9, whose sizes are those of 8.0."""


def in_interpreter(file, shares, options, mark):
    given = [f"--share {i}/{shares} {options}".strip() for i in range(1, shares + 1)]
    return [pytest.param(file, one, marks=mark, id=f"{file} {one}") for one in given]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("file", "options"),
    [
        *(*in_interpreter("interpret.py", 2, "", slow), *in_interpreter("interpret.py", 8, "--all", kernels)),
        *(*in_interpreter("interpret_steps.py", 4, "", slow), *in_interpreter("interpret_steps.py", 8, "--all", kernels)),
    ],
)
def test_kernels_agree_with_the_oracle_in_the_interpreter(file, options):
    """Run a case of every feature and every two options together, or all."""
    print(succeed(sys.executable, str(ROOT / "tests/backends/triton" / file), *options.split(), cwd=ROOT, OMP_NUM_THREADS="1"))


def check_code(role, dtype, head_dim, capability, folder, softcap=0.0):
    """Kernels do not spill, tall or low, and those for halves multiply on tensor cores, with 5 stages while copies run."""
    for low in (False, True):
        sizes = sizes_for(role, dtype, head_dim, (capability // 10, capability % 10), low)
        found = compile_kernel(role, dtype, head_dim, capability, sizes, folder, softcap)
        where = f"{role} {dtype} {head_dim} sm_{capability} {sizes} softcap {softcap}"
        assert (found.spills, found.stack) == (0, 0), f"{where}: {found.registers} registers"
        assert found.shared <= SHARED_BYTES[capability], where
        assert bool(re.search(PRODUCTS[capability], found.code)) == (dtype != "float32"), where
        assert "atom" not in found.code, where
        assert (re.search(r"cp\.async\.wait_group\s+[1-9]", found.code) is not None) == (sizes.stages == 5), "copies run ahead"


FORMS = [BiasForm(learned=True), BiasForm(2, (5, 1), placed=True, learned=True)]
SOME = ("forward", "bfloat16", 64, 90), ("dquery", "float16", 128, 80), ("forward", "float32", 128, 90)


@pytest.mark.parametrize(
    ("role", "dtype", "head_dim", "capability", "softcap"),
    [
        ("dkeyvalue", "float16", 16, 120, 0.0),
        *(pytest.param(*one, 0.0, marks=slow) for one in SOME),
        *(pytest.param(role, "float16", 32, 90, 30.0, marks=slow) for role in ROLES),
        *(
            pytest.param(*one, 0.0, marks=kernels)
            for one in product(ROLES, (*HALVES, "float32"), (*HEAD_DIMS, 80, 96), CAPABILITIES)
        ),
    ],
)
def test_kernels_compile_without_a_gpu(role, dtype, head_dim, capability, softcap, tmp_path):
    check_code(role, dtype, head_dim, capability, tmp_path, softcap)


@pytest.mark.parametrize(
    ("role", "dtype", "head_dim", "architecture", "form"),
    [
        pytest.param("forward", "float32", 16, "gfx942", None, marks=slow),
        *(pytest.param(*one, None, marks=kernels) for one in product(ROLES, (*HALVES, "float32"), HEAD_DIMS, HIP_ARCHITECTURES)),
        *(pytest.param(role, "bfloat16", 128, *one, marks=kernels) for role, *one in product(ROLES, HIP_ARCHITECTURES, FORMS)),
    ],
    ids=str,
)
def test_kernels_compile_for_gpus_of_amd(role, dtype, head_dim, architecture, form, tmp_path):
    facts = dict(seq=256, heads=4, head_dim=head_dim, dtype=dtype, device=Device.assume(architecture), bias=form)
    for low in (False, True):
        sizes = TunedLauncher().sizes(role, Problem(pattern=Pattern.dense(), **facts), low)
        found = compile_kernel(role, dtype, head_dim, architecture, sizes, tmp_path, form=form)
        assert (found.spills, found.stack) == (0, 0), f"{sizes}: {found.registers} registers"
        assert found.shared <= 64 * 1024, sizes
        assert "v_mfma" in found.code


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("role", ROLES)
def test_kernels_that_add_a_bias_compile_without_a_gpu(role, form, tmp_path):
    sizes = beside_bias(sizes_for(role, "float16", 64, (9, 0)))
    found = compile_kernel(role, "float16", 64, 90, sizes, tmp_path, form=form)
    assert (found.spills, found.stack) == (0, 0), found.registers
    assert (re.search(r"\b(atom|red)\.", found.code) is not None) == (role == "dquery")


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("step", STEPS)
def test_kernels_of_steps_compile_without_a_gpu(step, capability, tmp_path):
    case = STEPS[step]
    made = compile_step(case, capability, tmp_path)
    assert (made.spills, made.stack) == (0, 0), made.registers
    assert len(re.findall(r"\.gpu\.acquire\.", made.code)) == 2
    assert len(re.findall(r"atom\.global\.gpu\.acq_rel\.add", made.code)) == 1
    assert "ld.global.nc" not in made.code
    assert step != "as many" or re.search(r"ld\.global\S*\.v4\.b32", made.code), "four numbers of fp32 at a time"
