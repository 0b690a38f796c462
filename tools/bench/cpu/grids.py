"""Neighborhoods of a grid beside what shows as many keys: a window by the same kernel, and torch with a mask of all pairs.

NATTEN's own kernels for CPUs, which its versions up to 0.17 have, are not measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import split

from dilkit.pattern import Pattern
from dilkit.problem import Problem
from dilkit.testing.tensors import Tensors
from dilkit.tools.bench.cpu.cases import Grid
from dilkit.tools.bench.cpu.measured import MASKED, WINDOW, GridCase
from dilkit.tools.bench.ways import Way, by_torch, compared, native

ROWS = 1024
"""Of a mask that are made at once."""


def beside_window(grid: Grid, repeats: int, **sizes: int) -> GridCase:
    """Both by the kernel, on the same tensors of so many `heads` and `head_dim`."""
    problem = _problem(grid, sizes)
    inputs = Tensors.random(problem)
    window = replace(problem, pattern=Pattern.of(grid.window))
    return _case(grid, {"native": native(problem, inputs), WINDOW: native(window, inputs)}, repeats)


def beside_mask(grid: Grid, repeats: int, **sizes: int) -> GridCase:
    """The kernel, and torch's attention with a mask that was made before it is timed."""
    problem = _problem(grid, sizes)
    inputs = Tensors.random(problem)
    parts = split(torch.arange(problem.seq), ROWS)
    mask = torch.cat([problem.pattern.count_rows(rows, problem.seq, 1)[0] > 0 for rows in parts])[None, None]

    torchs = Way(problem, inputs, lambda *rows: by_torch(rows, mask))
    return _case(grid, {"native": native(problem, inputs), MASKED: torchs}, repeats)


def _problem(grid: Grid, sizes: Mapping[str, int]) -> Problem:
    fields: Any = dict(sizes, pattern=Pattern.of(grid.neighborhood), seq=grid.neighborhood.tokens)
    return Problem(**fields)


def _case(grid: Grid, ways: Mapping[str, Way], repeats: int) -> GridCase:
    case = GridCase(sides=grid.sides, shape=grid.shape, **compared(ways, repeats))
    able = [name for name in ways if case.timed(name)]
    rates = {name: (case.entries[name].flops or 0.0) / case.seconds(name) / 1e9 for name in able}
    return replace(case, entries=case.entries | {name: replace(case.entries[name], gflops=rates[name]) for name in able})
