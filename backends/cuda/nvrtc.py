"""Which NVRTC it is: that of the CUDA that CuPy is built for, also where one of another CUDA is installed beside it.

CuPy takes an NVRTC that the process has loaded, else the first that `cuda.pathfinder` finds, which looks for that of CUDA 13
first: CuPy for CUDA 12 would compile with NVRTC 13, which knows no GPU before 7.5. So the right one is loaded before CuPy asks.
Where the process has loaded NVRTC 13 before, CuPy takes that all the same.
"""

from __future__ import annotations

import ctypes
import sys
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any


def load() -> Any:
    """CuPy's module of the compiler, which is loaded at the first use. Raises RuntimeError where that is not possible."""
    try:
        from cupy.cuda import driver, nvrtc

        _load_own(driver.get_build_version() // 1000)
        nvrtc.getVersion()
    except Exception as error:
        hint = "install it with: pip install 'dilkit[cuda12]', or 'dilkit[cuda13]' beside a torch for CUDA 13"
        raise RuntimeError(f"NVRTC, the compiler of CUDA, cannot be loaded: {error}; {hint}") from error
    return nvrtc


@lru_cache(maxsize=1)
def _load_own(major: int) -> None:
    if path := installed(major):
        ctypes.CDLL(str(path))


def installed(major: int) -> Path | None:
    """The library in the package of NVRTC for CUDA `major`, up to 12: later ones are where CuPy looks first. None without it."""
    try:
        files = metadata.files(f"nvidia-cuda-nvrtc-cu{major}") or ()
    except metadata.PackageNotFoundError:
        return None
    name = f"libnvrtc.so.{major}"
    return next((Path(file.locate()) for file in files if file.name == name), None) if sys.platform == "linux" else None
