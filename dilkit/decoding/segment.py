"""The keys and values of one branch's open segment: those of the segment that the next token is in, none of earlier ones.

heads, by offset            slots ->
offset 0: heads 0, 2        | 0 | 2 | 4 | 6 |        heads of one offset lie side by side, so that a row's step
offset 1: heads 1, 3        | 1 | 3 | 5 | 7 |        reads one block of memory, and all of it is seen

for going back              | 0 |                    what the first rows of this segment took the place of
"""

from __future__ import annotations

import torch
from torch import Tensor

from dilkit.decoding.branch import KeptHeads, Layout, Part
from dilkit.pattern import Pattern

_FIRST_SLOTS = 64


class OpenSegment:
    """What a cache keeps for one branch.

    `rows` `(2, heads, batch, slots, head_dim)`: keys and values. To go back by up to `rollback` tokens into the segment before,
    there is `saved`, what its first slots held. `since`: where what can be restored begins. `latest`: the last row stored in the
    open segment, whether it was taken back or not.
    """

    def __init__(self, kept: KeptHeads, layout: Layout, rollback: int) -> None:
        self.kept, self.rollback, self.since, self.latest = kept, rollback, 0, 0
        with torch.inference_mode(False):  # a tensor made in inference mode could not be written to outside of it
            shape = (2, kept.heads, layout.batch, 0, layout.head_dim)
            self.rows = self.saved = torch.zeros(shape, dtype=layout.dtype, device=layout.device)

    def tokens(self, seen: int) -> int:
        """Tokens of the open segment, after `seen` tokens in all."""
        return seen % self.kept.length

    def needed(self, seen: int) -> int:
        """Rows of all heads that some row from `seen - rollback` on can see, of `seen` tokens."""
        tokens, length = self.tokens(seen), self.kept.length
        row, total = tokens - self.rollback, 0
        goes_back = row < 0 and seen - tokens - length >= self.since
        for offset, heads in self.kept.classes.items():
            before = self.kept.visible(offset, length, row + length) if goes_back else 0
            total += len(heads) * (before + self.kept.visible(offset, tokens, row))
        return total

    def append(self, seen: int, parts: list[Part], new: Tensor) -> None:
        """Store `parts` of a chunk that begins after `seen`; `new` `(2, batch, rows, kv_heads, head_dim)` is keys and values."""
        if self.tokens(seen) == 0:
            self.latest = seen
            if self.rollback:
                self.saved = self.rows[:, :, :, : -(-self.rollback // self.kept.rate)].clone()
        self.latest = max(self.latest, seen + new.shape[2])
        self._reserve(max((part.end for part in parts), default=0))
        for part in parts:
            kept = new[:, :, part.rows, part.of.heads].permute(0, 3, 1, 2, 4)
            self.rows[:, part.of.stored, :, part.first : part.end] = kept

    def append_last(self, seen: int, key: Tensor, value: Tensor) -> None:
        """Of a chunk that began where a segment does and ends after `seen` tokens, store what is in the open segment.

        And what is in the one before, if going back can lead there.
        """
        tokens, chunk = self.tokens(seen), key.shape[1]
        pieces = [self.kept.length, tokens] if tokens < min(self.rollback, chunk) else [tokens]
        back = sum(pieces)
        if chunk > tokens:
            self.since = seen - back
        for count in pieces:
            rows = slice(chunk - back, chunk - back + count)
            self.append(seen - back, self.kept.parts(seen - back, count), torch.stack((key[:, rows], value[:, rows])))
            back -= count

    def can_go_back(self, seen: int, length: int) -> bool:
        """Whether the rows are at hand, of `seen` tokens, that come after the first `length` of them."""
        begun = seen - self.tokens(seen)
        return length > begun or length % self.kept.length == 0 or self._restores(begun, length)

    def go_back(self, seen: int, length: int) -> None:
        """Forget all tokens of `seen` but the first `length`."""
        begun = seen - self.tokens(seen)
        if length > begun:
            return
        if not self._restores(begun, length):
            self.since = self.latest = length
        elif self.latest > begun:
            self.rows[:, :, :, : self.saved.shape[3]] = self.saved
            self.since, self.latest = begun - self.kept.length, begun

    def reorder(self, indices: Tensor) -> None:
        """Take the sequences `indices` instead."""
        with torch.inference_mode(False):
            self.rows, self.saved = (x.index_select(2, indices.to(x.device)) for x in (self.rows, self.saved))

    def _restores(self, begun: int, length: int) -> bool:
        """Whether the segment before the one that begins at `begun` is at hand, and `length` is in it."""
        before = begun - self.kept.length
        return self.since <= before < length and self.latest - begun <= self.rollback

    def _reserve(self, slots: int) -> None:
        """Room for so many slots: twice what there was, but never more than a segment has."""
        if slots <= (held := self.rows.shape[3]):
            return
        room = min(-(-self.kept.length // self.kept.rate), max(slots, 2 * held, _FIRST_SLOTS))
        with torch.inference_mode(False):
            grown = self.rows.new_zeros(*self.rows.shape[:3], room, self.rows.shape[4])
        grown[:, :, :, :held] = self.rows
        self.rows = grown


def open_segments(pattern: Pattern, layout: Layout, rollback: int) -> list[OpenSegment]:
    """One for each branch, with nothing in it."""
    return [OpenSegment(KeptHeads(pattern, branch, layout), layout, rollback) for branch in pattern.segments]
