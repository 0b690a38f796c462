"""Results of calls and how they are merged."""

import math
from dataclasses import replace

import pytest
import torch
from helpers.fakes import registered
from helpers.live_bytes import LiveBytes
from helpers.pairwise import every_nth
from helpers.sdpa import LONGNET, TorchRows, tensors

from dilkit import GlobalTokens, Pattern, SlidingWindow, dilated_attention
from dilkit.backends.sdpa.accumulators import merge_lse
from dilkit.backends.sdpa.backend import SDPA
from dilkit.backends.sdpa.kernels import KERNELS
from dilkit.inputs import Inputs
from dilkit.problem import Problem
from dilkit.testing.conformance import check
from dilkit.testing.packings import PACKED
from dilkit.testing.problems import OTHER_KINDS, PROBLEMS

HALVES = (torch.float16, torch.bfloat16)


@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize("batch", [1, 3])
def test_no_more_calls_than_without_and_a_launch_for_each(batch, kv_heads):
    q, k, v, dout = tensors(256, (8, kv_heads), torch.float32, batch)
    posed, counted = Problem.of(q, k, LONGNET, requires_grad=True), []
    for rows in (None, TorchRows()):
        calls = []
        backend = SDPA((noting(calls),), rows)
        out, lse = backend.forward(Inputs(q, k, v), posed)
        assert out.is_contiguous()
        assert lse.is_contiguous()
        backend.backward(dout, Inputs(q, k, v), out, lse, posed)
        counted.append(calls)
    assert counted[0] == counted[1]
    forwards, backwards = (calls.count(name) for name in ("forward", "backward"))
    adopted = 1 if kv_heads == 8 else 0  # calls: with grouped heads, none of them is all of the first branch
    assert rows.calls == ["merge"] * (forwards - adopted) + 3 * ["add"] * (backwards - adopted)


def noting(calls):
    def noted(name):
        def run(*arguments):
            calls.append(name)
            return getattr(KERNELS[0], name)(*arguments)

        return run

    return replace(KERNELS[0], forward=noted("forward"), backward=noted("backward"))


class Unseen(TorchRows):
    """The memory that these take is not counted: a kernel takes none."""

    def merge(self, *views):
        with LiveBytes.paused():
            super().merge(*views)

    def add(self, *views):
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
def test_a_forward_pass_holds_at_most_as_much_again_as_it_returns(pattern, dtype):
    q, k, v, _ = tensors(1024, (16, 16), dtype, width=64)
    posed, backend = Problem.of(q, k, pattern), SDPA(row_kernels=Unseen())
    with LiveBytes(q, k, v) as live:
        out, lse = backend.forward(Inputs(q, k, v), posed)
    results = out.nbytes + lse.nbytes
    assert results <= live.peak <= 2 * results


HALF_CASES = [case for case in (*PROBLEMS, *OTHER_KINDS, *PACKED) if case.dtype == "bfloat16" and case.gradients]


@pytest.mark.parametrize("case", every_nth(3, HALF_CASES), ids=lambda case: case.name)
def test_halves_that_are_rounded_at_each_merge_are_right(case):
    with registered(SDPA(row_kernels=(rows := TorchRows()))) as name:
        result = check(name, case)
    assert result.verdict in ("passed", "refused"), "; ".join(result.reasons)
    if case.lengths and result.verdict == "passed" and len(case.pattern.branches) > 1:
        assert set(rows.calls) == {"merge", "add"}


@pytest.mark.parametrize("places", [8, [3, 100, 200, 300, 400, 500, 700, 900]], ids=["at the begin", "scattered"])
def test_the_error_does_not_grow_with_the_number_of_results_of_a_row(places):
    pattern = Pattern.of(SlidingWindow(64), GlobalTokens(places))
    q, k, v, _ = tensors(1024, (2, 2), torch.bfloat16, width=64)
    exact = dilated_attention(q.double(), k.double(), v.double(), pattern, backend="reference")
    with registered(SDPA(row_kernels=TorchRows())) as name:
        error, plain = (dilated_attention(q, k, v, pattern, backend=one) - exact for one in (name, "reference"))
    assert error.norm() <= 2 * plain.norm()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_lse_and_shares_are_the_same_wherever_a_tensor_is_cut(dtype):
    old, new = (torch.randn(5000, dtype=dtype) * 5 for _ in range(2))
    old[::7] = new[::5] = -math.inf
    whole = merge_lse(old, new)
    torch.testing.assert_close(whole[0], torch.logaddexp(old, new))
    for step in (1, 3, 13, 1250, 1667):
        parts = [merge_lse(a, b) for a, b in zip(old.split(step), new.split(step), strict=True)]
        assert all(torch.equal(x, torch.cat(cut)) for x, cut in zip(whole, zip(*parts, strict=True), strict=True))
