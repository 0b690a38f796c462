"""Facts of this machine, and findings on them. Every probe is guarded: the installation may be broken."""

from __future__ import annotations

import importlib
import os
import platform
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Literal, TypeVar

import dilkit
from dilkit import environment
from dilkit.backend import torch_hint
from dilkit.backends.native.backend import instruction_set, is_built
from dilkit.checks import visible
from dilkit.device import Device, cuda_count, has_torch_code, probe
from dilkit.environment import VariableError
from dilkit.selector import requested_backends
from dilkit.tools.console.text import error_line, in_bytes

T = TypeVar("T")


@dataclass(frozen=True)
class Failure:
    """A probe that failed, which is a finding."""

    error: str

    def __str__(self) -> str:
        return self.error


def guarded(look: Callable[[], T]) -> T | Failure:
    """What `look()` returns, or the failure that came of it."""
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
    """Versions of what a result depends on."""
    return dict(
        dilkit=dilkit.__version__,
        python=platform.python_version(),
        torch=guarded(lambda: TorchBuild(_torch().__version__, _torch().version.cuda)),
        numpy=guarded(lambda: str(importlib.import_module("numpy").__version__)),
        plan_module=guarded(lambda: str(importlib.import_module("dilkit._cache").__file__)),
        platform=platform.platform(),
    )


def devices() -> list[Device | Failure]:
    """The devices of this machine, the CPU first: a `Device`, or the error that came of looking for it."""
    count = guarded(cuda_count)
    gpus = [count] if isinstance(count, Failure) else [guarded(partial(probe, "cuda", i)) for i in range(count)]
    return [guarded(lambda: probe("cpu")), *gpus]


@dataclass(frozen=True)
class VariableFacts:
    """An environment variable: its value (None when unset), and what is wrong with it (None when nothing is)."""

    name: str
    value: str | None
    default: str
    meaning: str
    error: str | None

    def __str__(self) -> str:
        if self.error:
            return f"MALFORMED: {self.error}"
        return f"unset: {self.default}" if self.value is None else self.value


@dataclass(frozen=True)
class CacheBound:
    """The most bytes that the pattern cache keeps, and the variable that says so."""

    limit: int
    variable: str = environment.CACHE_BYTES.name

    def __str__(self) -> str:
        return f"at most {in_bytes(self.limit)} of what was prepared for calls, in each process; {self.variable} sets it"


def pattern_cache() -> CacheBound | Failure:
    """What bounds the pattern cache."""
    return guarded(lambda: CacheBound(environment.cache_bytes()))


def variables() -> list[VariableFacts]:
    """The environment variables that dilkit reads."""
    read: dict[environment.Variable, Callable[[], object]] = {
        environment.BACKEND: requested_backends,
        environment.CACHE_BYTES: environment.cache_bytes,
        environment.CPU_ISA: _cpu_isa,
        environment.CUDA_CACHE: environment.cuda_cache,
        environment.GPU_PROOF: environment.gpu_proof,
        environment.TUNED: environment.tuned_file,
    }
    values = {v: guarded(read[v]) for v in environment.VARIABLES}
    errors = {v: looked.error for v, looked in values.items() if isinstance(looked, Failure)}
    return [VariableFacts(v.name, os.environ.get(v.name), v.default, v.meaning, errors.get(v)) for v in values]


def _cpu_isa() -> object:
    """The instruction set of the CPU kernel; None without it, or without torch, which it needs: the versions tell of that."""
    try:
        return instruction_set() if is_built() else None
    except ImportError:
        return None


def torch_note(device: Device) -> str | None:
    """What stands between the installed torch and `device`, and what to install; None when nothing does."""
    torch = guarded(_torch)
    if isinstance(torch, Failure):
        return f"torch cannot be imported, so nothing can run here: {torch}"
    if device.type != "cuda" or has_torch_code(device):
        return None
    name = "sm_{}{}".format(*device.capability) if device.capability else str(device)
    build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    return f"the installed torch {torch.__version__}, {build}, has no code for {name}: {torch_hint(device.capability)}"


def _torch() -> ModuleType:
    return importlib.import_module("torch")


REPORT = "this is unexpected: report it, with all that `dilkit doctor` prints"


@dataclass(frozen=True)
class Finding:
    """What was found of `name`, and the way out of it. "absent": it is optional, and not there or of no use here."""

    name: str
    state: Literal["works", "absent", "WRONG"]
    found: str
    way_out: str = ""

    def __str__(self) -> str:
        return f"{self.found}\nway out: {self.way_out}" if self.way_out else self.found


def works(name: str, found: str) -> Finding:
    """A finding of something that works."""
    return Finding(name, "works", found)


def absent(name: str, found: str, way_out: str = "") -> Finding:
    """A finding of something optional that is not there."""
    return Finding(name, "absent", visible(found), way_out)


def wrong(name: str, found: str, way_out: str = REPORT) -> Finding:
    """A finding of something that does not work."""
    return Finding(name, "WRONG", visible(found), way_out)


def all_of(look: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """What `look` finds, and what it raises: the installation may be broken anywhere."""
    findings: list[Finding] = []
    try:
        findings.extend(look())
    except ImportError as error:
        findings.append(wrong("this part", error_line(error), "install the module that it names again"))
    except VariableError as error:
        findings.append(wrong("this part", error_line(error), "correct it, or unset it"))
    except Exception as error:
        findings.append(wrong("this part", error_line(error)))
    return findings
