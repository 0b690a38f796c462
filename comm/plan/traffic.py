"""From counts of rows to bytes: what ranks send and receive in a forward and in a backward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dilkit.checks import boolean, integer, one_of
from dilkit.comm.plan.exchange import BranchExchange
from dilkit.comm.plan.messages import IntArray
from dilkit.comm.plan.segments import SegmentExchange
from dilkit.problem import DTYPE_BYTES, DTYPES

GRADIENTS = ("", "q", "k", "v", "qk", "qv", "kv", "qkv")
"""Inputs of which gradients may be asked for: queries, keys and values."""


@dataclass(frozen=True)
class Rows:
    """Sizes of rows: `head_dim` numbers of a dtype, `batch` of each, and a mask flag for each key with `key_padding_mask`.

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
class PhaseTraffic:
    """The bytes of one phase, `(2, world_size)` each: that ranks send to others, and that they receive from them.

    Rows go `there` to the ranks that compute with them, results come `back`, blocks go round a `ring`.
    """

    there: IntArray
    back: IntArray
    ring: IntArray

    def __add__(self, other: PhaseTraffic) -> PhaseTraffic:
        return PhaseTraffic(self.there + other.there, self.back + other.back, self.ring + other.ring)

    @property
    def sent(self) -> IntArray:
        sent: IntArray = (self.there + self.back + self.ring)[0]
        return sent

    @property
    def received(self) -> IntArray:
        received: IntArray = (self.there + self.back + self.ring)[1]
        return received


def branch_traffic(exchange: BranchExchange, step: str, rows: Rows) -> PhaseTraffic:
    """Return the traffic of one branch in a step: "forward", "backward", or "again", a backward pass for which no rows were kept.

    | step | there | back |
    |---|---|---|
    | forward | queries, keys, values (flags and positions) | results, each row with its lse |
    | backward | results, their gradients and lse | gradients of queries, keys and values that are asked for |
    | again | what is sent there forward and backward | the same |

    Round a ring go keys and values (flags and positions). In a backward pass their gradients are returned in one hop.
    """
    nothing = np.zeros((2, exchange.world_size), np.int64)
    if isinstance(exchange, SegmentExchange) and exchange.route.kind == "ring":
        blocks, gradients = exchange.ring_rows
        moved = blocks * rows.key_value_bytes + gradients * rows.dkey_value_bytes * (step != "forward")
        return PhaseTraffic(nothing, nothing, moved * rows.batch)
    queries, keys = exchange.counts
    there, back = leg_bytes(queries[:2], keys[:2], step, rows)
    return PhaseTraffic(there, back[::-1], nothing)


def leg_bytes(queries: NDArray[Any], keys: NDArray[Any], step: str, rows: Rows) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the bytes of so many rows there, and of what is computed with them back, in a step of `branch_traffic`."""
    row, lse = rows.row_bytes, rows.lse_bytes
    inputs, results = queries * rows.query_bytes + keys * rows.key_value_bytes, queries * (row + lse)
    if step == "forward":
        return inputs * rows.batch, results * rows.batch
    there = queries * (2 * row + lse) + inputs * (step == "again")
    return there * rows.batch, (queries * rows.dquery_bytes + keys * rows.dkey_value_bytes) * rows.batch
