"""Scores that know positions in the CUDA kernels: what they are compiled with, and the gradient of the weights of a bias."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from helpers.cuda_fakes import RecordingLauncher
from helpers.host_launcher import HostLauncher
from helpers.on_host import FP32, TENSOR_CORES, both_passes

from dilkit import Pattern, Problem
from dilkit.backends.cuda import scores
from dilkit.backends.cuda.backend import CupyRaw
from dilkit.backends.cuda.table import HEAD_DIMS, kernel_for
from dilkit.bias.form import BiasForm, LoweredBias
from dilkit.device import Capability
from dilkit.inputs import Inputs
from dilkit.testing.problems import Case
from dilkit.tools.bench.kernels.cases import CAPABILITIES

PLANE = BiasForm(dims=2, metric="max", placed=True, learned=True)
PROBLEM = Problem(pattern=Pattern([32, 64], [1, 2]), seq=100, heads=2, head_dim=16, requires_grad=True)
FORMS = (
    None,
    BiasForm(),
    BiasForm(sizes=(9,)),
    PLANE,
    replace(PLANE, metric="euclidean", dims=3),
    BiasForm(2, (3, 5), placed=True),
)


DTYPES = ("float32", "float16", "bfloat16")


def macros(problem: Problem, role: str) -> tuple[tuple[str, int], ...]:
    return scores.macros(role, problem.softcap > 0, problem.bias)


def test_a_kernel_is_compiled_with_what_a_call_has_alone() -> None:
    assert macros(PROBLEM, "forward") == ()
    capped, biased = replace(PROBLEM, softcap=2.0), replace(PROBLEM, bias=PLANE)
    assert dict(macros(capped, "dkeyvalue")) == dict(SOFTCAP=1)
    assert macros(capped, "dots") == ()
    assert dict(macros(biased, "forward")) == dict(BIASED=1, PLACED=1, DIMS=2, METRIC=2)
    assert dict(macros(biased, "dquery")) == dict(BIASED=1, PLACED=1, DIMS=2, METRIC=2, LEARNED=1)
    table = replace(PROBLEM, bias=BiasForm(sizes=(7,), metric="euclidean"), softcap=3.0)
    assert dict(macros(table, "dquery")) == dict(SOFTCAP=1, BIASED=2)


@pytest.mark.parametrize(
    ("capability", "dtype", "bias"),
    [(FP32, "float32", "clipped"), pytest.param(TENSOR_CORES, "float16", "max", marks=pytest.mark.slow)],
)
def test_gradients_of_weights_have_equal_bits_in_any_order(capability: Capability, dtype: str, bias: str) -> None:
    sizes: dict[str, Any] = dict(pattern=PROBLEM.pattern, seq=100, heads=2, batch=1)
    case = Case(feature="bits", variant="of weights", dtype=dtype, bias=bias, **sizes)
    orders = HostLauncher(workers=1), HostLauncher("random", seed=3, workers=1)
    one, other = (both_passes(case, capability, launcher) for launcher in orders)
    assert len(one) == 6
    assert one[5].abs().sum() > 0
    assert all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


def test_blocks_that_sum_gradients_of_weights_have_tiles_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """No counter gives them out, and parts of many entries leave room for few blocks."""
    launcher = RecordingLauncher(resident=3)
    backend = CupyRaw(launcher, FP32)
    form = BiasForm(sizes=(5,), learned=True)
    problem = replace(PROBLEM, bias=form)
    q, lse = torch.zeros(1, 100, 2, 16), torch.zeros(1, 2, 100)
    inputs = Inputs(q, q, q, bias=LoweredBias(form, torch.zeros(2, 5)))
    for _ in range(2):
        backend.backward(q, inputs, q, lse, problem)
        monkeypatch.setattr(scores, "MOST_PART_BYTES", 2 * 4 * 5 * (128 + 2))
    of_queries = [launch for launch in launcher.launches if launch.kernel.name == "fp32_dquery"]
    assert [launch.blocks for launch in of_queries] == [3, 3, 2, 2]
    assert all(launch.counter is None and launch.arguments["bias_parts"] for launch in of_queries)
    assert all(launch.kernel.macros["LEARNED"] == 1 for launch in of_queries)


@pytest.mark.parametrize(
    ("dtype", "capability", "form", "head_dims"),
    [
        *(pytest.param(dtype, (9, 0), form, (64,), marks=pytest.mark.slow) for dtype in DTYPES[:2] for form in FORMS[::3]),
        *(pytest.param(*row, HEAD_DIMS, marks=pytest.mark.kernels) for row in product(DTYPES, CAPABILITIES, FORMS)),
    ],
    ids=str,
)
def test_no_kernel_spills(dtype: str, capability: Capability, form: BiasForm | None, head_dims: tuple[int, ...]) -> None:
    """Kernels with a softcap and a bias fit, tall or low, plain or packed with dropout."""
    pytest.importorskip("cupy", reason="cupy is not installed: make kernels")
    from dilkit.backends.cuda import compile as cuda_compile
    from dilkit.backends.cuda.report import usages

    problem = replace(PROBLEM, softcap=1.0, bias=form and replace(form, learned=True))
    kernels = {
        kernel_for(role, dtype, head_dim, capability, True, rows, flag, flag, macros(problem, role)): None
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
