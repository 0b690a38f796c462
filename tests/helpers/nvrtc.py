"""NVRTC of CUDA 13, which stage `kernels` installs into a folder of its own, loaded by its path, in the form of CuPy's module."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from pathlib import Path

from dilkit.backends.cuda import nvrtc as cuda_nvrtc

FOLDER = Path(sys.prefix) / "nvidia-cuda-nvrtc"


def nvrtc_13() -> Path | None:
    """Its library; None where it is not installed."""
    return next(FOLDER.rglob("libnvrtc.so.13"), None)


class NVRTCError(RuntimeError):
    """NVRTC refuses something."""


class NVRTC:
    """As much of `cupy.cuda.nvrtc` as `dilkit.backends.cuda.compile` uses."""

    NVRTCError = NVRTCError

    def __init__(self, path: Path) -> None:
        for builtins in path.parent.glob("libnvrtc-builtins.so.*"):  # which it looks for by name alone
            ctypes.CDLL(str(builtins))
        self._library = ctypes.CDLL(str(path))
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._library, f"nvrtc{name}")(*arguments)
        if code:
            raise NVRTCError(self._library.nvrtcGetErrorString(code).decode())

    def _bytes(self, what: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"Get{what}Size", program, ctypes.byref(size))
        found = ctypes.create_string_buffer(size.value)
        self._call(f"Get{what}", program, found)
        return found.raw

    def getVersion(self) -> tuple[int, int]:
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("Version", ctypes.byref(major), ctypes.byref(minor))
        return major.value, minor.value

    def getSupportedArchs(self) -> list[int]:
        count = ctypes.c_int()
        self._call("GetNumSupportedArchs", ctypes.byref(count))
        found = (ctypes.c_int * count.value)()
        self._call("GetSupportedArchs", found)
        return list(found)

    def createProgram(self, source: str, name: str, headers: Sequence[bytes], names: Sequence[bytes]) -> ctypes.c_void_p:
        program, strings = ctypes.c_void_p(), ctypes.c_char_p * len(headers)
        self._call(
            "CreateProgram",
            ctypes.byref(program),
            source.encode(),
            name.encode(),
            len(headers),
            strings(*headers),
            strings(*names),
        )
        return program

    def compileProgram(self, program: ctypes.c_void_p, options: Sequence[str]) -> None:
        self._call("CompileProgram", program, len(options), (ctypes.c_char_p * len(options))(*(x.encode() for x in options)))

    def getCUBIN(self, program: ctypes.c_void_p) -> bytes:
        return self._bytes("CUBIN", program)

    def getPTX(self, program: ctypes.c_void_p) -> bytes:
        return self._bytes("PTX", program).rstrip(b"\0")

    def getProgramLog(self, program: ctypes.c_void_p) -> str:
        return self._bytes("ProgramLog", program).rstrip(b"\0").decode()

    def destroyProgram(self, program: ctypes.c_void_p) -> None:
        self._call("DestroyProgram", ctypes.byref(program))


def use_nvrtc_13() -> None:
    """Have all kernels of this process compiled by it; CuPy, if it were loaded after it, would take it for its own."""
    path = nvrtc_13()
    assert path is not None
    loaded = NVRTC(path)
    cuda_nvrtc.load = lambda: loaded
