"""The layout of messages between ranks, and which rows of a rank lie where in them.

A message from one rank to another has, branch by branch, the rows of the queries, then of the keys, then of the values; each of
these batch by batch, segment by segment, head by head, in sequence order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from dilkit.comm.plan.kept_rows import Messages


@dataclass(frozen=True)
class MessageLayout:
    """Where in the messages to or from all ranks the rows of a branch begin; the roles "q", "k", "v" say what is in them."""

    counts: list[int]
    """Rows of each rank's message: the send counts or the receive counts of an all-to-all."""
    starts: dict[tuple[str, int, int], int]
    """By (role, branch, other rank)."""

    @classmethod
    def of(cls, messages: Messages, roles: str, world_size: int, batch: int) -> MessageLayout:
        """The layout of messages that hold these roles."""
        counts, starts, at = [0] * world_size, {}, 0
        for branch, rank in sorted(messages, key=lambda key: key[::-1]):
            queries, keys = messages[branch, rank].rows()
            for role in roles:
                starts[role, branch, rank] = at
                rows = batch * (queries if role == "q" else keys)
                at += rows
                counts[rank] += rows
        return cls(counts, starts)

    def spans(self, roles: str) -> list[slice]:
        """The parts of all messages that hold these roles, in their order."""
        edges = [*self.starts.values(), sum(self.counts)]
        return [slice(*ends) for (role, _, _), ends in zip(self.starts, pairwise(edges), strict=True) if role in roles]


class MessageSlice(NamedTuple):
    """Rows of this rank, as `(batch * seq * heads)` numbers, that lie in a message at `start .. start + len(rows) - 1`."""

    branch: int
    start: int
    rows: Tensor

    @property
    def span(self) -> slice:
        """The part of the message."""
        return slice(self.start, self.start + len(self.rows))

    def to(self, device: torch.device) -> MessageSlice:
        """The same for rows on `device`."""
        return self._replace(rows=self.rows.to(device))


@dataclass(frozen=True)
class ReturnTable:
    """The rows of this rank for which something is returned, each once; and for each slice of what is returned, which of them."""

    rows: Tensor
    slices: list[MessageSlice]

    @classmethod
    def of(cls, slices: list[MessageSlice]) -> ReturnTable:
        """`slices` with rows numbered among those of all slices."""
        every = torch.cat([s.rows for s in slices]) if slices else torch.empty(0, dtype=torch.int64, device="cpu")
        rows = torch.unique(every)
        return cls(rows, [s._replace(rows=torch.searchsorted(rows, s.rows)) for s in slices])

    @staticmethod
    def joined(tables: Sequence[ReturnTable]) -> tuple[Tensor, list[list[MessageSlice]]]:
        """The rows of several tables, each once; and for each table its slices, with rows numbered among them."""
        if len(tables) == 1:
            return tables[0].rows, [tables[0].slices]
        rows = torch.unique(torch.cat([table.rows for table in tables]))
        places = [(table, torch.searchsorted(rows, table.rows)) for table in tables]
        return rows, [[s._replace(rows=place[s.rows]) for s in table.slices] for table, place in places]

    def to(self, device: torch.device) -> ReturnTable:
        """The same for rows on `device`."""
        return ReturnTable(self.rows.to(device), [s.to(device) for s in self.slices])
