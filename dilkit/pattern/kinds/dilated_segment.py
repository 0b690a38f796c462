"""`DilatedSegment`: LongNet's kind of branch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from dilkit.pattern.checks import WHOLE_SEQUENCE, PatternError
from dilkit.pattern.heads import Heads
from dilkit.pattern.kinds.branch import Branch
from dilkit.pattern.lowering.forms import Segments
from dilkit.pattern.runs import UNBOUNDED

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class DilatedSegment(Branch):
    """Segments of `segment_length` tokens, of which every `dilation_rate`-th is kept; a kept query sees its segment's kept keys.

        i sees j  if  i // w == j // w  and  (i mod w) mod r == (j mod w) mod r == offset of the head

    Here `w = segment_length` and `r = dilation_rate <= w`; the offset is by the pattern's rule (`Pattern`). `heads` is the range
    (start, stop) of query heads that the branch serves; None means all of them (LongNet, arXiv 2307.02486, eq. 4-8).

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
        self._settle(segment_length=self.segment_length, dilation_rate=self.dilation_rate)
        length, rate = self.segment_length, self.dilation_rate
        if rate > length:
            raise PatternError(f"dilation_rate={rate} exceeds segment_length={length}; at most the length")

    @property
    def differs_by_head(self) -> bool:
        return self.heads is not None or self.dilation_rate > 1

    @property
    def forgets_every(self) -> int:
        return self.segment_length

    @property
    def unit(self) -> int:
        return self.segment_length

    def sees(self, rows: Tensor, keys: Tensor, heads: Heads) -> Tensor:
        length, rate = self.segment_length, self.dilation_rate
        offsets = heads.offsets(rate, self.served(heads)).to(rows.device)[:, None]
        query_kept, key_kept = ((x % length) % rate == offsets for x in (rows, keys))
        return (rows[:, None] // length == keys // length) & query_kept[:, :, None] & key_kept[:, None, :]

    def pairs(self, seq: int, heads: Heads, is_causal: bool) -> int:
        length, served, total = min(self.segment_length, max(seq, 1)), self.served(heads), 0
        for tokens, segments in ((length, seq // length), (seq % length, 1)):
            rows, more = divmod(tokens, self.dilation_rate)
            longer = heads.below(more, self.dilation_rate, served)  # heads that keep one row more
            shorter = len(served) - longer
            total += segments * (longer * _seen(rows + 1, is_causal) + shorter * _seen(rows, is_causal))
        return total

    def forms(self, heads: Heads, seq: int) -> Iterable[Segments]:
        length, rate = (min(number, UNBOUNDED) for number in (self.segment_length, self.dilation_rate))
        offsets = tuple(heads.offset(self.dilation_rate, head // heads.group) for head in self.served(heads))
        return [Segments(heads=self.range_served(heads), length=length, rate=rate, offsets=offsets)]

    def zero_keys(self, rows: Tensor, seq: Tensor, heads: Heads) -> Tensor | int:
        import torch

        length, rate = seq.clamp(1, self.segment_length), self.dilation_rate
        offsets = heads.offsets(rate, self.served(heads)).to(rows.device)[:, None]
        place = rows % length
        tokens = torch.minimum(place + seq - rows, length)  # of the segment
        missing = -(-length // rate) - (tokens - offsets + rate - 1) // rate
        return (place % rate == offsets) * missing

    def __str__(self) -> str:
        length = "the whole sequence" if self.segment_length == WHOLE_SEQUENCE else f"{self.segment_length:,} tokens"
        share = "every token" if self.dilation_rate == 1 else f"1 token in {self.dilation_rate}"
        return f"segments of {length}, {share}{self.heads_text()}"


def _seen(rows: int, is_causal: bool) -> int:
    """Count the query-key pairs of one segment in which a head keeps `rows` rows."""
    return rows * (rows + 1) // 2 if is_causal else rows * rows
