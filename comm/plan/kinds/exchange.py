"""`BranchExchange`: how a branch without segments is computed over ranks.

    rank            0         1         2         3
    keys        |---------|---------|---------|---------|
    queries                    of rank 1                      rank 1 computes them, with its own keys in one call (local branches)
    foreign keys       |==|         |==|                      and with those that it is sent in small problems, merged by lse

Each rank computes its own queries. It is sent the keys and values of others that these see; a few queries that see very many keys
travel to the keys instead. Which rows those are follows from intervals of positions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dilkit.comm.plan.kept_rows import KeptRows, Message, SlotProblem, SmallProblem
from dilkit.comm.plan.local_branches import LocalBranch
from dilkit.comm.plan.routes import Route
from dilkit.comm.plan.sharded_segments import IntArray, ServedHead
from dilkit.pattern import Branch


@dataclass(frozen=True, eq=False)
class ExchangeCounts:
    """Rows that each rank sends, receives and computes with, `(world_size,)` each, for a batch of 1; as `RowCounts` has them.

    `queries_computed` and `keys_computed` are the rows that a rank receives, its own among them; `pairs` are those that it
    computes with them, as integers of any size.
    """

    queries_sent: IntArray
    queries_received: IntArray
    queries_computed: IntArray
    keys_sent: IntArray
    keys_received: IntArray
    keys_computed: IntArray
    pairs: NDArray[Any]

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return len(self.pairs)


@dataclass(frozen=True, eq=False)
class BranchExchange(ABC):
    """What is sent and computed of `branch`, which is that of `number`.

    Rank t holds the rows `cuts[t] .. cuts[t + 1] - 1`; several hold some.
    """

    number: int
    branch: Branch
    cuts: tuple[int, ...]
    heads: tuple[ServedHead, ...]
    is_causal: bool

    @property
    @abstractmethod
    def kind(self) -> str:
        """The kind of its route, where rows are sent at all."""

    @property
    @abstractmethod
    def counts(self) -> ExchangeCounts:
        """The rows of all ranks."""

    @abstractmethod
    def local(self, rank: int) -> LocalBranch | None:
        """What a rank computes with its own rows, before any arrive; None: nothing."""

    @abstractmethod
    def peers(self, rank: int) -> Iterable[int]:
        """The ranks with which a rank that holds rows may exchange some, itself among them."""

    @abstractmethod
    def message(self, source: int, target: int) -> Message:
        """What a rank sends another, or itself: rows that it computes with beside those of others."""

    @abstractmethod
    def problems(self, rank: int) -> Iterator[SmallProblem]:
        """What a rank computes with the rows that it receives: rows at equal steps, so that weights can be dropped."""

    def in_slots(self, rank: int) -> Iterator[SlotProblem | SmallProblem]:
        """The same in as few problems as there can be."""
        return self.problems(rank)

    @cached_property
    def route(self) -> Route:
        """Local if no rank computes with rows of others."""
        counts = self.counts
        return Route(self.kind if counts.queries_computed.any() else "local", 1)

    @property
    def seq(self) -> int:
        """Tokens of the whole sequence."""
        return self.cuts[-1]

    @cached_property
    def held(self) -> range:
        """The ranks that hold rows: all but the first and the last ones may be without."""
        some = [rank for rank, (start, stop) in enumerate(pairwise(self.cuts)) if start < stop]
        return range(some[0], some[-1] + 1)

    @cached_property
    def edges(self) -> IntArray:
        """The cuts between the ranks that hold rows, and the ends of the sequence."""
        return np.array(self.cuts[self.held.start : self.held.stop + 1], np.int64)

    @property
    def width(self) -> int:
        """Query heads in all."""
        return sum(head.width for head in self.heads)

    def shard(self, rank: int) -> tuple[int, int]:
        """The positions `start .. stop - 1` that a rank holds."""
        start, stop = self.cuts[rank : rank + 2]
        return start, stop

    def kept(self, head: ServedHead, start: int, stop: int) -> KeptRows:
        """The rows `start .. stop - 1` of a head."""
        return KeptRows(self.number, start, 1, stop - start, head.kv_head, head.first, head.width)

    def by_rank(self, rows: NDArray[Any]) -> NDArray[Any]:
        """`rows` of the ranks that hold some as `(world_size,)`, 0 for the others."""
        total = np.zeros(len(self.cuts) - 1, rows.dtype)
        total[self.held.start : self.held.stop] = rows
        return total
