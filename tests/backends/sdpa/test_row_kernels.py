"""Kernels that merge rows, in Triton's interpreter and compiled for GPUs."""

import math
import re
import subprocess

import pytest
import torch
from helpers.fakes import registered
from helpers.sdpa import TorchRows

pytest.importorskip("triton", reason="triton is not installed: it comes with torch's builds for CUDA")

from helpers.triton_compile import asked_for
from triton import compile as triton_compile, knobs, next_power_of_2
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.interpreter import InterpretedFunction

from dilkit.backends.sdpa import fusing, row_kernels
from dilkit.backends.sdpa.backend import SDPA
from dilkit.testing.conformance import check
from dilkit.testing.problems import PROBLEMS

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
KERNELS = {name: getattr(row_kernels, name) for name in ("merge_rows", "add_rows")}


@pytest.fixture
def interpreted(monkeypatch):
    for name in (*KERNELS, "place"):
        monkeypatch.setattr(row_kernels, name, InterpretedFunction(getattr(row_kernels, name).fn))
    return row_kernels


@pytest.mark.parametrize(
    ("dtype", "head_dim"),
    [
        pytest.param(dtype, head_dim, marks=[] if head_dim == 8 or (dtype, head_dim) == (torch.float16, 40) else pytest.mark.slow)
        for dtype in DTYPES
        for head_dim in (8, 40, 64, 128)
    ],
    ids=str,
)
def test_they_pass_their_proof(interpreted, dtype, head_dim):
    assert fusing.failure(interpreted, torch.device("cpu"), dtype, head_dim) == ""


def views(x):
    sliced = torch.full((x.shape[0], 3 * x.shape[2] + 1, 2 * x.shape[1], *x.shape[3:]), math.nan, dtype=x.dtype)
    view = sliced[:, 1::3, ::2].transpose(1, 2).copy_(x)
    return dict(packed=x.contiguous(), by_row=x.transpose(1, 2).contiguous().transpose(1, 2), sliced=view)


@pytest.mark.parametrize(("of_whole", "of_part"), [("packed", "sliced"), ("by_row", "packed"), ("sliced", "by_row")])
@pytest.mark.parametrize("sizes", [(1, 1, 1, 16), (3, 2, 70, 40), (2, 5, 33, 8)], ids=str)
def test_merges_of_views_agree_with_torch(interpreted, sizes, of_whole, of_part):
    torch.manual_seed(0)
    out, part = torch.randn(2, *sizes)
    lse, part_lse = 30 * torch.randn(2, *sizes[:3])
    lse[..., ::4] = part_lse[..., ::3] = -math.inf
    found = [views(x)[where] for x, where in ((out, of_whole), (lse, of_whole), (part, of_part), (part_lse, of_part))]
    out[lse == -math.inf] = 0.0
    TorchRows().merge(out, lse, part, part_lse)
    interpreted.merge(*found)
    torch.testing.assert_close(found[:2], [out, lse], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("group", "of_part"), [("none", "sliced"), ("batch", "packed"), ("heads", "by_row")])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_of_views_are_those_of_torch(interpreted, dtype, of_part, group):
    torch.manual_seed(0)
    part = torch.randn(3, 4, 37, 24).to(dtype)
    own = part.shape[0] if group != "batch" else 1, part.shape[1] if group != "heads" else 1
    total = torch.randn(*own, 37, 24)
    want, found = total.clone().expand_as(part), views(total)["sliced"].expand_as(part)
    TorchRows().add(want, part)
    interpreted.add(found, views(part)[of_part])
    assert torch.equal(found, want)


CASES = [case for case in PROBLEMS if case.dtype != "float64" and case.seq * case.heads * case.batch <= 512][::110]


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow if at else [], id=case.name) for at, case in enumerate(CASES)]
)
def test_the_backend_agrees_with_the_oracle(interpreted, case):
    with registered(SDPA(row_kernels=interpreted)) as name:
        result = check(name, case)
    assert result.verdict in ("passed", "refused"), "; ".join(result.reasons)


@pytest.mark.parametrize("capability", [90, *(pytest.param(number, marks=pytest.mark.slow) for number in (80, 100, 120))])
@pytest.mark.parametrize(
    ("part", "sums", "head_dim"), [pytest.param("bf16", "bf16", 128, marks=pytest.mark.slow), ("fp16", "fp32", 40)]
)
def test_compiled_for_gpus_they_read_whole_vectors_and_spill_nothing(monkeypatch, tmp_path, capability, part, sums, head_dim):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    for name, kernel in KERNELS.items():
        options, target = dict(enable_fp_fusion=False), GPUTarget("cuda", capability, 32)
        compiled = triton_compile(source(kernel, part, sums, head_dim), target, options)
        code = tmp_path / f"{name}.cubin"
        code.write_bytes(compiled.asm["cubin"])
        used = subprocess.check_output([knobs.nvidia.cuobjdump.path, "--dump-resource-usage", code], text=True)
        assert "STACK:0" in used
        assert "LOCAL:0" in used
        accesses = set(re.findall(r"(?:ld|st)\.global\S*", compiled.asm["ptx"]))
        by_row = {"ld.global.b32", "st.global.b32"} if name == "merge_rows" else set()  # lse: a number for each row
        assert accesses == {"ld.global.v4.b32", "st.global.v4.b32"} | by_row


@pytest.mark.parametrize("rate", [1, 2, 16])
def test_nothing_is_compiled_anew_for_another_length(rate):
    with asked_for() as asked:
        for seq in (320, 333, 17):
            out, lse = torch.zeros(2, 3, seq, 64), torch.zeros(2, 3, seq)
            rows = len(range(0, seq, rate))
            row_kernels.merge(out[:, :, ::rate], lse[:, :, ::rate], torch.zeros(2, 3, rows, 64), torch.zeros(2, 3, rows))
            row_kernels.add(out[:, :, ::rate], torch.zeros(2, 3, rows, 64))
    assert [name.split()[0] for name in sorted(set(asked))] == ["add_rows", "merge_rows"]


def source(kernel, part, sums, head_dim):
    """A kernel for tensors whose rows begin at multiples of 16 numbers."""
    pointers = dict(out=f"*{sums}", total=f"*{sums}", part=f"*{part}", lse="*fp32", part_lse="*fp32")
    padded = next_power_of_2(head_dim)
    constants = dict(WIDTH=head_dim, PADDED=padded, ROWS=row_kernels.NUMBERS // padded)
    signature = {name: "constexpr" if name in constants else pointers.get(name, "i32") for name in kernel.arg_names}
    aligned = [
        name in pointers or (name.startswith(("out_", "total_", "part_")) and "lse" not in name) for name in kernel.arg_names
    ]
    return ASTSource(kernel, signature, constants, {(i,): [["tt.divisibility", 16]] for i, x in enumerate(aligned) if x})
