"""The PTX of the kernels on the CPU: a small case of each kernel, faults that have to be noticed, and what is counted."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
from helpers.fakes import registered
from ptx.emulator import Options, measured
from ptx.mutations import Mutation, caught
from ptx.trials import SINGLE, STEP, TENSOR, Trial, opened, run

from dilkit import Pattern
from dilkit.testing.conformance import check
from dilkit.testing.problems import Case

pytest.importorskip("cupy", reason="cupy is not installed: make kernels")
pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")
slow = pytest.mark.slow
SIZES: dict[str, Any] = dict(seq=64, heads=1, kv_heads=1, batch=1, head_dim=64, dtype="float16")
SMALL = Case(feature="PTX", variant="", pattern=Pattern([64], [1]), **SIZES)
ROUNDED = [Trial("sizes", capability, SMALL, rounded=True) for capability in ((7, 5), (8, 0), (9, 0))]
"""With the rounding of devices."""


@pytest.mark.parametrize(
    "trial",
    [TENSOR[0], *(pytest.param(trial, marks=slow) for trial in (*TENSOR[1:], *SINGLE, *STEP, *ROUNDED))],
    ids=lambda trial: trial.name,
)
def test_kernels_are_right_as_ptx(trial: Trial) -> None:
    outcome = run(trial, seed=int(trial.rounded))
    assert not outcome.reason, outcome
    assert not trial.rounded or measured(trial.capability).group


@slow
@pytest.mark.parametrize(
    ("mutation", "said"),
    [
        *(((("mma_forward", fault, 0, 1)), "") for fault in ("barrier", "commit", "wait for two groups less", "order of A")),
        (("mma_forward", "transposed", 0, 1), ""),
        (("attend_stored", "fence", 1, 2), "race"),
        *((("attend_stored", "barrier", place, 12), "race") for place in (4, 10, 11)),
        *(((name, "wait for one group less", 2, 3), "under way") for name in ("mma_forward", "mma_dquery", "mma_dkeyvalue")),
        (("mma_forward", "counter", 0, 2), "leaves its counter"),
        (("mma_dquery_pairs", "copy of nothing", 1, 2), "not finite"),
    ],
    ids=str,
)
def test_faults_are_noticed(mutation: tuple[str, str, int, int], said: str) -> None:
    """What blocks of a step leave is written when all threads have come; copies have come before a tile without keys ends; a
    block may begin when others have ended; rows that are not there have to be zero."""
    reason = caught(Mutation(*mutation))
    assert reason
    assert said in reason


@slow
def test_what_a_launch_issues_is_counted() -> None:
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
