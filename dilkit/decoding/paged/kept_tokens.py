"""Which tokens of a branch are kept for some key/value heads, in order, and which of these a row sees.

DilatedSegment(6, 2), heads of offset 1     token    0 1 2 3 4 5 | 6 7 8 9 ...
                                            index      0   1   2     3   4         row 9 sees 3, 4: those of its segment

A branch is one or several of these; no key/value head is in two that show it the same key.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dilkit.pattern import WHOLE_SEQUENCE, Branch, Pattern
from dilkit.pattern.heads import Heads
from dilkit.pattern.lowering import Band, Global, Segments

NONE = range(0)


@dataclass(frozen=True)
class KeptTokens(ABC):
    """Those of `branch`, number `place` of the pattern, for the key/value heads `head`, `head + head_step`, ..., `heads` of them.

    `masked`: whether some query heads see only a part of what `seen` says, or nothing of it, by what the branch says of pairs.
    """

    branch: Branch
    place: int
    head: int
    head_step: int
    heads: int
    masked: bool

    @abstractmethod
    def before(self, token: int) -> int:
        """How many tokens before `token` are kept."""

    @abstractmethod
    def tokens(self, indices: range) -> range | NDArray[np.int64]:
        """Which tokens these are."""

    @abstractmethod
    def seen(self, row: int) -> range:
        """The indices that the row of token `row` sees, of those before it and its own."""

    @abstractmethod
    def needed(self, row: int) -> int:
        """The first index that a row from `row` on sees, or those that come if none of these is seen."""


@dataclass(frozen=True)
class OfSegments(KeptTokens):
    """`offset`, `offset + rate`, ... of each segment of `length` tokens."""

    length: int
    rate: int
    offset: int

    @property
    def _each(self) -> int:
        """How many a whole segment has."""
        return max(0, -(-(self.length - self.offset) // self.rate))

    def before(self, token: int) -> int:
        segment, place = divmod(token, self.length)
        return segment * self._each + max(0, -(-(place - self.offset) // self.rate))

    def tokens(self, indices: range) -> range | NDArray[np.int64]:
        if not indices or not self._each:
            return NONE
        (segment, slot), last = divmod(indices[0], self._each), indices[-1] // self._each
        if segment == last:
            first = segment * self.length + self.offset + slot * self.rate
            return range(first, first + len(indices) * indices.step * self.rate, indices.step * self.rate)
        segments, slots = np.divmod(np.arange(indices.start, indices.stop, indices.step), self._each)
        return np.asarray(segments * self.length + self.offset + slots * self.rate, np.int64)

    def seen(self, row: int) -> range:
        segment, place = divmod(row, self.length)
        slot, apart = divmod(place - self.offset, self.rate)
        return NONE if apart or slot < 0 else range(segment * self._each, segment * self._each + slot + 1)

    def needed(self, row: int) -> int:
        segment, place = divmod(row, self.length)
        is_over = place > self.offset + (self._each - 1) * self.rate
        return (segment + is_over) * self._each


@dataclass(frozen=True)
class OfBand(KeptTokens):
    """All tokens; a row sees those at distances `first`, `first + rate`, ... up to `back`, multiples of `rate`."""

    first: int
    back: int
    rate: int

    def before(self, token: int) -> int:
        return token

    def tokens(self, indices: range) -> range | NDArray[np.int64]:
        return indices

    def seen(self, row: int) -> range:
        farthest = min(self.back, row) // self.rate * self.rate
        nearest = -(-self.first // self.rate) * self.rate
        return range(row - farthest, row - nearest + 1, self.rate)

    def needed(self, row: int) -> int:
        return max(0, row - self.back // self.rate * self.rate)


@dataclass(frozen=True)
class OfGlobal(KeptTokens):
    """The global tokens, which all rows see but the global ones where those see all (`OfAll`)."""

    places: tuple[int, ...]
    rows: frozenset[int]

    def before(self, token: int) -> int:
        return bisect_left(self.places, token)

    def tokens(self, indices: range) -> range | NDArray[np.int64]:
        first = self.places[0] if self.places else 0
        if self.places == tuple(range(first, first + len(self.places))):
            return range(first + indices.start, first + indices.stop, indices.step)
        return np.array(self.places, np.int64)[indices.start : indices.stop : indices.step]

    def seen(self, row: int) -> range:
        return NONE if row in self.rows else range(self.before(row + 1))

    def needed(self, row: int) -> int:
        return 0


@dataclass(frozen=True)
class OfAll(KeptTokens):
    """All tokens up to the last of `rows`, which see them all."""

    rows: frozenset[int]

    @property
    def _end(self) -> int:
        return max(self.rows) + 1

    def before(self, token: int) -> int:
        return min(token, self._end)

    def tokens(self, indices: range) -> range | NDArray[np.int64]:
        return indices

    def seen(self, row: int) -> range:
        return range(row + 1) if row in self.rows else NONE

    def needed(self, row: int) -> int:
        return 0 if row < self._end else self._end


@dataclass(frozen=True)
class OfAny(KeptTokens):
    """All tokens, of which the branch says pair by pair which a row sees."""

    def before(self, token: int) -> int:
        return token

    def tokens(self, indices: range) -> range | NDArray[np.int64]:
        return indices

    def seen(self, row: int) -> range:
        return range(row + 1)

    def needed(self, row: int) -> int:
        return 0


def kept_tokens(pattern: Pattern, given: Heads) -> tuple[tuple[KeptTokens, ...], ...]:
    """Those of each branch for the heads at hand."""
    return tuple(tuple(_of_branch(branch, place, given)) for place, branch in enumerate(pattern.branches))


def _of_branch(branch: Branch, place: int, given: Heads) -> Iterator[KeptTokens]:
    served, group = branch.served(given), given.group
    first, stop = served.start // group, -(-served.stop // group)
    partly = len(served) != (stop - first) * group
    heads = place, first, 1, stop - first
    forms = [] if branch.is_evaluated else list(branch.forms(given, WHOLE_SEQUENCE))
    only = forms[0] if len(forms) == 1 and forms[0].without_rows is None else None
    if isinstance(only, Segments) and only.shares_offsets(group):
        yield from _of_segments(branch, place, only, group, partly)
    elif isinstance(only, Global) and (len(only.rows) == 0 or only.rows is only.columns):
        places, rows = _listed(only.columns), frozenset(_listed(only.rows))
        yield OfGlobal(branch, *heads, partly, places, rows)
        if rows:
            yield OfAll(branch, *heads, partly, rows)
    elif isinstance(only, Band):
        yield OfBand(branch, *heads, partly, only.first, only.back, only.rate)
    else:
        yield OfAny(branch, *heads, True)


def _of_segments(branch: Branch, place: int, form: Segments, group: int, partly: bool) -> Iterator[KeptTokens]:
    """One for the heads of each offset: they are a rate apart, or side by side."""
    by_offset: dict[int, list[int]] = defaultdict(list)
    for head, offset in enumerate(form.offsets, form.heads[0]):
        kv_head = head // group
        if by_offset[offset][-1:] != [kv_head]:
            by_offset[offset].append(kv_head)
    for offset, heads in sorted(by_offset.items()):
        step = heads[1] - heads[0] if len(heads) > 1 else 1
        yield OfSegments(branch, place, heads[0], step, len(heads), partly, form.length, form.rate, offset)


def _listed(runs: NDArray[np.int64]) -> tuple[int, ...]:
    return tuple(token for start, stop in runs.tolist() for token in range(start, stop))
