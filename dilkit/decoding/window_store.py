"""The store of a window: its last rows, in a ring; of strides and blocks, of which later rows see some: all rows.

SlidingWindow(4), after token 9          slots    | 8 | 9 | 6 | 7 |       token p is in slot p mod room
SlidingWindow(6, dilation_rate=2)        slots    | 6 | 7 | 8 | 9 | 4 | 5 |
    token 10 reads, a stride apart                  ^       ^       ^     those of its residue: one view, without a copy
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dilkit.decoding._kept_tokens import OfBand
from dilkit.decoding._tables import Slots
from dilkit.decoding.branch_store import FIRST_SLOTS, Block, BranchStore, Positions, served_heads, stacked, unseen_by
from dilkit.decoding.layout import Layout
from dilkit.pattern import Branch
from dilkit.pattern.checks import WHOLE_SEQUENCE
from dilkit.pattern.heads import Heads
from dilkit.pattern.lowering import Band, Form
from dilkit.pattern.runs import UNBOUNDED

ROWS_AT_ONCE = 64
"""Rows of a chunk that are held against a window together: so many rows more may be kept for them."""


class WindowStore(BranchStore):
    """Keys and values of the last `reach` rows, at last in a ring. A row sees its own residue modulo `stride` alone."""

    def __init__(self, branch: Branch, forms: Sequence[Form], given: Heads, layout: Layout, rollback: int) -> None:
        self.all_heads = given
        self.heads, serves_all = served_heads(branch, given)
        bands = [form for form in forms if isinstance(form, Band)]
        only_bands = len(bands) == len(forms) > 0
        whole = only_bands and len(bands) == 1 and not bands[0].first and bands[0].without_rows is None
        self.sees_all = whole and serves_all
        reach = max(band.back for band in bands) if only_bands else UNBOUNDED
        self.reach = WHOLE_SEQUENCE if reach == UNBOUNDED else reach
        self.stride, self.rollback = math.gcd(*(band.rate for band in bands)) if only_bands else 1, rollback
        slots, heads = Slots(), range(self.heads.start, self.heads.stop)
        if self.sees_all:
            kept_tokens = OfBand(branch, 0, heads, False, 0, bands[0].back, self.stride)
            slots = Slots((kept_tokens,), (None,), most=min(self._most(1), WHOLE_SEQUENCE))
        super().__init__(branch, len(heads), layout, rollback, slots)

    @property
    def _first(self) -> int:
        """The first token of those at hand, all of which are from it on."""
        return max(self.since, self.latest - self.rows.shape[3])

    def _most(self, count: int) -> int:
        """Return the slots that are ever needed where `count` rows come together; of a ring, a multiple of the stride."""
        rows = self.reach + max(self.rollback, count)
        return rows if self.reach == WHOLE_SEQUENCE else -(-rows // self.stride) * self.stride

    def at_once(self, seen: int) -> int:
        return WHOLE_SEQUENCE if self.reach == WHOLE_SEQUENCE else ROWS_AT_ONCE

    def columns(self, seen: int, count: int) -> int:
        return -(-min(seen + count, self._most(count)) // self.stride)

    def needed(self, seen: int) -> int:
        first = max(0, seen - self.rollback - self.reach, self._first)
        return self.rows.shape[1] * max(0, seen - first)

    def span(self, seen: int) -> range:
        return range(max(0, seen - self.reach), seen + 1)

    def extend(self, seen: int, new: Tensor) -> list[Block]:
        count = new.shape[3]
        self._append(seen, new, count)
        return [self._block(seen, count, row) for row in range(min(self.stride, count))]

    def make_room(self, seen: int) -> bool:
        if self.sees_all:
            self._make_slots(seen + 1, 1)
        return self.sees_all

    def append_last(self, seen: int, key: Tensor, value: Tensor) -> None:
        count = min(key.shape[1], self.reach + self.rollback)
        self.since = self.latest = seen - count
        if count:
            self._append(seen - count, stacked(key[:, -count:], value[:, -count:]), 1)

    def needed_from(self, length: int) -> int:
        return max(0, length - self.reach)

    def can_go_back(self, seen: int, length: int) -> bool:
        return self.needed_from(length) >= min(length, self._first)

    def go_back(self, seen: int, length: int) -> None:
        if self._first > self.needed_from(length):  # no row before is seen
            self.since = self.latest = length

    def fits(self, seen: int, slots: int, saved: int) -> bool:
        most = 2 * max(self.latest, FIRST_SLOTS) if self.reach == WHOLE_SEQUENCE else self._most(ROWS_AT_ONCE)
        whole = self.latest <= slots or slots % self.stride == 0
        first = max(self.since, self.latest - slots)
        within = self.since >= 0 and seen <= self.latest and first <= self.needed_from(seen)
        return whole and within and slots <= most and not saved

    def _append(self, seen: int, new: Tensor, together: int) -> None:
        """Store all rows; `together`: so many of them are held against what is stored."""
        self._make_slots(seen + new.shape[3], together)
        self.latest = max(self.latest, seen + new.shape[3])
        rows, room = new[:, self.heads], self.rows.shape[3]
        start = seen % room
        before = min(rows.shape[3], room - start)  # the end of the ring
        self.rows[:, :, :, start : start + before] = rows[:, :, :, :before]
        self.rows[:, :, :, : rows.shape[3] - before] = rows[:, :, :, before:]

    def _make_slots(self, tokens: int, together: int) -> None:
        """Make room for so many tokens: twice what there was, but never more than `_most`. A ring is laid out anew."""
        most, room = self._most(together), self.slots.count
        slots = min(max(self.latest, tokens), most)
        if slots <= room:
            return
        wanted = max(slots, 2 * room, FIRST_SLOTS)
        grown = self._grown(min(most, wanted if self.reach == WHOLE_SEQUENCE else -(-wanted // self.stride) * self.stride))
        if room:
            held = torch.arange(max(0, self.latest - room), self.latest, device=self.rows.device)
            grown[:, :, :, held % grown.shape[3]] = self.rows[:, :, :, held % room]
        self.rows = grown

    def _block(self, seen: int, count: int, row: int) -> Block:
        """Hold every `stride`-th row from `row` on against the slots of its residue."""
        first, end = seen + row, seen + count  # what was taken back is from `end` on: a bias has no positions of it
        held = min(end, room := self.rows.shape[3])
        residue, queries = first % self.stride, range(first, end, self.stride)
        keys: Positions = range(residue, end, self.stride)
        if end > room:  # the newest of the tokens that a slot has had; in the place of one taken back, one that no row sees
            slots = torch.arange(residue, held, self.stride, device=self.rows.device)
            keys = end - 1 - (end - 1 - slots) % room
        stored, unseen = self.rows[:, :, :, residue : held : self.stride], None
        if len(queries) > 1 or not self.sees_all or end - held < first - self.reach:
            unseen = unseen_by(self.branch, queries, keys, self.all_heads, self.heads, stored.device)
        return Block(self.heads, slice(row, None, self.stride), stored, queries, keys, unseen)
