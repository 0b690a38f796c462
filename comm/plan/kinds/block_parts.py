"""Parts of blocks: what ranks hold of them, which of them travel, and where they are found again in messages."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

import numpy as np

from dilkit.comm.plan.kept_rows import KeptRows, Message, Side
from dilkit.comm.plan.kinds.rectangles import Bools, Rectangle
from dilkit.comm.plan.sharded_segments import IntArray, ServedHead


class Unit(NamedTuple):
    """A layout `(blocks, blocks)` and the heads that follow it: all, or a single query head."""

    layout: Bools
    heads: tuple[ServedHead, ...]

    @property
    def width(self) -> int:
        """Query heads."""
        return sum(head.width for head in self.heads)


class Parts(NamedTuple):
    """What a rank holds of blocks: part i, of block `first + i`, are the rows from `edges[i]` on; `whole`: which are whole."""

    first: int
    edges: IntArray
    whole: Bools

    @property
    def blocks(self) -> slice:
        """The numbers of the blocks."""
        return slice(self.first, self.first + len(self.whole))

    @property
    def rows(self) -> IntArray:
        """Rows of each part."""
        return np.diff(self.edges)

    def span(self, run: tuple[int, int]) -> tuple[int, int]:
        """The rows `start .. stop - 1` of a run of parts."""
        return int(self.edges[run[0]]), int(self.edges[run[1]])


class Split(NamedTuple):
    """Which parts of queries of one rank see which parts of keys of another, by unit: with keys, or with queries that travel."""

    light: list[Bools]
    heavy: list[Bools]


@dataclass(frozen=True, eq=False)
class Travels:
    """Which parts go from whom to whom: queries by unit, keys by group of units with one key/value head. And pairs by rank."""

    queries: dict[tuple[int, int, int], Bools] = field(default_factory=dict)
    keys: dict[tuple[int, int, int], Bools] = field(default_factory=dict)
    pairs: dict[int, int] = field(default_factory=lambda: defaultdict(int))

    def add(self, which: dict[tuple[int, int, int], Bools], source: int, target: int, number: int, parts: Bools) -> None:
        """Have these parts travel as well."""
        if parts.any():
            key = source, target, number
            which[key] = which[key] | parts if key in which else parts


class Received(NamedTuple):
    """The kept rows of a message by head, ascending: of queries by the first query head, of keys by the key/value head."""

    queries: dict[int, list[KeptRows]]
    keys: dict[int, list[KeptRows]]

    @classmethod
    def of(cls, message: Message) -> Received:
        """Those of a message."""
        return cls(_by(message.queries, lambda kept: kept.first), _by(message.keys, lambda kept: kept.kv_head))


def _by(kept: Iterable[KeptRows], head: Callable[[KeptRows], int]) -> dict[int, list[KeptRows]]:
    return {number: list(some) for number, some in groupby(kept, key=head)}


def side_of(kept: list[KeptRows], start: int, stop: int) -> Side:
    """The rows `start .. stop - 1`, which are within one of these."""
    rows = kept[bisect_right(kept, start, key=lambda rows: rows.start) - 1]
    return Side((rows,), start - rows.start, 1, stop - start)


class Levels:
    """Numbers for the rectangles of a rank, which differ where two have queries or keys in common."""

    def __init__(self, parts: dict[int, Parts]) -> None:
        self.parts = parts
        self.used: dict[tuple[str, int, int], IntArray] = {}

    def next(self, unit: int, kv_head: int, asking: int, seen: int, rectangle: Rectangle) -> int:
        """The number of a rectangle of queries of the rank `asking` and keys of the rank `seen`."""
        queries = self._used("queries", asking, unit)[rectangle.top : rectangle.bottom]
        keys = self._used("keys", seen, kv_head)[rectangle.left : rectangle.right]
        level = int(max(queries.max(), keys.max()))
        queries[:] = keys[:] = level + 1
        return level

    def _used(self, role: str, rank: int, head: int) -> IntArray:
        """How many numbers the parts of a rank have used up."""
        return self.used.setdefault((role, rank, head), np.zeros(len(self.parts[rank].whole), np.int64))
