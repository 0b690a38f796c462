"""Facts of this machine. Every probe is guarded: the installation may be broken."""

from __future__ import annotations

import importlib
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import dilkit
from dilkit import environment
from dilkit.backend import torch_hint
from dilkit.backends.native.backend import instruction_set, is_built
from dilkit.device import Device, cuda_count, has_torch_code, probe
from dilkit.selector import requested_backends

T = TypeVar("T")


@dataclass(frozen=True)
class Failure:
    """A probe that failed."""

    error: str

    def __str__(self) -> str:
        return self.error


def guarded(look: Callable[[], T]) -> T | Failure:
    """Return the result of `look()`, or its failure."""
    try:
        return look()
    except Exception as error:
        return Failure(f"{type(error).__name__}: {error}")


@dataclass(frozen=True)
class TorchBuild:
    """The installed torch, and the CUDA it is built for (None: none)."""

    version: str
    cuda: str | None

    def __str__(self) -> str:
        return f"{self.version}, built {f'for CUDA {self.cuda}' if self.cuda else 'without CUDA'}"


def versions() -> dict[str, str | TorchBuild | Failure]:
    """Return versions on which results depend."""
    return dict(
        dilkit=dilkit.__version__,
        python=platform.python_version(),
        torch=guarded(_torch_build),
        numpy=guarded(lambda: str(importlib.import_module("numpy").__version__)),
        plan_module=guarded(lambda: str(importlib.import_module("dilkit._cache").__file__)),
        platform=platform.platform(),
    )


def _torch_build() -> TorchBuild:
    import torch

    return TorchBuild(torch.__version__, torch.version.cuda)


def devices() -> list[Device | Failure]:
    """Return the devices of this machine, the CPU first: a `Device`, or the error of looking for it."""
    count = guarded(cuda_count)
    gpus = [count] if isinstance(count, Failure) else [guarded(partial(probe, "cuda", i)) for i in range(count)]
    return [guarded(lambda: probe("cpu")), *gpus]


@dataclass(frozen=True)
class VariableFacts:
    """An environment variable: its value (None when unset), and its fault (None when it has none)."""

    name: str
    value: str | None
    default: str
    meaning: str
    error: str | None

    def __str__(self) -> str:
        if self.error:
            return f"MALFORMED: {self.error}"
        return f"unset: {self.default}" if self.value is None else self.value


def variables() -> list[VariableFacts]:
    """Return the environment variables that dilkit reads."""
    read: dict[environment.Variable, Callable[[], object]] = {
        environment.BACKEND: requested_backends,
        environment.CACHE_BYTES: environment.cache_bytes,
        environment.CPU_ISA: _cpu_isa,
        environment.CUDA_CACHE: environment.cuda_cache,
        environment.GPU_PROOF: environment.gpu_proof,
        environment.TUNED: environment.tuned_file,
    }
    values = {v: guarded(read[v]) for v in environment.VARIABLES}
    errors = {v: value.error for v, value in values.items() if isinstance(value, Failure)}
    return [VariableFacts(v.name, os.environ.get(v.name), v.default, v.meaning, errors.get(v)) for v in values]


def _cpu_isa() -> object:
    """Return the instruction set of the CPU kernel; None without it, or without torch: `versions` reports that."""
    try:
        return instruction_set() if is_built() else None
    except ImportError:
        return None


def torch_note(device: Device) -> str | None:
    """Return the fault of the installed torch on `device`, and the torch to install; None where there is none."""
    torch = guarded(_torch_build)
    if isinstance(torch, Failure):
        return f"torch cannot be imported, so nothing can run here: {torch}"
    if device.type != "cuda" or has_torch_code(device):
        return None
    name = "sm_{}{}".format(*device.capability) if device.capability else str(device)
    return f"the installed torch {torch}, has no code for {name}: {torch_hint(device.capability)}"
