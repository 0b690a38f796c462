"""The launches that go from the backend through Triton to a GPU, redirected to a machine that notes them."""

from __future__ import annotations

import pytest
import torch
from helpers.launches.launch import Argument, Launch, parameter_bytes, pointer, target

pytest.importorskip("triton", reason="triton is not installed: make stages, on Linux")

from helpers.launches.from_triton import redirected

from dilkit import Pattern
from dilkit.backends.tiles.schedule import schedule
from dilkit.backends.triton.sizes import Sizes, sizes_for
from dilkit.device import Capability
from dilkit.inputs import Inputs
from dilkit.problem import Problem

SM_80, SM_90 = (8, 0), (9, 0)
TARGETS = {SM_80: "sm_80", SM_90: "sm_90a"}
PRODUCTS = {SM_80: "mma.sync", SM_90: "wgmma.mma_async"}
"""What multiplies halves."""
GROUPS = 2


def pose(dtype: str, head_dim: int) -> Problem:
    """A problem of two groups."""
    sizes = dict(seq=300, heads=4, kv_heads=2, head_dim=head_dim, batch=2)
    return Problem(pattern=Pattern([256, 300], [1, 64]), dtype=dtype, requires_grad=True, **sizes)


def tensors(problem: Problem) -> Inputs:
    heads = problem.heads, problem.kv_heads, problem.kv_heads
    return Inputs(*(torch.zeros(2, 300, n, problem.head_dim, dtype=getattr(torch, problem.dtype)) for n in heads))


def sizes_of(launch: Launch, role: str, problem: Problem, capability: Capability) -> Sizes:
    """Tall tiles or low ones, which the number of threads tells apart."""
    able = (sizes_for(role, problem.dtype, problem.head_dim, capability, low) for low in (False, True))
    return next(sizes for sizes in able if (32 * sizes.warps, 1, 1) == launch.block)


def check(launches: list[Launch], role: str, problem: Problem, capability: Capability) -> None:
    """One launch for each group, of a program for each tile and element of the batch, with what its PTX has parameters for."""
    rows = sizes_of(launches[0], role, problem, capability).rows
    for launch, group in zip(launches, schedule(problem, rows).groups, strict=True):
        tiles = group.key_tiles if role == "dkeyvalue" else group.query_tiles
        assert (launch.entry, launch.grid) == (role, (problem.batch * len(tiles), 1, 1))
        assert target(launch.ptx) == TARGETS[capability]
        assert parameter_bytes(launch.ptx, role) == tuple(len(argument.data) for argument in launch.arguments)
        assert (PRODUCTS[capability] in launch.ptx) == (problem.dtype != "float32")


def pointers(launch: Launch) -> list[Argument]:
    return [argument for argument in launch.arguments if argument.reach]


@pytest.mark.parametrize(
    ("capability", "dtype", "head_dim"),
    [(SM_80, "float16", 16), pytest.param(SM_90, "bfloat16", 64, marks=pytest.mark.slow)],
)
def test_a_forward_pass_is_redirected(capability: Capability, dtype: str, head_dim: int) -> None:
    problem, launches = pose(dtype, head_dim), list[Launch]()
    inputs = tensors(problem)
    with redirected(capability, launches.append) as backend:
        out, lse = backend.forward(inputs, problem)
    check(launches, "forward", problem, capability)
    for launch in launches:
        assert pointers(launch)[:5] == [*map(pointer, (inputs.query, inputs.key, inputs.value, out, lse))]
        assert launch.shared_bytes > 0


def test_a_kernel_that_is_loaded_already_goes_to_the_machine_of_the_day() -> None:
    problem, first, second = pose("float16", 16), list[Launch](), list[Launch]()
    x, delta = torch.zeros(2, 300, 4, 16, dtype=torch.float16), torch.zeros(2, 4, 300)
    for noted in (first, second):
        with redirected(SM_80, noted.append) as backend:
            backend.launch_role("dots", {"dout": x, "out": x, "delta": delta}, problem)
    assert first == second
    assert [(launch.entry, launch.grid, launch.block) for launch in first] == [("dots", (40, 1, 1), (128, 1, 1))]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("capability", TARGETS)
def test_a_backward_pass_is_redirected(capability: Capability, dtype: str) -> None:
    problem, launches = pose(dtype, 32), list[Launch]()
    inputs = tensors(problem)
    dout, lse = torch.zeros_like(inputs.query), torch.zeros(2, 4, 300)
    with redirected(capability, launches.append) as backend:
        dquery, dkey, dvalue, *_ = backend.backward(dout, inputs, inputs.query, lse, problem)
    dots, *rest = launches
    assert (dots.entry, dots.grid, dots.block) == ("dots", (40, 1, 1), (128, 1, 1))
    for role, part, written in (("dquery", rest[:GROUPS], [dquery]), ("dkeyvalue", rest[GROUPS:], [dkey, dvalue])):
        check(part, role, problem, capability)
        for launch in part:
            assert pointers(launch)[6 : 6 + len(written)] == [*map(pointer, written)]
