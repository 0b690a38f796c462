"""The steps of a GPU day, those that matter most first in each stage: time may run out."""

from __future__ import annotations

from dataclasses import replace

from dilkit.tools.gpu_day.step import Step

PARTS = 8
"""Steps that the sweep is dealt out to."""

OURS, REHEARSED = ("cupy_raw", "triton"), ("native",)
"""Backends with kernels of our own, on a GPU and in a rehearsal: verified one by one, so that one that hangs costs itself."""


OF_EACH = (
    Step("correctness", "launch", "every kernel launched", 170, "correctness.launches:launched"),
    Step("correctness", "verify", "verify", 170, "correctness.verified:verified"),
)
"""Steps that there is one of for each of our backends."""
KERNELS = (
    Step("correctness", "versions", "versions", 40, "correctness.installation:versions"),
    Step("correctness", "compile", "all kernels, compiled on all cores", 180, "correctness.launches:compiled"),
    Step("correctness", "load", "all kernels, loaded: occupancy", 60, "correctness.launches:loaded"),
)
"""Before those of the first of our backends."""
TORCH = Step("correctness", "torch", "verify: torch's kernels", 170, "correctness.verified:verified", ("torch",))
"""After them: from 8.0 on, the automatic choice for halves is torch's."""
WAYS = (
    Step("correctness", "graph", "in a CUDA graph", 60, "correctness.calls:graph"),
    Step("correctness", "stream", "on a side stream", 40, "correctness.calls:stream"),
    Step("correctness", "small cache", "a tiny DILKIT_CACHE_BYTES", 60, "correctness.calls:small_cache"),
    Step("correctness", "long", "the longest sequence", 60, "correctness.calls:longest"),
    Step("correctness", "compile mode", "torch.compile", 120, "correctness.calls:in_compiled_code"),
    Step("correctness", "rough times", "rough times", 90, "correctness.rough:times"),
    Step("correctness", "ranks", "two ranks that share the device", 110, "correctness.two_ranks:two_ranks"),
)
"""Before those of the other backends."""
REST = (
    Step("correctness", "first call", "the first call in a new process", 90, "correctness.launches:first_call"),
    Step("correctness", "second device", "on a second device", 40, "correctness.calls:second_device"),
    Step("correctness", "memcheck", "compute-sanitizer memcheck", 170, "correctness.sanitizer:sanitized", ("memcheck",)),
    Step("correctness", "racecheck", "compute-sanitizer racecheck", 170, "correctness.sanitizer:sanitized", ("racecheck",)),
    Step("correctness", "generated", "verify: FlexAttention", 170, "correctness.verified:verified", ("generated",)),
)
SPEED = (
    Step("speed", "bf16 forward", "suite: bf16, forward", 200, "speed.suite:part", ("bfloat16", "bfloat16", "forward")),
    Step("speed", "bf16 backward", "suite: bf16, backward", 200, "speed.suite:part", ("bfloat16", "bfloat16", "backward")),
    Step("speed", "launches", "suite: launches", 40, "speed.suite:part", ("float32", "launches")),
    Step("speed", "fp32 forward", "suite: fp32, forward", 200, "speed.suite:part", ("float32", "float32", "forward")),
    Step("speed", "views", "strided against contiguous views in torch's kernels", 60, "speed.views:strided"),
    Step("speed", "memory", "suite: memory", 40, "speed.suite:part", ("float32", "memory")),
    Step("speed", "lengths", "suite: lengths", 60, "speed.suite:part", ("float32", "seeds")),
    Step("speed", "longest", "suite: the longest sequence", 60, "speed.suite:part", ("bfloat16", "longest")),
    Step("speed", "fp32 backward", "suite: fp32, backward", 200, "speed.suite:part", ("float32", "float32", "backward")),
)
PREFERENCES = (
    *(
        Step("preferences", f"sweep {i + 1}", f"sweep, part {i + 1} of {PARTS}", 120, "preferences.sweep:part", (str(i),))
        for i in range(PARTS)
    ),
    Step("preferences", "tiles", "tall against low tiles", 60, "preferences.tiles:heights"),
    Step("preferences", "counters", "counters of the profiler", 90, "preferences.counters:counters"),
)


def plan(rehearse: bool) -> tuple[Step, ...]:
    """All steps, of a GPU or of a rehearsal."""
    first, *others = REHEARSED if rehearse else OURS
    return (*KERNELS, *_of(first), TORCH, *WAYS, *(step for name in others for step in _of(name)), *REST, *SPEED, *PREFERENCES)


def _of(name: str) -> list[Step]:
    """The steps of one backend of ours."""
    named = ((step, f"{step.name} {name}", f"{step.what}: {name}") for step in OF_EACH)
    return [replace(step, name=own, what=what, backend=name, options=(name,)) for step, own, what in named]
