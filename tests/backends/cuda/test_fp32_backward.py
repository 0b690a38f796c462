"""The fp32 gradient kernels, run on the CPU: against the oracle, in any order of threads, to the last bit the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.host_launcher import HostLauncher
from helpers.pairwise import every_pair
from torch import Tensor

from dilkit import Pattern
from dilkit.backends.cuda.arguments import make_arguments
from dilkit.backends.cuda.table import STORAGE, CudaKernel, kernel_for
from dilkit.backends.tiles.schedule import schedule
from dilkit.testing.accuracy import LIMITS
from dilkit.testing.conformance import expected
from dilkit.testing.problems import NESTED, PROBLEMS, Case
from dilkit.testing.tensors import Tensors, make_tensors

BLOCKS = 3
MAXWELL = 5, 2
NAMES = {"dquery": ("dq",), "dkeyvalue": ("dk", "dv")}

SMALL = [case for case in PROBLEMS if case.dtype in STORAGE and case.gradients and not case.zero_keys]
DEEP = Pattern([128, 256, 512], [1, 2, 4])
LARGE = [
    Case(feature="tiles", variant=variant, **{"head_dim": 64, "batch": 1, "heads": 2, "seq": 500, "pattern": DEEP, **fields})
    for variant, fields in {
        "several of a class": {},
        "causal": dict(is_causal=True),
        "groups": dict(pattern=Pattern([64, 128, 512], [1, 4, 16]), heads=4, seq=515),
        "grouped heads causal": dict(heads=4, kv_heads=2, is_causal=True, mask="random", seq=300),
        "wide": dict(head_dim=128, seq=330, mask="right"),
        "wide causal half": dict(head_dim=120, seq=200, is_causal=True, dtype="float16"),
        "wide groups": dict(head_dim=128, seq=300, dtype="bfloat16", pattern=Pattern([64, 256], [1, 8]), kv_heads=1),
        "96": dict(head_dim=96, seq=260, heads=1),
        "72 of 96": dict(head_dim=72, seq=150, pattern=Pattern.dense(), is_causal=True),
        "33 of 48 once": dict(head_dim=33, seq=210, pattern=Pattern([64, 192], [1, 3], overlap="once")),
    }.items()
]


def forward(case: Case, tensors: Tensors) -> tuple[Tensor, Tensor]:
    """out and lse of scores rounded as the kernels round them, product by product and sum by sum; large ones must cancel."""
    q, k, v = (x.float().transpose(1, 2) for x in tensors.qkv)
    k, v = (x.repeat_interleave(case.heads // x.shape[1], dim=1) for x in (k, v))
    scores = torch.zeros(*q.shape[:3], case.seq)
    for d in range(case.head_dim):
        scores += q[..., d, None] * k[..., None, :, d]
    count = case.pattern.count(case.seq, case.heads, kv_heads=case.kv_heads or case.heads, is_causal=case.is_causal)
    if tensors.mask is not None:
        count = count * ~tensors.mask[:, None, None]
    powers = scores.double() * case.problem().scale + count.double().log()
    lse = torch.logsumexp(powers, -1)
    weights = torch.exp(powers - lse.nan_to_num(neginf=0.0)[..., None])
    return (weights @ v.double()).transpose(1, 2), lse.expand(case.batch, -1, -1)


def run(
    case: Case, role: str, order: str = "forward", seed: int = 0, vector: bool | None = None, capability: int = 0, **options: Any
) -> dict[str, Tensor]:
    """The gradients that `role` computes of `case`, written over NaN, as compiled for `capability` (0: none with copies)."""
    problem, tensors = case.problem(), make_tensors(case)
    out, lse = forward(case, tensors)
    delta = (tensors.dout.double() * out).sum(-1).transpose(1, 2) - tensors.dlse.double()
    grads = {"dquery": tensors.query, "dkey": tensors.key, "dvalue": tensors.value}
    grads = {name: torch.full(x.shape, torch.nan, dtype=x.dtype) for name, x in grads.items()}
    given = dict(query=tensors.query, key=tensors.key, value=tensors.value, dout=tensors.dout, **grads)
    aligned = all(fits(x) for x in given.values())
    kernel = kernel_for(role, "float32", case.head_dim, MAXWELL, aligned if vector is None else vector)
    kernel = storing(kernel, case.dtype, capability)
    given |= dict(lse=lse.float().contiguous(), delta=delta.float().contiguous(), mask=tensors.mask)
    launcher = HostLauncher(order, seed, **options)
    for i, group in enumerate(schedule(problem, kernel.tile_rows).groups):
        tiles = group.query_tiles if role == "dquery" else group.key_tiles
        counter = np.zeros(1, np.int32)
        places = dict(tiles=tiles.ctypes.data, branches=group.branches.ctypes.data)
        if not options.get("checked"):
            places["counter"] = counter.ctypes.data
        if len(tiles):
            launcher.launch(kernel, BLOCKS, make_arguments(problem, given, group, len(tiles), places, first=i == 0))
    return {"d" + name[1]: x for name, x in grads.items() if "d" + name[1] in NAMES[role]}


def storing(kernel: CudaKernel, dtype: str, capability: int) -> CudaKernel:
    """The fp32 kernel for tensors of another dtype, whatever else would be chosen for those, as compiled for a capability."""
    defines = [(name, STORAGE[dtype] if name == "STORAGE" else x) for name, x in kernel.defines]
    return replace(kernel, defines=(*defines, ("__CUDA_ARCH__", capability)))


def fits(x: Tensor) -> bool:
    """Whether rows begin at multiples of 16 bytes and are a multiple long."""
    sizes = x.data_ptr(), *(n * x.element_size() for n in (*x.stride()[:3], x.shape[-1]))
    return all(size % 16 == 0 for size in sizes)


def judge(case: Case, found: dict[str, Tensor]) -> None:
    want = expected(case)
    for name, x in found.items():
        error = torch.where(want.exact[name] == x, 0.0, (x.double() - want.exact[name]).abs()).nan_to_num(nan=torch.inf).max()
        assert error <= LIMITS[name] * want.error[name], f"{name}: {error:.3g}, plain torch {want.error[name]:.3g}"


def case_name(value: object) -> str | None:
    return value.name if isinstance(value, Case) else None


@pytest.mark.kernels
@pytest.mark.parametrize("role", NAMES)
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_problems(case: Case, role: str) -> None:
    judge(case, run(case, role, order="random", seed=len(case.name)))


USUAL = [
    ("grouped heads causal", "dquery", 900),
    ("grouped heads causal", "dkeyvalue", 610),
    ("wide causal half", "dkeyvalue", 900),
]
PAIRS = every_pair(LARGE, NAMES, [610, 900], mark=pytest.mark.kernels)


def usual(param: Any) -> Any:
    """Of `PAIRS`, what is not `USUAL` is slow, for what has to be compiled."""
    case, role, capability = param.values
    chosen = (case.variant, role, capability) in USUAL
    return pytest.param(*param.values, marks=[] if chosen else param.marks or pytest.mark.slow)


@pytest.mark.parametrize(("case", "role", "capability"), [usual(param) for param in PAIRS], ids=case_name)
def test_larger_problems(case: Case, role: str, capability: int) -> None:
    judge(case, run(case, role, capability=capability))


@pytest.mark.parametrize("role", NAMES)
@pytest.mark.parametrize("dtype", ["float32", pytest.param("float16", marks=pytest.mark.slow)])
def test_the_same_bits_in_any_order_and_with_any_loads(dtype: str, role: str) -> None:
    sizes = dict(batch=1, heads=2, kv_heads=1, seq=140, head_dim=32)
    case = Case(feature="bits", variant="", pattern=NESTED, is_causal=True, mask="random", dtype=dtype, **sizes)
    want = run(case, role)
    for order, seed, vector, capability in [("reverse", 0, True, 0), ("random", 1, True, 900), ("random", 2, False, 0)]:
        for name, x in run(case, role, order, seed, vector, capability).items():
            assert torch.equal(x, want[name])


@pytest.mark.parametrize(
    ("role", "capability"),
    [
        ("dkeyvalue", 900),
        *(pytest.param(*x, marks=pytest.mark.slow) for x in (("dquery", 900), ("dquery", 610), ("dkeyvalue", 610))),
    ],
)
def test_no_thread_reads_what_another_may_still_write(capability: int, role: str) -> None:
    sizes = dict(batch=1, heads=2, kv_heads=1, seq=150, head_dim=40)
    case = Case(feature="checked", variant="", pattern=NESTED, is_causal=True, mask="random", **sizes)
    judge(case, run(case, role, "random", 3, capability=capability, checked=True))
