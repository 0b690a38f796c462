"""A configuration that suites measure: a pattern, and the length of sequence that it is for."""

from __future__ import annotations

from typing import Any, NamedTuple

from dilkit.pattern import Pattern
from dilkit.problem import Problem

HEADS = 8


class Configuration(NamedTuple):
    """A sequence of `seq` tokens in branches of these lengths and rates; `offset` and `tail` are the pattern's."""

    seq: int
    segment_lengths: tuple[int, ...]
    dilation_rates: tuple[int, ...]
    heads: int = HEADS
    offset: str = "modulo"
    tail: str = "exact"

    def problem(self, head_dim: int, divisor: int = 1, **fields: Any) -> Problem:
        """The problem, its lengths divided by `divisor`."""
        pairs = zip(self.segment_lengths, self.dilation_rates, strict=True)
        lengths = [max(length // divisor, rate) for length, rate in pairs]
        pattern = Pattern(lengths, self.dilation_rates, offset=self.offset, tail=self.tail)
        return Problem(pattern=pattern, seq=self.seq // divisor, heads=self.heads, head_dim=head_dim, **fields)
