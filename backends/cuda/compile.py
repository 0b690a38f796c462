"""CUDA sources to machine code: NVRTC, with a cache on disk that many processes share.

    file = cache / sha256(source, headers, options, build of NVRTC).cubin = sha256(code) + code

A file is believed only if its digest is right. Where the cache cannot be used, each process compiles for itself.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import sys
import warnings
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

from dilkit import environment, files
from dilkit.backends.cuda.table import CudaKernel
from dilkit.device import Capability

SOURCES = Path(__file__).parent / "kernels"
OPTIONS = ("--std=c++17", "--ptxas-options=-v")
FIRST_OWN = 90
"""The first architecture with instructions that no later one keeps: those of sm_90a."""
OWN_SOURCES = frozenset({"hopper_forward.cu"})
"""Sources with such instructions."""
DIGEST = hashlib.sha256().digest_size


def code_of(kernel: CudaKernel, capability: Capability) -> bytes:
    """Return the cubin of `kernel` for `capability`, cached or compiled. Raises RuntimeError if NVRTC is missing or refuses."""
    arguments = options_of(kernel, capability)
    place = _place(kernel.source, arguments)
    if place is None:
        return compiled(kernel.source, arguments)[0]
    code = _read(place)
    if code is None:
        code = compiled(kernel.source, arguments)[0]
        _keep(place, code)
    return code


def compiler_version() -> tuple[int, int]:
    """Return the version of NVRTC. Raises RuntimeError if it cannot be loaded."""
    major, minor = load_nvrtc().getVersion()
    return major, minor


def compiler_build() -> str:
    """Return NVRTC's version and build, such as "12.9.86 CL-36037853". Raises RuntimeError without NVRTC."""
    return _build(load_nvrtc())


def facts() -> tuple[str, str]:
    """Return the compiler's build and a digest of all sources, on which machine code depends. Raises without NVRTC."""
    digest = hashlib.sha256("".join(part for both in _texts().items() for part in both).encode()).hexdigest()
    return f"NVRTC {compiler_build()}", f"sources {digest[:16]}"


def options_of(kernel: CudaKernel, capability: Capability) -> tuple[str, ...]:
    macros = (f"-D{name}={value}" for name, value in sorted(kernel.macros.items()))
    known, own_only = load_nvrtc().getSupportedArchs(), kernel.source in OWN_SOURCES
    return (f"--gpu-architecture={architecture(capability, known, own_only=own_only)}", *OPTIONS, *macros)


def architecture(capability: Capability, known: Sequence[int], *, own_only: bool = False) -> str:
    """Return the newest known architecture whose code runs on `capability`: of the same major version, and not newer.

    `own_only`: the one with every instruction of `capability`, such as wgmma of sm_90a. Raises RuntimeError if there is none.
    """
    number, form = 10 * capability[0] + capability[1], "a" if own_only else ""
    oldest = max(number, FIRST_OWN) if own_only else 10 * capability[0]
    if able := [other for other in known if oldest <= other <= number]:
        return f"sm_{max(able)}{form}"
    shown = ", ".join(f"sm_{other}" for other in known)
    version = ".".join(map(str, compiler_version()))
    raise RuntimeError(
        f"NVRTC {version} compiles for {shown}, none of which runs on sm_{number}{form}: install a newer CUDA toolkit for newer "
        "GPUs, one of CUDA 12 for those before sm_75 (pip install 'dilkit[cuda12]', with nothing that loads NVRTC 13 before)"
    )


def compiled(source: str, arguments: tuple[str, ...], texts: Mapping[str, str] | None = None) -> tuple[bytes, str]:
    """Return the machine code and the compiler's log of the file `source`; `texts`: other contents for all files, by name.

    Raises RuntimeError with the log if NVRTC refuses the source.
    """
    compiler, contents = load_nvrtc(), dict(texts or _texts())
    headers = {name: text.encode() for name, text in contents.items() if name.endswith(".cuh")}
    program = compiler.createProgram(contents[source], source, list(headers.values()), [name.encode() for name in headers])
    try:
        compiler.compileProgram(program, arguments)
        return compiler.getCUBIN(program), compiler.getProgramLog(program)
    except compiler.NVRTCError as error:
        text = f"{error}: {source} with {' '.join(arguments)}\n{compiler.getProgramLog(program)}"
        raise RuntimeError(text) from None
    finally:
        compiler.destroyProgram(program)


def load_nvrtc() -> Any:
    """Return CuPy's module of NVRTC, the compiler of CUDA, loaded at the first use. Raises RuntimeError where that fails.

    CuPy takes an NVRTC that the process has loaded, else the first that `cuda.pathfinder` finds: that of CUDA 13, which
    knows no GPU before 7.5, for CUDA 12 as well. So the one of CuPy's CUDA is loaded before CuPy asks.
    """
    try:
        from cupy.cuda import driver, nvrtc

        if path := installed_nvrtc(driver.get_build_version() // 1000):
            ctypes.CDLL(str(path))
        nvrtc.getVersion()
    except Exception as error:
        hint = "install it with: pip install 'dilkit[cuda12]', or 'dilkit[cuda13]' beside a torch for CUDA 13"
        raise RuntimeError(f"NVRTC, the compiler of CUDA, cannot be loaded: {error}; {hint}") from error
    return nvrtc


@lru_cache(maxsize=1)
def installed_nvrtc(major: int) -> Path | None:
    """Return the library of the NVRTC package for CUDA 12; None without it, and for later CUDA, which CuPy finds itself."""
    try:
        files_of_package = metadata.files(f"nvidia-cuda-nvrtc-cu{major}") or ()
    except metadata.PackageNotFoundError:
        return None
    name = f"libnvrtc.so.{major}"
    paths = (Path(file.locate()) for file in files_of_package if file.name == name)
    return next(paths, None) if sys.platform == "linux" else None


@lru_cache(maxsize=1)
def _texts() -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(SOURCES.glob("*.cu*"))}


@lru_cache(maxsize=4)
def _build(compiler: Any) -> str:
    """Read the compiler's build from the head of compiled PTX: `getVersion` has no patch level."""
    program = compiler.createProgram("", "nothing.cu", [], [])
    try:
        compiler.compileProgram(program, ())
        head = " ".join(line for line in compiler.getPTX(program).decode().splitlines() if line.startswith("//"))
    finally:
        compiler.destroyProgram(program)
    said = re.search(r"Build ID: (\S+).* V([\d.]+)", head)
    return f"{said[2]} {said[1]}" if said else head


def _place(source: str, arguments: tuple[str, ...]) -> Path | None:
    folder = environment.cuda_cache()
    if folder is None:
        return None
    texts = _texts()
    headers = sorted(name for name in texts if name.endswith(".cuh"))
    parts = [compiler_build(), *arguments, *(x for name in (source, *headers) for x in (name, texts[name]))]
    return folder / f"{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()}.cubin"


def _read(place: Path) -> bytes | None:
    """Return the cached code; None if it is missing or damaged, or if another user may have written it."""
    if why := files.why_others_may_write(place.parent) or files.why_others_may_write(place):
        _warn_that_none_are_kept(why)
        return None
    try:
        cubin = files.read_bytes(place)
    except OSError:
        return None
    digest, code = cubin[:DIGEST], cubin[DIGEST:]
    return code if code and hashlib.sha256(code).digest() == digest else None


def _keep(place: Path, code: bytes) -> None:
    files.write_privately(place, hashlib.sha256(code).digest() + code)


@lru_cache(maxsize=8)
def _warn_that_none_are_kept(why: str) -> None:
    text = f"CUDA kernels are compiled anew, none are kept: {why}, or set {environment.CUDA_CACHE.name} to another folder"
    warnings.warn(text, stacklevel=2)
