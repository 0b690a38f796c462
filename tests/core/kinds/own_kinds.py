"""A package with kinds of branches of its own, as another project would write it: one says what it sees, one its form as well."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import dilkit
from dilkit.pattern.heads import Heads
from dilkit.pattern.lowering import Band, Form

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Colours(dilkit.Branch):
    """Cells of `cell` tokens take turns in `2 + h` colours, h the query head, and tokens see those of their colour."""

    kind: ClassVar[str] = "colours"

    cell: int
    heads: tuple[int, int] | None = None

    @property
    def differs_by_head(self) -> bool:
        return True

    def sees(self, rows: Tensor, keys: Tensor, heads: Heads) -> Tensor:
        import torch

        served = self.served(heads)
        colours = torch.tensor(heads.in_model[served.start : served.stop], device=rows.device)[:, None] + 2
        of_rows, of_keys = (x // self.cell % colours for x in (rows, keys))
        return of_rows[:, :, None] == of_keys[:, None]


@dataclass(frozen=True)
class Echo(dilkit.Branch):
    """Every token sees those that are exactly `distance` away."""

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
