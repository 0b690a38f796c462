"""Steps of decoding by `kernels/attend_stored.cu`: what it is compiled with, how its work is divided, and its argument."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from dilkit.backends.cuda import scores
from dilkit.backends.cuda.arguments import make_arguments
from dilkit.backends.cuda.launch import CudaLauncher
from dilkit.backends.cuda.table import STORAGE, CudaKernel, kernel_for, padded
from dilkit.decoding.placed import PlacedStep
from dilkit.device import Capability
from dilkit.op.boundary import empty_outputs
from dilkit.problem import Problem

MOST_GROUP = 8
"""Query heads that a block computes at once, with sums in registers. A larger group reads stored rows once for each so many."""

PIECE_ROWS = 256
"""Stored rows for which another block is worth a partial, about."""

MOST_ITEMS, MOST_TOKENS = 2**31 - 2**20, 2**31 - 1
"""The kernel counts them by 32-bit numbers."""


class Division(NamedTuple):
    """How the work of a step is divided: rows and their shares of query heads, the pieces of each, and items in all."""

    merges: int
    splits: int
    items: int


def kernel_of(problem: Problem, capability: Capability) -> CudaKernel:
    """The kernel for steps of `problem`."""
    stored = {**STORAGE, "int8": 3}[problem.stored]
    macros = ("GROUP", _group(problem)), ("STORED", stored), *scores.macros("stored", problem.softcap > 0, problem.bias)
    return kernel_for("stored", problem.dtype, problem.head_dim, capability, scores=macros)


def attend(placed: PlacedStep, kernel: CudaKernel, launcher: CudaLauncher) -> tuple[Tensor, Tensor]:
    """`(out, lse)` of a step, in one launch."""
    step, device = placed.step, placed.step.query.device
    resident = launcher.resident(kernel, device)
    division = _divided(placed, resident)
    out, lse = empty_outputs(step.query)
    sizes = division.merges * division.splits, _group(placed.problem), padded(placed.problem.head_dim) + 2
    partials = torch.empty(sizes, dtype=torch.float32, device=device)
    tensors = dict(query=step.query, key=step.key, value=step.value, out=out, lse=lse)
    if step.bias is not None:
        tensors |= dict(bias_weights=step.bias.weights, positions=step.bias.positions)
    problem = replace(placed.problem, batch=step.query.shape[0], seq=step.query.shape[1])
    addresses = dict(counter=launcher.counter(device))
    arguments = make_arguments(problem, tensors, addresses=addresses, step=_numbers(placed, partials, division))
    if division.items:
        launcher.launch(kernel, min(division.items, resident), arguments, device)
    return out, lse


def _group(problem: Problem) -> int:
    """The query heads that are computed at once, as a power of two."""
    return min(MOST_GROUP, 1 << (problem.heads // problem.kv_heads - 1).bit_length())


def _divided(placed: PlacedStep, resident: int) -> Division:
    """As many pieces as blocks that run at once, if that many are worth it."""
    problem, pairs = placed.problem, placed.step.query.shape[:2].numel() * placed.problem.kv_heads
    merges = pairs * -(-problem.heads // problem.kv_heads // _group(problem))
    splits = max(1, min(resident // max(1, merges), -(-placed.most // PIECE_ROWS)))
    items = (pairs if len(placed.writes) else 0) + merges * (splits + 1)
    if items > MOST_ITEMS:
        raise ValueError(
            f"query has {pairs} rows and key/value heads, {items} items of work; at most {MOST_ITEMS}: make several calls"
        )
    return Division(merges, splits, items)


def _numbers(placed: PlacedStep, partials: Tensor, division: Division) -> tuple[int, ...]:
    """The values of `dilkit.backends.cuda.arguments.STEP`."""
    step = placed.step
    tables = placed.spans, placed.writes, placed.pages, placed.memory, partials
    tokens = 0 if step.bias is None or step.bias.positions is None else step.bias.positions.shape[1]
    if tokens > MOST_TOKENS:
        raise ValueError(f"positions of the bias are of {tokens} tokens; at most {MOST_TOKENS}, or backend='reference'")
    counts = (len(x) for x in (placed.pages, placed.spans, placed.writes, step.stored, step.positions, step.unseen))
    sink = 0 if step.sink is None else step.sink.data_ptr()
    return *(x.data_ptr() if x.numel() else 0 for x in tables), sink, *counts, tokens, division.splits
