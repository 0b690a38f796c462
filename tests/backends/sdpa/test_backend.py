"""The sdpa backend."""

import math
import sys
from dataclasses import replace

import pytest
import torch
from helpers.pairwise import every_pair
from helpers.project import succeed
from helpers.sdpa import LONGNET, TorchRows, agrees_with_the_oracle, other_queries, problem, tensors, views_of_heads
from hypothesis import given, settings, strategies as st
from torch import Tensor

from dilkit import Pattern, dilated_attention
from dilkit.backend import Limits
from dilkit.backends.sdpa.backend import SDPA
from dilkit.backends.sdpa.grids import FORMS
from dilkit.backends.sdpa.kernels import KERNELS, SdpaKernel
from dilkit.device import Device
from dilkit.inputs import Inputs
from dilkit.pattern import WHOLE_SEQUENCE
from dilkit.pattern.lowering import Runs, lower
from dilkit.problem import Problem
from dilkit.testing.conformance import check
from dilkit.testing.memory import peak_memory
from dilkit.testing.problems import Case


def plain_forward(q, k, v, mask, causal, scale):
    scores = plain_scores(q, k, mask, causal, scale)
    return (torch.softmax(scores, -1) @ v).contiguous(), torch.logsumexp(scores, -1)


def plain_backward(dout, q, k, v, out, lse, mask, causal, scale):
    assert lse.is_contiguous()
    assert not (lse == -math.inf).any()
    p = (plain_scores(q, k, mask, causal, scale) - lse.unsqueeze(-1)).exp()
    ds = p * (dout @ v.mT - (dout * out).sum(-1, keepdim=True)) * scale
    return ds @ k, ds.mT @ q, p.mT @ dout


def plain_scores(q, k, mask, causal, scale):
    scores = scale * q @ k.mT
    if mask is not None:
        assert mask.is_contiguous()
        scores = scores.masked_fill(mask.unsqueeze(-2), -math.inf)
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    return scores


PLAIN = SDPA((SdpaKernel("plain", Limits(query_offset=True, forms=FORMS), plain_forward, plain_backward),))
"""The backend around a kernel whose results lie in memory as CUDA kernels' do, not as the CPU's."""
FUSED = SDPA(row_kernels=TorchRows()), SDPA(PLAIN.kernels, TorchRows())
"""The same backends with one merge a call, as on CUDA devices."""


class Recorder:
    def __init__(self):
        cpu = KERNELS[0]
        self.given: list[tuple[Tensor, ...]] = []
        self.returned: list[tuple[Tensor, ...]] = []
        recording = replace(cpu, forward=self._recording(cpu.forward), backward=self._recording(cpu.backward))
        self.backend = SDPA((recording,))

    def _recording(self, function):
        def run(*arguments):
            self.given.append(tuple(x for x in arguments if isinstance(x, Tensor)))
            self.returned.append(function(*arguments))
            return self.returned[-1]

        return run


def storage(x):
    return x.untyped_storage().data_ptr()


@given(views_of_heads, st.integers(1, 40), st.booleans(), st.booleans(), st.integers(1, 2), other_queries)
@settings(max_examples=30, deadline=None)
@pytest.mark.parametrize("backend", [SDPA(), PLAIN, *FUSED], ids=["cpu", "plain", "fused", "fused plain"])
def test_any_pattern_agrees_with_the_oracle(backend, drawn, seq, is_causal, masked, batch, queries):
    pattern = drawn[0].with_branches(*drawn[0].branches, tail="exact")  # the operator pads, not the backend
    seq = min(seq, pattern.max_seq)
    queries = None if queries is None or sum(queries) > pattern.max_seq else queries
    done = agrees_with_the_oracle(backend, pattern, seq, drawn[1], masked, batch, queries, is_causal=is_causal)
    assert done or pattern.overlap == "once" or Runs.name in lower(pattern, seq, *drawn[1]).names


def test_a_scale_of_zero():
    """It is no factor of a masked score, which is -inf."""
    result = check("sdpa", Case(feature="scale", variant="0 causal", scale=0.0, is_causal=True))
    assert result.verdict == "passed", result.reasons


def test_longnet_takes_few_calls_on_views():
    recorder, (q, k, v, dout) = Recorder(), tensors(256, (8, 8), torch.float32)
    posed = Problem.of(q, k, LONGNET, requires_grad=True)
    out, lse = recorder.backend.forward(Inputs(q, k, v), posed)
    assert len(recorder.given) == 1 + 2 + 1
    for given_tensors in recorder.given:
        assert [storage(x) for x in given_tensors] == [storage(q), storage(k), storage(v)]
    recorder.given.clear()
    recorder.backend.backward(dout, Inputs(q, k, v), out, lse, posed)
    assert len(recorder.given) == 1 + 2 + 1
    for do_, q_, k_, v_, out_, _ in recorder.given:
        assert [storage(x) for x in (do_, q_, k_, v_, out_)] == [storage(x) for x in (dout, q, k, v, out)]


def test_strided_inputs_are_not_copied():
    recorder = Recorder()
    packed = torch.randn(2, 8, 300, 3 * 16 + 5)
    q, k, v = (packed.transpose(1, 2)[:, 10:266, :, i * 16 : (i + 1) * 16] for i in range(3))
    recorder.backend.forward(Inputs(q, k, v), Problem.of(q, k, LONGNET))
    assert {storage(x) for given_tensors in recorder.given for x in given_tensors} == {storage(packed)}


STRIDES = [(200, 1, 64, 1), (200, 0, 64, 1), (1, 130, 65, 1), (200, 130, 2, 1)]


@pytest.mark.parametrize(
    ("at", "strides", "dtype"),
    every_pair(range(4), STRIDES, [torch.float64, torch.float32, torch.bfloat16, torch.float16]),
    ids=str,
)
def test_rows_that_share_memory(at, strides, dtype):
    shared = torch.randn(3000).to(dtype).as_strided((2, 20, 2, 64), strides)
    given = [shared if i == at else torch.randn(2, 20, 2, 64).to(dtype) for i in range(4)]

    def compute(q, k, v, dout):
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        out, lse = dilated_attention(*inputs, LONGNET, backend="sdpa", return_lse=True)
        return out, lse, *torch.autograd.grad(out, inputs, dout)

    bound = 16 * torch.finfo(dtype).eps  # on some processors products of rows at other addresses differ in the last bits
    for found, right in zip(compute(*given), compute(*(x.contiguous() for x in given)), strict=True):
        torch.testing.assert_close(found, right, rtol=bound, atol=bound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_result_of_a_first_branch_that_is_everything_is_not_copied(dtype):
    recorder, (q, k, v, dout) = Recorder(), tensors(256, (8, 8), dtype)
    pattern = LONGNET if dtype == torch.float32 else Pattern([64], [1])
    posed = Problem.of(q, k, pattern, requires_grad=True)
    out, lse = recorder.backend.forward(Inputs(q, k, v), posed)
    assert storage(out) == storage(recorder.returned[0][0])
    recorder.returned.clear()
    gradients = recorder.backend.backward(dout, Inputs(q, k, v), out, lse, posed)
    assert [storage(x) for x in gradients] == [storage(x) for x in recorder.returned[0]]


def test_forward_needs_less_than_three_outputs_of_memory():
    q, k, v, _ = tensors(16384, (8, 8), torch.float32, width=64)
    pattern = Pattern([256, 512, 1024, 2048], [1, 2, 4, 8])
    posed, backend = Problem.of(q, k, pattern), SDPA()
    assert peak_memory(lambda: backend.forward(Inputs(q, k, v), posed)) < 3 * q.numel() * 4


THREAD_BITS = """
import torch
from dilkit import Pattern, dilated_attention
for dtype in (torch.float64, torch.float32, torch.bfloat16):
    for seq, heads, kv_heads in ((12007, 3, 3), (257, 1, 1), (1000, 6, 2), (283, 5, 5), (31, 1, 1)):
        q, k, v, dout = (torch.randn(1, seq, h, 33).to(dtype) for h in (heads, kv_heads, kv_heads, heads))
        found = []
        for threads in (1, 2, 3, 5):
            torch.set_num_threads(threads)
            leaves = [x.clone().requires_grad_() for x in (q, k, v)]
            options = dict(is_causal=seq % 2 == 1, backend="sdpa", return_lse=True)
            out, lse = dilated_attention(*leaves, Pattern([60, 100, 210], [1, 1, 5]), **options)
            found.append((out, lse, *torch.autograd.grad(out, leaves, dout)))
        print(dtype, seq, all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True)))
"""


@pytest.mark.slow
@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="another BLAS than MKL, of which nothing is promised")
def test_every_number_of_threads_gives_the_same_bits_with_mkl_in_its_compatible_mode(tmp_path):
    """MKL's bits depend on its threads unless this mode is set before the start."""
    compared = succeed(sys.executable, "-c", THREAD_BITS, cwd=tmp_path, MKL_CBWR="COMPATIBLE").splitlines()
    assert len(compared) == 15
    assert [line for line in compared if not line.endswith("True")] == []


@pytest.mark.parametrize("seq", [1, 2, 9])
def test_segments_and_rates_without_end(seq):
    pattern = Pattern([WHOLE_SEQUENCE, WHOLE_SEQUENCE - 1, 4], [WHOLE_SEQUENCE, 2**62, 1])
    assert agrees_with_the_oracle(SDPA(), pattern, seq, (4, 2))


@pytest.mark.parametrize(
    ("pattern", "refused"),
    [
        (Pattern([16], [2], overlap="once"), False),
        (Pattern([16, 32], [1, 2], overlap="once", heads=[(0, 4), (4, 8)]), False),
        (Pattern([16, 16], [2, 4], overlap="once", offset="block", heads=[(2, 3), (2, 3)]), False),  # rows 0 mod 2 and 1 mod 4
        (Pattern([16, 16], [2, 4], overlap="once", offset="block", heads=[(6, 7), (6, 7)]), True),
        (Pattern([16, 16], [2, 4], overlap="once", offset="block", heads=[(3, 4), (2, 3)]), False),
        (Pattern([16, 32], [1, 2], overlap="once"), True),
    ],
)
def test_overlap_once_is_refused_where_branches_meet(pattern, refused):
    posed = problem(pattern=pattern, seq=64)
    assert any(r.code == "overlap" for r in SDPA().refusals(posed)) == refused


@pytest.mark.parametrize(
    ("lengths", "text"),
    [([2**20, 2**40], ""), ([2**20, 2**62], ""), ([2**20 + 1, 2**20 + 3], "shows after 1,099,515,822,083 rows only, more than")],
)
def test_overlap_once_of_a_sequence_without_end(lengths, text):
    meeting = Pattern(lengths, [2, 3], overlap="once", heads=[(0, 1), (0, 1)])
    apart = Pattern(lengths, [2, 3], overlap="once", heads=[(0, 1), (1, 2)])
    found = SDPA().refusals(problem(pattern=meeting, seq=2**42))
    assert [r.code for r in found] == ["overlap"]
    assert (text or "two branches see the same key") in str(found[0])
    assert SDPA().refusals(problem(pattern=apart, seq=2**42)) == ()


def test_a_device_of_another_kind_is_refused():
    posed = replace(problem(), device=Device("mps", "mps"))
    assert [r.code for r in SDPA().refusals(posed)] == ["device"]
    with pytest.raises(ValueError, match="mps"):
        SDPA().forward(Inputs(*tensors(256, (8, 8))[:3]), posed)
