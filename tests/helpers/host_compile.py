"""Compiles `.cu` files as C with a shim in place of CUDA."""

import ctypes
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from helpers import cpu_time
from ptx.emulator import MACHINE

ROOT = Path(__file__).parents[2]
SHIM = ROOT / "tests/backends/cuda/host"
KERNELS = ROOT / "backends/cuda/kernels"
FIBER = MACHINE / "fiber.h"
LANGUAGE = ("-x", "c", "-std=gnu11", "-fno-strict-aliasing", "-Wall", "-Wno-unused", "-Wno-unknown-pragmas")
# Products and sums are rounded apart, so that equal arithmetic gives equal bits in kernels compiled with different macros.
# Most kernels run for less time than a compiler takes to optimize them, but places in the code are exact with -O1 only.
FLAGS = (*LANGUAGE, "-Og", "-march=native", "-ffp-contract=off", "-fPIC", "-Werror=frame-larger-than=65536")
SANITIZED = ("-fsanitize=thread", "-fsanitize=bounds", "-fsanitize=signed-integer-overflow")
CHECKED = ("-O1", "-DHOST_CHECKED", "-g1", "-fno-tree-sra", *SANITIZED, "--param=tsan-instrument-func-entry-exit=0")
WEEK = 7 * 24 * 3600

Macros = tuple[tuple[str, int], ...]


@cache
def library(source: str | Path, macros: Macros, checked: bool, number: int) -> ctypes.CDLL:
    """Copy `number` of the library of a kernel file: each has shared memory and threads of its own."""
    with tempfile.NamedTemporaryFile(dir=_directory(), suffix=".so") as place:  # a file of its own, or it is the same library
        shutil.copyfile(compile_kernel(source, macros, checked), place.name)
        return ctypes.CDLL(place.name)


@cache
def compile_kernel(source: str | Path, macros: Macros, checked: bool) -> Path:
    path = KERNELS / source
    flags = [*FLAGS, *(CHECKED if checked else ()), *(f"-D{name}={value}" for name, value in macros)]
    files = sorted([path, FIBER, *SHIM.glob("*.h"), *KERNELS.glob("*.cuh")])
    text = [*flags, _compiler(), *(f"{file.name}\n{file.read_text()}" for file in files)]
    place = _directory() / f"{path.stem}-{hashlib.sha256(chr(0).join(text).encode()).hexdigest()[:24]}.so"
    if not place.exists():
        with _alone(place):
            if not place.exists():
                with cpu_time.compiling():
                    _build(path, flags, place)
    return place


def _build(path: Path, flags: list[str], place: Path):
    with tempfile.TemporaryDirectory(dir=_directory()) as folder:
        built = Path(folder, "kernel.o"), Path(folder, "kernel.so")
        _run("gcc", *flags, f"-I{SHIM}", f"-I{MACHINE}", f"-I{KERNELS}", "-c", "-o", str(built[0]), str(path))
        _run("gcc", "-shared", "-o", str(built[1]), str(built[0]), "-lm")  # apart, or runtimes of sanitizers come along
        built[1].replace(place)


@contextmanager
def _alone(place: Path) -> Iterator[None]:
    with place.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@cache
def arrays(path: Path) -> tuple[tuple[int, int, str], ...]:
    """List address, bytes and name of a library's static arrays, except the gaps of `host/memory.h`."""
    symbols = (line.split() for line in _run("nm", "-S", "--defined-only", str(path)).splitlines())
    found = ((int(s[0], 16), int(s[1], 16), s[3].split(".")[0]) for s in symbols if len(s) == 4 and s[2] in "dDbB")
    return tuple(array for array in found if not array[2].startswith("host_gap"))


def with_lines(text: str, path: Path) -> str:
    """`text` with files and lines for the places in the code of a library, which are marked with `@`."""
    marked = re.compile(r"@([0-9a-f]+)")
    found = lines({int(place, 16) for place in marked.findall(text)}, path)
    return marked.sub(lambda match: found[int(match[1], 16)], text)


def lines(places: Collection[int], path: Path) -> dict[int, str]:
    """Return file and line of code places, with those that they are inlined into."""
    if not places:
        return {}
    text = _run("addr2line", "-a", "-i", "-e", str(path), *(f"{place:x}" for place in places))
    blocks = [block.splitlines() for block in re.split(r"^0x", text, flags=re.MULTILINE)[1:]]
    return {int(place, 16): " in ".join(_name(line) for line in those) for place, *those in blocks}


def _name(line: str) -> str:
    return Path(line.partition(" (discriminator")[0]).name


@cache
def _compiler() -> str:
    return _run("gcc", "--version")


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
    return done.stdout


@cache
def _directory() -> Path:
    """Make a private folder of the user for libraries; remove those older than a week."""
    place = Path(tempfile.gettempdir()) / f"dilkit-cuda-host-{os.getuid()}"
    place.mkdir(mode=0o700, exist_ok=True)
    if place.stat().st_uid != os.getuid():
        raise PermissionError(f"{place} belongs to another user; set TMPDIR")
    for old in (*place.glob("*.so"), *place.glob("*.lock")):
        with suppress(FileNotFoundError):
            if time.time() - old.stat().st_mtime > WEEK:
                old.unlink()
    return place
