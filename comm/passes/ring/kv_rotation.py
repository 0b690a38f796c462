"""KV rotation: the key/value blocks of a ring schedule go from rank to rank, hop by hop, and never lie together.

hop        0       1       2          member i computes with block i - hop, while block i - hop - 1 comes from
member 0   B0      B2      B1         member i - 1 and block i - hop goes to member i + 1.
member 1   B1 <-   B0 <-   B2
member 2   B2 <-   B1 <-   B0         With causality a block goes only to the members after its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dilkit.comm.passes.rank_bias import RankBias
from dilkit.comm.passes.rank_inputs import RankInputs
from dilkit.comm.passes.ring.segment import RingBranch
from dilkit.comm.passes.rows import collect_rows, pack_columns, unpack_columns
from dilkit.comm.transports.base import Comm, Pending


class KVBlock(NamedTuple):
    """Keys and values `(n, head_dim)`, their mask flags `(n,)` or None, and their positions `(n, dims)` or None."""

    keys: Tensor
    values: Tensor
    flags: Tensor | None
    positions: Tensor | None


class KVRotation:
    """Key/value blocks going round the segments of a branch: iterating gives, for each hop, the block that each segment is at.

    It is None where a segment has no further hop. The blocks of the next hop are sent and received while those of a hop are
    being computed with, in buffers of their own.
    """

    def __init__(self, comm: Comm, ring: RingBranch, inputs: RankInputs, bias: RankBias | None) -> None:
        self.comm, self.tables, self.hops = comm, ring.tables, ring.hops
        _, key, value, mask, *_ = inputs
        tensors = [key, value]
        if bias is not None:
            tensors.append(bias.by_head(len(key), key.shape[2]))
        if mask is not None:
            tensors.append(mask[:, :, None, None].expand(*key.shape[:3], 1).contiguous())
        self.has_flags, self.has_positions = mask is not None, bias is not None
        self.columns = [(x.shape[-1], x.dtype) for x in tensors]
        self.own = [pack_columns(*(collect_rows(x, one.keys) for x in tensors)) for one in self.tables]
        self.like = key.new_empty(0, sum(width * dtype.itemsize for width, dtype in self.columns), dtype=torch.uint8)

    def __iter__(self) -> Iterator[tuple[int, list[KVBlock | None]]]:
        held: list[Tensor | None] = list(self.own)
        for hop in range(self.hops):
            transfer = self._rotate(hop, held) if hop + 1 < self.hops else None
            yield hop, [None if rows is None else self._block(rows) for rows in held]
            if transfer is not None:
                arrived = iter(transfer.wait())
                held = [None if one.receives[hop] is None else next(arrived) for one in self.tables]

    def _block(self, rows: Tensor) -> KVBlock:
        key, value, *further = unpack_columns(rows, *self.columns)
        flags = further.pop().view(-1) if self.has_flags else None
        return KVBlock(key, value, flags, further.pop() if self.has_positions else None)

    def _rotate(self, hop: int, held: list[Tensor | None]) -> RowTransfer:
        """Begin to send each block on to the next rank, and to receive the one of the rank before."""
        sends = [
            (one.segment.neighbour(1), rows)
            for one, rows in zip(self.tables, held, strict=True)
            if rows is not None and one.sends[hop]
        ]
        receives = [(one.segment.neighbour(-1), rows) for one in self.tables if (rows := one.receives[hop]) is not None]
        return RowTransfer.begin(self.comm, sends, receives, self.like, f"keys and values, hop {hop + 1} of {self.hops - 1}")


@dataclass
class RowTransfer:
    """Tables of rows under way, perhaps several from one rank; `wait()` gives them in the order in which they were asked for."""

    pending: Pending
    order: list[int]
    counts: list[int]

    @classmethod
    def begin(
        cls, comm: Comm, sends: list[tuple[int, Tensor]], receives: list[tuple[int, int]], like: Tensor, step: str
    ) -> RowTransfer:
        """Send `(rank, rows)` and receive `(rank, number of rows)`; `like` has the width and the dtype of all."""
        send_counts, recv_counts = [0] * comm.size, [0] * comm.size
        for rank, rows in sends:
            send_counts[rank] += len(rows)
        for rank, count in receives:
            recv_counts[rank] += count
        message = torch.cat([like, *(rows for _, rows in sorted(sends, key=lambda send: send[0]))])
        order = sorted(range(len(receives)), key=lambda i: receives[i][0])
        return cls(comm.exchange(message, send_counts, recv_counts, step), order, [receives[i][1] for i in order])

    def wait(self) -> list[Tensor]:
        """The tables."""
        arrived = dict(zip(self.order, torch.split(self.pending.wait(), self.counts), strict=True))
        return [arrived[i] for i in range(len(arrived))]
