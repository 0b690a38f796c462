"""The steps of a GPU day, those that matter most first in each stage: time may run out."""

from __future__ import annotations

from dataclasses import replace

from dilkit.tools.gpu_day.step import Step

PARTS = 8
"""Steps that the sweep is dealt out to."""

OURS, REHEARSED = ("cupy_raw", "triton"), ("native",)
"""Backends with kernels of our own, on a GPU and in a rehearsal: verified one by one, so that one that hangs costs itself."""


OF_EACH = (
    Step("right", "launch", "every kernel launched", 170, "right.kernels:launched"),
    Step("right", "verify", "verify", 170, "right.verified:verified"),
)
"""Steps that there is one of for each of our backends."""
KERNELS = (
    Step("right", "versions", "versions", 40, "right.installation:versions"),
    Step("right", "compile", "all kernels, compiled on all cores", 180, "right.kernels:compiled"),
    Step("right", "load", "all kernels, loaded: occupancy", 60, "right.kernels:loaded"),
)
"""Before those of the first of our backends."""
WAYS = (
    Step("right", "graph", "in a CUDA graph", 60, "right.calls:graph"),
    Step("right", "stream", "on a side stream", 40, "right.calls:stream"),
    Step("right", "small cache", "a tiny DILKIT_CACHE_BYTES", 60, "right.calls:small_cache"),
    Step("right", "long", "the longest sequence", 60, "right.calls:longest"),
    Step("right", "compile mode", "torch.compile", 120, "right.calls:in_compiled_code"),
    Step("right", "rough times", "rough times", 90, "right.rough:times"),
    Step("right", "ranks", "two ranks that share the device", 110, "right.ranks:two_ranks"),
)
"""Before those of the other backends."""
REST = (
    Step("right", "first call", "the first call in a new process", 90, "right.kernels:first_call"),
    Step("right", "torch", "verify: torch's kernels", 170, "right.verified:verified", ("torch",)),
    Step("right", "second device", "on a second device", 40, "right.calls:second_device"),
    Step("right", "memcheck", "compute-sanitizer memcheck", 170, "right.sanitizer:sanitized", ("memcheck",)),
    Step("right", "racecheck", "compute-sanitizer racecheck", 170, "right.sanitizer:sanitized", ("racecheck",)),
)
FAST = (
    Step("fast", "bf16 forward", "suite: bf16, forward", 200, "fast.suite:part", ("bfloat16", "bfloat16", "forward")),
    Step("fast", "bf16 backward", "suite: bf16, backward", 200, "fast.suite:part", ("bfloat16", "bfloat16", "backward")),
    Step("fast", "launches", "suite: launches", 40, "fast.suite:part", ("float32", "launches")),
    Step("fast", "fp32 forward", "suite: fp32, forward", 200, "fast.suite:part", ("float32", "float32", "forward")),
    Step("fast", "views", "strided against contiguous views in torch's kernels", 60, "fast.views:strided"),
    Step("fast", "memory", "suite: memory", 40, "fast.suite:part", ("float32", "memory")),
    Step("fast", "lengths", "suite: lengths", 60, "fast.suite:part", ("float32", "seeds")),
    Step("fast", "longest", "suite: the longest sequence", 60, "fast.suite:part", ("bfloat16", "longest")),
    Step("fast", "fp32 backward", "suite: fp32, backward", 200, "fast.suite:part", ("float32", "float32", "backward")),
)
ROWS = (
    *(Step("rows", f"sweep {i + 1}", f"sweep, part {i + 1} of {PARTS}", 120, "rows.sweep:part", (str(i),)) for i in range(PARTS)),
    Step("rows", "tiles", "tall against low tiles", 60, "rows.tiles:heights"),
    Step("rows", "counters", "counters of the profiler", 90, "rows.counters:counters"),
)


def plan(rehearse: bool) -> tuple[Step, ...]:
    """All steps, of a GPU or of a rehearsal."""
    first, *others = REHEARSED if rehearse else OURS
    return (*KERNELS, *_of(first), *WAYS, *(step for name in others for step in _of(name)), *REST, *FAST, *ROWS)


def _of(name: str) -> list[Step]:
    """The steps of one backend of ours."""
    named = ((step, f"{step.name} {name}", f"{step.what}: {name}") for step in OF_EACH)
    return [replace(step, name=own, what=what, backend=name, options=(name,)) for step, own, what in named]
