"""The measurements of `dilkit tune`: seconds a call for each backend, by setup and problem shape; for sizes of kernels.

They are in one file (`DILKIT_TUNED`), which a process reads and checks once. A file that is malformed, or that was measured on
another device or with other versions, is ignored with one warning.
"""

from __future__ import annotations

import warnings
from functools import lru_cache
from importlib import metadata
from itertools import count
from pathlib import Path

from dilkit import __version__, environment
from dilkit.device import Device
from dilkit.pattern import DilatedSegment
from dilkit.problem import Problem
from dilkit.selection.tuned_file import Seconds, TunedError, TunedKernel, TunedSetup, TunedShape, bucket, load


def seconds(problem: Problem) -> Seconds:
    """Return the measured backends for problems like this one, fastest first; empty if nothing was measured."""
    return measured(problem.device, shape_of(problem))


def measured(device: Device, shape: TunedShape | TunedKernel) -> Seconds:
    """Return what was measured on `device`, fastest first, if anything; warn once of a file that is malformed or out of date."""
    path = environment.tuned_file()
    if path is None or device.assumed:
        return ()
    entries, complaint = _read(path, generation)
    setup = setup_of(device)
    entry = entries.get((setup, shape))
    setups = {other: None for other, _ in entries if other.device == setup.device}
    if not complaint and setups and setup not in setups:
        complaint = f"measured on {'; on '.join(map(str, setups))}; this is {setup}"
    mine = object()
    if entry is None and complaint and _warned.setdefault(str(path), mine) is mine:  # without a lock that a fork might leave held
        way_out = "measure anew with `dilkit tune`, or remove the file"
        warnings.warn(f"{path} is ignored: {complaint}; {way_out}", stacklevel=2)
    return entry or ()


def read_again() -> None:
    """Read the file again at its next use. Call this after writing it."""
    global generation
    generation = next(_generations)
    _warned.clear()


@lru_cache(maxsize=8)
def setup_of(device: Device) -> TunedSetup:
    capability = "none" if device.capability is None else f"{device.capability[0]}.{device.capability[1]}"
    try:
        torch_version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch_version = "unknown"
    return TunedSetup(device.type, device.name or device.type, capability, torch_version, __version__)


def shape_of(problem: Problem) -> TunedShape:
    flags = dict(is_causal=problem.is_causal, requires_grad=problem.requires_grad, dropout=problem.dropout_p > 0)
    flags |= dict(key_padding_mask=problem.key_padding_mask, varlen=problem.varlen, kv_cache=problem.kv_cache)
    return TunedShape(problem.dtype, problem.head_dim, branches=branches_of(problem), seq=bucket(problem.seq), **flags)


def branches_of(problem: Problem) -> str:
    """Return the branches as "2048/1 4096/2": segment length, rounded to a power of two, and rate; others by call."""
    pattern, seq = problem.pattern, max(problem.seq, 1)
    parts = [
        f"{bucket(min(b.segment_length, seq))}/{b.dilation_rate}" if isinstance(b, DilatedSegment) else b.call()
        for b in pattern.branches
    ]
    return " ".join([*parts, *(["once"] if pattern.overlap == "once" else []), *([] if pattern.heads is None else ["by heads"])])


_generations = count(1)
generation = 0
"""A number that changes whenever the file is to be read again."""
_warned: dict[str, object] = {}


@lru_cache(maxsize=8)
def _read(path: Path, generation: int) -> tuple[dict[tuple[TunedSetup, TunedShape | TunedKernel], Seconds], str]:
    """Read the measurements in `path` and the fault of the file; a missing one is a fault if a variable names it."""
    if environment.tuned().strip() and not path.exists():
        return {}, "there is no such file"
    try:
        return {(entry.setup, entry.shape): entry.seconds for entry in load(path)}, ""
    except TunedError as error:
        return {}, str(error).removeprefix(f"{path}: ")
