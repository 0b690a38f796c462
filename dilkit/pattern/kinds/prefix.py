"""`Prefix`: the first tokens see each other both ways, everything later is causal."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from dilkit.pattern.heads import Heads
from dilkit.pattern.kinds.branch import Branch
from dilkit.pattern.lowering.forms import Band, Form, Runs
from dilkit.pattern.lowering.tables import RunTable
from dilkit.pattern.runs import UNBOUNDED

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Prefix(Branch):
    """A prefix language model: the first `length` tokens see each other, and every token those before it and itself.

        i sees j  if  j <= i  or  (i < length  and  j < length)

    It says itself what is causal, in a call with `is_causal=False`; with `is_causal=True` it is causal attention. T5 (arXiv
    1910.10683) calls it a causal mask with prefix. A prefix longer than the sequence is all of it.
    `heads` is the range (start, stop) of query heads that the branch serves; None means all of them. Raises `PatternError` or
    TypeError.

        >>> from dilkit import Pattern, Prefix
        >>> Pattern.of(Prefix(2)).count(4, 1)[0].tolist()
        [[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
    """

    kind: ClassVar[str] = "prefix"

    length: int
    heads: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        self._settle(length=self.length)

    def sees(self, rows: Tensor, keys: Tensor, heads: Heads) -> Tensor:
        return (keys <= rows[:, None].clamp(min=self.length - 1))[None]

    def pairs(self, seq: int, heads: Heads, is_causal: bool) -> int:
        first = 0 if is_causal else min(self.length, seq)
        return len(self.served(heads)) * (seq * (seq + 1) // 2 + first * (first - 1) // 2)

    def forms(self, heads: Heads, seq: int) -> Iterable[Form]:
        import numpy as np

        served, first = self.range_served(heads), np.array([[0, min(self.length, UNBOUNDED)]])
        yield Band(heads=served, ahead=0, without_rows=first, without_columns=first[:0])
        table = RunTable(first[0, 1:], np.ones(1, np.int64), first)
        yield Runs(heads=served, queries=table, keys=table)

    def __str__(self) -> str:
        return f"the first {self.length:,} tokens among themselves, and what is before each token{self.heads_text()}"
