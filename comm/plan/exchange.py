"""`BranchExchange`: how a branch is computed over ranks, and what is sent for it.

    rank            0         1         2         3
    keys        |---------|---------|---------|---------|
    queries                    of rank 1                      rank 1 computes them, with its own keys in one call (local branches)
    foreign keys       |==|         |==|                      and with those that it is sent in small problems, merged by lse

Messages are described once, from rank to rank: a rank packs its rows by them, and plans and simulations count theirs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from dilkit.comm.plan.messages import HeadRows, IntArray, Message, SmallProblem, message_rows
from dilkit.comm.plan.shardable_forms import ServedHead
from dilkit.pattern import Branch

LocalBranch = tuple[int, int, Branch]
"""A branch of the rows `start .. stop - 1` alone, as if they were the whole sequence: `(start, stop, branch)`."""
Pairs = NDArray[Any]
"""`(world_size,)`: query-key pairs, as integers of any size."""
Sent = tuple[IntArray, IntArray, NDArray[Any], NDArray[Any]]
"""Messages side by side, which broadcast: source and target, and rows of queries and of keys, for a batch of 1."""


Counts = tuple[IntArray, IntArray]
"""Rows of queries and of keys, `(3, world_size)` each: sent, received, computed with; for a batch of 1."""


@dataclass(frozen=True)
class Route:
    """The way a branch is computed over ranks: `kind` is one of `ROUTE_TEXTS`; groups of `group_size` ranks divide the heads."""

    kind: str
    group_size: int


@dataclass(frozen=True, eq=False)
class BranchExchange(ABC):
    """The messages and small problems of `branch`, number `number`. Rank t holds the rows `cuts[t] .. cuts[t + 1] - 1`."""

    kind: ClassVar[str]
    """The kind of its route, where rows are sent at all."""
    number: int
    branch: Branch
    cuts: tuple[int, ...]
    heads: tuple[ServedHead, ...]
    is_causal: bool

    @abstractmethod
    def local(self, rank: int) -> LocalBranch | None:
        """Return the branch that a rank computes with its own rows, before any arrive; None: nothing."""

    @abstractmethod
    def peers(self, rank: int) -> Iterable[int]:
        """Return the ranks with which a rank that holds rows may exchange some, itself among them."""

    @abstractmethod
    def message(self, source: int, target: int) -> Message:
        """Return the rows that a rank sends another, or itself: those that it computes with beside rows of others."""

    @abstractmethod
    def problems(self, rank: int) -> Iterator[SmallProblem]:
        """Yield the problems of a rank with the rows that it receives: rows at equal steps, so that weights can be dropped."""

    def in_slots(self, rank: int) -> Iterator[SmallProblem]:
        """Yield `problems` packed into as few problems as possible."""
        return self.problems(rank)

    @property
    @abstractmethod
    def pairs(self) -> Pairs:
        """The pairs that each rank computes in small problems."""

    def messages(self) -> Iterator[Sent]:
        """Yield all messages, some side by side."""
        for source in self.held:
            targets = [*self.peers(source)]
            queries, keys = np.array([message_rows(self.message(source, target)) for target in targets], np.int64).T
            yield np.full(len(targets), source), np.array(targets), queries, keys

    @cached_property
    def counts(self) -> Counts:
        """The rows of all messages, by rank; its own are among those that a rank computes with."""
        counts = np.zeros((2, 3, self.world_size), np.int64)
        for source, target, *by_role in self.messages():
            for (sent, received, computed), rows in zip(counts, by_role, strict=True):
                away = rows * (source != target)
                np.add.at(sent, source, away)
                np.add.at(received, target, away)
                np.add.at(computed, target, rows)
        return counts[0], counts[1]

    @property
    def route(self) -> Route:
        """Local if no rank computes with rows of others."""
        return Route(self.kind if self.counts[0][2].any() else "local", 1)

    @property
    def seq(self) -> int:
        return self.cuts[-1]

    @property
    def world_size(self) -> int:
        return len(self.cuts) - 1

    @cached_property
    def held(self) -> range:
        """The ranks that hold rows: all but the first and the last ones may be without."""
        some = [rank for rank, (start, stop) in enumerate(pairwise(self.cuts)) if start < stop]
        return range(some[0], some[-1] + 1)

    @cached_property
    def edges(self) -> IntArray:
        return np.array(self.cuts, np.int64)

    @cached_property
    def width(self) -> int:
        return sum(head.width for head in self.heads)

    def shard(self, rank: int) -> tuple[int, int]:
        """Return the positions `start .. stop - 1` that a rank holds."""
        start, stop = self.cuts[rank : rank + 2]
        return start, stop

    def rows_of(self, head: ServedHead, start: int, stop: int) -> HeadRows:
        return HeadRows(self.number, head, start, 1, stop - start)
