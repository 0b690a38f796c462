"""Results of calls that are merged by one kernel each: how many launches and how much memory that takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.live_bytes import LiveBytes
from helpers.row_kernels import TorchRows
from helpers.sdpa import LONGNET, tensors
from torch import Tensor

from dilkit import Pattern, register_backend, unregister_backend
from dilkit.backends.sdpa.backend import SDPA
from dilkit.backends.sdpa.kernels import KERNELS, SdpaKernel
from dilkit.inputs import Inputs
from dilkit.problem import Problem
from dilkit.testing.conformance import check
from dilkit.testing.problems import PROBLEMS, Case

HALVES = (torch.float16, torch.bfloat16)


@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize("batch", [1, 3])
def test_no_more_calls_than_without_and_a_launch_for_each(batch: int, kv_heads: int) -> None:
    q, k, v, dout = tensors(256, (8, kv_heads), torch.float32, batch)
    posed, counted = Problem.of(q, k, LONGNET, requires_grad=True), []
    for rows in (None, TorchRows()):
        calls: list[str] = []
        backend = SDPA((noting(calls),), rows)
        out, lse = backend.forward(Inputs(q, k, v), posed)
        assert out.is_contiguous()
        assert lse.is_contiguous()
        backend.backward(dout, Inputs(q, k, v), out, lse, posed)
        counted.append(calls)
    assert counted[0] == counted[1]
    forwards, backwards = (calls.count(name) for name in ("forward", "backward"))
    adopted = 1 if kv_heads == 8 else 0  # calls: with grouped heads, none of them is all of the first branch
    assert rows is not None
    assert rows.calls == ["merge"] * (forwards - adopted) + 3 * ["add"] * (backwards - adopted)


def noting(calls: list[str]) -> SdpaKernel:
    """The CPU kernel, which writes down when it is called."""

    def noted(name: str) -> Any:
        def run(*arguments: Any) -> Any:
            calls.append(name)
            return getattr(KERNELS[0], name)(*arguments)

        return run

    return replace(KERNELS[0], forward=noted("forward"), backward=noted("backward"))


class Unseen(TorchRows):
    """The memory that these take is not counted: a kernel takes none."""

    def merge(self, *views: Tensor) -> None:
        with LiveBytes.paused():
            super().merge(*views)

    def add(self, *views: Tensor) -> None:
        with LiveBytes.paused():
            super().add(*views)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize(
    "pattern",
    [
        Pattern([64, 128, 256, 512, 1024], [1, 2, 4, 8, 16]),
        Pattern([64, 128], [1, 2]),
        Pattern([64, 256, 1024], [1, 4, 16]),
        Pattern([64, 128, 1024], [1, 1, 1]),
        Pattern([64, 128], [2, 2]),
    ],
    ids=str,
)
def test_a_forward_pass_holds_at_most_as_much_again_as_it_returns(pattern: Pattern, dtype: torch.dtype) -> None:
    q, k, v, _ = tensors(1024, (16, 16), dtype, width=64)
    posed, backend = Problem.of(q, k, pattern), SDPA(row_kernels=Unseen())
    with LiveBytes(q, k, v) as live:
        out, lse = backend.forward(Inputs(q, k, v), posed)
    results = out.nbytes + lse.nbytes
    assert results <= live.peak <= 2 * results


@pytest.fixture
def fused() -> Any:
    register_backend(backend := SDPA(row_kernels=TorchRows()))
    yield backend.name
    unregister_backend(backend.name)


@pytest.mark.parametrize("case", [case for case in PROBLEMS if case.dtype == "bfloat16"], ids=lambda case: case.name)
def test_halves_that_are_rounded_at_each_merge_are_right(fused: str, case: Case) -> None:
    result = check(fused, case)
    assert result.verdict in ("passed", "refused"), "; ".join(result.reasons)
