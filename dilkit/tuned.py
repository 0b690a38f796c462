"""What `dilkit tune` has measured: seconds a call, by backend, under everything that the order of backends depends on.

It lies in one file (`DILKIT_TUNED`), which a process reads once and checks whole. A file that is malformed, or that was
measured on another device or with other versions, is ignored with one warning.
"""

from __future__ import annotations

import json
import math
import threading
import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

from dilkit import __version__, environment
from dilkit.checks import boolean, integer, one_of, real
from dilkit.device import Device
from dilkit.problem import DTYPES, Problem

SCHEMA = 1

Seconds = tuple[tuple[str, float], ...]
"""Backends and seconds a call, the fastest first."""


class TunedError(ValueError):
    """A file that is no table of measured orders. The text names the file, and what is wrong with it."""


@dataclass(frozen=True)
class Setup:
    """What a time depends on beside the problem: the device, and the versions of torch and dilkit."""

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
class Shape:
    """What a time depends on in the problem. `seq` and the segment lengths in `branches` are powers of two, the nearest."""

    dtype: str
    head_dim: int
    is_causal: bool
    requires_grad: bool
    branches: str
    seq: int

    def __post_init__(self) -> None:
        one_of("dtype", self.dtype, DTYPES)
        integer("head_dim", self.head_dim, at_least=1)
        boolean("is_causal", self.is_causal)
        boolean("requires_grad", self.requires_grad)
        _text("branches", self.branches)
        if bucket(integer("seq", self.seq, at_least=1)) != self.seq:
            raise ValueError(f"seq={self.seq} is not a power of two")


@dataclass(frozen=True)
class Entry:
    """Backends in the order to try them for one shape on one setup, each with the median seconds of a call."""

    setup: Setup
    shape: Shape
    seconds: Seconds

    def __post_init__(self) -> None:
        names = [name for name, _ in self.seconds]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"seconds={self.seconds!r} names no backend, or one twice")
        for name, taken in self.seconds:
            _text("backend", name)
            real(name, taken, above=0.0)


def seconds(problem: Problem) -> Seconds:
    """What was measured for problems like this one, in the order to try them; empty where nothing was.

    Warns, once for a file, where the file is malformed or what it holds for this kind of device is out of date.
    """
    path = environment.tuned_file()
    if path is None or problem.device.assumed:
        return ()
    entries, complaint = _read(path, _generation)
    found = entries.get((setup := setup_of(problem.device), shape_of(problem)))
    if found is None and (complaint := complaint or _stale(entries, setup)):
        _warn_once(path, complaint)
    return found or ()


def state() -> tuple[object, ...]:
    """A value that changes whenever `seconds` may: reading it costs a microsecond."""
    return environment.tuned(), _generation


def read_again() -> None:
    """Read the file anew at the next use: for whoever has written it."""
    global _generation
    with _lock:
        _generation += 1
        _warned.clear()


def load(path: Path) -> tuple[Entry, ...]:
    """The entries in the file `path`, none if there is no such file. Raises `TunedError` for a file that is not one of ours."""
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, RecursionError) as error:
        raise TunedError(f"{path}: {type(error).__name__}: {error}") from None
    if not isinstance(found, dict) or found.get("schema") != SCHEMA or not isinstance(found.get("entries"), list):
        raise TunedError(f"{path}: no object with schema {SCHEMA} and a list of entries")
    entries = []
    for i, data in enumerate(found["entries"]):
        try:
            entries.append(_entry(data))
        except (TypeError, ValueError) as error:
            raise TunedError(f"{path}: entry {i}: {error}") from None
    return tuple(entries)


def to_text(entries: Iterable[Entry]) -> str:
    """The file that `load` reads."""
    listed = [dict(setup=asdict(e.setup), shape=asdict(e.shape), seconds=dict(e.seconds)) for e in entries]
    return json.dumps(dict(schema=SCHEMA, entries=listed), indent=1, allow_nan=False) + "\n"


def setup_of(device: Device) -> Setup:
    """Everything beside the problem, as it is now, on `device`."""
    capability = "none" if device.capability is None else f"{device.capability[0]}.{device.capability[1]}"
    return Setup(device.type, device.name, capability, _torch_version(), __version__)


def shape_of(problem: Problem) -> Shape:
    """The shape under which times of `problem` are kept."""
    flags = dict(is_causal=problem.is_causal, requires_grad=problem.requires_grad)
    return Shape(problem.dtype, problem.head_dim, branches=branches_of(problem), seq=bucket(problem.seq), **flags)


def branches_of(problem: Problem) -> str:
    """The pattern's branches as "2048/1 4096/2": segment length, rounded to a power of two and at most `seq`, and rate."""
    pattern, seq = problem.pattern, max(problem.seq, 1)
    parts = [f"{bucket(min(b.segment_length, seq))}/{b.dilation_rate}" for b in pattern.branches]
    return " ".join([*parts, *(["once"] if pattern.overlap == "once" else []), *([] if pattern.heads is None else ["by heads"])])


def bucket(length: int) -> int:
    """The power of two that is nearest to `length` by ratio; 1 for 0."""
    return 1 << round(math.log2(max(length, 1)))


_lock = threading.Lock()
_generation = 0
_warned: set[Path] = set()


@lru_cache(maxsize=8)
def _read(path: Path, generation: int) -> tuple[dict[tuple[Setup, Shape], Seconds], str]:
    """The orders in `path` by what they are for, and what is wrong with the file: empty where nothing is."""
    try:
        return {(entry.setup, entry.shape): entry.seconds for entry in load(path)}, ""
    except TunedError as error:
        return {}, str(error).removeprefix(f"{path}: ")


def _stale(entries: Iterable[tuple[Setup, Shape]], here: Setup) -> str:
    """Why nothing measured for this kind of device holds here; empty where something does, or nothing was measured."""
    setups = {setup: None for setup, _ in entries if setup.device == here.device}
    if not setups or here in setups:
        return ""
    return f"measured on {'; on '.join(map(str, setups))}; this is {here}"


def _warn_once(path: Path, complaint: str) -> None:
    with _lock:
        told = path in _warned
        _warned.add(path)
    if not told:
        way_out = "measure anew with `dilkit tune`, or remove it with `dilkit tune --clear`"
        warnings.warn(f"{path} is ignored: {complaint}; {way_out}", stacklevel=2)


def _entry(data: Any) -> Entry:
    found = _fields(data, "entry", {"setup", "shape", "seconds"})
    setup, shape = (_fields(found[name], name, {f.name for f in fields(kind)}) for name, kind in _PARTS)
    if not isinstance(found["seconds"], dict):
        raise TypeError("seconds is no object of backends and seconds")
    return Entry(Setup(**setup), Shape(**shape), tuple(found["seconds"].items()))


_PARTS: tuple[tuple[str, Any], ...] = (("setup", Setup), ("shape", Shape))


def _fields(data: Any, what: str, names: set[str]) -> dict[str, Any]:
    if not isinstance(data, dict) or set(data) != names:
        raise TypeError(f"{what} is no object of {', '.join(sorted(names))}")
    return data


def _text(name: str, value: Any) -> None:
    if not isinstance(value, str) or not value:
        raise TypeError(f"{name}={value!r} is no text")


@lru_cache(maxsize=1)
def _torch_version() -> str:
    """torch's version, found out without importing it."""
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return "unknown"
