"""`SlidingWindow`: the tokens next to each token."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from dilkit.pattern.checks import PatternError
from dilkit.pattern.heads import Heads
from dilkit.pattern.kinds.branch import Branch
from dilkit.pattern.lowering.forms import Band
from dilkit.pattern.runs import UNBOUNDED

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class SlidingWindow(Branch):
    """Every query sees the keys around it, less than `window` tokens away.

        i sees j  if  |i - j| < window  and  (i - j) mod dilation_rate == 0

    Under causality that is `0 <= i - j < window`, the `sliding_window` of transformers (Mistral, arXiv 2310.06825); otherwise
    `window - 1` tokens on both sides. A `dilation_rate`, at most the window, leaves out all but every so-many-th of them: with
    the rate r a query sees about one key in r of the same span (Longformer, arXiv 2004.05150). `heads` is the range
    (start, stop) of query heads that the branch serves; None means all of them. Raises `PatternError` or TypeError.

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
