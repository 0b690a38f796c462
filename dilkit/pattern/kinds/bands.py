"""`DilatedSegment`, `SlidingWindow` and `Strided`: tokens at regular distances, in a segment, next to each token, or anywhere."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from dilkit.pattern.checks import WHOLE_SEQUENCE, PatternError
from dilkit.pattern.heads import Heads
from dilkit.pattern.kinds.branch import Branch
from dilkit.pattern.lowering.forms import Band, Segments
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


@dataclass(frozen=True)
class SlidingWindow(Branch):
    """Every query sees the keys around it, less than `window` tokens away.

        i sees j  if  |i - j| < window  and  (i - j) mod dilation_rate == 0

    Under causality that is `0 <= i - j < window`, the `sliding_window` of transformers (Mistral, arXiv 2310.06825); otherwise
    `window - 1` tokens on both sides. A `dilation_rate` r, at most the window, leaves every r-th of them (Longformer, arXiv
    2004.05150). `heads`: the query heads (start, stop) that it serves; None means all. Raises
    `PatternError` or TypeError.

        >>> from dilkit import Pattern, SlidingWindow
        >>> Pattern.of(SlidingWindow(2)).count(4, 1)[0].tolist()
        [[1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 1], [0, 0, 1, 1]]
        >>> Pattern.of(SlidingWindow(3, dilation_rate=2)).count(6, 1, is_causal=True)[0, 5].tolist()
        [0, 0, 0, 1, 0, 1]
    """

    kind: ClassVar[str] = "sliding_window"

    window: int
    dilation_rate: int = 1
    heads: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        self._settle(window=self.window, dilation_rate=self.dilation_rate)
        if self.dilation_rate > self.window:
            raise PatternError(f"dilation_rate={self.dilation_rate} exceeds window={self.window}; at most the window is needed")

    @property
    def reach(self) -> int:
        """The distance of the farthest key that a query sees, on either side."""
        return (self.window - 1) // self.dilation_rate * self.dilation_rate

    def sees(self, rows: Tensor, keys: Tensor, heads: Heads) -> Tensor:
        apart = (rows[:, None] - keys).abs()
        return ((apart <= self.reach) & (apart % self.dilation_rate == 0))[None]

    def pairs(self, seq: int, heads: Heads, is_causal: bool) -> int:
        steps = min(self.reach, max(seq - 1, 0)) // self.dilation_rate
        before = steps * seq - self.dilation_rate * steps * (steps + 1) // 2  # pairs whose key comes before the query
        return len(self.served(heads)) * (seq + before * (1 if is_causal else 2))

    def forms(self, heads: Heads, seq: int) -> Iterable[Band]:
        reach = min(self.reach, UNBOUNDED)
        return [Band(heads=self.range_served(heads), back=reach, ahead=reach, rate=min(self.dilation_rate, UNBOUNDED))]

    def __str__(self) -> str:
        share = "" if self.dilation_rate == 1 else f", 1 token in {self.dilation_rate}"
        return f"a window of {self.window:,} tokens{share}{self.heads_text()}"


@dataclass(frozen=True)
class Strided(Branch):
    """Every query sees the keys of the whole sequence that are a multiple of `stride` tokens away, itself among them.

        i sees j  if  (i - j) mod stride == 0

    It is the second half of the strided pattern of Sparse Transformers (arXiv 1904.10509), next to a window. Unlike in a dilated
    segment of the whole sequence, every row of every head takes part. `heads`: the query heads (start, stop) that it serves; None
    means all. Raises `PatternError` or TypeError.

        >>> from dilkit import Pattern, Strided
        >>> Pattern.of(Strided(3)).count(8, 1)[0, 4].tolist()
        [0, 1, 0, 0, 1, 0, 0, 1]
    """

    kind: ClassVar[str] = "strided"

    stride: int
    heads: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        self._settle(stride=self.stride)

    def sees(self, rows: Tensor, keys: Tensor, heads: Heads) -> Tensor:
        return (rows[:, None] % self.stride == keys % self.stride)[None]

    def pairs(self, seq: int, heads: Heads, is_causal: bool) -> int:
        tokens, longer = divmod(seq, self.stride)  # of a residue class; so many classes have one token more
        squares = longer * (tokens + 1) ** 2 + (self.stride - longer) * tokens**2
        return len(self.served(heads)) * ((squares + seq) // 2 if is_causal else squares)

    def forms(self, heads: Heads, seq: int) -> Iterable[Band]:
        return [Band(heads=self.range_served(heads), rate=min(self.stride, UNBOUNDED))]

    def __str__(self) -> str:
        return f"1 token in {self.stride:,} of the whole sequence, counted from each query{self.heads_text()}"


def _seen(rows: int, is_causal: bool) -> int:
    return rows * (rows + 1) // 2 if is_causal else rows * rows
