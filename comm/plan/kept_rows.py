"""Kept rows: rows that travel together, or are computed with; and the small problems made of them. Values without tensors."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dilkit.comm.plan.sharded_segments import IntArray
from dilkit.pattern import Pattern


class KeptRows(NamedTuple):
    """Rows of one key/value head, or of its query heads, in one rank's shard: the positions `start, start + step, ...`.

    The query heads are `first .. first + width - 1`.
    """

    branch: int
    start: int
    step: int
    positions: int
    kv_head: int
    first: int
    width: int

    @property
    def stop(self) -> int:
        """The position after the last one."""
        return self.start + self.step * (self.positions - 1) + 1


class Message(NamedTuple):
    """What one rank sends another for one branch: kept rows of queries, and of keys (and values)."""

    queries: list[KeptRows]
    keys: list[KeptRows]

    def rows(self) -> tuple[int, int]:
        """Rows of queries and of keys, for a batch of 1."""
        return sum(kept.positions * kept.width for kept in self.queries), sum(kept.positions for kept in self.keys)


Messages = dict[tuple[int, int], Message]
"""By (branch, other rank)."""


class ProblemRows(NamedTuple):
    """The queries or the keys of a small problem: so many of some kept rows, from number `first` on, every `step`-th.

    Kept rows are counted on from one to the next. A negative step goes backwards; steps other than 1 are within one of them.
    """

    kept: tuple[KeptRows, ...]
    first: int
    step: int
    rows: int

    @classmethod
    def whole(cls, kept: list[KeptRows]) -> ProblemRows:
        """All of them."""
        return cls(tuple(kept), 0, 1, sum(rows.positions for rows in kept))

    @property
    def start(self) -> int:
        """The position of the first row."""
        return self.kept[0].start + self.kept[0].step * self.first

    @property
    def positions(self) -> IntArray:
        """The position of each row, int64 `(rows,)`."""
        every = np.concatenate([rows.start + rows.step * np.arange(rows.positions) for rows in self.kept])
        return every[self.first + self.step * np.arange(self.rows)]

    @property
    def stride(self) -> int:
        """Positions from row to row."""
        return self.kept[0].step * self.step


class SmallProblem(NamedTuple):
    """Query rows of one head, and the key rows that they attend to."""

    queries: ProblemRows
    keys: ProblemRows
    is_causal: bool
    pattern: Pattern | None = Pattern.dense()
    """None: every query sees every key, with causality those up to its own number; by whatever pattern wastes least."""
    key_group: int = 0
    """Problems that have queries or keys in common have different key groups: a stack has each of its rows once."""
    excluded_queries: tuple[int, ...] = ()
    excluded_keys: tuple[int, ...] = ()
    """The positions `start .. stop - 1` of `(start, stop, start, stop, ...)`, which take no part."""


class SlotProblem(NamedTuple):
    """Query rows and key rows of one head in slots of `slot` rows each, of which `pattern` says which see which.

    Each of the sides begins with a slot; where its rows do not fill the last one, others stand in, which see nothing.
    """

    queries: tuple[ProblemRows, ...]
    keys: tuple[ProblemRows, ...]
    pattern: Pattern
    slot: int
    slots: int
    key_group: int
    """As in `SmallProblem`."""
