"""The store of dilated segments: the segment that the next token is in, none of earlier ones.

heads, by offset            slots ->
offset 0: heads 0, 2        | 0 | 2 | 4 | 6 |        heads of one offset lie side by side, so that a row's step
offset 1: heads 1, 3        | 1 | 3 | 5 | 7 |        reads one block of memory, and all of it is seen

for going back              | 0 |                    what the first rows of this segment took the place of

slot s of a head with offset o  =  token  start of the segment + o + s * dilation_rate
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dilkit.decoding._kept_tokens import kept_of_segments
from dilkit.decoding._tables import Slots
from dilkit.decoding.branch_store import Block, BranchStore, stacked
from dilkit.decoding.layout import Layout
from dilkit.pattern import Branch
from dilkit.pattern.lowering import Segments


class HeadClass(NamedTuple):
    heads: slice
    stored: slice


@dataclass(frozen=True)
class SegmentPart:
    """Rows of a chunk, within one segment, that one class of heads keeps: `count` of them, in slots `first` to `end - 1`."""

    kept_by: HeadClass
    rows: slice
    first: int
    count: int

    @property
    def end(self) -> int:
        return self.first + self.count


class SegmentStore(BranchStore):
    """Keys and values of the open segment; `saved`: what its first slots held, to go back by up to `rollback` tokens.

    `since`: where what can be restored begins. `tokens`, `classes`: what the heads of each offset keep, and these heads.
    `offsets` `(kv_heads, group)`: that of each query head, -1 if it is not served. `partly`: True if a group is served in part.
    """

    def __init__(self, branch: Branch, form: Segments, layout: Layout, rollback: int) -> None:
        self.length, self.rate = form.length, form.rate
        start, stop = form.heads
        offsets = [-1] * start + list(form.offsets) + [-1] * (layout.heads - stop)
        with torch.inference_mode(False):
            self.offsets = torch.tensor(offsets, device=layout.device).view(layout.kv_heads, -1)
        self.tokens = tuple(kept_of_segments(form, layout.heads // layout.kv_heads))
        self.partly = any(one.masked for one in self.tokens)
        self.classes: dict[int, HeadClass] = {}
        count = 0
        for one in self.tokens:
            heads = slice(one.head, one.head + (one.heads - 1) * one.head_step + 1, one.head_step)
            self.classes[one.offset] = HeadClass(heads, slice(count, count + one.heads))
            count += one.heads
        unseen = tuple((self.offsets[of.heads, :, None] < 0) if self.partly else None for of in self.classes.values())
        super().__init__(branch, count, layout, rollback, Slots(self.tokens, unseen, length=form.length))

    def at_once(self, seen: int) -> int:
        return self.length - seen % self.length

    def columns(self, seen: int, count: int) -> int:
        return -(-(seen % self.length + count) // self.rate)

    def needed(self, seen: int) -> int:
        begun, row = self.needed_from(seen), max(0, seen - self.rollback)
        first = begun - self.length if begun - self.length >= self.since else begun  # of the rows at hand
        return sum(one.heads * (one.before(seen) - max(one.needed(row), one.before(first))) for one in self.tokens)

    def extend(self, seen: int, new: Tensor) -> list[Block]:
        parts = self._parts(seen, new.shape[3])
        self._append(seen, parts, new)
        return [self._block(seen, new.shape[3], part) for part in parts]

    def make_room(self, seen: int) -> bool:
        self._begin(seen)
        tokens = seen % self.length
        if tokens % self.rate in self.classes:
            self._reserve(tokens // self.rate + 1, self._most)
        return True

    def append_last(self, seen: int, key: Tensor, value: Tensor) -> None:
        """Store the open segment of the chunk, and the segment before if going back can lead there."""
        tokens, chunk = seen % self.length, key.shape[1]
        pieces = [self.length, tokens] if tokens < min(self.rollback, chunk) else [tokens]
        back = sum(pieces)
        if chunk > tokens:
            self.since = seen - back
        for count in pieces:
            rows = slice(chunk - back, chunk - back + count)
            self._append(seen - back, self._parts(seen - back, count), stacked(key[:, rows], value[:, rows]))
            back -= count

    def needed_from(self, length: int) -> int:
        return length - length % self.length

    def can_go_back(self, seen: int, length: int) -> bool:
        begun = self.needed_from(seen)
        return length > begun or length % self.length == 0 or self._restores(begun, length)

    def go_back(self, seen: int, length: int) -> None:
        begun = self.needed_from(seen)
        if length > begun:
            return
        if not self._restores(begun, length):
            self.since = self.latest = length
        elif self.latest > begun:
            self.rows[:, :, :, : self.saved.shape[3]] = self.saved
            self.since, self.latest = begun - self.length, begun

    def fits(self, seen: int, slots: int, saved: int) -> bool:
        tokens, begun = seen % self.length, self.needed_from(seen)
        ends = begun + self.length if tokens else seen
        if not (0 <= self.since <= begun and slots <= self._most and saved <= self._most and seen <= self.latest <= ends):
            return False
        before, over_it = (self.length, self.latest - begun) if self._restores(begun, begun) else (0, 0)
        held, replaced = (max(one.before(count) for one in self.tokens) for count in (max(tokens, before), over_it))
        return held <= slots and replaced <= saved

    @property
    def _most(self) -> int:
        return -(-self.length // self.rate)

    def _parts(self, seen: int, count: int) -> list[SegmentPart]:
        parts = []
        for row in range(min(self.rate, count)):
            slot, offset = divmod(seen % self.length + row, self.rate)
            if (heads := self.classes.get(offset)) is not None:
                parts.append(SegmentPart(heads, slice(row, None, self.rate), slot, -(-(count - row) // self.rate)))
        return parts

    def _append(self, seen: int, parts: list[SegmentPart], new: Tensor) -> None:
        self._begin(seen)
        self.latest = max(self.latest, seen + new.shape[3])
        self._reserve(max((part.end for part in parts), default=0), self._most)
        for part in parts:
            heads, stored = part.kept_by
            self.rows[:, stored, :, part.first : part.end] = new[:, heads, :, part.rows]

    def _begin(self, seen: int) -> None:
        """Save, where a segment begins, the rows that its first ones take the place of."""
        if seen % self.length == 0 and self.latest <= seen:  # else it is what a call had begun with that failed, and is saved
            self.latest = seen
            if self.rollback:
                self.saved = self.rows[:, :, :, : -(-self.rollback // self.rate)].clone()

    def _block(self, seen: int, count: int, part: SegmentPart) -> Block:
        (heads, held), first, begun = part.kept_by, seen + part.rows.start, self.needed_from(seen)
        keys = range(begun + (first - begun) % self.rate, first + (part.count - 1) * self.rate + 1, self.rate)
        stored, queries = self.rows[:, held, :, : part.end], range(first, seen + count, self.rate)
        unseen: Tensor | None = None
        if part.count > 1:  # of the new rows, none sees a later one
            later = torch.ones(part.count, part.end, dtype=torch.bool, device=stored.device).triu(part.first + 1)
            unseen = later[None, None, :, None]
        if self.partly:
            unserved = self.offsets[heads, None, None, :, None] < 0
            unseen = unserved if unseen is None else unseen | unserved
        return Block(heads, part.rows, stored, queries, keys, unseen)

    def _restores(self, begun: int, length: int) -> bool:
        """True if the segment before the one that begins at `begun` is at hand, and `length` is in it."""
        before = begun - self.length
        return self.since <= before < length and self.latest - begun <= self.rollback
