"""The PTX of Triton and of numba.cuda on the CPU: a small case of each kernel, and faults that have to be noticed."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import Any

import pytest
import torch
from ptx.emulator import Emulator, Options
from ptx.faults import CASE, SUBJECTS
from ptx.mutations import Mutation, caught
from ptx.trials import Trial, every_trial, is_installed, opened, run

from dilkit import Pattern
from dilkit.problem import Problem
from dilkit.testing.problems import Case

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")
needs_triton = pytest.mark.skipif(not is_installed("triton"), reason="triton is not installed: make stages, on Linux")
needs_numba = pytest.mark.skipif(
    not is_installed("numba_cuda"), reason="numba-cuda is not installed with compilers: make kernels"
)
slow = pytest.mark.slow
ROLES = 4
FORWARD = Case(feature="PTX", variant="forward", pattern=Pattern([64], [1]), seq=33, heads=1, batch=1, gradients=False)
SKIPPED = "forward for sm_90a has wgmma, which the emulator does not model"


@pytest.mark.parametrize(
    ("backend", "capability", "case", "launches", "skipped"),
    [
        pytest.param("triton", (8, 0), replace(FORWARD, dtype="float16"), 1, "", marks=needs_triton),
        pytest.param("triton", (9, 0), replace(FORWARD, dtype="float16"), 0, SKIPPED, marks=[slow, needs_triton]),
        *(
            pytest.param("triton", (8, 0), replace(CASE, dtype=dtype, bias=bias), ROLES, "", marks=[slow, needs_triton])
            for dtype, bias in (("float32", "none"), ("bfloat16", "none"), *(("float32", x) for x in ("alibi", "clipped")))
        ),
        pytest.param("triton", (8, 0), SUBJECTS["triton attend_stored"].trials[0].case, 2, "", marks=[slow, needs_triton]),
        *(pytest.param("numba_cuda", one, CASE, ROLES, "", marks=[slow, needs_numba]) for one in ((8, 0), (5, 2))),
    ],
    ids=lambda x: x.name if isinstance(x, Case) else None,
)
def test_kernels_are_right_as_ptx(backend: str, capability: Any, case: Any, launches: int, skipped: str) -> None:
    """Weights of a bias: a lane whose compiler fuses its own product with the sum of another lane has another sum, and either
    may be stored."""
    outcome = run(Trial("list", capability, case, backend=backend), seed=0)
    assert (outcome.reason, outcome.skipped) == ("", skipped)
    assert outcome.launches == launches or outcome.launches > launches == ROLES


@needs_triton
@pytest.mark.parametrize(
    ("dtype", "head_dim", "capability"),
    [
        *(("float32", 16, (8, 0)), ("bfloat16", 64, (9, 0)), ("float16", 128, (8, 0))),
        *(pytest.param("float32", dim, one, marks=slow) for dim in (8, 40, 64, 256) for one in ((8, 0), (9, 0))),
    ],
)
def test_results_of_calls_are_merged_rightly_as_ptx(dtype: str, head_dim: int, capability: tuple[int, int]) -> None:
    """All warps hold the lse of a row, and one of them writes it: it must not do so before the others have read it."""
    from ptx.launches.from_triton import redirected

    from dilkit.backends.sdpa import fusing, row_kernels

    with redirected(capability, emulator := Emulator()):
        assert fusing.failure(row_kernels, torch.device("cpu"), getattr(torch, dtype), head_dim) == ""
    assert set(emulator.launches) == {"merge_rows", "add_rows"}


@needs_numba
def test_sums_of_numba_are_right_as_ptx() -> None:
    problem = Problem(pattern=Pattern([32], [1]), seq=40, heads=2, head_dim=16, batch=1, requires_grad=True)
    a, b, delta = torch.randn(1, 40, 2, 16), torch.randn(1, 40, 2, 16), torch.zeros(1, 2, 40)
    with opened("numba_cuda", (8, 0), Options()) as (backend, _):
        backend.launch_role("dots", {"dout": a, "out": b, "delta": delta}, problem)
    torch.testing.assert_close(delta, (a * b).sum(-1).transpose(1, 2), atol=1e-5, rtol=1e-5)


FAULTS = "barrier", "wait for a group less", "copy of nothing", "condition of a store"


@slow
@pytest.mark.parametrize(
    ("mutation", "said"),
    [
        *(pytest.param(("triton forward", fault, 1, 2), "", marks=needs_triton) for fault in FAULTS),
        pytest.param(("triton attend_stored", "order of an atomic operation", 0, 1), "race", marks=needs_triton),
        pytest.param(("numba_cuda forward", "barrier", 1, 2), "race", marks=needs_numba),
    ],
)
def test_faults_are_noticed(mutation: tuple[str, str, int, int], said: str) -> None:
    reason = caught(Mutation(*mutation))
    assert reason
    assert said in reason


def test_trials_have_names_of_their_own() -> None:
    names = [trial.name for trial in every_trial()]
    assert len(set(names)) == len(names) > 0
