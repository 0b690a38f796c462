"""`DilatedSegment`, `SlidingWindow` and `Strided`: tokens at regular distances, in a segment, next to each token, or anywhere."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from dilkit.checks import integer
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
    """Every query sees the keys around it: less than `window` tokens away, or up to `before` behind it and `after` ahead of it.

        SlidingWindow(window)           i sees j  if  |i - j| < window           and  (i - j) mod dilation_rate == 0
        SlidingWindow(before=, after=)  i sees j  if  -after <= i - j <= before  and  (i - j) mod dilation_rate == 0

    Under causality `window` is `0 <= i - j < window`, the `sliding_window` of transformers (Mistral, arXiv 2310.06825), and
    `after` changes nothing. `before` and `after` are flash-attn's `window_size=(left, right)`; -1 leaves a side open. A
    `dilation_rate` r leaves every r-th key (Longformer, arXiv 2004.05150); it is at most the reach of the wider side plus 1.
    `heads`: the query heads (start, stop) that it serves; None means all. Raises `PatternError` or TypeError.

        >>> from dilkit import Pattern, SlidingWindow
        >>> Pattern.of(SlidingWindow(2)).count(4, 1)[0].tolist()
        [[1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 1], [0, 0, 1, 1]]
        >>> Pattern.of(SlidingWindow(before=0, after=2)).count(4, 1)[0].tolist()
        [[1, 1, 1, 0], [0, 1, 1, 1], [0, 0, 1, 1], [0, 0, 0, 1]]
        >>> Pattern.of(SlidingWindow(3, dilation_rate=2)).count(6, 1, is_causal=True)[0, 5].tolist()
        [0, 0, 0, 1, 0, 1]
    """

    kind: ClassVar[str] = "sliding_window"

    window: int | None = None
    """None where the sides differ; then `before` and `after` are given, else they are None."""
    dilation_rate: int = 1
    before: int | None = field(default=None, kw_only=True)
    after: int | None = field(default=None, kw_only=True)
    heads: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        self._settle(dilation_rate=self.dilation_rate)
        sides = self.before, self.after
        if sides != (None, None) if self.window is not None else None in sides:
            window = "no window" if self.window is None else f"window={self.window}"
            raise PatternError(f"{window}, before={self.before}, after={self.after}: give window alone, or both before and after")
        if self.window is None:
            reaches = {name: integer(name, side) for name, side in zip(("before", "after"), sides, strict=True)}
            for name, reach in reaches.items():
                if not -1 <= reach < WHOLE_SEQUENCE:
                    raise PatternError(f"{name}={reach}: tokens from 0 on are needed, or -1 for an open side")
            before, after = (-1 if reach == _OPEN else reach for reach in reaches.values())
            self._set(before=before, after=after)
            if before == after:
                self._set(window=WHOLE_SEQUENCE if before == -1 else before + 1, before=None, after=None)
        if self.window is not None:
            self._settle(window=self.window)
        if self.dilation_rate > (widest := max(self.reaches) + 1):
            raise PatternError(f"dilation_rate={self.dilation_rate} exceeds window={widest}; at most the window is needed")

    @property
    def goes_by_distance(self) -> bool:
        return True

    @property
    def reaches(self) -> tuple[int, int]:
        """The largest distances behind and ahead of a query at which it may see keys."""
        if self.window is not None:
            return self.window - 1, self.window - 1
        return tuple(_OPEN if side == -1 else side for side in (self.before, self.after))  # type: ignore[return-value]

    @property
    def reach(self) -> int:
        """The distance of the farthest key that a query sees, on the wider side."""
        return max(self.reaches) // self.dilation_rate * self.dilation_rate

    def to_fields(self) -> dict[str, Any]:
        fields, sides = super().to_fields(), {"before", "after"} if self.window is not None else {"window"}
        return {name: value for name, value in fields.items() if name not in sides}

    def call(self) -> str:
        return super().call().replace("window=", "", 1)

    def sees(self, rows: Tensor, keys: Tensor, heads: Heads) -> Tensor:
        apart, (before, after) = rows[:, None] - keys, self.reaches
        return ((apart <= before) & (-apart <= after) & (apart % self.dilation_rate == 0))[None]

    def pairs(self, seq: int, heads: Heads, is_causal: bool) -> int:
        rate, total = self.dilation_rate, seq
        for reach in self.reaches[:1] if is_causal else self.reaches:
            steps = min(reach, max(seq - 1, 0)) // rate
            total += steps * seq - rate * steps * (steps + 1) // 2
        return len(self.served(heads)) * total

    def forms(self, heads: Heads, seq: int) -> Iterable[Band]:
        rate = self.dilation_rate
        back, ahead = (UNBOUNDED if reach >= UNBOUNDED else reach // rate * rate for reach in self.reaches)
        return [Band(heads=self.range_served(heads), back=back, ahead=ahead, rate=min(rate, UNBOUNDED))]

    def __str__(self) -> str:
        share = "" if self.dilation_rate == 1 else f", 1 token in {self.dilation_rate}"
        if self.window is not None:
            return f"a window of {self.window:,} tokens{share}{self.heads_text()}"
        before, after = ("all" if reach == _OPEN else f"{reach:,}" for reach in self.reaches)
        return f"a window of {before} tokens before and {after} after{share}{self.heads_text()}"


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

    @property
    def goes_by_distance(self) -> bool:
        return True

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


_OPEN = WHOLE_SEQUENCE - 1
"""The reach of a side that is open: a window of it is the largest integer."""


def _seen(rows: int, is_causal: bool) -> int:
    return rows * (rows + 1) // 2 if is_causal else rows * rows
