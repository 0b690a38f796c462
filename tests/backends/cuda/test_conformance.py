"""The CUDA backend and its kernels as a whole, run on the CPU: the problem list against the oracle, forward and gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from helpers.cuda_runs import (
    CHANGED,
    DROPPED,
    KINDS,
    KINDS_FIRST,
    LISTED,
    QUICK,
    REST,
    SCORED,
    SCORED_FIRST,
    SIZES,
    USUAL,
    Runs,
    name,
)
from helpers.on_host import FP32, TENSOR_CORES, OnHost

from dilkit import BlockSparse, Pattern, register_backend, unregister_backend
from dilkit.backends.tiles import fill
from dilkit.backends.tiles.relations import relations
from dilkit.device import Capability
from dilkit.op.operators import backward_op, encode_call, forward_op
from dilkit.testing.conformance import Result, check
from dilkit.testing.problems import Case


@contextmanager
def backend(capability: Capability) -> Iterator[str]:
    """Within the block, a name under which the backend is known."""
    own = OnHost(capability)
    register_backend(own)
    try:
        yield own.name
    finally:
        unregister_backend(own.name)


def all_but(listed: Runs, usual: Runs) -> list[Any]:
    """`listed` as parameters: what is not `usual` is slow, most of it for what has to be compiled."""
    return [pytest.param(run, marks=[] if run in usual else pytest.mark.slow, id=name(run)) for run in listed]


@pytest.mark.parametrize("run", all_but(USUAL, QUICK))
def test_the_kernels_are_right(run: tuple[Capability, Case], into_matrix: Callable[[Result], None]) -> None:
    with backend(run[0]) as known:
        result = check(known, run[1])
    into_matrix(result)
    assert result.verdict == "passed", result


@pytest.mark.parametrize(
    "run", [param for kind, listed in enumerate(KINDS) for param in all_but(listed[kind::2], KINDS_FIRST[kind])]
)
def test_the_kernels_are_right_with_every_kind(run: tuple[Capability, Case], into_matrix: Callable[[Result], None]) -> None:
    with backend(run[0]) as known:
        result = check(known, run[1])
    into_matrix(result)
    assert result.verdict == "passed", result


DROPPED_FIRST = [next(run for run in DROPPED if run[0] == FP32), next(run for run in DROPPED[::-1] if run[1].lengths)]
"""One with each kind of kernel, one of them of packed sequences."""


@pytest.mark.parametrize("run", all_but(DROPPED, DROPPED_FIRST))
def test_the_kernels_drop_the_right_weights(run: tuple[Capability, Case], into_matrix: Callable[[Result], None]) -> None:
    with backend(run[0]) as known:
        result = check(known, run[1])
    into_matrix(result)
    assert result.verdict == "passed", result


@pytest.mark.parametrize("run", all_but(SCORED, SCORED_FIRST))
def test_the_kernels_change_scores_rightly(run: tuple[Capability, Case], into_matrix: Callable[[Result], None]) -> None:
    with backend(run[0]) as known:
        result = check(known, run[1])
    into_matrix(result)
    assert result.verdict == "passed", result


@pytest.mark.parametrize(
    ("capability", "dtype"), [(FP32, torch.float32), pytest.param(TENSOR_CORES, torch.float16, marks=pytest.mark.slow)]
)
def test_weights_are_dropped_by_their_place_in_the_whole(capability: Capability, dtype: torch.dtype) -> None:
    """As over ranks: the rows of a call are some of a longer sequence."""
    draw, pattern = torch.Generator().manual_seed(0), Pattern([16, 40], [1, 2])
    inputs = [torch.randn(2, 40, 2, 8, generator=draw).to(dtype) for _ in range(4)]
    seed, places = torch.tensor(2**62 + 99), torch.tensor([[7, 3, 2**33 + 5, 2**35 + 1, 3], [1, 0, 0, 2, 1]])
    found = []
    with backend(capability) as known:
        for who in (known, "reference"):
            call = encode_call(pattern, False, True, who, 0.4)
            out, lse = forward_op(*inputs[:3], None, 0.3, call, None, None, None, seed, places)
            saved = [*inputs[:3], out, lse]
            found.append([out, *backward_op(inputs[3], *saved, None, 0.3, call, None, None, seed, places)])
    for got, right in zip(*found, strict=True):
        torch.testing.assert_close(got, right, rtol=0, atol=1e-5 if dtype is torch.float32 else 0.02)


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "dtype"), [(FP32, "float32"), (TENSOR_CORES, "bfloat16")])
def test_rows_that_see_more_runs_than_a_launch_takes(capability: Capability, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fill, "LEAST_ROWS", 0)
    pattern = Pattern.of(BlockSparse(np.add.outer(np.arange(150), np.arange(150)) % 2 == 0, 1))
    sizes: dict[str, Any] = dict(pattern=pattern, seq=149, batch=1, heads=2, kv_heads=1, dtype=dtype)
    assert len([*relations(Case(feature="kinds", variant="", **sizes).problem())]) == 2
    with backend(capability) as known:
        for is_causal in (False, True):
            result = check(known, Case(feature="kinds", variant="runs", is_causal=is_causal, **sizes))
            assert result.verdict == "passed", result


@pytest.mark.kernels
@pytest.mark.parametrize(
    "run", REST + SIZES + CHANGED + [run for kind, listed in enumerate(KINDS) for run in listed[1 - kind :: 2]], ids=name
)
def test_the_kernels_are_right_at_other_sizes(run: tuple[Capability, Case]) -> None:
    with backend(run[0]) as known:
        result = check(known, run[1])
    assert result.verdict == "passed", result


def test_every_problem_is_run_with_each_kind_of_kernel() -> None:
    ran = [(capability, case.name) for capability, case in USUAL + REST]
    for case in LISTED:
        kinds = {"float64": [], "float32": [FP32]}.get(case.dtype, [FP32, TENSOR_CORES])
        assert [capability for capability, known in ran if known == case.name].count(FP32) == kinds.count(FP32)
        assert [capability for capability, known in ran if known == case.name].count(TENSOR_CORES) == kinds.count(TENSOR_CORES)
