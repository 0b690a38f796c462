"""Steps of decoding by the kernel of `attend_stored`: its arguments, and its launch."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from dilkit.backends.tiles.steps import counts_of, divided, empty_partials, group_of
from dilkit.backends.triton.biases import bias_constants, bias_view
from dilkit.backends.triton.launch import TritonLauncher
from dilkit.backends.triton.sizes import padded
from dilkit.decoding.layout import width_of
from dilkit.decoding.protocol import PlacedStep, Step
from dilkit.op.boundary import empty_outputs
from dilkit.problem import Problem


def attend(placed: PlacedStep, launcher: TritonLauncher) -> tuple[Tensor, Tensor]:
    """Compute `(out, lse)` of a decoding step in one launch."""
    step, problem, device = placed.step, placed.problem, placed.step.query.device
    sizes = launcher.sizes("stored", problem, low=True)
    division = divided(placed, launcher.resident(sizes, device))
    out, lse = empty_outputs(step.query)
    if not division.items:
        return out, lse
    views = *(_view(x) for x in (step.query, *_new_rows(step), out)), lse, step.sink
    tables = placed.spans, placed.writes, placed.pages, placed.memory, empty_partials(placed, division, padded(problem.head_dim))
    counts, of_bias = (*counts_of(placed), division.splits), _bias(step, problem)
    numbers = step.query.shape[1], problem.heads, problem.kv_heads, division.writes, division.merges
    arguments = *views, *tables, *counts, *of_bias, launcher.counter(device), *numbers, problem.scale * math.log2(math.e)
    launcher.launch("stored", sizes, division.items, arguments, _constants(problem) | dict(COLUMNS=sizes.columns))
    return out, lse


def _constants(problem: Problem) -> dict[str, Any]:
    """Return the kernel's constants, other than its sizes."""
    import torch
    import triton.language as tl

    stored, dim = getattr(torch, problem.stored), problem.head_dim
    kinds = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.int8: tl.int8}
    sizes = dict(DIM=dim, SIZE=padded(dim), WIDTH=width_of(dim, stored), GROUP=group_of(problem))
    return dict(STORED=kinds[stored], SOFTCAP=problem.softcap) | sizes | bias_constants(problem)


def _new_rows(step: Step) -> tuple[Tensor, Tensor]:
    """Return the new keys and values; where there are none, the query stands in for them."""
    return (step.query, step.query) if step.key is None or step.value is None else (step.key, step.value)


def _view(x: Tensor) -> Any:
    from dilkit.backends.triton.tiles import View

    return View(x.detach(), *x.stride()[:3])


def _bias(step: Step, problem: Problem) -> tuple[Any, ...]:
    """Return a bias as the kernel's arguments: weights, positions, their batch stride, entries and sizes."""
    if step.bias is None:
        return None, None, 0, 0, (1, 1, 1)
    view = bias_view(dict(bias_weights=step.bias.weights, positions=step.bias.positions), problem, None)
    return view.weights, view.positions, view.apart, view.entries, view.sizes
