"""Yardsticks and samples of benchmarks, made small: a test looks at what is done with them, not at what they reach."""

from __future__ import annotations

import pytest

from dilkit.tools.measure import ceilings, timing


def shrink(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the rest of a test, the matmul, the copy and the multiply-adds take no time, and a sample is one call."""
    monkeypatch.setitem(ceilings.MATMUL_SIZE, "cpu", 64)
    monkeypatch.setitem(ceilings.COPY_BYTES, "cpu", 1 << 20)
    monkeypatch.setattr(ceilings, "ROUNDS", 1 << 10)
    monkeypatch.setattr(timing, "_calls_lasting", lambda function, min_time, clock: 1)
