"""`Strided`: tokens that are multiples of a stride apart."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from dilkit.pattern.heads import Heads
from dilkit.pattern.kinds.branch import Branch
from dilkit.pattern.lowering.forms import Band
from dilkit.pattern.runs import UNBOUNDED

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Strided(Branch):
    """Every query sees the keys of the whole sequence that are a multiple of `stride` tokens away, itself among them.

        i sees j  if  (i - j) mod stride == 0

    It is the second half of the strided pattern of Sparse Transformers (arXiv 1904.10509), next to a window. Unlike a dilated
    segment of the whole sequence, in which a head keeps one row in `stride`, every row of every head takes part. `heads` is the
    range (start, stop) of query heads that the branch serves; None means all of them. Raises `PatternError` or TypeError.

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
