"""The sdpa backend: which kernel runs where, how often it is called and with what, and what is made of its results."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.project import succeed
from helpers.strategies import Heads, patterns_with_heads
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dilkit import Pattern
from dilkit.backend import Limits
from dilkit.backends.sdpa import kernels as sdpa_kernels
from dilkit.backends.sdpa import merge as sdpa_sums
from dilkit.backends.sdpa.backend import SDPA
from dilkit.backends.sdpa.kernels import KERNELS, Kernel, installed
from dilkit.device import GENERATIONS, Device
from dilkit.oracle import oracle_attention
from dilkit.pattern import WHOLE_SEQUENCE
from dilkit.problem import Problem
from dilkit.tools.measure.memory import peak_memory

LONGNET = Pattern([64, 128, 256], [1, 2, 4])


def problem(device: str = "cpu", dtype: str = "float32", **options: Any) -> Problem:
    sizes = dict(pattern=LONGNET, seq=256, heads=8, head_dim=64)
    return Problem(**{**sizes, **options}, dtype=dtype, device=Device.assume(device))


def plain_forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Attention in a few lines, with NaN in rows that see nothing and results laid out as (batch, heads, rows)."""
    scores = plain_scores(q, k, mask, causal, scale)
    return (torch.softmax(scores, -1) @ v).contiguous(), torch.logsumexp(scores, -1)


def plain_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    assert lse.is_contiguous()
    assert not (lse == -math.inf).any()
    p = (plain_scores(q, k, mask, causal, scale) - lse.unsqueeze(-1)).exp()
    ds = p * (dout @ v.mT - (dout * out).sum(-1, keepdim=True)) * scale
    return ds @ k, ds.mT @ q, p.mT @ dout


def plain_scores(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    scores = scale * q @ k.mT
    if mask is not None:
        assert mask.is_contiguous()
        scores = scores.masked_fill(mask.unsqueeze(-2), -math.inf)
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    return scores


PLAIN = SDPA((Kernel("plain", Limits(), plain_forward, plain_backward),))
"""The backend around a kernel whose results lie in memory as CUDA kernels' do, not as the CPU's."""


class Recorder:
    """The CPU kernel, with every tensor that it is given and returns."""

    def __init__(self) -> None:
        cpu = KERNELS[0]
        self.given: list[tuple[Tensor, ...]] = []
        self.returned: list[tuple[Tensor, ...]] = []
        recording = replace(cpu, forward=self._recording(cpu.forward), backward=self._recording(cpu.backward))
        self.backend = SDPA((recording,))

    def _recording(self, function: Any) -> Any:
        def run(*arguments: Any) -> Any:
            self.given.append(tuple(x for x in arguments if isinstance(x, Tensor)))
            self.returned.append(function(*arguments))
            return self.returned[-1]

        return run


def tensors(seq: int, heads: Heads, dtype: torch.dtype = torch.float64, batch: int = 1, width: int = 8) -> list[Tensor]:
    """Query, key, value and the gradient of the output."""
    counts = (heads[0], heads[1], heads[1], heads[0])
    return [torch.randn(batch, seq, count, width, dtype=dtype) for count in counts]


def storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


@given(patterns_with_heads(), st.integers(1, 40), st.booleans(), st.booleans(), st.integers(1, 2), st.integers(0, 99))
@settings(max_examples=50, deadline=None)
@pytest.mark.parametrize("backend", [SDPA(), PLAIN], ids=["cpu", "plain"])
def test_any_pattern_agrees_with_the_oracle(
    backend: SDPA, chosen: tuple[Pattern, Heads], seq: int, is_causal: bool, masked: bool, batch: int, seed: int
) -> None:
    torch.manual_seed(seed)
    pattern, heads = chosen
    q, k, v, dout = tensors(seq, heads, batch=batch)
    mask = torch.rand(batch, seq) < 0.6 if masked else None
    posed = Problem.of(q, k, pattern, is_causal=is_causal, key_padding_mask=masked, requires_grad=True)
    if backend.refusals(posed):
        assert pattern.overlap == "once"
        return
    out, lse = backend.forward(q, k, v, posed, mask)
    found = backend.backward(dout, q, k, v, out, lse, posed, mask)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    want, want_lse = oracle_attention(*leaves, pattern, is_causal=is_causal, key_padding_mask=mask)
    torch.testing.assert_close((out, lse), (want.detach(), want_lse.detach()), rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(found, torch.autograd.grad(want, leaves, dout), rtol=1e-10, atol=1e-12)


def test_longnet_takes_few_calls_on_views() -> None:
    recorder, (q, k, v, dout) = Recorder(), tensors(256, (8, 8), torch.float32)
    posed = Problem.of(q, k, LONGNET, requires_grad=True)
    out, lse = recorder.backend.forward(q, k, v, posed)
    assert len(recorder.given) == 1 + 2 + 1
    for given_tensors in recorder.given:
        assert [storage(x) for x in given_tensors] == [storage(q), storage(k), storage(v)]
    recorder.given.clear()
    recorder.backend.backward(dout, q, k, v, out, lse, posed)
    assert len(recorder.given) == 1 + 2 + 1
    for do_, q_, k_, v_, out_, _ in recorder.given:
        assert [storage(x) for x in (do_, q_, k_, v_, out_)] == [storage(x) for x in (dout, q, k, v, out)]


def test_strided_inputs_are_not_copied() -> None:
    recorder = Recorder()
    packed = torch.randn(2, 8, 300, 3 * 16 + 5)
    q, k, v = (packed.transpose(1, 2)[:, 10:266, :, i * 16 : (i + 1) * 16] for i in range(3))
    recorder.backend.forward(q, k, v, Problem.of(q, k, LONGNET))
    assert {storage(x) for given_tensors in recorder.given for x in given_tensors} == {storage(packed)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_result_of_a_first_branch_that_is_everything_is_not_copied(dtype: torch.dtype) -> None:
    recorder, (q, k, v, dout) = Recorder(), tensors(256, (8, 8), dtype)
    pattern = LONGNET if dtype == torch.float32 else Pattern([64], [1])
    posed = Problem.of(q, k, pattern, requires_grad=True)
    out, lse = recorder.backend.forward(q, k, v, posed)
    assert storage(out) == storage(recorder.returned[0][0])
    recorder.returned.clear()
    gradients = recorder.backend.backward(dout, q, k, v, out, lse, posed)
    assert [storage(x) for x in gradients] == [storage(x) for x in recorder.returned[0]]


def test_forward_needs_less_than_three_outputs_of_memory() -> None:
    q, k, v, _ = tensors(16384, (8, 8), torch.float32, width=64)
    pattern = Pattern([256, 512, 1024, 2048], [1, 2, 4, 8])
    posed, backend = Problem.of(q, k, pattern), SDPA()
    assert peak_memory(lambda: backend.forward(q, k, v, posed)) < 3 * q.numel() * 4


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_lse_and_shares_are_the_same_wherever_a_tensor_is_cut(dtype: torch.dtype) -> None:
    old, new = (torch.randn(5000, dtype=dtype) * 5 for _ in range(2))
    old[::7] = new[::5] = -math.inf
    whole = sdpa_sums._joined(old, new)
    torch.testing.assert_close(whole[0], torch.logaddexp(old, new))
    for step in (1, 3, 13, 1250, 1667):
        parts = [sdpa_sums._joined(a, b) for a, b in zip(old.split(step), new.split(step), strict=True)]
        assert all(torch.equal(x, torch.cat(cut)) for x, cut in zip(whole, zip(*parts, strict=True), strict=True))


def test_every_number_of_threads_gives_the_same_bits(tmp_path: Path) -> None:
    """Where MKL multiplies, its bits depend on its number of threads unless it is told otherwise before the process starts."""
    environment = {"MKL_CBWR": "COMPATIBLE", "PYTHONPATH": str(Path(__file__).parents[2])}
    compared = succeed(sys.executable, "-m", "helpers.thread_bits", cwd=tmp_path, **environment).splitlines()
    assert len(compared) == 15
    assert [line for line in compared if not line.endswith("equal")] == []


@pytest.mark.parametrize("seq", [1, 2, 9])
def test_segments_and_rates_without_end(seq: int) -> None:
    q, k, v, dout = tensors(seq, (4, 2))
    pattern = Pattern([WHOLE_SEQUENCE, WHOLE_SEQUENCE - 1, 4], [WHOLE_SEQUENCE, 2**62, 1])
    posed = Problem.of(q, k, pattern, requires_grad=True)
    out, lse = SDPA().forward(q, k, v, posed)
    found = SDPA().backward(dout, q, k, v, out, lse, posed)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    want, want_lse = oracle_attention(*leaves, pattern)
    torch.testing.assert_close((out, lse, *found), (want.detach(), want_lse.detach(), *torch.autograd.grad(want, leaves, dout)))


@pytest.mark.parametrize("scale", [0.0, -0.3])
def test_scales_of_zero_and_below(scale: float) -> None:
    q, k, v, dout = tensors(64, (2, 1))
    posed = Problem.of(q, k, LONGNET, is_causal=True, requires_grad=True, scale=scale)
    out, lse = SDPA().forward(q, k, v, posed)
    found = SDPA().backward(dout, q, k, v, out, lse, posed)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    want, _ = oracle_attention(*leaves, LONGNET, is_causal=True, scale=scale)
    torch.testing.assert_close((out, *found), (want.detach(), *torch.autograd.grad(want, leaves, dout)))


OLD, AMPERE, NEW = ("sm_52", "sm_60", "sm_61", "sm_70", "sm_75"), ("sm_80", "sm_86", "sm_89"), ("sm_90", "sm_100")


def expected_kernel(device: str, dtype: str, masked: bool) -> str | None:
    """Which kernel runs at head_dim 64 without FlashAttention 3 and 4, written down by hand."""
    if device == "cpu":
        return "cpu-flash"
    if dtype == "float64" or (dtype == "bfloat16" and device in OLD):
        return None
    if dtype == "float32" or masked or device in OLD:
        return "memory-efficient"
    return "flash" if device in AMPERE else "cudnn"


@pytest.fixture
def no_flash_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest torch, and nothing else."""
    monkeypatch.setattr(sdpa_kernels, "installed", lambda name: not name.startswith("flash_attn"))


@pytest.mark.usefixtures("no_flash_packages")
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("device", ["cpu", *OLD, *AMPERE, *NEW])
def test_kernel_by_device(device: str, dtype: str, masked: bool) -> None:
    posed = problem(device, dtype, key_padding_mask=masked, requires_grad=True)
    expected, backend = expected_kernel(device, dtype, masked), SDPA()
    if expected is None:
        reasons = backend.refusals(posed)
        assert {str(r).split(":")[0] for r in reasons} == {"flash3", "flash4", "cudnn", "flash", "memory-efficient"}
        assert any(str(r).startswith(f"memory-efficient: dtype {dtype}") for r in reasons)
        assert backend.detail(posed) == ""
    else:
        assert backend.refusals(posed) == ()
        assert backend.detail(posed).split(";")[0] == f"{expected} kernel"


def test_every_known_generation_is_in_the_table() -> None:
    assert {f"sm_{g.capability[0]}{g.capability[1]}" for g in GENERATIONS} == {*OLD, *AMPERE, *NEW}


@pytest.mark.usefixtures("no_flash_packages")
def test_detail_says_why_better_kernels_were_passed_over() -> None:
    detail = SDPA().detail(problem("sm_61", "float16"))
    assert "flash: capability 6.1: at least 8.0 is needed" in detail
    assert "cudnn: capability 6.1: at least 9.0 is needed" in detail


@pytest.mark.usefixtures("no_flash_packages")
@pytest.mark.parametrize(
    ("device", "options", "expected"),
    [
        ("sm_90", dict(kv_heads=2), "flash"),
        ("sm_90", dict(pattern=Pattern([64, 64], [1, 64])), "flash"),  # one row a problem
        ("sm_90", dict(head_dim=256), "cudnn"),
        ("sm_100", dict(head_dim=256), "flash"),
        ("sm_90", dict(head_dim=60), None),
        ("sm_70", dict(head_dim=60), None),
        ("sm_61", dict(head_dim=61), "memory-efficient"),
        ("sm_90", dict(head_dim=264), "memory-efficient"),
        ("sm_80", dict(head_dim=256, requires_grad=True), "flash"),
        ("sm_89", dict(head_dim=256, requires_grad=True), "memory-efficient"),
        ("sm_89", dict(head_dim=256), "flash"),
    ],
)
def test_kernel_by_shape(device: str, options: dict[str, Any], expected: str | None) -> None:
    posed = problem(device, "float16", **options)
    assert bool(SDPA().refusals(posed)) == (expected is None)
    assert SDPA().detail(posed).split(" ")[0] == (expected or "")


@pytest.mark.usefixtures("no_flash_packages")
def test_cudnn_is_passed_over_where_determinism_is_asked_for() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        assert SDPA().detail(problem("sm_90", "float16", requires_grad=True)).startswith("flash kernel")
        assert SDPA().detail(problem("sm_90", "float16")).startswith("cudnn kernel")
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("no_flash_packages")
@pytest.mark.parametrize("kv_heads", [8, 4])
@pytest.mark.parametrize(("device", "dtype"), [("sm_61", "float32"), ("sm_80", "float16"), ("sm_90", "bfloat16")])
@pytest.mark.parametrize("masked", [False, True])
def test_cuda_operators_take_what_they_are_given(device: str, dtype: str, kv_heads: int, masked: bool) -> None:
    """Schemas and shapes only: torch's meta kernels of the CUDA operators, for there may be no GPU."""
    pattern = Pattern([48, 200], [1, 4])
    options = dict(kv_heads=kv_heads, batch=2, is_causal=True, key_padding_mask=masked, requires_grad=True)
    posed = problem(device, dtype, pattern=pattern, seq=200, **options)
    kind = getattr(torch, dtype)
    q, k, v, dout = (torch.empty(2, 200, h, 64, dtype=kind, device="meta") for h in (8, kv_heads, kv_heads, 8))
    mask = torch.empty(2, 200, dtype=torch.bool, device="meta") if masked else None
    out, lse = SDPA().forward(q, k, v, posed, mask)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == (q.shape, kind, (2, 8, 200), torch.float32)
    gradients = SDPA().backward(dout, q, k, v, out, lse, posed, mask)
    assert [(g.shape, g.dtype) for g in gradients] == [(x.shape, kind) for x in (q, k, v)]


def test_missing_flash_packages_are_refused_with_a_hint(no_flash_packages: None) -> None:
    by_name = {kernel.name: kernel for kernel in KERNELS}
    (missing,) = by_name["flash3"].refusals(problem("sm_90", "float16"))
    assert str(missing).startswith("module flash_attn_interface: not installed (")
    assert [r.value for r in by_name["flash4"].refusals(problem("sm_100", "float16"))] == ["flash_attn.cute.interface"]


def test_a_torch_without_flash_3_is_refused_with_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sdpa_kernels, "installed", lambda name: name != "torch.nn.attention._fa3")
    (missing,) = next(k for k in KERNELS if k.name == "flash3").refusals(problem("sm_90", "float16"))
    assert "activate_flash_attention_impl" in missing.hint


@pytest.mark.parametrize("before", [None, "FA4", "FA3"])
def test_flash_3_is_activated_around_the_call_and_restored(monkeypatch: pytest.MonkeyPatch, before: str | None) -> None:
    active, history = before, []

    def activate(name: str | None = None) -> None:
        nonlocal active
        active = name
        history.append(name)

    monkeypatch.setattr(sdpa_kernels, "installed", lambda name: True)
    for name, function in (("activate", activate), ("restore", activate), ("current", lambda: active)):
        monkeypatch.setattr(torch.nn.attention, f"{name}_flash_attention_impl", function, raising=False)
    kernel = next(k for k in KERNELS if k.name == "flash3")
    assert SDPA().detail(problem("sm_90", "float16")) == "flash3 kernel"
    with kernel.active():
        assert active == "FA3"
    with pytest.raises(RuntimeError, match="failed"), kernel.active():
        raise RuntimeError("failed")
    assert active == before
    assert len(history) == (0 if before == "FA3" else 4)


def test_modules_are_looked_up_without_importing_their_parents(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "loud_package" / "inner").mkdir(parents=True)
    (tmp_path / "loud_package" / "__init__.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "loud_package" / "inner" / "leaf.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert installed("loud_package.inner.leaf")
    assert not installed("loud_package.inner.other")
    assert not installed("loud_package.leaf.deeper")


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
def test_overlap_once_is_refused_where_branches_meet(pattern: Pattern, refused: bool) -> None:
    posed = problem(pattern=pattern, seq=64)
    assert any(r.code == "overlap" for r in SDPA().refusals(posed)) == refused


def test_a_device_of_another_kind_is_refused() -> None:
    posed = replace(problem(), device=Device("mps", "mps"))
    assert [r.code for r in SDPA().refusals(posed)] == ["device"]
    with pytest.raises(ValueError, match="mps"):
        SDPA().forward(*tensors(256, (8, 8))[:3], posed)
