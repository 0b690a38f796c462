"""A configuration that suites measure: a pattern, and the length of sequence that it is for."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from dilkit.integrations.gigapath.config import SlideEncoderConfig
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
        lengths = divided(self.segment_lengths, self.dilation_rates, divisor)
        pattern = Pattern(lengths, self.dilation_rates, offset=self.offset, tail=self.tail)
        return Problem(pattern=pattern, seq=self.seq // divisor, heads=self.heads, head_dim=head_dim, **fields)


def divided(segment_lengths: Sequence[int], dilation_rates: Sequence[int], divisor: int) -> tuple[int, ...]:
    """Return the lengths of segments divided by `divisor`, each at least its rate."""
    return tuple(max(length // divisor, rate) for length, rate in zip(segment_lengths, dilation_rates, strict=True))


GIGAPATH = SlideEncoderConfig()
CONFIGURATIONS = {
    "A": Configuration(32768, (2048, 4096, 8192, 16384, 32768), (1, 2, 4, 8, 16)),
    "B": Configuration(16384, (512, 1024), (1, 2)),
    "C": Configuration(131072, (2048, 8192, 32768, 131072), (1, 4, 16, 64)),
    "D": Configuration(65536, (1024, 4096, 16384, 65536), (1, 4, 16, 64)),
    "G": Configuration(10001, GIGAPATH.segment_lengths, GIGAPATH.dilation_rates, GIGAPATH.num_heads, "block", GIGAPATH.tail),
    "million": Configuration(1 << 20, (2048, 8192, 32768, 131072, 524288), (1, 4, 16, 64, 256)),
}
"""Configurations by name; G is GigaPath's slide encoder on a slide of 10,000 tiles and the class token."""
