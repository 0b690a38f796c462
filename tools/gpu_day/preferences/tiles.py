"""Tall tiles against low ones, in the kernels that have both."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product

from dilkit import registry
from dilkit.backends.cuda.backend import CupyRaw
from dilkit.backends.tiles.schedule import LOW_ROWS, MOST_ROWS
from dilkit.device import device_named
from dilkit.problem import Problem
from dilkit.testing.tensors import Tensors
from dilkit.tools.console.text import error_line, in_seconds
from dilkit.tools.gpu_day.preferences.sweep import LAYERS
from dilkit.tools.gpu_day.step import Context, Item, absent, noted
from dilkit.tools.measure.implementation import backend_implementations
from dilkit.tools.measure.timing import time_interleaved

HEIGHTS = {"tall": MOST_ROWS, "low": LOW_ROWS}
NAME = "cupy_raw"


def heights(context: Context) -> Iterator[Item]:
    """Forward and training in bf16, causal and not, at both head_dims."""
    device = device_named(context.device)
    if not context.right(NAME, "bfloat16"):
        yield absent("tiles", f"{NAME} is wrong in bfloat16")
        return
    for (layer, masked), dim, causal, train in product(LAYERS[:5:2], (64, 128), (False, True), (False, True)):
        flags = dict(is_causal=causal, requires_grad=train, key_padding_mask=masked)
        problem = layer.problem(dim, dtype="bfloat16", device=device, **flags)
        if reasons := backend_implementations([NAME])[0].refusals(problem):
            yield absent("tiles", "; ".join(reasons))
            return
        try:
            yield _compared(problem)
        except Exception as error:
            yield absent(str(problem), error_line(error))


def _compared(problem: Problem) -> Item:
    inputs, calls = Tensors.random(problem), {}
    for name, rows in HEIGHTS.items():
        backend = CupyRaw(tile_rows=rows)
        backend.name = f"{NAME}: {name}"
        registry.register_backend(backend)
        (implementation,) = backend_implementations([backend.name])
        calls[name] = partial(implementation.once, inputs, problem)
    try:
        times = {name: found.median_s for name, found in time_interleaved(calls, 7, 2, 0.01, problem.device.type).items()}
    finally:
        for name in HEIGHTS:
            registry.unregister_backend(f"{NAME}: {name}")
    shown = ", ".join(f"{name} {in_seconds(seconds)}" for name, seconds in times.items())
    return noted(str(problem), f"{shown}: tall / low {times['tall'] / times['low']:.2f}", **times)
