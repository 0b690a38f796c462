"""What this machine has: versions, devices, environment. Every probe is guarded: the installation may be broken."""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
from collections.abc import Callable
from types import ModuleType
from typing import Any

import dilkit
from dilkit import environment
from dilkit.backend import torch_hint
from dilkit.backends.native.backend import instruction_set
from dilkit.device import Device, cuda_count, probe, torch_has_code
from dilkit.selector import requested_backends


def guarded(look: Callable[[], Any]) -> Any:
    """What `look()` returns, or `{"error": text}`: a failing probe is a finding."""
    try:
        return look()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def failure(value: Any) -> str | None:
    """The text of a probe that failed; None for one that did not."""
    return value["error"] if isinstance(value, dict) and "error" in value else None


def versions() -> dict[str, Any]:
    """Versions of what a result depends on; torch with the CUDA it is built for (None: none)."""
    return dict(
        dilkit=dilkit.__version__,
        python=platform.python_version(),
        torch=guarded(lambda: dict(version=_torch().__version__, cuda=_torch().version.cuda)),
        numpy=guarded(lambda: importlib.import_module("numpy").__version__),
        plan_module=guarded(_cache_module),
        platform=platform.platform(),
    )


def devices() -> list[Any]:
    """The devices of this machine, the CPU first: a `Device`, or the error that came of looking for it."""
    count = guarded(cuda_count)
    gpus = [count] if failure(count) else [guarded(lambda i=i: probe("cuda", i)) for i in range(count)]
    return [guarded(lambda: probe("cpu")), *gpus]


def variables() -> list[dict[str, Any]]:
    """The environment variables that dilkit reads: value (None when unset), and what is wrong with it (None when nothing is)."""
    read = {
        environment.BACKEND: requested_backends,
        environment.CACHE_BYTES: environment.cache_bytes,
        environment.CPU_ISA: instruction_set,
        environment.CUDA_CACHE: environment.cuda_cache,
        environment.TUNED: environment.tuned_file,
    }
    found = []
    for v in environment.VARIABLES:
        facts = dict(name=v.name, value=os.environ.get(v.name), default=v.default, meaning=v.meaning)
        found.append(facts | dict(error=failure(guarded(read[v]))))
    return found


def torch_note(device: Device) -> str | None:
    """What stands between the installed torch and `device`, and what to install; None when nothing does."""
    torch = guarded(_torch)
    if error := failure(torch):
        return f"torch cannot be imported, so nothing can run here: {error}"
    if device.type != "cuda" or has_code(device):
        return None
    name = f"sm_{device.capability[0]}{device.capability[1]}" if device.capability else str(device)
    build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    return f"the installed torch {torch.__version__}, {build}, has no code for {name}: {torch_hint(device.capability)}"


def has_code(device: Device) -> bool | None:
    """Whether the installed torch has code for `device`, assumed or not; None when that cannot be told."""
    torch = guarded(_torch)
    if failure(torch):
        return None
    if device.torch_code is not None or device.capability is None:
        return device.torch_code
    return torch_has_code(device.capability, _architectures(torch))


def _torch() -> ModuleType:
    return importlib.import_module("torch")


def _architectures(torch: Any) -> list[str]:
    """What torch was built for. `torch.cuda.get_arch_list` tells only where a GPU is."""
    flags = getattr(torch._C, "_cuda_getArchFlags", lambda: None)()
    return flags.split() if flags else []


def _cache_module() -> str:
    spec = importlib.util.find_spec("dilkit._cache")
    if spec is None or spec.origin is None:
        raise ImportError("dilkit._cache is not built; install dilkit again (pip install -e . in a checkout)")
    importlib.import_module("dilkit._cache")
    return spec.origin
