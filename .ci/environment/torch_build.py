"""Choose the build of torch to install: the one for CPUs where pip's would bring CUDA and there is no GPU.

On Linux x86-64 the default build of torch carries gigabytes of CUDA. pip cannot ask for the other one without the address of a
package index; uv can (`--torch-backend cpu`), so it fetches torch alone, and pip does the rest. Where that does not work, pip's
build is taken: it is larger, and computes the same.
"""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

GPU_MARKS = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg", "/proc/driver/nvidia/version")
PIP = (sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")


def prefer_cpu(requirement: str, constraints: tuple[str, str]) -> None:
    """Install torch for CPUs where that saves gigabytes. `requirement` and `constraints` as pip takes them."""
    if sys.platform != "linux" or importlib.util.find_spec("torch") or has_gpu() or not brings_cuda(requirement, constraints):
        return
    with tempfile.TemporaryDirectory() as folder:
        uv = shutil.which("uv") or fetched_uv(folder)
        if uv is None or not installed_by_uv(uv, requirement, constraints):
            print("(torch's build for CPUs was not to be had: pip's build, with CUDA)", end=" ", flush=True)


def has_gpu() -> bool:
    return shutil.which("nvidia-smi") is not None or any(Path(mark).exists() for mark in GPU_MARKS)


def brings_cuda(requirement: str, constraints: tuple[str, str]) -> bool:
    """True if the torch that pip would choose needs CUDA's libraries; nothing but its metadata is read."""
    options = ("--dry-run", "--no-deps", "--ignore-installed", "--report", "-")
    done = subprocess.run((*PIP, *options, *constraints, requirement), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return False  # pip says what is wrong when it installs
    (chosen,) = json.loads(done.stdout)["install"]
    needs = chosen["metadata"].get("requires_dist", [])
    return any(re.match("nvidia-|cuda-", need) and "extra ==" not in need for need in needs)


def fetched_uv(folder: str) -> "str | None":
    done = subprocess.run((*PIP, "--no-deps", "--target", folder, "uv"), capture_output=True, check=False)
    return str(Path(folder) / "bin" / "uv") if done.returncode == 0 else None


def installed_by_uv(uv: str, requirement: str, constraints: tuple[str, str]) -> bool:
    """True if uv installed torch; it gives up soon where its host is out of reach."""
    command = (uv, "pip", "install", "--quiet", "--python", sys.executable, "--torch-backend", "cpu", "--no-deps")
    soon = {"UV_HTTP_CONNECT_TIMEOUT": "5", "UV_HTTP_RETRIES": "1"}
    return subprocess.run((*command, *constraints, requirement), env={**os.environ, **soon}, check=False).returncode == 0
