"""From counts of rows to bytes: what ranks send and receive in a forward and in a backward pass."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dilkit.checks import boolean, integer, one_of
from dilkit.comm.plan.spread import Counts
from dilkit.comm.plan.tally import Tally
from dilkit.problem import DTYPE_BYTES, DTYPES


@dataclass(frozen=True)
class Rows:
    """What rows are: `head_dim` numbers of a dtype, `batch` of each, and whether keys have a flag that masks them."""

    head_dim: int
    dtype: str
    batch: int = 1
    key_padding_mask: bool = False

    def __post_init__(self) -> None:
        one_of("dtype", self.dtype, DTYPES)
        boolean("key_padding_mask", self.key_padding_mask)
        integer("head_dim", self.head_dim, at_least=1)
        integer("batch", self.batch, at_least=1)

    @property
    def row(self) -> int:
        """Bytes of a row of queries, keys, values or results."""
        return self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def number(self) -> int:
        """Bytes of a number that goes with a row of results: its lse."""
        return 8 if self.dtype == "float64" else 4

    @property
    def key_and_value(self) -> int:
        """Bytes of a row of keys and its values, with its flag."""
        return 2 * self.row + self.key_padding_mask


@dataclass(frozen=True)
class Traffic:
    """Bytes that each rank sends to others, and that it receives from them: `(world_size,)` each."""

    sent: Counts
    received: Counts

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.sent + other.sent, self.received + other.received)

    @property
    def busier(self) -> Counts:
        """The larger of the two: links work both ways at once."""
        return np.maximum(self.sent, self.received)


@dataclass(frozen=True)
class Legs:
    """The traffic of one phase: rows to those that compute with them, what they found back, and rows round rings."""

    there: Traffic
    back: Traffic
    ring: Traffic

    @classmethod
    def none(cls, world_size: int) -> Legs:
        """No traffic."""
        nothing = Traffic(*np.zeros((2, world_size), np.int64))
        return cls(nothing, nothing, nothing)

    def __add__(self, other: Legs) -> Legs:
        return Legs(self.there + other.there, self.back + other.back, self.ring + other.ring)

    @property
    def sent(self) -> Counts:
        return (self.there + self.back + self.ring).sent

    @property
    def received(self) -> Counts:
        return (self.there + self.back + self.ring).received


def legs_of(tally: Tally, is_ring: bool, backward: bool, rows: Rows) -> Legs:
    """The traffic of one branch.

    | phase | there | back |
    |---|---|---|
    | forward | queries, keys, values (and flags) | results with a number a row, their lse |
    | backward | results, their gradients and lse | gradients of all three |

    Round a ring go keys and values (and flags), and in a backward pass their gradients home, in one hop.
    """
    nothing = Legs.none(tally.world_size)
    row, both, batch = rows.row, rows.key_and_value, rows.batch
    if is_ring:
        sent, received = tally.ring_keys_sent * both, tally.ring_gradients_received * 2 * row * backward
        home = tally.ring_keys_received
        around = Traffic(sent + home * 2 * row * backward, home * both + received)
        return Legs(nothing.there, nothing.back, Traffic(batch * around.sent, batch * around.received))
    out, owned = tally.queries_sent, tally.queries_received
    if backward:
        there = Traffic(out * (2 * row + rows.number), owned * (2 * row + rows.number))
        back = Traffic(owned * row + tally.keys_received * 2 * row, out * row + tally.keys_sent * 2 * row)
    else:
        there = Traffic(out * row + tally.keys_sent * both, owned * row + tally.keys_received * both)
        back = Traffic(owned * (row + rows.number), out * (row + rows.number))
    return Legs(*(Traffic(batch * leg.sent, batch * leg.received) for leg in (there, back)), nothing.ring)
