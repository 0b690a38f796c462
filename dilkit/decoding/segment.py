"""The keys and values of one branch's open segment: those of the segment that the next token is in, none of earlier ones.

heads, by offset            slots ->
offset 0: heads 0, 2        | 0 | 2 | 4 | 6 |        heads of one offset lie side by side, so that a row's step
offset 1: heads 1, 3        | 1 | 3 | 5 | 7 |        reads one block of memory, and all of it is seen

for going back              | 0 |                    what the first rows of this segment took the place of
"""

from __future__ import annotations

import torch
from torch import Tensor

from dilkit.decoding._tables import Slots
from dilkit.decoding.block import Block
from dilkit.decoding.branch import KeptHeads, Part
from dilkit.decoding.branch_rows import FIRST_SLOTS, BranchRows
from dilkit.decoding.layout import Layout
from dilkit.pattern import Branch
from dilkit.pattern.lowering import Segments


class OpenSegment(BranchRows):
    """What a cache keeps of dilated segments: the open one.

    To go back by up to `rollback` tokens into the segment before, there is `saved`, what its first slots held. `since`: where
    what can be restored begins. `latest`: the last row stored in the open segment, whether it was taken back or not.
    """

    def __init__(self, branch: Branch, form: Segments, layout: Layout, rollback: int) -> None:
        self.kept = KeptHeads(form, layout)
        super().__init__(branch, self.kept.heads, layout, rollback, Slots(self.kept.tokens, self.kept.unseen, length=form.length))

    def tokens(self, seen: int) -> int:
        """Tokens of the open segment, after `seen` tokens in all."""
        return seen % self.kept.length

    def at_once(self, seen: int) -> int:
        return self.kept.length - self.tokens(seen)

    def columns(self, seen: int, count: int) -> int:
        return self.kept.slots(0, self.tokens(seen) + count)

    def needed(self, seen: int) -> int:
        tokens, length = self.tokens(seen), self.kept.length
        row, total = tokens - self.rollback, 0
        goes_back = row < 0 and seen - tokens - length >= self.since
        for offset, heads in self.kept.classes.items():
            before = self.kept.visible(offset, length, row + length) if goes_back else 0
            total += len(heads) * (before + self.kept.visible(offset, tokens, row))
        return total

    def extend(self, seen: int, new: Tensor) -> list[Block]:
        parts = self.kept.parts(seen, new.shape[2])
        self._append(seen, parts, new)
        return [self._block(seen, new.shape[2], part) for part in parts]

    def make_room(self, seen: int) -> bool:
        tokens = self.tokens(seen)
        self._begin(seen, tokens)
        if tokens % self.kept.rate in self.kept.classes:
            self._reserve(tokens // self.kept.rate + 1)
        return True

    def _begin(self, seen: int, tokens: int) -> None:
        """Where a segment begins, save what its first rows take the place of."""
        if tokens == 0 and self.latest <= seen:  # else it is what a call had begun with that failed, and is saved
            self.latest = seen
            if self.rollback:
                self.saved = self.rows[:, :, :, : -(-self.rollback // self.kept.rate)].clone()

    def _block(self, seen: int, count: int, part: Part) -> Block:
        rate, heads, first = self.kept.rate, part.of.heads, seen + part.rows.start
        begins = seen - self.tokens(seen)
        keys = range(begins + (first - begins) % rate, first + (part.count - 1) * rate + 1, rate)
        stored, queries = self.rows[:, part.of.stored, :, : part.end], range(first, seen + count, rate)
        unseen: Tensor | None = None
        if part.count > 1:  # of the new rows, none sees a later one
            later = torch.ones(part.count, part.end, dtype=torch.bool, device=stored.device).triu(part.first + 1)
            unseen = later[None, None, :, None]
        if self.kept.partly:
            unserved = self.kept.offsets[heads, None, None, :, None] < 0
            unseen = unserved if unseen is None else unseen | unserved
        return Block(heads, part.rows, stored, queries, keys, unseen)

    def _append(self, seen: int, parts: list[Part], new: Tensor) -> None:
        """Store `parts` of a chunk that begins after `seen`; `new` `(2, batch, rows, kv_heads, head_dim)` is keys and values."""
        self._begin(seen, self.tokens(seen))
        self.latest = max(self.latest, seen + new.shape[2])
        self._reserve(max((part.end for part in parts), default=0))
        for part in parts:
            kept = new[:, :, part.rows, part.of.heads].permute(0, 3, 1, 2, 4)
            self.rows[:, part.of.stored, :, part.first : part.end] = kept

    def append_last(self, seen: int, key: Tensor, value: Tensor) -> None:
        """And what is in the segment before, if going back can lead there."""
        tokens, chunk = self.tokens(seen), key.shape[1]
        pieces = [self.kept.length, tokens] if tokens < min(self.rollback, chunk) else [tokens]
        back = sum(pieces)
        if chunk > tokens:
            self.since = seen - back
        for count in pieces:
            rows = slice(chunk - back, chunk - back + count)
            self._append(seen - back, self.kept.parts(seen - back, count), torch.stack((key[:, rows], value[:, rows])))
            back -= count

    def needed_from(self, length: int) -> int:
        return length - self.tokens(length)

    def can_go_back(self, seen: int, length: int) -> bool:
        begun = seen - self.tokens(seen)
        return length > begun or length % self.kept.length == 0 or self._restores(begun, length)

    def go_back(self, seen: int, length: int) -> None:
        begun = seen - self.tokens(seen)
        if length > begun:
            return
        if not self._restores(begun, length):
            self.since = self.latest = length
        elif self.latest > begun:
            self.rows[:, :, :, : self.saved.shape[3]] = self.saved
            self.since, self.latest = begun - self.kept.length, begun

    def fits(self, seen: int, slots: int, saved: int) -> bool:
        tokens, most = self.tokens(seen), -(-self.kept.length // self.kept.rate)
        begun = seen - tokens
        ends = begun + self.kept.length if tokens else seen
        if not (0 <= self.since <= begun and slots <= most and saved <= most and seen <= self.latest <= ends):
            return False
        restores = self._restores(begun, begun)
        of_before, over_it = (self.kept.length, self.latest - begun) if restores else (0, 0)
        return self._most_slots(max(tokens, of_before)) <= slots and self._most_slots(over_it) <= saved

    def _most_slots(self, tokens: int) -> int:
        return max(self.kept.slots(offset, tokens) for offset in self.kept.classes)

    def _restores(self, begun: int, length: int) -> bool:
        """Whether the segment before the one that begins at `begun` is at hand, and `length` is in it."""
        before = begun - self.kept.length
        return self.since <= before < length and self.latest - begun <= self.rollback

    def _reserve(self, slots: int) -> None:
        """Room for so many slots: twice what there was, but never more than a segment has."""
        if slots <= (held := self.slots.count):
            return
        grown = self._grown(min(-(-self.kept.length // self.kept.rate), max(slots, 2 * held, FIRST_SLOTS)))
        grown[:, :, :, :held] = self.rows
        self.rows = grown
