"""The PTX that NVRTC makes of a kernel, kept in build/ptx by everything that it depends on."""

from __future__ import annotations

import hashlib
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

from dilkit.backends.cuda import compile as cuda_compile
from dilkit.backends.cuda import nvrtc
from dilkit.backends.cuda.table import CudaKernel
from dilkit.device import Capability

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "build/ptx"
WEEK = 7 * 24 * 3600


def ptx_of(kernel: CudaKernel, capability: Capability) -> str:
    """The PTX of `kernel` for devices of `capability`.

    Raises RuntimeError as `dilkit.backends.cuda.compile.code_of` does.
    """
    options = virtual(cuda_compile.options_of(kernel, capability))
    parts = (kernel.source, *options, *cuda_compile.facts())
    place = kept(f"{kernel.name}-{digest(parts)}.ptx")
    if not place.exists():
        appear(place, _compiled(kernel.source, options))
    return place.read_text()


def virtual(options: tuple[str, ...]) -> tuple[str, ...]:
    """Options for PTX alone, in the place of machine code."""
    return tuple(o.replace("=sm_", "=compute_") for o in options if not o.startswith("--ptxas-options"))


def kept(name: str) -> Path:
    return _folder() / name


@cache
def _folder() -> Path:
    """What is a week old is removed."""
    KEPT.mkdir(parents=True, exist_ok=True)
    for old in KEPT.iterdir():
        with suppress(FileNotFoundError):
            if time.time() - old.stat().st_mtime > WEEK:
                old.unlink()
    return KEPT


def digest(parts: tuple[str, ...]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def appear(place: Path, text: str) -> None:
    """Write a file that other processes see whole or not at all."""
    own = place.with_suffix(f".{id(text)}")
    own.write_text(text)
    own.replace(place)


def _compiled(source: str, options: tuple[str, ...]) -> str:
    compiler = nvrtc.load()
    texts = {path.name: path.read_text() for path in sorted(cuda_compile.SOURCES.glob("*.cu*"))}
    headers = {name: text.encode() for name, text in texts.items() if name.endswith(".cuh")}
    program = compiler.createProgram(texts[source], source, list(headers.values()), [name.encode() for name in headers])
    try:
        compiler.compileProgram(program, options)
        text: bytes = compiler.getPTX(program)
    finally:
        compiler.destroyProgram(program)
    return text.decode().rstrip("\0")
