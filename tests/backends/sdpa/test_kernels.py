"""The kernels of the sdpa backend."""

from dataclasses import replace

import pytest
import torch
from helpers.sdpa import problem

from dilkit import Pattern, list_backends
from dilkit.backends.sdpa import aten, kernels
from dilkit.backends.sdpa.backend import SDPA
from dilkit.backends.sdpa.kernels import KERNELS, installed
from dilkit.backends.sdpa.one_kernel import one_kernel_backends
from dilkit.device import GENERATIONS, Device
from dilkit.inputs import Inputs

OLD, AMPERE, NEW = ("sm_52", "sm_60", "sm_61", "sm_70", "sm_75"), ("sm_80", "sm_86", "sm_89", "sm_120"), ("sm_90", "sm_100")


def expected_kernel(device, dtype, masked):
    if device == "cpu":
        return "cpu-flash"
    if dtype == "float64" or (dtype == "bfloat16" and device in OLD):
        return None
    if dtype == "float32" or masked or device in OLD:
        return "memory-efficient"
    return "flash" if device in AMPERE else "cudnn"


def test_a_kernel_for_cpus_that_fails_is_refused(monkeypatch):
    def fails(*_):
        raise RuntimeError("cannot pack\nmore of it")

    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    monkeypatch.setattr(aten, "cpu_forward", fails)
    kernels._cpu_error.cache_clear()
    (found,) = SDPA().refusals(problem("cpu", "bfloat16"))
    kernels._cpu_error.cache_clear()
    way_out = "unset ATEN_CPU_CAPABILITY, or set ONEDNN_MAX_CPU_ISA=AVX2 too"
    assert str(found) == f"cpu-flash: dtype bfloat16: torch: cannot pack ({way_out})"
    assert not SDPA().refusals(problem("cpu", "float32"))


@pytest.fixture
def no_flash_packages(monkeypatch):
    monkeypatch.setattr("dilkit.backends.sdpa.kernels.installed", lambda name: not name.startswith("flash_attn"))


@pytest.mark.usefixtures("no_flash_packages")
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("device", ["cpu", *OLD, *AMPERE, *NEW])
def test_kernel_by_device(device, dtype, masked):
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


def test_every_known_generation_is_in_the_table():
    assert {f"sm_{g.capability[0]}{g.capability[1]}" for g in GENERATIONS} == {*OLD, *AMPERE, *NEW}


@pytest.mark.usefixtures("no_flash_packages")
def test_detail_says_why_better_kernels_were_passed_over():
    detail = SDPA().detail(problem("sm_61", "float16"))
    assert "flash: capability 6.1: at least 8.0 is needed" in detail
    assert "cudnn: capability 6.1: at least 9.0 is needed" in detail


@pytest.mark.usefixtures("no_flash_packages")
@pytest.mark.parametrize(
    ("device", "options", "expected"),
    [
        ("sm_90", dict(kv_heads=2), "flash"),
        ("sm_90", dict(pattern=Pattern([64, 64], [1, 64])), "flash"),  # one row a problem
        ("sm_90", dict(head_dim=256), "flash"),
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
def test_kernel_by_shape(device, options, expected):
    posed = problem(device, "float16", **options)
    assert bool(SDPA().refusals(posed)) == (expected is None)
    assert SDPA().detail(posed).split(" ")[0] == (expected or "")


@pytest.mark.usefixtures("no_flash_packages")
def test_cudnn_is_passed_over_where_determinism_is_asked_for():
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
def test_cuda_operators_take_what_they_are_given(device, dtype, kv_heads, masked):
    """Schemas and shapes only: torch's meta kernels of the CUDA operators, for there may be no GPU."""
    pattern = Pattern([48, 200], [1, 4])
    options = dict(kv_heads=kv_heads, batch=2, is_causal=True, key_padding_mask=masked, requires_grad=True)
    posed = problem(device, dtype, pattern=pattern, seq=200, **options)
    kind = getattr(torch, dtype)
    q, k, v, dout = (torch.empty(2, 200, h, 64, dtype=kind, device="meta") for h in (8, kv_heads, kv_heads, 8))
    mask = torch.empty(2, 200, dtype=torch.bool, device="meta") if masked else None
    out, lse = SDPA().forward(Inputs(q, k, v, key_padding_mask=mask), posed)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == (q.shape, kind, (2, 8, 200), torch.float32)
    gradients = SDPA().backward(dout, Inputs(q, k, v, key_padding_mask=mask), out, lse, posed)
    assert [(g.shape, g.dtype) for g in gradients] == [(x.shape, kind) for x in (q, k, v)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_the_memory_efficient_kernel_gets_rows_of_out_where_it_looks_for_them(monkeypatch, dtype):
    """The backward pass takes only the strides of batch and heads from `out`."""
    given = []
    rows, lse = torch.zeros(2, 3, 40, 64, dtype=dtype)[:, :, ::2], torch.zeros(2, 3, 20)
    monkeypatch.setattr(aten, "_aten", lambda name: lambda *arguments, scale: given.extend(arguments) or (rows, rows, rows, None))
    aten.efficient_backward(rows, rows, rows, rows, rows, lse, None, False, 1.0)
    out = given[5]
    assert out.shape == rows.shape
    assert out.stride() == (20 * 3 * 64, 64, 3 * 64, 1)


def test_missing_flash_packages_are_refused_with_a_hint(no_flash_packages):
    by_name = {kernel.name: kernel for kernel in KERNELS}
    (missing,) = by_name["flash3"].refusals(problem("sm_90", "float16"))
    assert str(missing).startswith("module flash_attn_interface: not installed (")
    for device in ("sm_90", "sm_100"):
        assert [r.value for r in by_name["flash4"].refusals(problem(device, "float16"))] == ["flash_attn.cute.interface"]


def test_a_torch_without_flash_3_is_refused_with_a_hint(monkeypatch):
    monkeypatch.setattr("dilkit.backends.sdpa.kernels.installed", lambda name: name != "torch.nn.attention._fa3")
    (missing,) = next(k for k in KERNELS if k.name == "flash3").refusals(problem("sm_90", "float16"))
    assert "2.11 or newer" in missing.hint


@pytest.mark.parametrize(
    ("device", "head_dim", "kernel"),
    [
        ("sm_90", 64, "flash4"),
        ("sm_90", 256, "flash4"),
        ("sm_100", 128, "flash4"),
        ("sm_100", 256, "flash"),
        ("sm_120", 64, "flash"),
    ],
)
def test_flash_4_computes_where_it_is_installed(monkeypatch, device, head_dim, kernel):
    monkeypatch.setattr("dilkit.backends.sdpa.kernels.installed", lambda name: name != "flash_attn_interface")
    detail = SDPA().detail(problem(device, "bfloat16", head_dim=head_dim, requires_grad=True))
    assert detail.split(";")[0] == f"{kernel} kernel"


@pytest.mark.usefixtures("no_flash_packages")
@pytest.mark.parametrize("takes", [True, False])
def test_torch_says_whether_cudnn_takes_wide_heads(monkeypatch, takes):
    shapes, empty = [], torch.empty

    def asked(parameters):
        shapes.append((*parameters.query.shape, parameters.query.dtype, parameters.query.requires_grad))
        return takes

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "empty", lambda *sizes, device=None, **options: empty(*sizes, **options))
    monkeypatch.setattr(torch.backends.cuda, "can_use_cudnn_attention", asked)
    here = Device("cuda", "H200", (9, 0), Device.assume("sm_90").features, torch_code=True)
    detail = SDPA().detail(replace(problem("sm_90", "bfloat16", head_dim=192, requires_grad=True), device=here))
    assert detail.split(";")[0] == ("cudnn kernel" if takes else "flash kernel")
    assert set(shapes) == {(1, 8, 64, 192, torch.bfloat16, True)}


@pytest.mark.parametrize("before", [None, "FA4", "FA3"])
def test_flash_3_is_activated_around_the_call_and_restored(monkeypatch, before):
    active, history = before, []

    def activate(name=None):
        nonlocal active
        active = name
        history.append(name)

    monkeypatch.setattr("dilkit.backends.sdpa.kernels.installed", lambda name: True)
    for name, function in (("activate", activate), ("restore", activate), ("current", lambda: active)):
        monkeypatch.setattr(torch.nn.attention, f"{name}_flash_attention_impl", function, raising=False)
    kernel = next(k for k in KERNELS if k.name == "flash3")
    assert SDPA().detail(problem("sm_90", "float16")).split(";")[0] == "flash3 kernel"
    with kernel.active():
        assert active == "FA3"
    with pytest.raises(RuntimeError, match="failed"), kernel.active():
        raise RuntimeError("failed")
    assert active == before
    assert len(history) == (0 if before == "FA3" else 4)


def test_modules_are_looked_up_without_importing_their_parents(tmp_path, monkeypatch):
    (tmp_path / "loud_package" / "inner").mkdir(parents=True)
    (tmp_path / "loud_package" / "__init__.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "loud_package" / "inner" / "leaf.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert installed("loud_package.inner.leaf")
    assert not installed("loud_package.inner.other")
    assert not installed("loud_package.leaf.deeper")


def test_kernels_are_known_only_within_the_block():
    with one_kernel_backends("cuda") as names:
        assert {"sdpa:flash", "sdpa:memory-efficient"} <= set(names) <= set(list_backends())
    assert not set(names) & set(list_backends())
