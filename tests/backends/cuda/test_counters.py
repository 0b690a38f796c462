"""Counters of launches: the kernels leave them at 0, and the launcher asks for those of its stream."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from helpers.cuda_fakes import FakeCupy, cupy
from helpers.host_launcher import HostLauncher
from helpers.on_host import FP32, TENSOR_CORES, both_passes

from dilkit import Pattern
from dilkit.backends.cuda.backend import CupyRaw
from dilkit.backends.cuda.launch import CupyLauncher
from dilkit.backends.tiles import counters
from dilkit.device import Capability
from dilkit.inputs import Inputs
from dilkit.problem import Problem
from dilkit.testing.problems import Case

__all__ = ["cupy"]

FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)


class Recorder(HostLauncher):
    """Notes what is in the counter before each launch and after it."""

    def __init__(self, workers: int) -> None:
        super().__init__("random", workers=workers)
        self.found: list[int] = []

    def launch(self, kernel: Any, blocks: int, arguments: Any, device: object = None, memory: Any = None) -> None:
        counter = ctypes.c_int32.from_address(self.counter())
        before = counter.value
        super().launch(kernel, blocks, arguments, device, memory)
        self.found += [before, counter.value]


@pytest.mark.parametrize("capability", [FP32, TENSOR_CORES])
@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("lengths", [(), (3, 90, 0, 1, 40)])
def test_every_kernel_leaves_its_counter_as_it_found_it(capability: Capability, workers: int, lengths: tuple[int, ...]) -> None:
    """One counter serves all launches of two forwards and backwards, of more tiles than blocks and, packed, of fewer."""
    launcher = Recorder(workers)
    sizes: dict[str, Any] = dict(seq=sum(lengths) or 150, heads=2, head_dim=16, batch=1, lengths=lengths)
    pattern, dtype = Pattern([32, 128], [1, 8]), "float32" if capability == FP32 else "bfloat16"
    case = Case(feature="counters", variant="", pattern=pattern, dtype=dtype, **sizes)
    results = [both_passes(case, capability, launcher) for _ in range(2)]
    assert set(launcher.found) == {0}
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_launch_makes_nothing_to_count_with() -> None:
    backend = CupyRaw(HostLauncher(workers=1), FP32)
    problem = Problem(pattern=Pattern([32], [1]), seq=1024, heads=1, head_dim=16)
    x = torch.zeros(1, 1024, 1, 16)
    backend.forward(Inputs(x, x, x), problem)
    calls: list[str] = []

    class Watch(torch.overrides.BaseTorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.append(function.__name__)
            return function(*args, **kwargs or {})

    with Watch():
        backend.forward(Inputs(x, x, x), problem)
    makers = ("empty", "new_empty", "zeros", "new_zeros", "full", "tensor", "zero_", "fill_")
    assert [name for name in calls if name in makers] == ["new_empty", "new_empty"]


def test_the_launcher_asks_for_the_current_stream(cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "to", lambda self, device: self)
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(counters, "cuda_stream_number", lambda stream: asked.append((stream, cupy.device)) or stream)
    launcher = CupyLauncher()
    one, other = launcher.counter(FIRST), launcher.counter(SECOND)
    assert asked == [(77, 0), (78, 1)], "of the device that is current"
    assert launcher.counter(FIRST) == one != other
    cupy.stream = 99
    assert launcher.counter(FIRST) not in (one, other)
    cupy.capturing = True
    assert len({one, other, *(launcher.counter(FIRST) for _ in range(3))}) == 5
