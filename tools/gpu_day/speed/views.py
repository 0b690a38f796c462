"""What torch's kernels make of strided views: the same rows, dilated in place, copied before, and contiguous from the start."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product

import torch

from dilkit import Pattern, Problem
from dilkit.backends.sdpa.kernels import KERNELS, SdpaKernel
from dilkit.backends.sdpa.strided_calls import TensorStrides, strided_calls
from dilkit.device import device_named
from dilkit.testing.tensors import Tensors
from dilkit.tools.console.text import error_line, in_seconds
from dilkit.tools.gpu_day.step import Context, Item, absent, noted
from dilkit.tools.measure.timing import time_interleaved

NAMES = ("cudnn", "flash", "flash3", "flash4", "cpu-flash")
RATES, ROWS, HEAD_DIMS = (1, 2, 4, 16), 2048, (64, 128)
SEQ = 65536


def strided(context: Context) -> Iterator[Item]:
    """Each kernel, rate and head_dim in bf16, forward."""
    device, small = device_named(context.device), 64 if context.rehearse else 1
    kernels = [kernel for kernel in KERNELS if kernel.name in NAMES and context.right(f"sdpa:{kernel.name}", "bfloat16")]
    for kernel, dim, rate in product(kernels, HEAD_DIMS[: 1 if context.rehearse else None], RATES):
        pattern = Pattern([ROWS // small * rate], [rate])
        asked = Problem(pattern=pattern, seq=SEQ // small, heads=8, head_dim=dim, dtype="bfloat16", device=device)
        what = f"{kernel.name}, bf16, head_dim {dim}, rate {rate}"
        if kernel.limits.devices is not None and context.kind not in kernel.limits.devices:
            continue
        if reasons := kernel.refusals(asked):
            yield absent(what, "; ".join(map(str, reasons)))
            continue
        try:
            yield _timed(what, kernel, asked, 2 if context.rehearse else 15)
        except Exception as error:
            yield absent(what, error_line(error))


def _timed(what: str, kernel: SdpaKernel, asked: Problem, repeats: int) -> Item:
    inputs = Tensors.random(asked)
    strides = tuple(map(TensorStrides.of, inputs.qkv))
    calls = strided_calls(asked.pattern, asked.seq, asked.heads, asked.kv_heads, asked.batch, strides)
    views = [[call.kernel_view(x) for x in inputs.qkv] for call in calls]
    copies = [[x.contiguous() for x in view] for view in views]

    def run(given: list[list[torch.Tensor]], copied: bool = False) -> None:
        with kernel.active():
            for x in given:
                kernel.forward(*([one.contiguous() for one in x] if copied else x), None, False, asked.scale)

    ways = {"strided": partial(run, views), "contiguous": partial(run, copies), "copied": partial(run, views, copied=True)}
    kind = asked.device.type
    times = {name: samples.median_s for name, samples in time_interleaved(ways, repeats, 2, 0.005, kind).items()}
    shown = ", ".join(f"{name} {in_seconds(seconds)}" for name, seconds in times.items())
    return noted(what, f"{shown}: strided / contiguous {times['strided'] / times['contiguous']:.2f}", **times)
