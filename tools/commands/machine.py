"""Facts of this machine. Every probe is guarded: the installation may be broken."""

import importlib
import platform
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import dilkit
from dilkit.backend import torch_hint
from dilkit.device import Device, cuda_count, has_torch_code, probe

T = TypeVar("T")


@dataclass(frozen=True)
class Failure:
    error: str

    def __str__(self) -> str:
        return self.error


def guarded(look: Callable[[], T]) -> T | Failure:
    try:
        return look()
    except Exception as error:
        return Failure(f"{type(error).__name__}: {error}")


def versions() -> dict[str, str | Failure]:
    return dict(
        dilkit=dilkit.__version__,
        python=platform.python_version(),
        torch=guarded(_torch_build),
        numpy=guarded(lambda: str(importlib.import_module("numpy").__version__)),
        plan_module=guarded(lambda: str(importlib.import_module("dilkit._cache").__file__)),
        platform=platform.platform(),
    )


def _torch_build() -> str:
    import torch

    return f"{torch.__version__}, built {f'for CUDA {torch.version.cuda}' if torch.version.cuda else 'without CUDA'}"


def devices() -> list[Device | Failure]:
    """Return the devices of this machine, the CPU first: a `Device`, or the error of looking for it."""
    count = guarded(cuda_count)
    gpus = [count] if isinstance(count, Failure) else [guarded(partial(probe, "cuda", i)) for i in range(count)]
    return [guarded(lambda: probe("cpu")), *gpus]


def torch_note(device: Device) -> str | None:
    """Return the fault of the installed torch on `device`, and the torch to install; None where there is none."""
    torch = guarded(_torch_build)
    if isinstance(torch, Failure):
        return f"torch cannot be imported, so nothing can run here: {torch}"
    if device.type != "cuda" or has_torch_code(device):
        return None
    name = "sm_{}{}".format(*device.capability) if device.capability else str(device)
    return f"the installed torch {torch}, has no code for {name}: {torch_hint(device)}"
