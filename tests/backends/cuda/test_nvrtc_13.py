"""The kernels compiled by NVRTC of CUDA 13, in a process of its own, for the GPUs that it and that of CUDA 12 know."""

import ctypes
import multiprocessing
import re
import site
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from dilkit.backends.cuda import compile as cuda_compile
from dilkit.backends.cuda.compile import compiler_build, compiler_version, installed_nvrtc, options_of
from dilkit.backends.cuda.table import kernel_for
from dilkit.backends.tiles.schedule import MOST_ROWS
from dilkit.tools.bench.workloads.kernels_compiled import CAPABILITIES, Build, builds, compiled

FOLDER = Path(sys.prefix) / "nvidia-cuda-nvrtc"


def nvrtc_13() -> Path | None:
    return next(FOLDER.rglob("libnvrtc.so.13"), None)


class NVRTCError(RuntimeError):
    """NVRTC refuses something."""


class NVRTC:
    NVRTCError = NVRTCError

    def __init__(self, path: Path):
        for builtins in path.parent.glob("libnvrtc-builtins.so.*"):  # which it looks for by name alone
            ctypes.CDLL(str(builtins))
        self._library = ctypes.CDLL(str(path))
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p

    def _call(self, name: str, *arguments):
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
        given = source.encode(), name.encode(), len(headers), strings(*headers), strings(*names)
        self._call("CreateProgram", ctypes.byref(program), *given)
        return program

    def compileProgram(self, program: ctypes.c_void_p, options: Sequence[str]):
        self._call("CompileProgram", program, len(options), (ctypes.c_char_p * len(options))(*(x.encode() for x in options)))

    def getCUBIN(self, program: ctypes.c_void_p) -> bytes:
        return self._bytes("CUBIN", program)

    def getPTX(self, program: ctypes.c_void_p) -> bytes:
        return self._bytes("PTX", program).rstrip(b"\0")

    def getProgramLog(self, program: ctypes.c_void_p) -> str:
        return self._bytes("ProgramLog", program).rstrip(b"\0").decode()

    def destroyProgram(self, program: ctypes.c_void_p):
        self._call("DestroyProgram", ctypes.byref(program))


def use_nvrtc_13():
    """Compile all kernels of this process with it; CuPy must be loaded first."""
    path = nvrtc_13()
    assert path is not None
    loaded = NVRTC(path)
    cuda_compile.load_nvrtc = lambda: loaded


pytestmark = pytest.mark.skipif(nvrtc_13() is None, reason="NVRTC of CUDA 13 is not installed: make kernels")

KNOWN = [capability for capability in CAPABILITIES if capability >= (7, 5)]
ALL = [build for dtype in ("float32", "bfloat16") for build in builds(KNOWN, [64, 128], [dtype], ["plain"])]
USUAL = [build for build in builds([(9, 0)], [64], ["bfloat16"], ["plain"]) if build.kernel.tile_rows == MOST_ROWS]


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=use_nvrtc_13) as found:
        yield found


def marks(build: Build):
    return [] if build == USUAL[0] else pytest.mark.slow if build in USUAL else pytest.mark.kernels


@pytest.mark.parametrize(
    "build", [pytest.param(build, marks=marks(build), id="-".join(map(str, build.keys[0]))) for build in ALL]
)
def test_a_kernel_compiles_and_fits(process, build):
    found = process.submit(compiled, build).result()
    assert [kernel.name for kernel in found] == list(build.names)
    assert {kernel.architecture for kernel in found} == {"sm_{}{}".format(*build.capability)}
    assert [complaint for kernel in found for complaint in kernel.complaints] == []


def test_it_says_which_it_is_and_refuses_gpus_that_it_no_longer_knows(process):
    assert re.match(r"13\.\d", process.submit(compiler_build).result())
    with pytest.raises(RuntimeError, match=r"NVRTC 13\.\d compiles for sm_75.*runs on sm_61: .*'dilkit\[cuda12\]'"):
        process.submit(options_of, kernel_for("forward", "float32", 64, (6, 1)), (6, 1)).result()


def install_beside():
    """Have this process find the package of NVRTC 13 before all others."""
    path = nvrtc_13()
    assert path is not None
    found = [str(path.parents[3]), *site.getsitepackages()]
    site.getsitepackages = lambda prefixes=None: found


def test_one_that_is_installed_beside_does_not_take_the_place_of_that_of_cupy():
    """CuPy alone would take NVRTC 13, also where CuPy is for CUDA 12."""
    cupy = pytest.importorskip("cupy", reason="cupy is not installed: make kernels")
    own = cupy.cuda.driver.get_build_version() // 1000
    if installed_nvrtc(own) is None:
        pytest.skip(f"NVRTC {own} is not installed as a package of its own")
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=install_beside) as process:
        assert process.submit(compiler_version).result()[0] == own
