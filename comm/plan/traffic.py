"""From counts of rows to bytes: what ranks send and receive in a forward and in a backward pass."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dilkit.checks import boolean, integer, one_of
from dilkit.comm.plan.kinds.exchange import ExchangeCounts
from dilkit.comm.plan.row_counts import RowCounts
from dilkit.comm.plan.sharded_segments import IntArray
from dilkit.problem import DTYPE_BYTES, DTYPES

GRADIENTS = ("", "q", "k", "v", "qk", "qv", "kv", "qkv")
"""Of which inputs gradients may be asked for: of queries, keys and values."""


@dataclass(frozen=True)
class Rows:
    """How large rows are: `head_dim` numbers of a dtype, `batch` of each, and whether a mask flag travels with each key.

    `dtype` is a name such as `"float32"` or `"bfloat16"`. `position_dims`: with a bias of the scores, the numbers of a position,
    which travels with each query and key: 1 along a sequence, or as many as coordinates or a grid have. `gradients`: of which
    inputs a backward pass returns gradients, "qkv" or a part of it. An exchange plan counts rows; this turns its counts into
    bytes.

    Raises ValueError or TypeError for a dtype that is not known and for sizes below 1.

        >>> from dilkit.comm import Rows
        >>> rows = Rows(head_dim=64, dtype="bfloat16", key_padding_mask=True)
        >>> rows.row_bytes, rows.key_value_bytes, rows.lse_bytes
        (128, 257, 4)
    """

    head_dim: int
    dtype: str
    batch: int = 1
    key_padding_mask: bool = False
    position_dims: int = 0
    gradients: str = "qkv"

    def __post_init__(self) -> None:
        one_of("dtype", self.dtype, DTYPES)
        one_of("gradients", self.gradients, GRADIENTS)
        boolean("key_padding_mask", self.key_padding_mask)
        integer("head_dim", self.head_dim, at_least=1)
        integer("batch", self.batch, at_least=1)
        integer("position_dims", self.position_dims, at_least=0)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of queries, keys, values or results."""
        return self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def lse_bytes(self) -> int:
        """Bytes of the lse that travels with one row of results: fp32, or fp64 for fp64 rows."""
        return 8 if self.dtype == "float64" else 4

    @property
    def query_bytes(self) -> int:
        """Bytes of one row of queries, with its position."""
        return self.row_bytes + self.position_dims * self.lse_bytes

    @property
    def key_value_bytes(self) -> int:
        """Bytes of one row of keys and one of values, with the flag of the mask and the position."""
        return 2 * self.row_bytes + self.key_padding_mask + self.position_dims * self.lse_bytes

    @property
    def dquery_bytes(self) -> int:
        """Bytes of the gradient of one row of queries, if it is asked for."""
        return self.row_bytes * ("q" in self.gradients)

    @property
    def dkey_value_bytes(self) -> int:
        """Bytes of the gradients of one row of keys and one of values, as far as they are asked for."""
        return self.row_bytes * (("k" in self.gradients) + ("v" in self.gradients))


@dataclass(frozen=True)
class Traffic:
    """Bytes that each rank sends to others, and that it receives from them: `(world_size,)` each."""

    sent: IntArray
    received: IntArray

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.sent + other.sent, self.received + other.received)

    def __mul__(self, times: int) -> Traffic:
        return Traffic(times * self.sent, times * self.received)

    @property
    def busier(self) -> IntArray:
        """The larger of the two: links work both ways at once."""
        return np.maximum(self.sent, self.received)


@dataclass(frozen=True)
class PhaseTraffic:
    """The traffic of one phase: rows `there` to the ranks that compute with them, results `back`, and blocks round a `ring`."""

    there: Traffic
    back: Traffic
    ring: Traffic

    @classmethod
    def none(cls, world_size: int) -> PhaseTraffic:
        """No traffic."""
        nothing = Traffic(*np.zeros((2, world_size), np.int64))
        return cls(nothing, nothing, nothing)

    def __add__(self, other: PhaseTraffic) -> PhaseTraffic:
        return PhaseTraffic(self.there + other.there, self.back + other.back, self.ring + other.ring)

    @property
    def sent(self) -> IntArray:
        """Bytes that each rank sends to others in all."""
        return (self.there + self.back + self.ring).sent

    @property
    def received(self) -> IntArray:
        """Bytes that each rank receives from others in all."""
        return (self.there + self.back + self.ring).received


def branch_traffic(counts: RowCounts | ExchangeCounts, is_ring: bool, step: str, rows: Rows) -> PhaseTraffic:
    """The traffic of one branch in a step: "forward", "backward", or "again", a backward pass for which no rows were kept.

    | step | there | back |
    |---|---|---|
    | forward | queries, keys, values (flags and positions) | results, each row with its lse |
    | backward | results, their gradients and lse | gradients of queries, keys and values that are asked for |
    | again | what is sent there forward and backward | the same |

    Round a ring go keys and values (flags and positions). In a backward pass their gradients are returned in one hop.
    """
    nothing = PhaseTraffic.none(counts.world_size)
    if is_ring and isinstance(counts, RowCounts):
        return PhaseTraffic(nothing.there, nothing.back, _ring_traffic(counts, step != "forward", rows) * rows.batch)
    row, query, key_value, lse = rows.row_bytes, rows.query_bytes, rows.key_value_bytes, rows.lse_bytes
    dquery, dkey_value = rows.dquery_bytes, rows.dkey_value_bytes
    out, owned = counts.queries_sent, counts.queries_received
    inputs = Traffic(out * query + counts.keys_sent * key_value, owned * query + counts.keys_received * key_value)
    if step == "forward":
        there, back = inputs, Traffic(owned * (row + lse), out * (row + lse))
    else:
        there = Traffic(out * (2 * row + lse), owned * (2 * row + lse))
        there = there + inputs if step == "again" else there
        back = Traffic(
            owned * dquery + counts.keys_received * dkey_value,
            out * dquery + counts.keys_sent * dkey_value,
        )
    return PhaseTraffic(there * rows.batch, back * rows.batch, nothing.ring)


def _ring_traffic(counts: RowCounts, backward: bool, rows: Rows) -> Traffic:
    """Blocks that are sent on and, backward, gradients that are returned; for a batch of 1."""
    key_value, gradients = rows.key_value_bytes, rows.dkey_value_bytes * backward
    foreign = counts.ring_keys_received
    sent = counts.ring_keys_sent * key_value + foreign * gradients
    return Traffic(sent, foreign * key_value + counts.ring_gradients_received * gradients)
