"""The kernels in Triton compiled for a GPU, without one."""

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from helpers.steps import StepCase, make_step
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from dilkit import Pattern
from dilkit.backends.triton.backend import TritonTiles
from dilkit.backends.triton.launch import compiling, kernel
from dilkit.backends.triton.sizes import Sizes, step_sizes
from dilkit.bias.form import BiasForm, LoweredBias
from dilkit.inputs import Inputs
from dilkit.problem import Problem

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
ANY_SIZES = Sizes(16, 16, 4, 1)


class FakeDriver:
    """The part of a driver that Triton uses to bind arguments and compile."""

    utils = SimpleNamespace(get_device_properties=lambda device: dict(max_shared_mem=227 * 1024))

    def __init__(self, capability: int):
        self.capability = capability

    def get_current_target(self):
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # so that what is compiled for one is not taken for another

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def map_python_to_cpp_type(self, name: str) -> str:
        return name


class FakeHip(FakeDriver):
    """A driver that reports an AMD GPU, so that kernels compile for it where there is none."""

    utils = SimpleNamespace(get_device_properties=lambda device: dict(max_shared_mem=64 * 1024))

    def __init__(self, architecture: str):
        super().__init__(int(architecture[3:], 16))
        self.architecture = architecture

    def get_current_target(self):
        return GPUTarget("hip", self.architecture, 64)


class CompilingLauncher:
    """Compiles what is launched, on tensors of the CPU, with `chosen` sizes for `role`."""

    def __init__(self, role: str, chosen: Sizes):
        self.role, self.chosen, self.compiled = role, chosen, []

    def sizes(self, role: str, problem: Problem, low: bool) -> Sizes:
        return self.chosen if role == self.role else ANY_SIZES

    def resident(self, sizes: Sizes, device: torch.device) -> int:
        return 264

    def counter(self, device: torch.device) -> int:
        return 2**40

    def launch(self, role: str, sizes: Sizes, programs: int, arguments: tuple[Any, ...], constants: dict[str, Any]):
        if role == self.role:
            self.compiled.append(kernel(role).warmup(*arguments, **constants, **compiling(sizes), grid=(programs,)))


class UncompiledDriver(FakeDriver):
    numbers = count(1000)

    def __init__(self, capability: int):
        super().__init__(capability)
        self.number = next(self.numbers)

    def get_current_device(self) -> int:
        return self.number


AskedFor = list[str]


@contextmanager
def asked_for() -> Iterator[AskedFor]:
    found: AskedFor = []

    def note(*, key, fn, **others):
        found.append(f"{fn.name} {key}")
        return True  # it is there already

    before, knobs.runtime.jit_cache_hook = knobs.runtime.jit_cache_hook, note
    driver.set_active(UncompiledDriver(90))
    try:
        yield found
    finally:
        driver.set_active(None)
        knobs.runtime.jit_cache_hook = before


@dataclass(frozen=True)
class Compiled:
    """A kernel's code (PTX, or AMD's assembly), registers, stack, spills and shared memory."""

    code: str
    registers: int
    stack: int
    spills: int
    shared: int


def compile_kernel(
    role: str,
    dtype: str,
    head_dim: int,
    target: int | str,
    sizes: Sizes,
    folder: Path,
    softcap: float = 0.0,
    form: BiasForm | None = None,
) -> Compiled:
    """Compile the largest kernel of `role`: causal, masked, grouped heads, in a later group of branches.

    `target`: a capability such as 90, or an architecture of AMD's such as "gfx942".
    """
    launcher = CompilingLauncher(role, sizes)
    fields = dict(seq=320, heads=4, kv_heads=2, head_dim=head_dim, batch=2, dtype=dtype, is_causal=True)
    problem = Problem(pattern=Pattern([320, 320], [1, 64]), key_padding_mask=True, softcap=softcap, bias=form, **fields)
    q, k, v = (torch.zeros(2, 320, heads, head_dim, dtype=getattr(torch, dtype)) for heads in (4, 2, 2))
    bias = None if form is None else LoweredBias(form, torch.zeros(4, form.entries), torch.zeros(2, 320, form.dims))
    mask, backend = torch.zeros(2, 320, dtype=torch.bool), TritonTiles(launcher)
    driver.set_active(FakeDriver(target) if isinstance(target, int) else FakeHip(target))
    try:
        if role == "forward":
            backend.forward(Inputs(q, k, v, key_padding_mask=mask, bias=bias), problem)
        else:
            backend.backward(q, Inputs(q, k, v, key_padding_mask=mask, bias=bias), q, torch.zeros(2, 4, 320), problem)
    finally:
        driver.set_active(None)  # so that the next one asks what there is
    return _report(launcher.compiled[-1], folder)


def compile_step(case: StepCase, target: int | str, folder: Path) -> Compiled:
    launcher = CompilingLauncher("stored", step_sizes(case.problem))
    driver.set_active(FakeDriver(target) if isinstance(target, int) else FakeHip(target))
    try:
        TritonTiles(launcher).attend_stored(make_step(case), case.problem)
    finally:
        driver.set_active(None)
    return _report(launcher.compiled[-1], folder)


def _report(made, folder: Path) -> Compiled:
    if (text := made.asm.get("amdgcn")) is not None:
        names = "vgpr_count", "private_segment_fixed_size", "vgpr_spill_count"
        registers, stack, spills = (int(re.search(rf"\.{name}:\s*(\d+)", text)[1]) for name in names)
        return Compiled(text, registers, stack, spills, made.metadata.shared)
    code = folder / "kernel.cubin"
    code.write_bytes(made.asm["cubin"])
    usage, sass = (
        subprocess.run([TOOLS / "cuobjdump", option, code], capture_output=True, text=True, check=True).stdout
        for option in ("--dump-resource-usage", "-sass")
    )
    registers, stack = (int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK"))
    spills = len(re.findall(r"\b(?:STL|LDL)\b", sass))
    return Compiled(made.asm["ptx"], registers, stack, spills, made.metadata.shared)
