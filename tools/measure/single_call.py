"""One call, with its result, time and memory; and whether two results are one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from torch import Tensor

from dilkit.testing import memory
from dilkit.testing.accuracy import Check

AGREEMENT = 1e-4
"""Largest difference that two ways of computing may have in fp32, in units of the largest value."""
AGREEMENT_BF16 = 5e-2
"""The same of many layers under autocast to bfloat16, which has eight bits."""


@dataclass(frozen=True)
class SingleCall:
    """One call: its result, its seconds, and the bytes that it held beyond what was held before, None where `why` not."""

    result: Any
    seconds: float
    peak_bytes: int | None
    why: str | None = None


def call_once(call: Callable[[], Any]) -> SingleCall:
    """Call it, once."""
    calls: list[tuple[Any, float]] = []

    def timed() -> None:
        start = perf_counter()
        calls.append((call(), perf_counter() - start))

    try:
        peak: int | None = memory.peak_memory(timed)
        why = None
    except memory.MeasureError as error:
        peak, why = None, str(error)
        timed()
    return SingleCall(*calls[0], peak, why)


def agreement(what: str, found: Tensor, other: Tensor, seq: int, within: float = AGREEMENT) -> Check:
    """Whether two results of `seq` tokens, computed in one of two ways, are one: by default of those computed in fp32."""
    error, largest = (x.abs().max().item() for x in (found.double() - other.double(), other))
    return Check.of(what, seq, error, 0.0, within * largest)
