"""Times below which a launch cannot be: what it issues over what a unit does at most, unit by unit."""

from __future__ import annotations

from dataclasses import dataclass

from dilkit.tools.bench.costs.cards import SHUFFLED, SPECIAL, WARP, Card
from dilkit.tools.bench.costs.record import KernelCost

PRODUCT = 2 * 16 * 16 * 8
"""FLOPs of a product of matrices."""


@dataclass(frozen=True)
class Bound:
    """Seconds that each unit needs at least. Units work at the same time, launches one after the other."""

    tensor: float = 0.0
    fp32: float = 0.0
    shared: float = 0.0
    special: float = 0.0
    shuffles: float = 0.0
    memory: float = 0.0

    @property
    def limit(self) -> str:
        """The unit that needs the longest."""
        return max(UNITS, key=lambda unit: float(getattr(self, unit)))

    @property
    def seconds(self) -> float:
        return float(getattr(self, self.limit))

    def __add__(self, other: Bound) -> Bound:
        return Bound(*(getattr(self, unit) + getattr(other, unit) for unit in UNITS))


UNITS = tuple(Bound.__dataclass_fields__)


def bound_of(cost: KernelCost, card: Card) -> Bound:
    """That of a launch on a card of its architecture."""
    return Bound(
        tensor=cost.products * PRODUCT / card.tensor if cost.products else 0.0,
        fp32=(cost.fma + cost.fp32) / (card.lanes * card.cycles),
        shared=(cost.matrices + cost.shared) / card.cycles,
        special=cost.special / (SPECIAL * card.cycles),
        shuffles=cost.shuffles * WARP / (SHUFFLED * card.cycles),
        memory=cost.memory / card.memory,
    )
