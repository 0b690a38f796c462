"""What `dilkit tune` has measured: seconds a call, by backend, under everything that the order of backends depends on.

It lies in one file (`DILKIT_TUNED`), which a process reads once and checks whole. A file that is malformed, or that was
measured on another device or with other versions, is ignored with one warning.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterable
from functools import lru_cache
from importlib import metadata
from pathlib import Path

from dilkit import __version__, environment
from dilkit.device import Device
from dilkit.problem import Problem
from dilkit.selection.tuned_file import Seconds, TunedError, TunedSetup, TunedShape, bucket, load


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


def setup_of(device: Device) -> TunedSetup:
    """Everything beside the problem, as it is now, on `device`."""
    capability = "none" if device.capability is None else f"{device.capability[0]}.{device.capability[1]}"
    return TunedSetup(device.type, device.name or device.type, capability, _torch_version(), __version__)


def shape_of(problem: Problem) -> TunedShape:
    """The shape under which times of `problem` are kept."""
    flags = dict(is_causal=problem.is_causal, requires_grad=problem.requires_grad)
    return TunedShape(problem.dtype, problem.head_dim, branches=branches_of(problem), seq=bucket(problem.seq), **flags)


def branches_of(problem: Problem) -> str:
    """The pattern's branches as "2048/1 4096/2": segment length, rounded to a power of two and at most `seq`, and rate."""
    pattern, seq = problem.pattern, max(problem.seq, 1)
    parts = [f"{bucket(min(b.segment_length, seq))}/{b.dilation_rate}" for b in pattern.branches]
    return " ".join([*parts, *(["once"] if pattern.overlap == "once" else []), *([] if pattern.heads is None else ["by heads"])])


_lock = threading.Lock()
_generation = 0
_warned: set[Path] = set()


@lru_cache(maxsize=8)
def _read(path: Path, generation: int) -> tuple[dict[tuple[TunedSetup, TunedShape], Seconds], str]:
    """The orders in `path` by what they are for, and what is wrong with the file: empty where nothing is."""
    try:
        return {(entry.setup, entry.shape): entry.seconds for entry in load(path)}, ""
    except TunedError as error:
        return {}, str(error).removeprefix(f"{path}: ")


def _stale(entries: Iterable[tuple[TunedSetup, TunedShape]], here: TunedSetup) -> str:
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


@lru_cache(maxsize=1)
def _torch_version() -> str:
    """torch's version, found out without importing it."""
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return "unknown"
