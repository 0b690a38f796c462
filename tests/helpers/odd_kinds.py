"""Kinds of branches that are not dilkit's."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np

import dilkit
from dilkit.pattern.heads import Heads
from dilkit.pattern.lowering import Band, Form, Global, Segments

if TYPE_CHECKING:
    from torch import Tensor


class DiffersByHead(dilkit.Branch):
    @property
    def differs_by_head(self) -> bool:
        return True


@dilkit.register_kind
@dataclass(frozen=True)
class Reach(dilkit.Branch):
    """Tokens see up to `back` before and `ahead` after them, at multiples of `rate`."""

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


@dilkit.register_kind
@dataclass(frozen=True)
class Turns(DiffersByHead):
    """Dilated segments with the offset of each query head, also among those that share a key/value head."""

    kind: ClassVar[str] = "turns"

    length: int
    rate: int
    heads: tuple[int, int] | None = None

    def sees(self, rows: Tensor, keys: Tensor, heads: Heads) -> Tensor:
        offsets = rows.new_tensor(self._offsets(heads))[:, None]
        of_rows, of_keys = (x % self.length % self.rate == offsets for x in (rows, keys))
        return (rows[:, None] // self.length == keys // self.length) & of_rows[:, :, None] & of_keys[:, None]

    def forms(self, heads: Heads, seq: int) -> Iterable[Form]:
        offsets = tuple(self._offsets(heads))
        return [Segments(heads=self.range_served(heads), length=self.length, rate=self.rate, offsets=offsets)]

    def _offsets(self, heads: Heads) -> list[int]:
        start, stop = self.range_served(heads)
        return [head % self.rate for head in heads.in_model[start:stop]]


@dilkit.register_kind
@dataclass(frozen=True)
class Posts(dilkit.Branch):
    """Tokens in `rows` see all, and all see those in `columns`: intervals from one to before another."""

    kind: ClassVar[str] = "posts"

    rows: tuple[int, int]
    columns: tuple[int, int]
    heads: tuple[int, int] | None = None

    def sees(self, rows: Tensor, keys: Tensor, heads: Heads) -> Tensor:
        return (_within(rows, self.rows)[:, None] | _within(keys, self.columns))[None]

    def forms(self, heads: Heads, seq: int) -> Iterable[Form]:
        return [Global(heads=self.range_served(heads), rows=np.array([self.rows]), columns=np.array([self.columns]))]


@dilkit.register_kind
@dataclass(frozen=True)
class Gap(DiffersByHead):
    """A branch `of` some kind without a range of queries and a range of keys."""

    kind: ClassVar[str] = "gap"

    of: str
    rows: tuple[int, int]
    columns: tuple[int, int]
    heads: tuple[int, int] | None = None

    def sees(self, rows: Tensor, keys: Tensor, heads: Heads) -> Tensor:
        return self._whole().sees(rows, keys, heads) & ~_within(rows, self.rows)[:, None] & ~_within(keys, self.columns)

    def forms(self, heads: Heads, seq: int) -> Iterable[Form]:
        left_out = dict(without_rows=np.array([self.rows]), without_columns=np.array([self.columns]))
        return [replace(form, **left_out) for form in self._whole().forms(heads, seq)]

    def _whole(self) -> dilkit.Branch:
        whole = dict(window=dilkit.SlidingWindow(6), segments=dilkit.DilatedSegment(8, 2), tokens=dilkit.GlobalTokens([2, 9]))
        return whole[self.of].of_heads(self.heads)


@dataclass(frozen=True)
class Colours(DiffersByHead):
    """Cells of `cell` tokens take turns in `2 + h` colours for query head h; tokens see their colour."""

    kind: ClassVar[str] = "colours"

    cell: int
    heads: tuple[int, int] | None = None

    def sees(self, rows: Tensor, keys: Tensor, heads: Heads) -> Tensor:
        served = self.served(heads)
        colours = rows.new_tensor(heads.in_model[served.start : served.stop])[:, None] + 2
        of_rows, of_keys = (x // self.cell % colours for x in (rows, keys))
        return of_rows[:, :, None] == of_keys[:, None]


@dataclass(frozen=True)
class Echo(dilkit.Branch):
    kind: ClassVar[str] = "echo"

    distance: int
    heads: tuple[int, int] | None = None

    def sees(self, rows: Tensor, keys: Tensor, heads: Heads) -> Tensor:
        return ((rows[:, None] - keys).abs() == self.distance)[None]

    def forms(self, heads: Heads, seq: int) -> Iterable[Form]:
        far = self.distance
        return [Band(heads=self.range_served(heads), back=far, ahead=far, begin=far)]

    def pairs(self, seq: int, heads: Heads, is_causal: bool) -> int:
        return len(self.served(heads)) * max(seq - self.distance, 0) * (1 if is_causal else 2)


def _within(x: Tensor, interval: tuple[int, int]) -> Tensor:
    return (interval[0] <= x) & (x < interval[1])
