"""The compiled C of a kernel, kept in build/ptx by the PTX, what translates and runs it, and the compiler."""

from __future__ import annotations

import ctypes
import os
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ptx.source import ROOT, digest, kept
from ptx.translate import translate

MACHINE = Path(__file__).parent / "machine"
FIBER = ROOT / "tests/backends/cuda/host"
FLAGS = (
    *("-std=gnu11", "-march=native", "-ffp-contract=off", "-fno-strict-aliasing", "-fwrapv"),
    *("-fPIC", "-fvisibility=hidden", "-w"),
)


class Range(ctypes.Structure):
    """`Range` of machine/thread.h."""

    _fields_ = [("low", ctypes.c_uint64), ("bytes", ctypes.c_int64), ("name", ctypes.c_char_p), ("constant", ctypes.c_int64)]


class Launch(ctypes.Structure):
    """`Launch` of machine/thread.h."""

    _fields_ = [
        *((n, ctypes.c_int32) for n in ("blocks", "threads", "across", "resident")),
        *((n, ctypes.c_int32) for n in ("checked", "late", "group", "fraction", "ulps", "range_count")),
        ("seed", ctypes.c_uint64),
        ("dynamic_bytes", ctypes.c_int64),
        ("loops", ctypes.c_int64),
        ("ranges", ctypes.POINTER(Range)),
        ("error", ctypes.c_char_p),
        ("counts", ctypes.POINTER(ctypes.c_int64)),
        ("numbers", ctypes.POINTER(ctypes.c_int32)),
        ("grid", ctypes.c_int32),
    ]


@dataclass(frozen=True)
class Library:
    """`launch(parameters, launch)` returns 0, or 1 with a text in `launch.error`."""

    path: Path

    def launch(self, parameters: int, launch: Launch) -> int:
        return int(_loaded(self.path).ptx_launch(ctypes.c_void_p(parameters), ctypes.byref(launch)))


def library_of(text: str, counted: bool = False) -> Library:
    """The library of the kernel in PTX `text`. Raises UnknownPTX, and RuntimeError with what the compiler says.

    Of a kernel, which is thousands of lines that run once or twice, compiling takes longer than running what is not optimized.
    """
    flags = (*FLAGS, *(("-DCOUNTED",) if counted else ()), f"-I{MACHINE}", f"-I{FIBER}")
    place = kept(f"{digest((text, *flags, _compiler(), *made_by()))}.so")
    if not place.exists():
        own = "-O0", "-DKERNEL", "-shared", *flags, "-x", "c", "-"
        _compile((*own, "-x", "none", str(_machine(flags)), "-lm"), place, translate(text))
    return Library(place)


@cache
def _machine(flags: tuple[str, ...]) -> Path:
    """What every kernel is linked to."""
    place = kept(f"machine-{digest((*flags, _compiler(), *made_by()))}.o")
    if not place.exists():
        _compile(("-O2", "-c", *flags, str(MACHINE / "machine.c")), place)
    return place


def _compile(options: tuple[str, ...], place: Path, code: str = "") -> None:
    own = place.with_suffix(f".{os.getpid()}")
    command = ["gcc", *options, "-o", str(own)]
    done = subprocess.run(command, input=code, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
    own.replace(place)


@cache
def _loaded(path: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(path))


@cache
def made_by() -> tuple[str, ...]:
    """The files that decide what C a text is, and what that does."""
    own = MACHINE.parent
    translator = (*(own / "instructions").glob("*.py"), *(own / f"{name}.py" for name in ("parse", "operands", "translate")))
    return tuple(path.read_text() for path in sorted((*translator, *MACHINE.glob("*.[ch]"), *FIBER.glob("*.h"))))


@cache
def _compiler() -> str:
    return subprocess.check_output(["gcc", "--version"], text=True)
