"""Rows that travel from rank to rank, and the small problems made of them. Values without tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dilkit.comm.plan.shardable_forms import ServedHead
from dilkit.pattern import Pattern

IntArray = NDArray[np.int64]


class HeadRows(NamedTuple):
    """Rows of one key/value head, or of its query heads, in one rank's shard: `size` positions `start, start + step, ...`."""

    branch: int
    head: ServedHead
    start: int
    step: int
    size: int


SharedRows = tuple[tuple[ServedHead, ...], int, int, int]
"""Rows that several heads share: `(heads, start, step, size)`."""
Message = tuple[list[SharedRows], list[SharedRows]]
"""Rows of queries, and of keys (and values), that one rank sends another for one branch."""


def message_rows(message: Message) -> tuple[int, int]:
    """Return how many rows of queries and of keys a message has, for a batch of 1."""
    queries, keys = message
    by_query = sum(size * sum([head.width for head in heads]) for heads, _, _, size in queries)
    return by_query, sum(size * len(heads) for heads, _, _, size in keys)


def by_head(branch: int, rows: Iterable[SharedRows]) -> list[HeadRows]:
    """Return rows of a message head by head, in the order in which they lie there."""
    return [HeadRows(branch, head, start, step, size) for heads, start, step, size in rows for head in heads]


class RowSpan(NamedTuple):
    """`size` of the rows `rows` of a message: number `first`, then every `step`-th, backwards if `step` is negative."""

    rows: HeadRows
    first: int
    step: int
    size: int

    @property
    def start(self) -> int:
        return self.rows.start + self.rows.step * self.first

    @property
    def stride(self) -> int:
        return self.rows.step * self.step


Side = tuple[RowSpan, ...]
"""The queries or the keys of a small problem, one span after the other."""


def whole(rows: Iterable[HeadRows]) -> Side:
    return tuple(RowSpan(some, 0, 1, some.size) for some in rows)


def length(side: Side, slot: int = 1) -> int:
    """Count the rows of a side, with each span rounded up to whole slots."""
    return sum(-(-span.size // slot) * slot for span in side)


def part(side: Side, first: int, last: int) -> Side:
    """Return the rows `first .. last - 1` of a side."""
    spans, before = [], 0
    for span in side:
        low, high = max(first - before, 0), min(last - before, span.size)
        if low < high:
            spans.append(span._replace(first=span.first + span.step * low, size=high - low))
        before += span.size
    return tuple(spans)


def positions(side: Side) -> IntArray:
    return np.concatenate([span.start + span.stride * np.arange(span.size) for span in side])


class SmallProblem(NamedTuple):
    """Query rows of one head, and the key rows that they attend to.

    `pattern` None: every query sees every key, with causality those up to its own number. Problems with queries or keys in common
    have different `key_group`s: a stack has each of its rows once. Excluded positions are `(start, stop, start, stop, ...)`.

    With a `slot` of several rows, each span of a side begins with a slot, and `pattern` holds for slots. Where a span does not
    fill its last slot, fillers do, which see nothing.
    """

    queries: Side
    keys: Side
    is_causal: bool
    pattern: Pattern | None = None
    key_group: int = 0
    excluded_queries: tuple[int, ...] = ()
    excluded_keys: tuple[int, ...] = ()
    slot: int = 1
