"""The CUDA kernels themselves: compiled, loaded, launched, and the first call of a process."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch

from dilkit import environment
from dilkit.backends.cuda import compile as cuda_compile
from dilkit.backends.cuda import scores
from dilkit.backends.cuda.launch import CupyLauncher
from dilkit.backends.cuda.table import HEAD_DIMS, STORAGE, CudaKernel, kernel_for, padded
from dilkit.backends.tiles.backend import ROLES
from dilkit.backends.tiles.schedule import LOW_ROWS, MOST_ROWS
from dilkit.backends.triton import sizes
from dilkit.device import Capability, device_named
from dilkit.selection.proving import cases
from dilkit.testing.problems import LARGE
from dilkit.testing.tensors import Tensors
from dilkit.threads import usable_cores
from dilkit.tools.commands.verify import LISTED
from dilkit.tools.console.text import error_line, in_seconds
from dilkit.tools.gpu_day import backends
from dilkit.tools.gpu_day.correctness.checking import checked
from dilkit.tools.gpu_day.step import Context, Item, absent, judged, noted
from dilkit.tools.measure.implementation import backend_implementations

ASSUMED: Capability = (9, 0)
"""What a rehearsal compiles for."""
REHEARSED = 2
SECONDS = 90.0
"""For the cases that launch every kernel."""
KINDS: tuple[dict[str, Any], ...] = ({}, dict(varlen=True), dict(dropout=True), dict(varlen=True, dropout=True))
"""Of calls: each has kernels of its own."""


def needed(capability: Capability) -> list[CudaKernel]:
    """The kernels of every dtype and head_dim, and those of the problem list for packed sequences, dropout, softcaps and biases.

    Those of one compilation are next to each other.
    """
    listed = (
        (c.dtype, c.head_dim, bool(c.lengths) and not c.rows, c.dropout_p > 0, c.softcap > 0, c.problem().bias)
        for c in (*LISTED, *LARGE)
    )
    able = [(dtype, padded(dim), *how) for dtype, dim, *how in listed if dtype in STORAGE and dim <= HEAD_DIMS[-1]]
    asked = dict.fromkeys([*product(STORAGE, HEAD_DIMS, (False,), (False,), (False,), (None,)), *able])
    kernels: dict[CudaKernel, None] = {}
    for (dtype, dim, packed, dropout, *changed), role, vector, rows in product(
        asked, ROLES, (True, False), (MOST_ROWS, LOW_ROWS)
    ):
        flags = (packed, dropout, scores.macros(role, *changed)) if role != "dots" else ()
        kernels[kernel_for(role, dtype, dim, capability, vector, rows, *flags)] = None
    return sorted(kernels, key=_unit)


def _unit(kernel: CudaKernel) -> tuple[object, ...]:
    """Kernels of equal ones come from one compilation."""
    return kernel.source, sorted(kernel.macros.items())


def compiled(context: Context) -> Iterator[Item]:
    """All kernels for the device, in as many processes as there are cores; those in the folder of kernels are taken."""
    try:
        version = ".".join(map(str, cuda_compile.compiler_version()))
    except RuntimeError as error:
        yield absent("compiler", error_line(error))
        return
    capability = device_named(context.device).capability or ASSUMED
    kernels = needed(capability)[: REHEARSED if context.rehearse else None]
    began, before = time.monotonic(), _kept()
    failures = compile_all(kernels, capability)
    seconds, made = time.monotonic() - began, _kept() - before
    yield from (judged(name, why, "cupy_raw") for name, why in failures)
    where = f"sm_{capability[0]}{capability[1]}, NVRTC {version}, {usable_cores()} cores"
    text = f"{len(kernels)} for {where}: {made} compiled, in {in_seconds(seconds)}; the others were in {environment.cuda_cache()}"
    yield noted("kernels", text, seconds=seconds, compiled=float(made))


def compile_all(kernels: Sequence[CudaKernel], capability: Capability) -> list[tuple[str, str]]:
    """Compile into the folder of kernels what is not there. (kernel, why) of those that the compiler refuses."""
    units = list({repr(_unit(kernel)): kernel for kernel in kernels}.values())
    with multiprocessing.get_context("spawn").Pool(min(usable_cores(), len(units))) as pool:
        failures = pool.map(partial(_failure, capability), units, chunksize=1)
    return [(kernel.name, why) for kernel, why in zip(units, failures, strict=True) if why]


def _failure(capability: Capability, kernel: CudaKernel) -> str:
    """Why the compiler refuses a kernel; empty if it does not."""
    try:
        cuda_compile.code_of(kernel, capability)
    except RuntimeError as error:
        return error_line(error)
    return ""


def _kept() -> int:
    """How many compilations are kept."""
    folder = environment.cuda_cache()
    return len(list(folder.glob("*.cubin"))) if folder and folder.is_dir() else 0


def loaded(context: Context) -> Iterator[Item]:
    """Each kernel on the device: how many blocks of it a multiprocessor holds, beside what registers were limited for."""
    device = device_named(context.device)
    if "cupy_raw" not in backends.able(context) or device.capability is None:
        yield absent("occupancy", "no CUDA device")
        return
    launcher, where = CupyLauncher(), torch.device(context.device)
    processors, verdicts = torch.cuda.get_device_properties(where).multi_processor_count, Counter[str]()
    for kernel in needed(device.capability):
        name = f"{kernel.name} {dict(kernel.defines)}, tiles of {kernel.tile_rows}"
        try:
            blocks = launcher.resident(kernel, where) // processors
        except Exception as error:
            yield judged(name, error_line(error), "cupy_raw")
            continue
        verdict = "as promised" if blocks == kernel.blocks else "fewer" if blocks < kernel.blocks else "more"
        verdicts[verdict] += 1
        if verdict == "fewer":
            yield noted(name, f"the table promises {kernel.blocks} blocks, the driver {blocks}")
    yield noted("blocks on a multiprocessor", ", ".join(f"{count} {what}" for what, count in verdicts.items()))


def launched(context: Context, name: str) -> Iterator[Item]:
    """The cases of a proof for every dtype, head_dim and kind of call: every kernel runs, and is compared with the oracle."""
    few = 1 if context.rehearse else None
    padded_to = sizes.HEAD_DIMS if name == "triton" else HEAD_DIMS
    dims, dtypes, kinds = padded_to[:few], backends.DTYPES[:few], KINDS[:few]
    if name not in backends.ours(context):
        yield absent(f"launch of {name}", "cannot compute here: `dilkit info` says why")
        return
    every = [case for dtype, dim, kind in product(dtypes, dims, kinds) for case in cases(dtype, dim, gradients=True, **kind)]
    every.sort(key=lambda case: (case.dropout_p, case.variant))  # those at once are of other dtypes and head_dims: other kernels
    results = []
    for result in checked((name,), every, context, SECONDS):
        results.append(result)
        if result.verdict in ("failed", "broken"):
            case = result.case
            what = f"{name}, {case.dtype} x {case.head_dim}, {case.variant}{', dropout' * (case.dropout_p > 0)}"
            yield judged(what, "; ".join(result.reasons), name, case.dtype)
    for dtype in dtypes:
        right = sum(result.verdict == "passed" and result.case.dtype == dtype for result in results)
        yield noted(f"{name}, {dtype}", f"{right} small problems right, forward and gradients")
    if missing := len(every) - len(results):
        yield noted(f"launch of {name}: cases left out", f"{missing} of {len(every)}, for {SECONDS:.0f} seconds were over")


def first_call(context: Context) -> Iterator[Item]:
    """What a user waits for: with the kernels compiled, the first forward and backward pass of a process, and the proof."""
    asked = backends.problem(device_named(context.device), dtype="bfloat16", requires_grad=True)
    inputs = Tensors.random(asked)
    for name in backends.ours(context):
        (implementation,) = backend_implementations([name])
        for proof, what in (("off", "first call"), ("always", "first call with its proof")):
            os.environ[environment.GPU_PROOF.name] = proof
            began = time.perf_counter()
            gradients = implementation.once(inputs, asked)
            gradients[0].sum().item()
            seconds = time.perf_counter() - began
            yield noted(f"{name}: {what}", in_seconds(seconds), seconds=seconds)
