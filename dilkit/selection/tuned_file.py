"""The file that `dilkit tune` writes: its entries, and functions to read, check and write it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from dilkit import files
from dilkit.checks import boolean, integer, one_of, real
from dilkit.problem import DTYPES

SCHEMA = 1

Seconds = tuple[tuple[str, float], ...]
"""Backends, or sizes of a kernel, and seconds a call, the fastest first."""
SIZES = re.compile(r"[1-9]\d* x [1-9]\d*, [1-9]\d* warps, [1-9]\d* stages")
"""Sizes of a kernel, as in "64 x 32, 4 warps, 5 stages": rows and columns of a score tile first."""


class TunedError(ValueError):
    """The file is not one that `dilkit tune` wrote. The text names the file and what is wrong with it."""


@dataclass(frozen=True)
class TunedSetup:
    """The setup of a measurement: the device and the versions of torch and dilkit."""

    device: str
    name: str
    capability: str
    torch: str
    dilkit: str

    def __post_init__(self) -> None:
        for field in fields(self):
            _text(field.name, getattr(self, field.name))

    def __str__(self) -> str:
        return f"{self.name} with torch {self.torch} and dilkit {self.dilkit}"


@dataclass(frozen=True)
class TunedShape:
    """The facts of a problem that a measured time depends on, lengths as powers of two; defaults are not in files."""

    dtype: str
    head_dim: int
    is_causal: bool
    requires_grad: bool
    branches: str
    seq: int
    key_padding_mask: bool = False
    varlen: bool = False
    kv_cache: bool = False
    dropout: bool = False

    def __post_init__(self) -> None:
        one_of("dtype", self.dtype, DTYPES)
        integer("head_dim", self.head_dim, at_least=1)
        for name in ("is_causal", "requires_grad", *_FLAGS):
            boolean(name, getattr(self, name))
        _text("branches", self.branches)
        if bucket(integer("seq", self.seq, at_least=1)) != self.seq:
            raise ValueError(f"seq={self.seq} is not a power of two")


_FLAGS = frozenset(field.name for field in fields(TunedShape) if field.default is False)


@dataclass(frozen=True)
class TunedKernel:
    """A kernel whose sizes were measured: that of `role` for a dtype and head_dim. `backend` includes its compiler's version."""

    backend: str
    role: str
    dtype: str
    head_dim: int

    def __post_init__(self) -> None:
        _text("backend", self.backend)
        _text("role", self.role)
        one_of("dtype", self.dtype, DTYPES)
        integer("head_dim", self.head_dim, at_least=1)

    def __str__(self) -> str:
        return f"{self.role} of {self.backend}, {self.dtype} x {self.head_dim}"


@dataclass(frozen=True)
class TunedEntry:
    """Backends in the order to try them for one shape, or sizes of a kernel, each with the median seconds of a call."""

    setup: TunedSetup
    shape: TunedShape | TunedKernel
    seconds: Seconds

    def __post_init__(self) -> None:
        names = [name for name, _ in self.seconds]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"seconds={self.seconds!r} names no backend, or one twice")
        for name, taken in self.seconds:
            _text("backend", name)
            real(name, taken, above=0.0)
            if isinstance(self.shape, TunedKernel) and not SIZES.fullmatch(name):
                raise ValueError(f"{name!r} names no sizes of a kernel")


def load(path: Path) -> tuple[TunedEntry, ...]:
    """Read the entries in the file `path`, none if there is no such file. Raises `TunedError` for a malformed file."""
    try:
        content = json.loads(files.read_bytes(path).decode())
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, RecursionError) as error:
        raise TunedError(f"{path}: {type(error).__name__}: {error}") from None
    if not isinstance(content, dict) or content.get("schema") != SCHEMA or not isinstance(content.get("entries"), list):
        raise TunedError(f"{path}: no object with schema {SCHEMA} and a list of entries")
    if not isinstance(kernels := content.get("kernels", []), list):  # which files of earlier versions do not have
        raise TunedError(f"{path}: kernels is no list")
    entries = []
    for i, data in enumerate((*content["entries"], *kernels)):
        try:
            entries.append(_entry(data, TunedShape if i < len(content["entries"]) else TunedKernel))
        except (TypeError, ValueError) as error:
            raise TunedError(f"{path}: entry {i}: {error}") from None
    return tuple(entries)


def to_text(entries: Iterable[TunedEntry]) -> str:
    lists: dict[str, list[Any]] = dict(entries=[], kernels=[])
    for e in entries:
        shape = {name: value for name, value in asdict(e.shape).items() if value or name not in _FLAGS}
        listed = dict(setup=asdict(e.setup), shape=shape, seconds=dict(e.seconds))
        lists["kernels" if isinstance(e.shape, TunedKernel) else "entries"].append(listed)
    return json.dumps(dict(schema=SCHEMA, **lists), indent=1, allow_nan=False) + "\n"


def bucket(length: int) -> int:
    """Return the power of two that is nearest to `length` by ratio; 1 for 0."""
    return 1 << round(math.log2(max(length, 1)))


def _entry(data: Any, kind: type[TunedShape | TunedKernel]) -> TunedEntry:
    parts = _fields(data, "entry", {"setup", "shape", "seconds"})
    setup = _fields(parts["setup"], "setup", {f.name for f in fields(TunedSetup)})
    shape = _fields(parts["shape"], "shape", {f.name for f in fields(kind)})
    if not isinstance(parts["seconds"], dict):
        raise TypeError("seconds is no object of backends and seconds")
    return TunedEntry(TunedSetup(**setup), kind(**shape), tuple(parts["seconds"].items()))


def _fields(data: Any, what: str, names: set[str]) -> dict[str, Any]:
    if not isinstance(data, dict) or not names - _FLAGS <= set(data) <= names:
        raise TypeError(f"{what} is no object of {', '.join(sorted(names))}")
    return data


def _text(name: str, value: Any) -> None:
    if not isinstance(value, str) or not value:
        raise TypeError(f"{name}={value!r} is no text")
