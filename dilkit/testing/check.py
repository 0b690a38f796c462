"""`Check`: the error of a result beside what is allowed. No torch is needed to read it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Check:
    """The largest error of a result against fp64, beside that of plain torch math and what is allowed; infinite ones as text."""

    what: str
    seq: int
    error: Any
    plain_error: Any
    allowed: Any
    passed: bool

    @classmethod
    def of(cls, what: str, seq: int, error: float, plain_error: float, allowed: float) -> Check:
        """Make a check, which is passed if the error is within what is allowed."""
        errors = [x if math.isfinite(x) else str(x) for x in (error, plain_error, allowed)]
        return cls(what, seq, errors[0], errors[1], errors[2], error <= allowed)

    @property
    def ratio(self) -> float:
        """The error in units of what is allowed."""
        return float(self.error) / float(self.allowed)

    @property
    def complaint(self) -> str:
        """The error and what is allowed, in words."""
        return f"{self.what} at {self.seq:,} tokens: error {float(self.error):.2g}, at most {float(self.allowed):.2g} allowed"
