"""The heads that a pattern is applied to, and where they stand in the whole model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Heads:
    """`count` query heads over `kv_heads` key/value heads: of the `total` that the model has, those from `first` on.

    `rule` is the pattern's `offset`, by which a key/value head has its first row in a segment.
    """

    count: int
    kv_heads: int
    rule: str
    first: int
    total: int

    @property
    def group(self) -> int:
        """Query heads of a key/value head."""
        return self.count // self.kv_heads

    @property
    def in_model(self) -> range:
        """The numbers in the whole model of the query heads at hand."""
        return range(self.first * self.group, self.first * self.group + self.count)

    def offset(self, rate: int, kv_head: int) -> int:
        """Return the first row that key/value head `kv_head`, of those at hand, keeps of a segment with this rate."""
        if self.rule == "modulo":
            return (self.first + kv_head) % rate
        return (self.first + kv_head) // -(-self.total // rate)

    def offsets(self, rate: int, served: range) -> Tensor:
        """Return `offset` of the query heads `served`, int64 `(len(served),)`."""
        import torch

        return torch.tensor([self.offset(rate, head // self.group) for head in served], dtype=torch.int64, device="cpu")

    def below(self, limit: int, rate: int, served: range) -> int:
        """Count the query heads among `served` with an offset below `limit`, without a look at each of them."""
        return self._below(limit, rate, served.stop) - self._below(limit, rate, served.start)

    def _below(self, limit: int, rate: int, stop: int) -> int:
        def before(kv_head: int) -> int:
            """Count the key/value heads of the model before this one with such an offset."""
            if self.rule == "modulo":
                return kv_head // rate * limit + min(kv_head % rate, limit)
            return min(kv_head, limit * -(-self.total // rate))

        kv_head, part = divmod(stop, self.group)
        whole, next_one = (before(self.first + h) for h in (kv_head, kv_head + 1))
        return (whole - before(self.first)) * self.group + (next_one - whole) * part
