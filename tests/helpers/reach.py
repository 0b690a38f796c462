"""A kind of branch whose bands reach as far back, and as far ahead, as one says; of those of dilkit hardly any is one-sided."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import dilkit
from dilkit.pattern.heads import Heads
from dilkit.pattern.lowering import Band, Form

if TYPE_CHECKING:
    from torch import Tensor


@dilkit.register_kind
@dataclass(frozen=True)
class Reach(dilkit.Branch):
    """Every token sees those up to `back` before it and up to `ahead` after it, of those a multiple of `rate` away."""

    kind: ClassVar[str] = "reach"

    back: int
    ahead: int
    rate: int = 1
    heads: tuple[int, int] | None = None

    def sees(self, rows: Tensor, keys: Tensor, heads: Heads) -> Tensor:
        apart = rows[:, None] - keys
        return ((apart <= self.back) & (-apart <= self.ahead) & (apart % self.rate == 0))[None]

    def forms(self, heads: Heads, seq: int) -> Iterable[Form]:
        return [Band(heads=self.range_served(heads), back=self.back, ahead=self.ahead, rate=self.rate)]
