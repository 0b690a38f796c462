"""The PTX of the kernels on the CPU: a small case of each kernel, faults that have to be noticed, and what is counted."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
from ptx.launcher import OnPTX, Options
from ptx.mutations import Mutation, caught
from ptx.rounding import measured
from ptx.trials import SINGLE, STEP, TENSOR, Outcome, Trial, run

from dilkit import Pattern, register_backend, unregister_backend
from dilkit.testing.conformance import check
from dilkit.testing.problems import Case

pytest.importorskip("cupy", reason="cupy is not installed: make kernels")
pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")
slow = pytest.mark.slow
SIZES: dict[str, Any] = dict(seq=64, heads=1, kv_heads=1, batch=1, head_dim=64, dtype="float16")
SMALL = Case(feature="PTX", variant="", pattern=Pattern([64], [1]), **SIZES)


def passed(outcome: Outcome) -> bool:
    return not outcome.reason


@pytest.mark.parametrize(
    "trial",
    [TENSOR[0], *(pytest.param(trial, marks=slow) for trial in (*TENSOR[1:], *SINGLE, *STEP))],
    ids=lambda trial: trial.name,
)
def test_kernels_are_right_as_ptx(trial: Trial) -> None:
    outcome = run(trial, seed=0)
    assert passed(outcome), outcome


@slow
@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (9, 0)])
def test_they_are_as_right_with_the_rounding_of_devices(capability: tuple[int, int]) -> None:
    trial = Trial("sizes", capability, SMALL, rounded=True)
    outcome = run(trial, seed=1)
    assert passed(outcome), outcome
    assert measured(capability).group


@slow
@pytest.mark.parametrize("fault", ["barrier", "commit", "wait for two groups less", "order of A", "transposed"])
def test_faults_are_noticed(fault: str) -> None:
    assert caught(Mutation("mma_forward", fault, 0, 1))


@slow
def test_a_fence_between_blocks_is_needed() -> None:
    assert "race" in caught(Mutation("attend_stored", "fence", 1, 2))


@slow
@pytest.mark.parametrize("place", [4, 10, 11])
def test_blocks_of_a_step_wait_for_all_threads_of_others(place: int) -> None:
    """What they leave, and how far they are, is written when all have come: not while others of the block, or a merge, read."""
    assert "race" in caught(Mutation("attend_stored", "barrier", place, 12))


@slow
@pytest.mark.parametrize("kernel", ["mma_forward", "mma_dquery", "mma_dkeyvalue"])
def test_copies_have_come_before_a_tile_without_keys_ends(kernel: str) -> None:
    assert "under way" in caught(Mutation(kernel, "wait for one group less", 2, 3))


@slow
def test_a_block_may_begin_when_others_have_ended() -> None:
    assert "leaves its counter" in caught(Mutation("mma_forward", "counter", 0, 2))


@slow
def test_rows_that_are_not_there_have_to_be_zero() -> None:
    assert "not finite" in caught(Mutation("mma_dquery_pairs", "copy of nothing", 1, 2))


@slow
def test_what_a_launch_issues_is_counted() -> None:
    """Of one full tile of 64 rows and 64 keys that all see each other."""
    own = OnPTX((8, 0), Options(counted=True))
    register_backend(own)
    try:
        assert check(own.name, SMALL).verdict == "passed"
    finally:
        unregister_backend(own.name)
    counts = own.own.counts["mma_forward"]
    assert counts.products_k16 * 16 * 8 * 16 == 2 * 64 * 64 * 64  # Q K^T and P V
    assert counts.copied == 3 * 64 * 64 * 2  # queries, keys and values
    assert counts.matrix_wavefronts == counts.matrices > 0
    assert counts.shared_wavefronts >= counts.shared_least_wavefronts > 0
    assert counts.special >= 64 * 64
    assert counts.global_stored == 64 * 64 * 2 + 64 * 4  # out and lse
    assert counts.barriers > 0
    products = {name: of_all.products_k16 * 16 * 8 * 16 / 64**3 for name, of_all in own.own.counts.items()}
    passes = 3  # one through out, and, as it is of float16, two through lse
    # A pass: Q K^T, dO V^T and dS K; Q K^T, dO V^T, P^T dO and dS^T Q.
    assert products == dict(mma_forward=2, row_dots=0, mma_dquery=3 * passes, mma_dkeyvalue=4 * passes)
    assert own.own.launches == dict(mma_forward=1, row_dots=passes, mma_dquery=passes, mma_dkeyvalue=passes)
