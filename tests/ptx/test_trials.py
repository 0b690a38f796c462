"""The PTX of the kernels on the CPU."""

import shutil
from dataclasses import replace

import pytest
import torch
from helpers.fakes import registered
from helpers.project import ROOT
from ptx.costs import costs
from ptx.emulator import Emulator, Options, measured
from ptx.faults import CASE, SUBJECTS
from ptx.mutations import Mutation, caught
from ptx.trials import HOPPER_SMALL, SINGLE, STEP, TENSOR, Trial, every_trial, is_installed, opened, run

from dilkit import Pattern
from dilkit.backends.cuda.compile import compiler_version
from dilkit.problem import Problem
from dilkit.testing.conformance import check
from dilkit.testing.problems import Case
from dilkit.tools.results.file import read_result
from dilkit.tools.results.rows import RowsResult

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")
needs_cupy = pytest.mark.skipif(not is_installed("cupy_raw"), reason="cupy is not installed: make kernels")
needs_triton = pytest.mark.skipif(not is_installed("triton"), reason="triton is not installed: make stages, on Linux")
needs_numba = pytest.mark.skipif(
    not is_installed("numba_cuda"), reason="numba-cuda is not installed with compilers: make kernels"
)
slow = pytest.mark.slow
SIZES = dict(seq=64, heads=1, kv_heads=1, batch=1, head_dim=64, dtype="float16")
SMALL = Case(feature="PTX", variant="", pattern=Pattern([64], [1]), **SIZES)
FORWARD = Case(feature="PTX", variant="forward", pattern=Pattern([64], [1]), seq=33, heads=1, batch=1, gradients=False)
ROUNDED = [Trial("sizes", capability, SMALL, rounded=True) for capability in ((7, 5), (8, 0), (9, 0))]
"""Trials with the rounding of devices."""
ROLES = 4
SKIPPED = "forward for sm_100a has tcgen05, which the emulator does not model"


@needs_cupy
@pytest.mark.parametrize(
    "trial",
    [
        *(TENSOR[0], HOPPER_SMALL[0]),
        *(pytest.param(trial, marks=slow) for trial in (*TENSOR[1:], *HOPPER_SMALL[1:], *SINGLE, *STEP, *ROUNDED)),
    ],
    ids=lambda trial: trial.name,
)
def test_kernels_in_cuda_are_right_as_ptx(trial):
    outcome = run(trial, seed=int(trial.rounded))
    assert not outcome.reason, outcome
    assert not trial.rounded or measured(trial.capability).group


@pytest.mark.parametrize(
    ("backend", "capability", "case", "launches", "skipped"),
    [
        pytest.param("triton", (8, 0), replace(FORWARD, dtype="float16"), 1, "", marks=needs_triton),
        pytest.param("triton", (9, 0), replace(FORWARD, dtype="float16"), 1, "", marks=[slow, needs_triton]),
        pytest.param("triton", (10, 0), replace(FORWARD, dtype="float16"), 0, SKIPPED, marks=[slow, needs_triton]),
        *(
            pytest.param("triton", (8, 0), replace(CASE, dtype=dtype, bias=bias), ROLES, "", marks=[slow, needs_triton])
            for dtype, bias in (("float32", "none"), ("bfloat16", "none"), *(("float32", x) for x in ("alibi", "clipped")))
        ),
        pytest.param("triton", (8, 0), SUBJECTS["triton attend_stored"].trials[0].case, 2, "", marks=[slow, needs_triton]),
        *(pytest.param("numba_cuda", one, CASE, ROLES, "", marks=[slow, needs_numba]) for one in ((8, 0), (5, 2))),
    ],
    ids=lambda x: x.name if isinstance(x, Case) else None,
)
def test_kernels_in_python_are_right_as_ptx(backend, capability, case, launches, skipped):
    """Lanes may fuse their own product with another lane's sum, so that the weights of a bias have two right sums."""
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
def test_results_of_calls_are_merged_rightly_as_ptx(dtype, head_dim, capability):
    """All warps hold the lse of a row, and one of them writes it: it must not do so before the others have read it."""
    from ptx.launches.from_triton import redirected

    from dilkit.backends.sdpa import fusing, row_kernels

    with redirected(capability, emulator := Emulator()):
        assert fusing.failure(row_kernels, torch.device("cpu"), getattr(torch, dtype), head_dim) == ""
    assert set(emulator.launches) == {"merge_rows", "add_rows"}


@needs_numba
def test_sums_of_numba_are_right_as_ptx():
    problem = Problem(pattern=Pattern([32], [1]), seq=40, heads=2, head_dim=16, batch=1, requires_grad=True)
    a, b, delta = torch.randn(1, 40, 2, 16), torch.randn(1, 40, 2, 16), torch.zeros(1, 2, 40)
    with opened("numba_cuda", (8, 0), Options()) as (backend, _):
        backend.launch_role("dots", {"dout": a, "out": b, "delta": delta}, problem)
    torch.testing.assert_close(delta, (a * b).sum(-1).transpose(1, 2), atol=1e-5, rtol=1e-5)


FAULTS = "barrier", "wait for no group", "condition of a store"
CUDA_FAULTS = [
    *((("mma_forward", fault, 0, 1), "") for fault in ("barrier", "commit", "wait for two groups less", "order of A")),
    (("mma_forward", "transposed", 0, 1), ""),
    (("attend_stored", "fence", 1, 2), "race"),
    *((("attend_stored", "barrier", place, 12), "race") for place in (4, 10, 11)),
    *(((name, "wait for one group less", 2, 3), "under way") for name in ("mma_forward", "mma_dquery", "mma_dkeyvalue")),
    (("mma_forward", "counter", 0, 2), "leaves its counter"),
    (("mma_dquery_pairs", "copy of nothing", 1, 2), "not finite"),
    *((("hopper_forward", fault, 0, 2), "") for fault in ("wait for a phase", "fence of proxies", "wait for products")),
]
"""Faults, and a part of the reason why each is caught."""


@slow
@pytest.mark.parametrize(
    ("mutation", "said"),
    [
        *(pytest.param(*one, marks=needs_cupy) for one in CUDA_FAULTS),
        *(pytest.param(("triton forward", fault, 1, 2), "", marks=needs_triton) for fault in FAULTS),
        pytest.param(("triton forward on Hopper", "wait for no product", 0, 1), "", marks=needs_triton),
        pytest.param(("triton attend_stored", "order of an atomic operation", 0, 1), "race", marks=needs_triton),
        pytest.param(("numba_cuda forward", "barrier", 1, 2), "race", marks=needs_numba),
    ],
    ids=str,
)
def test_faults_are_noticed(mutation, said):
    reason = caught(Mutation(*mutation))
    assert reason
    assert said in reason


def test_trials_have_names_of_their_own():
    names = [trial.name for trial in every_trial()]
    assert len(set(names)) == len(names) > 0


@slow
@needs_cupy
def test_what_a_launch_issues_is_counted():
    with opened("cupy_raw", (8, 0), Options(counted=True)) as (backend, emulator), registered(backend) as name:
        assert check(name, SMALL).verdict == "passed"
    counts = emulator.counts["mma_forward"]
    assert counts.products_k16 * 16 * 8 * 16 == 2 * 64 * 64 * 64  # Q K^T and P V
    assert counts.copied == 3 * 64 * 64 * 2  # queries, keys and values
    assert counts.matrix_wavefronts == counts.matrices > 0
    assert counts.shared_wavefronts >= counts.shared_least_wavefronts > 0
    assert counts.special >= 64 * 64
    assert counts.global_stored == 64 * 64 * 2 + 64 * 4  # out and lse
    assert counts.barriers > 0
    products = {name: of_all.products_k16 * 16 * 8 * 16 / 64**3 for name, of_all in emulator.counts.items()}
    passes = 3  # one through out, and, as it is of float16, two through lse
    # A pass: Q K^T, dO V^T and dS K; Q K^T, dO V^T, P^T dO and dS^T Q.
    assert products == dict(mma_forward=2, row_dots=0, mma_dquery=3 * passes, mma_dkeyvalue=4 * passes)
    assert emulator.launches == dict(mma_forward=1, row_dots=passes, mma_dquery=passes, mma_dkeyvalue=passes)


@slow
@needs_cupy
def test_what_the_kernels_issue_is_what_the_page_says():
    result = read_result(ROOT / "docs/results/costs.json", RowsResult, "costs")
    if result.facts["nvrtc"] != ".".join(map(str, compiler_version())):
        pytest.skip(f"the page was made with NVRTC {result.facts['nvrtc']}")
    assert all(row in result.rows for row in costs("B", 64, "bfloat16", (8, 0))), "write the page anew with: make costs"
