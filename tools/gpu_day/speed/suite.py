"""Parts of the suite of CUDA kernels, without what is wrong and without numba."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from dilkit.tools.bench.gpu import OURS, GpuSizes, GpuSuite, implementations
from dilkit.tools.bench.run import begin, measured
from dilkit.tools.gpu_day import backends
from dilkit.tools.gpu_day.step import Context, Item, absent
from dilkit.tools.results.decode import encode

REPEATS = 7
REHEARSED = GpuSuite(quick=True, repeats=1, device="cpu", sizes=GpuSizes(divisor=256))
"""On the CPU, at lengths at which a step takes a second."""


def part(context: Context, dtype: str, *words: str) -> Iterator[Item]:
    """The steps of the suite that have all of `words` in their names, with the backends that are right in `dtype`."""
    if "longest" in words and not context.right(OURS[0], dtype):
        yield absent("the longest sequence", f"{OURS[0]}, which computes it, is wrong in {dtype}")
        return
    if context.rehearse and {"forward", "backward"} & set(words):
        words = (*words, "A,")
    suite = replace(REHEARSED if context.rehearse else GpuSuite(repeats=REPEATS), rows=words)
    with suite.prepared():
        known = backends.timed(context, dtype, (i.name for i in implementations() if i.name not in backends.LEFT_OUT))
    suite = replace(suite, backend=tuple(known))
    steps = list(suite.steps())
    with suite.prepared() as facts:
        result = begin(suite, steps, dict(backend=known, rows=list(words)), facts)
        for step in steps:
            result = measured(result, step)
            yield encode(result)
