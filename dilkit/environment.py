"""All environment variables of dilkit, read again at each use.

A malformed value raises `VariableError`, a ValueError that names the variable.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from dilkit.checks import shown

DEFAULT_CACHE_BYTES = 128 * 1024**2


class VariableError(ValueError):
    """An environment variable of dilkit's is malformed. A ValueError that names it."""


@dataclass(frozen=True)
class Variable:
    """One environment variable: its name, its meaning, and its default."""

    name: str
    meaning: str
    default: str


BACKEND = Variable(
    "DILKIT_BACKEND",
    "Names of the backends to use, comma-separated, in order of preference. A `backend=` argument or "
    "`dilkit.use_backend(...)` wins over it. If none of the named backends can compute a call, the call raises.",
    "automatic choice",
)
CACHE_BYTES = Variable(
    "DILKIT_CACHE_BYTES",
    "Upper bound in bytes of the pattern cache, which keeps what was prepared for a call (index tables, layouts, token orders): "
    "a process grows by about that at most, however many patterns it uses. 0 turns the cache off.",
    f"{DEFAULT_CACHE_BYTES} (128 MiB)",
)
CPU_ISA = Variable(
    "DILKIT_CPU_ISA",
    "Instruction set of the CPU kernel, and of the codes of points: `generic`, `avx2`, `avx512`, `avx512bf16` or `amx`, as far "
    "as the machine has them.",
    "the best there is",
)
CUDA_CACHE = Variable(
    "DILKIT_CUDA_CACHE",
    "Folder where compiled CUDA kernels are kept, for all processes. (`XDG_CACHE_HOME` unset means `~/.cache`.)",
    "`dilkit/cuda` in `XDG_CACHE_HOME`",
)
GPU_PROOF = Variable(
    "DILKIT_GPU_PROOF",
    "Whether dilkit's own kernels have to compute small problems rightly on a GPU before they are used there, and so classes of "
    "packages that are newer than those tested: `once`, and what came of it is kept beside the compiled kernels; `always`, in "
    "each process; `off`.",
    "once",
)
GPU_PROOFS = ("once", "always", "off")
TUNED = Variable(
    "DILKIT_TUNED",
    "File of the orders of backends that `dilkit tune` has measured; the automatic choice follows it, and `triton` the sizes of "
    "its kernels. A process reads it once. `none`: use no such file.",
    "`dilkit/tuned.json` in `XDG_CACHE_HOME`",
)
CPU_ISAS = ("generic", "avx2", "avx512", "avx512bf16", "amx")
BF16_SETS = ("amx", "avx512bf16")
"""Instruction sets that are AVX-512 but for products of bf16 pairs: code without these runs that for AVX-512."""
VARIABLES = (BACKEND, CACHE_BYTES, CPU_ISA, CUDA_CACHE, GPU_PROOF, TUNED)

_RAW = getattr(os.environ, "_data", None)
"""The dict in `os.environ`: a look-up takes a tenth of the time, and at most calls all variables are unset."""
_RAW_NAMES = {variable.name: os.fsencode(variable.name) if os.name == "posix" else variable.name for variable in VARIABLES}

_CHOICES = (BACKEND, CPU_ISA, GPU_PROOF, TUNED)
_RAW_CHOICES = tuple(_RAW_NAMES[variable.name] for variable in _CHOICES)

NOW = object()
"""The value of a variable at the time of the call."""
_warned: set[str] = set()


def choices() -> tuple[object, ...]:
    """Return raw values of the variables that affect the choice of a backend, in 0.3 us."""
    if _RAW is None:
        return tuple(os.environ.get(variable.name) for variable in _CHOICES)
    get = _RAW.get
    backend, isa, proof, tuned = _RAW_CHOICES
    return get(backend), get(isa), get(proof), get(tuned)


def _text(variable: Variable) -> str:
    if _RAW is not None and _RAW_NAMES[variable.name] not in _RAW:
        return ""
    return os.environ.get(variable.name, "")


def check() -> None:
    """Raise `VariableError` if a variable is malformed, and warn of names that are nearly those of a variable."""
    backend_names(), cache_bytes(), cpu_isa(), cuda_cache(), gpu_proof(), tuned_file()
    for name in unknown_names():
        if (meant := similar_name(name)) and name not in _warned:
            _warned.add(name)
            warnings.warn(f"{name} is set, but dilkit reads no variable of this name; did you mean {meant}?", stacklevel=2)


def unknown_names() -> list[str]:
    """Return the variables `DILKIT_*` that are set and that dilkit does not read."""
    return sorted(name for name in os.environ if name.startswith("DILKIT_") and name not in _RAW_NAMES)


def similar_name(name: str) -> str | None:
    """Return the variable that `name` may be a misspelling of."""
    import difflib

    return next(iter(difflib.get_close_matches(name, _RAW_NAMES, n=1, cutoff=0.8)), None)


def backend_names(raw: object = NOW) -> tuple[str, ...]:
    """Return the names in `DILKIT_BACKEND`, or in a raw value of it from `choices()`; an empty tuple when unset or blank."""
    if raw is NOW:
        raw = None if _RAW is not None and _RAW_CHOICES[0] not in _RAW else choices()[0]
    if raw is None:
        return ()
    text = raw if isinstance(raw, str) else os.fsdecode(cast(bytes, raw))
    if not text.strip():
        return ()
    names = tuple(part.strip() for part in text.split(","))
    if not all(names):
        raise VariableError(f"{BACKEND.name}={shown(text)} has an empty name; write it as {BACKEND.name}=sdpa or =native,sdpa")
    return names


def cache_bytes() -> int:
    """Return the value of `DILKIT_CACHE_BYTES`, a whole number of bytes, 0 or more."""
    text = _text(CACHE_BYTES)
    if not text.strip():
        return DEFAULT_CACHE_BYTES
    try:
        size = int(text)
    except ValueError:
        size = -1
    if size < 0:
        raise VariableError(f"{CACHE_BYTES.name}={shown(text)} must be a whole number of bytes, 0 or more (0 turns it off)")
    return size


def cpu_isa(available: tuple[str, ...] | None = None) -> str:
    """Return the value of `DILKIT_CPU_ISA`, one of `available` on this machine, or the first of them when unset or blank.

    Without `available` it may be any known instruction set.
    """
    if _RAW is not None and _RAW_CHOICES[1] not in _RAW:
        return (available or CPU_ISAS)[0]
    name = _text(CPU_ISA).strip()
    if not name:
        return (available or CPU_ISAS)[0]
    if name not in (available or CPU_ISAS):
        here = "one" if available is None else f"an instruction set that this machine has ({', '.join(available)})"
        raise VariableError(f"{CPU_ISA.name}={shown(name)} is not {here}; instruction sets are {', '.join(CPU_ISAS)}")
    return name


def cuda_cache() -> Path | None:
    """Return the value of `DILKIT_CUDA_CACHE`, or its default; None if it is unset and there is no home folder."""
    return _path(CUDA_CACHE, "cuda")


def gpu_proof() -> str:
    """Return the value of `DILKIT_GPU_PROOF`, one of `GPU_PROOFS`."""
    mode = _text(GPU_PROOF).strip() or GPU_PROOFS[0]
    if mode not in GPU_PROOFS:
        raise VariableError(f"{GPU_PROOF.name}={shown(mode)} must be one of {', '.join(GPU_PROOFS)}")
    return mode


@contextmanager
def without_proofs() -> Iterator[None]:
    """Use kernels without a proof within the block, in all threads: their results are being checked."""
    before = os.environ.get(GPU_PROOF.name)
    os.environ[GPU_PROOF.name] = "off"
    try:
        yield
    finally:
        del os.environ[GPU_PROOF.name]
        os.environ.update({} if before is None else {GPU_PROOF.name: before})


def tuned() -> str:
    """Return the text of `DILKIT_TUNED`."""
    return _text(TUNED)


def tuned_file() -> Path | None:
    """Return the value of `DILKIT_TUNED`, or its default; None for `none`, or if it is unset and there is no home folder."""
    return None if tuned().strip() == "none" else _path(TUNED, "tuned.json")


def _path(variable: Variable, name: str) -> Path | None:
    text = _text(variable).strip()
    caches = os.environ.get("XDG_CACHE_HOME", "").strip() or "~/.cache"
    try:
        return (Path(text) if text else Path(caches, "dilkit", name)).expanduser()
    except RuntimeError:
        if text:
            raise VariableError(f"{variable.name}={shown(text)}: there is no such home folder; give the whole path") from None
        return None


@dataclass(frozen=True)
class Launch:
    """The start of this process as one of several: by "mpirun" or "torchrun", as rank `rank` of `size`.

    `local_rank` and `local_size`: the same, counted among the processes of this host.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int
    local_size: int


_LAUNCHERS = (
    ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("mpirun", *(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))),
    ("mpirun", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
"""Launchers, and the variables in which they pass the numbers of `Launch` to a process; mpirun is Open MPI's or MPICH's."""


def launch() -> Launch | None:
    """Return the launch of this process; None for a process that was started alone."""
    for launcher, *names in _LAUNCHERS:
        rank, size, local_rank, local_size = (os.environ.get(name, "") for name in names)
        if rank.isdigit() and size.isdigit():
            return Launch(launcher, int(rank), int(size), int(local_rank or rank), int(local_size or size))
    return None


def first_of_all() -> bool:
    """True if this process is rank 0, or was started alone: messages of the whole job come from it."""
    started = launch()
    return started is None or started.rank == 0


def threads_are_set() -> bool:
    """True if `OMP_NUM_THREADS` sets the number of threads of a process; torchrun sets it to 1 if it is unset."""
    return bool(os.environ.get("OMP_NUM_THREADS", "").strip())
