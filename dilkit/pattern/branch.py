"""`DilatedSegment`: one branch of a pattern."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dilkit.checks import integer
from dilkit.pattern.checks import WHOLE_SEQUENCE, PatternError, head_ranges


@dataclass(frozen=True)
class DilatedSegment:
    """One branch of a pattern: segments of `segment_length` tokens, of which every `dilation_rate`-th is kept.

        kept(p) = (p mod segment_length) mod dilation_rate == offset of the head

    `heads` is the range (start, stop) of query heads that the branch serves; None means all of them. `Pattern` makes its
    branches and checks their values (LongNet, arXiv 2307.02486, eq. 4-8).

    Example:

        >>> from dilkit import Pattern
        >>> branch = Pattern([2048, 8192], [1, 4]).branches[1]
        >>> branch
        DilatedSegment(segment_length=8192, dilation_rate=4, heads=None)
        >>> print(branch)
        segments of 8,192 tokens, 1 token in 4
    """

    kind: ClassVar[str] = "dilated_segment"

    segment_length: int
    dilation_rate: int
    heads: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        length, rate = integer("segment_length", self.segment_length), integer("dilation_rate", self.dilation_rate)
        if not 1 <= rate <= length <= WHOLE_SEQUENCE:
            raise PatternError(f"dilation_rate={rate} of segment_length={length}: 1 <= rate <= length <= 2**63 - 1 is needed")
        head_ranges([self.heads], 1)

    def serves(self, head: int) -> bool:
        """Whether query head `head` takes part in this branch."""
        return self.heads is None or self.heads[0] <= head < self.heads[1]

    def __str__(self) -> str:
        length = "the whole sequence" if self.segment_length == WHOLE_SEQUENCE else f"{self.segment_length:,} tokens"
        kept = "every token" if self.dilation_rate == 1 else f"1 token in {self.dilation_rate}"
        heads = "" if self.heads is None else f", heads {self.heads[0]}-{self.heads[1] - 1}"
        return f"segments of {length}, {kept}{heads}"
