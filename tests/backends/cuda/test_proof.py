"""The proof of the CUDA kernels."""

from dataclasses import replace

import pytest
from helpers.cuda_fakes import RecordingLauncher
from helpers.fakes import registered
from helpers.host_launcher import HostLauncher
from helpers.on_host import FP32, OnHost

from dilkit import Device, Pattern, Problem, SlidingWindow
from dilkit.backends.cuda import compile as cuda_compile
from dilkit.backends.cuda.backend import CupyRaw
from dilkit.backends.tiles import device
from dilkit.backends.tiles.relations import FAR
from dilkit.bias.form import BiasForm
from dilkit.selection.proving import StepProof, cases
from dilkit.testing.conformance import check

PROBLEM = Problem(pattern=Pattern([64], [1]), seq=64, heads=2, head_dim=32, device=Device("cuda", "GPU", (9, 0)))


def test_facts_name_device_driver_sources_and_compiler(monkeypatch):
    monkeypatch.setattr(device, "cuda_driver", lambda: 12080)
    monkeypatch.setattr(cuda_compile, "compiler_build", lambda: "12.9.86 CL-1")
    facts = CupyRaw().proof_facts(PROBLEM)
    assert facts[:5] == ("GPU", "capability (9, 0)", "driver 12080", "cupy_raw", "NVRTC 12.9.86 CL-1")
    assert facts[6:] == ("float32", "head_dim 32")
    assert CupyRaw(hopper=True).proof_facts(PROBLEM) == (*facts[:6], "hopper", *facts[6:])
    window = replace(PROBLEM, pattern=Pattern.of(SlidingWindow(4)))
    assert CupyRaw().proof_facts(window) == (*facts, "kinds")
    assert CupyRaw().proof_facts(replace(PROBLEM, softcap=2.0)) == (*facts, "softcap")
    step = replace(PROBLEM, kv_heads=1, stored="int8", pattern=window.pattern)
    assert CupyRaw().proof_facts(step) == (*facts, "int8 stored, for 2 query heads")
    biased = replace(PROBLEM, bias=BiasForm(dims=2, metric="max", placed=True))
    assert CupyRaw().proof_facts(biased) == (*facts, "bias coordinates in 2-D, max")
    texts = cuda_compile._texts()
    monkeypatch.setattr(cuda_compile, "_texts", lambda: texts | {"dilated.cuh": texts["dilated.cuh"] + "\n"})
    assert CupyRaw().proof_facts(PROBLEM)[5] != facts[5]
    assert CupyRaw(RecordingLauncher()).proof_facts(PROBLEM) == ()


class Tampering(HostLauncher):
    def __init__(self, name: str, value):
        super().__init__(workers=1)
        self.name, self.value = name, value

    def launch(self, kernel, blocks: int, arguments, *rest):
        arguments = arguments.copy()
        arguments[self.name] = self.value
        super().launch(kernel, blocks, arguments, *rest)


@pytest.mark.parametrize(
    ("name", "value", "variant"),
    [
        pytest.param("scale", 0.2, "full", marks=pytest.mark.slow),
        ("ahead", FAR, "causal"),
        pytest.param("mask", 0, "mask", marks=pytest.mark.slow),
        ("once", 0, "once, strided"),
        ("scale", 0.25, "full"),
    ],
)
def test_kernels_that_get_something_wrong_fail(name, value, variant):
    [case] = (case for case in cases("float32", 16, gradients=True, kinds=True) if case.variant == variant)
    backend = OnHost(FP32)
    backend.launcher = Tampering(name, value)
    with registered(backend):
        right = (name, value) == ("scale", 16**-0.5)
        assert check(backend.name, case).verdict == ("passed" if right else "failed")


@pytest.mark.slow
@pytest.mark.parametrize(("scale", "wrong"), [(16**-0.5, 0), (0.2, 6)])
def test_steps_that_get_something_wrong_fail(scale, wrong):
    backend = OnHost(FP32)
    backend.launcher = Tampering("scale", scale)
    asked = dict(device="cpu", dtype="float32", stored="float32", head_dim=16, group=2, softcap=False, bias=None)
    with registered(backend):
        assert len([*StepProof(backend.name, **asked).complaints()]) == wrong
