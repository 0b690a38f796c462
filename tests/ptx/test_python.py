"""The PTX of Triton and of numba.cuda on the CPU: a small case of each kernel, and faults that have to be noticed."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import torch
from ptx import python_trials
from ptx.backends import is_installed, opened
from ptx.launcher import Options
from ptx.mutations import Mutation, caught
from ptx.recorded import RecordedMachine
from ptx.subjects import CASE, SUBJECTS
from ptx.trials import Trial, run

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


@needs_triton
def test_triton_is_right_as_ptx() -> None:
    outcome = run(Trial("list", (8, 0), replace(FORWARD, dtype="float16"), backend="triton"), seed=0)
    assert (outcome.reason, outcome.skipped, outcome.launches) == ("", "", 1)


@slow
@needs_triton
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_of_triton_are_right_as_ptx(dtype: str) -> None:
    outcome = run(Trial("list", (8, 0), replace(CASE, dtype=dtype), backend="triton"), seed=1)
    assert (outcome.reason, outcome.skipped) == ("", "")
    assert outcome.launches >= ROLES


@slow
@needs_triton
@pytest.mark.parametrize("bias", ["alibi", "euclidean", "clipped"])
def test_gradients_of_weights_of_a_bias_have_the_same_bits_whichever_lane_is_last(bias: str) -> None:
    """A lane whose compiler fuses its own product with the sum of another lane has another sum, and either may be stored."""
    outcome = run(Trial("list", (8, 0), replace(CASE, dtype="float32", bias=bias), backend="triton"), seed=0)
    assert (outcome.reason, outcome.skipped) == ("", "")


@slow
@needs_triton
def test_a_step_of_triton_is_right_as_ptx() -> None:
    [trial] = SUBJECTS["triton attend_stored"].trials
    outcome = run(trial, seed=0)
    assert (outcome.reason, outcome.launches) == ("", 2)


@slow
@needs_triton
def test_what_the_machine_has_no_model_of_is_skipped_with_its_reason() -> None:
    outcome = run(Trial("list", (9, 0), replace(FORWARD, dtype="float16"), backend="triton"), seed=0)
    assert (outcome.reason, outcome.launches) == ("", 0)
    assert outcome.skipped == "forward for sm_90a has wgmma, which the machine does not model"


@slow
@needs_numba
@pytest.mark.parametrize("capability", [(8, 0), (5, 2)])
def test_numba_is_right_as_ptx(capability: tuple[int, int]) -> None:
    outcome = run(Trial("list", capability, CASE, backend="numba_cuda"), seed=0)
    assert (outcome.reason, outcome.skipped) == ("", "")
    assert outcome.launches >= ROLES


@needs_triton
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
@pytest.mark.parametrize(
    ("dtype", "head_dim"),
    [
        ("float32", 16),
        ("bfloat16", 64),
        ("float16", 128),
        *(pytest.param("float32", dim, marks=slow) for dim in (8, 40, 64, 256)),
    ],
)
def test_results_of_calls_are_merged_rightly_as_ptx(dtype: str, head_dim: int, capability: tuple[int, int]) -> None:
    """All warps hold the lse of a row, and one of them writes it: it must not do so before the others have read it."""
    from ptx.launches.from_triton import redirected

    from dilkit.backends.sdpa import fusing, row_kernels

    with redirected(capability, machine := RecordedMachine(Options())):
        assert fusing.failure(row_kernels, torch.device("cpu"), getattr(torch, dtype), head_dim) == ""
    assert set(machine.launches) == {"merge_rows", "add_rows"}


@needs_numba
def test_sums_of_numba_are_right_as_ptx() -> None:
    problem = Problem(pattern=Pattern([32], [1]), seq=40, heads=2, head_dim=16, batch=1, requires_grad=True)
    a, b, delta = torch.randn(1, 40, 2, 16), torch.randn(1, 40, 2, 16), torch.zeros(1, 2, 40)
    with opened("numba_cuda", (8, 0), Options()) as (backend, _):
        backend.launch_role("dots", {"dout": a, "out": b, "delta": delta}, problem)
    torch.testing.assert_close(delta, (a * b).sum(-1).transpose(1, 2), atol=1e-5, rtol=1e-5)


@slow
@needs_triton
@pytest.mark.parametrize("fault", ["barrier", "wait for a group less", "copy of nothing", "condition of a store"])
def test_faults_of_triton_are_noticed(fault: str) -> None:
    assert caught(Mutation("triton forward", fault, 1, 2))


@slow
@needs_triton
def test_the_order_of_atomic_operations_is_needed() -> None:
    assert "race" in caught(Mutation("triton attend_stored", "order of an atomic operation", 0, 1))


@slow
@needs_numba
def test_a_barrier_of_numba_is_needed() -> None:
    assert "race" in caught(Mutation("numba_cuda forward", "barrier", 1, 2))


def test_trials_have_names_of_their_own() -> None:
    names = [trial.name for trial in python_trials.every_trial()]
    assert len(set(names)) == len(names) > 0
