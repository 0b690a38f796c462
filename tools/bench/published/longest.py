"""The longest sequence that fits into a given amount of memory: found by trying, doubling first, then halving the interval."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from dilkit.problem import Problem
from dilkit.testing import memory
from dilkit.testing.tensors import Tensors
from dilkit.tools.bench.published.record import Longest, Trial
from dilkit.tools.measure.implementation import Implementation


def longest(implementation: Implementation, problem: Problem, limit: int, grain: int, budget: float) -> Longest:
    """The longest `seq` of `problem` of which a call fits into `limit` bytes, inputs counted, as a multiple of `grain`; 0: none.

    No call is made that is expected to take more than `budget` seconds.
    """
    import torch

    tried: list[Trial] = []

    def fits(seq: int) -> bool:
        """Whether a call has room, on the device and within the limit; what it took is noted."""
        own, start = replace(problem, seq=seq), time.perf_counter()
        try:
            peak = memory.peak_memory(lambda: called(own, implementation.once), problem.device.type)
        except (MemoryError, torch.cuda.OutOfMemoryError):
            tried.append(Trial(seq, None, None))
            return False
        tried.append(Trial(seq, peak, time.perf_counter() - start))
        return peak <= limit

    def too_slow(seq: int) -> bool:
        last = tried[-1]
        return (last.seconds or 0.0) * (seq / last.seq) ** (2 if implementation.quadratic else 1) > budget

    record = Longest(who=implementation.name, backward=problem.requires_grad, limit_bytes=limit)
    try:
        seq, slow = bisect(fits, grain, too_slow)
    except memory.MeasureError as error:
        return replace(record, stopped=str(error))
    stopped = f"a call would take more than {budget:g} s (--budget)" if slow else None
    return replace(record, seq=seq, tried=tuple(tried), stopped=stopped)


def bisect(fits: Callable[[int], bool], grain: int, too_slow: Callable[[int], bool]) -> tuple[int, bool]:
    """The largest multiple of `grain` that fits, 0 if none does, where what is longer than something too long does not fit.

    True beside it: it was `too_slow` to look further.
    """
    low, high = 0, grain
    while fits(high):
        low, high = high, 2 * high
        if too_slow(high):
            return low, True
    while high - low > grain:
        middle = (low + high) // (2 * grain) * grain
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low, False


def called(problem: Problem, call: Callable[[Tensors, Problem], Any]) -> Any:
    """What a call returns, and its inputs: random, without a gradient of the output where the problem asks for none."""
    inputs = Tensors.random(problem)
    if not problem.requires_grad:
        inputs = replace(inputs, dout=inputs.query.detach())
    return inputs, call(inputs, problem)
