"""What is measured on hosts."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from dilkit.pattern import DilatedSegment, Pattern
from dilkit.problem import Problem
from dilkit.tools.bench.suite import Sizes

FIVE = Pattern([128, 512, 2048, 8192, 131_072], [1, 4, 16, 64, 256])
"""LongNet's series of lengths and rates, the last of them for the whole sequence. The first is a quarter of what LongNet takes at
this length, because a core has to do for two hosts: so computing does not outweigh what is sent."""
CHECKED = Problem(pattern=Pattern([16, 32, 64, 256, 512], [1, 2, 4, 8, 16]), seq=512, heads=4, head_dim=16, dtype="bfloat16")
"""What every way is checked on: five branches too, of which two are longer than a shard."""


@dataclass(frozen=True)
class HostsSizes(Sizes):
    """`hosts` compute a sequence of `problem`, over links of so many `gbits` a second each way.

    `few_heads`: half as many as hosts, of which a segment's ranks form groups (the hybrid route).
    """

    hosts: int = 4
    gbits: tuple[float, ...] = (1.0, 10.0)
    problem: Problem = field(default_factory=lambda: Problem(pattern=FIVE, seq=131_072, heads=4, head_dim=64, dtype="bfloat16"))
    checked: Problem = CHECKED
    few_heads: int = 2

    def shortened(self, divisor: int) -> Problem:
        """The problem with lengths divided by `divisor`."""
        p = self.problem
        segments = [b for b in p.pattern.branches if isinstance(b, DilatedSegment)]
        branches = (replace(b, segment_length=max(b.segment_length // divisor, b.dilation_rate)) for b in segments)
        return replace(p, seq=p.seq // divisor, pattern=p.pattern.with_branches(*branches), requires_grad=True)
