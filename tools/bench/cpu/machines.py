"""Results of the CPU suite from several machines, put side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dilkit.tools.bench.cpu.record import CpuResult
from dilkit.tools.bench.cpu.targets import TARGETS


def merged(results: Sequence[CpuResult]) -> CpuResult:
    """The first machine's result with those of the others beside it, each judged anew by today's targets.

    A machine is a CPU with so many cores and an instruction set; of one that comes twice the later result stands in the place of
    the earlier. Raises ValueError where results are of other lengths.
    """
    by_machine: dict[tuple[object, ...], CpuResult] = {}
    for result in results:
        for one in (result, *result.beside):
            by_machine[one.environment.device_name, one.environment.cores, one.environment.features, one.isa] = one
    if len({one.quick for one in by_machine.values()}) > 1:
        quick = ", ".join(f"{one.machine} of {one.date}" for one in by_machine.values() if one.quick)
        raise ValueError(f"--merge: measured with --quick at other lengths than the rest: {quick}; run the whole suite there")
    first, *others = (replace(one, beside=(), figures=tuple(t.judge(one) for t in TARGETS)) for one in by_machine.values())
    return replace(first, beside=tuple(others))
