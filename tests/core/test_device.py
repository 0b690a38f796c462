"""Facts about devices, and calls under another default device than that of their tensors."""

import ctypes
import dataclasses
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dilkit import Device, DilatedCache, PagedCache, Pattern, Problem, attention_rows, dilated_attention_with_kvcache, registry
from dilkit.backends.sdpa.backend import SDPA
from dilkit.backends.triton.backend import TritonTiles
from dilkit.decoding.stores import kept_count
from dilkit.device import (
    _cpu_facts,
    cuda_driver,
    cuda_stream_number,
    current_stream,
    features_of,
    generation_of,
    parse_capability,
    probe,
    torch_has_code,
)
from dilkit.oracle import oracle_attention_varlen
from dilkit.orders import points
from dilkit.selector import trace

# What NVIDIA's programming guide says of each compute capability, for the features that backends ask about.
FEATURES = {
    "sm_52": {"fp16_storage"},
    "sm_60": {"fp16_storage", "fp16_arithmetic"},
    "sm_61": {"fp16_storage"},
    "sm_70": {"fp16_storage", "fp16_arithmetic", "fp16_tensor_cores"},
    "sm_75": {"fp16_storage", "fp16_arithmetic", "fp16_tensor_cores"},
    "sm_80": {"fp16_storage", "fp16_arithmetic", "fp16_tensor_cores", "bf16", "tf32", "async_copy"},
    "sm_86": {"fp16_storage", "fp16_arithmetic", "fp16_tensor_cores", "bf16", "tf32", "async_copy"},
    "sm_89": {"fp16_storage", "fp16_arithmetic", "fp16_tensor_cores", "bf16", "tf32", "async_copy", "fp8"},
    "sm_90": {"fp16_storage", "fp16_arithmetic", "fp16_tensor_cores", "bf16", "tf32", "async_copy", "fp8", "tma", "wgmma"},
    "sm_100": {"fp16_storage", "fp16_arithmetic", "fp16_tensor_cores", "bf16", "tf32", "async_copy", "fp8", "tma", "tcgen05"},
}


@pytest.mark.parametrize("name", FEATURES)
def test_the_ten_assumed_devices(name):
    device = Device.assume(name)
    assert device.features == FEATURES[name]
    assert (device.type, device.assumed, device.torch_code, device.memory) == ("cuda", True, None, None)
    assert str(device) == f"assumed ({generation_of(device.capability).example}, {name})"


WAYS = dict.fromkeys(["sm_61", "sm61", "61", "6.1", " SM_61 "], (6, 1)) | {"sm_100": (10, 0), "12.0": (12, 0)}


@pytest.mark.parametrize(("text", "capability"), WAYS.items())
def test_ways_to_write_a_capability(text, capability):
    assert parse_capability(text) == capability
    assert Device.assume(text).capability == capability


@pytest.mark.parametrize(
    ("text", "like", "lost"),
    [("sm_62", "GTX 1080", set()), ("sm_87", "RTX 3090", set()), ("sm_103", "B200", set()), ("sm_110", "B200", {"tcgen05"})],
)
def test_devices_between_the_known_ones(text, like, lost):
    """They count as the nearest older generation, without features that may not outlive a major version."""
    device = Device.assume(text)
    assert device.name == f"like {like}"
    assert device.features == generation_of(device.capability).features - lost


@pytest.mark.parametrize("built_for", [["gfx90a", "gfx942"], ["gfx90a"]])
def test_an_amd_gpu_is_no_nvidia_gpu_of_the_same_number(monkeypatch, built_for):
    properties = dict(name="AMD Instinct MI300X", major=9, minor=4, gcnArchName="gfx942:sramecc+:xnack-", total_memory=2**37)
    monkeypatch.setattr(torch.version, "hip", "6.4.0")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(**properties))
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: built_for)
    probe.cache_clear()
    device = probe("cuda", 0)
    probe.cache_clear()
    assert (device.type, device.platform, device.capability, device.architecture) == ("cuda", "hip", None, "gfx942")
    assert str(device) == "hip (AMD Instinct MI300X, gfx942)"
    assert (device.features, device.torch_code) == (frozenset(), "gfx942" in built_for)
    assert Device.assume("gfx942").platform == "hip"
    for dtype, name in (("bfloat16", "flash"), ("float32", "memory-efficient")):
        problem = Problem(
            pattern=Pattern([64], [1]), seq=64, heads=2, head_dim=64, dtype=dtype, device=device, requires_grad=True
        )
        decisions = {decision.name: decision for decision in trace(problem, registry.backends()).decisions}
        if len(built_for) > 1:
            assert decisions.pop("sdpa").detail.startswith(f"{name} kernel")
            facts = SDPA().proof_facts(problem)
            assert {"sdpa", name, str(device)} <= set(facts)
            if decisions.pop("triton").verdict == "able":
                assert {"triton", "HIP 6.4.0", str(device)} <= set(TritonTiles().proof_facts(problem))
            assert decisions.pop("reference").verdict == "able"
        assert {decision.verdict for decision in decisions.values()} == {"refused"}
        reasons = [[str(reason) for reason in decision.reasons] for decision in decisions.values()]
        assert all(any(reason.startswith(("device hip", "torch hip")) for reason in some) for some in reasons)


def test_a_gpu_older_than_all_known_ones_has_no_features_but_is_a_device():
    assert features_of((3, 5)) == frozenset()


def test_the_cpu_of_this_machine():
    device = Device.assume("cpu")
    assert dataclasses.replace(device, assumed=False) == probe("cpu")
    assert device.features <= {"avx2", "fma", "f16c", "avx512", "avx512_bf16", "neon"}
    assert device.memory is None or device.memory > 2**26
    assert str(device) == f"cpu ({device.name})"


CODE = {
    "sm_60": ([(6, 0), (6, 1)], [(7, 0)]),
    "sm_61": ([], [(6, 0)]),
    "sm_80": ([(8, 6), (8, 9)], [(9, 0)]),
    "sm_86": ([], [(8, 0)]),
    "sm_90": ([(9, 0)], [(10, 0)]),
    "sm_120": ([(12, 0), (12, 1)], []),
    "compute_80": ([(8, 0)], []),
    "compute_90": ([(10, 0), (12, 0)], [(8, 9)]),
    "sm_90a": ([(9, 0)], [(10, 0)]),
    "sm_100a": ([(10, 0)], [(10, 3)]),
    "compute_90a": ([(9, 0)], [(10, 0)]),
    "compute_100a": ([], [(10, 3)]),
    "sm_100f": ([(10, 0), (10, 3)], [(12, 0)]),
    "sm_103f": ([], [(10, 0)]),
    "compute_100f": ([(10, 3)], [(12, 0)]),
    "gfx90a": ([], [(9, 0)]),
    "sm_90x": ([], [(9, 0)]),
}
"""Capabilities by architecture that run its code, and some that do not."""


@pytest.mark.parametrize("architecture", CODE)
def test_which_code_runs_where(architecture):
    assert not torch_has_code((9, 0), [])
    for runs, capabilities in zip((True, False), CODE[architecture], strict=True):
        for capability in capabilities:
            for built in ([architecture], ["sm_52", architecture], [architecture, "gfx90a"]):
                assert torch_has_code(capability, built) is runs, capability


def test_the_driver_says_its_version_or_why_it_does_not(monkeypatch):
    def says(version, code):
        def driver_version(place):
            ctypes.cast(place, ctypes.POINTER(ctypes.c_int))[0] = version
            return code

        return SimpleNamespace(cuDriverGetVersion=driver_version)

    def missing():
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr("dilkit.device._driver", lambda: says(13000, 0))
    assert cuda_driver.__wrapped__() == 13000
    with pytest.raises(RuntimeError, match=r"12\.0 or newer, .*cuStreamGetId"):
        cuda_stream_number(0)
    monkeypatch.setattr("dilkit.device._driver", lambda: says(0, 999))
    with pytest.raises(RuntimeError, match="error 999"):
        cuda_driver.__wrapped__()
    monkeypatch.setattr("dilkit.device._driver", missing)
    with pytest.raises(RuntimeError, match="cannot be loaded"):
        cuda_driver.__wrapped__()


@pytest.mark.parametrize(
    ("model", "name"),
    [("AMD EPYC", "AMD EPYC (family 26, model 2)"), ("AMD Ryzen 7 5800X", "AMD Ryzen 7 5800X")],
)
def test_a_cpu_without_a_number_has_its_family_and_model(monkeypatch, model, name):
    core = f"cpu family\t: 26\nmodel\t\t: 2\nmodel name\t: {model}\nflags\t\t: fma avx2\n\n"
    monkeypatch.setattr(Path, "read_text", lambda self, **options: core * 2)
    shown, features = _cpu_facts()
    assert shown == name
    assert features >= {"fma", "avx2"}


PATTERN = Pattern([4, 8], [1, 2])
CUTS = 0, 3, 4, 9, 12
STARTS = torch.tensor([0, 5, 12], dtype=torch.int32)


def pieces(x, attend):
    return torch.cat([attend(*[x[:, start:stop]] * 3) for start, stop in pairwise(CUTS)], 1)


def cached(x):
    cache = DilatedCache(PATTERN, 2)
    found = pieces(x, cache.attend)
    cache.reorder([0, 0])
    return torch.cat((found, cache.attend(*[x[:, -1:].expand(2, -1, -1, -1)] * 3)[:1]), 1)


def paged(x):
    cache = PagedCache(PATTERN, 2, 2, 4, nbytes=1 << 14, page_rows=2, device="cpu")
    number = cache.add()
    return pieces(x, lambda *rows: cache.attend(*(y[0] for y in rows), [number], [rows[0].shape[1]])[None])


def stepped(x):
    caches, one = x.clone(), dict(key=x[:, 5:6], value=x[:, 5:6])
    return dilated_attention_with_kvcache(
        x[:, 5:6], caches, caches.clone(), PATTERN, **one, cache_seqlens=STARTS[1:2], backend="native"
    )


def test_the_current_stream_is_known_with_and_without_torchs_short_way(monkeypatch):
    device = torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=70 + device.index))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 80 + index, raising=False)
    assert current_stream(device) == 81
    monkeypatch.delattr(torch._C, "_cuda_getCurrentRawStream")
    assert current_stream(device) == 71


CALLS = dict(
    cache=cached,
    pages=paged,
    kvcache=stepped,
    weights=lambda x: attention_rows(x, x, PATTERN, [3, 9]),
    oracle=lambda x: oracle_attention_varlen(*[x] * 3, PATTERN, [5, 7]),
    codes=lambda x: points.decode(points.encode(STARTS[:, None].expand(-1, 2)), 2, 4),
    count=lambda x: PATTERN.count(8, 2),
    kept=lambda x: kept_count(Pattern([4], [2]), 6, 1),
)


@pytest.mark.parametrize("name", CALLS)
def test_torchs_default_device_has_no_say(name):
    x, found = torch.randn(1, 12, 2, 4), []
    for device in ("meta", "cpu"):
        with torch.device(device):
            found.append(CALLS[name](x))
    torch.testing.assert_close(found[0], found[1])
