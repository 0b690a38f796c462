"""Steps of decoding by `kernels/attend_stored.cu`: what it is compiled with, its argument, and its launch."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from dilkit.backends.cuda import scores
from dilkit.backends.cuda.arguments import make_arguments
from dilkit.backends.cuda.launch import CudaLauncher
from dilkit.backends.cuda.table import STORAGE, CudaKernel, kernel_for, padded
from dilkit.backends.tiles.steps import counts_of, divided, empty_partials, group_of
from dilkit.decoding.protocol import PlacedStep
from dilkit.device import Capability
from dilkit.op.boundary import empty_outputs
from dilkit.problem import Problem


def kernel_of(problem: Problem, capability: Capability) -> CudaKernel:
    """Return the kernel for decoding steps of `problem`."""
    stored = {**STORAGE, "int8": 3}[problem.stored]
    macros = ("GROUP", group_of(problem)), ("STORED", stored), *scores.macros("stored", problem.softcap > 0, problem.bias)
    return kernel_for("stored", problem.dtype, problem.head_dim, capability, scores=macros)


def attend(placed: PlacedStep, kernel: CudaKernel, launcher: CudaLauncher) -> tuple[Tensor, Tensor]:
    """Compute `(out, lse)` of a decoding step in one launch."""
    step, device = placed.step, placed.step.query.device
    resident = launcher.resident(kernel, device)
    division = divided(placed, resident)
    out, lse = empty_outputs(step.query)
    partials = empty_partials(placed, division, padded(placed.problem.head_dim))
    tensors = dict(query=step.query, key=step.key, value=step.value, out=out, lse=lse)
    if step.bias is not None:
        tensors |= dict(bias_weights=step.bias.weights, positions=step.bias.positions)
    problem = replace(placed.problem, batch=step.query.shape[0], seq=step.query.shape[1])
    addresses = dict(counter=launcher.counter(device))
    arguments = make_arguments(problem, tensors, addresses=addresses, step=_numbers(placed, partials, division.splits))
    if division.items:
        launcher.launch(kernel, min(division.items, resident), arguments, device)
    return out, lse


def _numbers(placed: PlacedStep, partials: Tensor, splits: int) -> tuple[int, ...]:
    """Return the values of the fields `dilkit.backends.cuda.arguments.STEP`."""
    tables = placed.spans, placed.writes, placed.pages, placed.memory, partials
    sink = 0 if placed.step.sink is None else placed.step.sink.data_ptr()
    return *(x.data_ptr() if x.numel() else 0 for x in tables), sink, *counts_of(placed), splits
