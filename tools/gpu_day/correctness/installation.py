"""What the machine has: versions, the GPU, tools."""

from __future__ import annotations

import importlib
import shutil
import subprocess
from collections.abc import Iterator

from dilkit.device import device_named
from dilkit.tools.commands.facts import Failure, guarded
from dilkit.tools.commands.facts import versions as known_versions
from dilkit.tools.console.text import in_bytes
from dilkit.tools.gpu_day.step import Context, Item, absent, noted

MODULES = ("cupy", "triton", "numba", "mpi4py", "matplotlib")
TOOLS = ("nvcc", "ncu", "compute-sanitizer", "mpirun", "gcc")
STATE = "driver_version,pstate,clocks.sm,clocks.max.sm,clocks.mem,temperature.gpu,power.limit,ecc.mode.current"


def versions(context: Context) -> Iterator[Item]:
    """The device and its state, versions, tools."""
    device = device_named(context.device)
    yield noted("device", f"{device}, {in_bytes(device.memory)}")
    for name, found in known_versions().items():
        yield noted(name, str(found))
    for name in MODULES:
        module = guarded(lambda name=name: str(importlib.import_module(name).__version__))  # type: ignore[misc]
        yield absent(name, str(module)) if isinstance(module, Failure) else noted(name, module)
    from dilkit.backends.cuda import compile as cuda_compile

    version = guarded(cuda_compile.compiler_version)
    yield absent("NVRTC", str(version)) if isinstance(version, Failure) else noted("NVRTC", ".".join(map(str, version)))
    for name in TOOLS:
        place = shutil.which(name)
        yield noted(name, place) if place else absent(name, "not on the path")
    yield _state()


def _state() -> Item:
    """What nvidia-smi says of the GPU before anything runs; nothing is changed."""
    command = ["nvidia-smi", f"--query-gpu={STATE}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return absent("nvidia-smi", str(error))
    return noted(f"nvidia-smi: {STATE}", done.stdout.strip() or done.stderr.strip())
