"""The store of global tokens, for ever, and before the last that sees all, all rows before it.

GlobalTokens([0, 5])        until token 5 has come    | 0 | 1 | 2 | 3 | 4 | 5 |      it sees all before it
                            from then on              | 0 | 5 |
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import torch
from torch import Tensor

from dilkit.decoding._kept_tokens import OfGlobal
from dilkit.decoding._tables import Slots
from dilkit.decoding.branch_store import Block, BranchStore, Positions, served_heads, stacked, unseen_by
from dilkit.decoding.layout import Layout
from dilkit.pattern import Branch
from dilkit.pattern.checks import WHOLE_SEQUENCE
from dilkit.pattern.heads import Heads
from dilkit.pattern.lowering import Global


class GlobalStore(BranchStore):
    """Keys and values of global tokens.

    All rows before token `before` are kept until it has come. `since` is 0 until then, and `before` when they have been left out.
    """

    def __init__(self, branch: Branch, form: Global, given: Heads, layout: Layout, rollback: int) -> None:
        self.all_heads = given
        self.heads, self.sees_all = served_heads(branch, given)
        runs = [range(start, stop) for start, stop in form.columns.tolist()]
        self.tokens: Sequence[int] = runs[0] if len(runs) == 1 and not runs[0].start else [token for run in runs for token in run]
        first_ones = isinstance(self.tokens, range)
        self.before = 0 if first_ones or not len(form.rows) else self.tokens[-1] + 1
        with torch.inference_mode(False):
            self.places = None if first_ones else torch.tensor(self.tokens, device=layout.device)
        heads = range(self.heads.start, self.heads.stop)
        kept_tokens = OfGlobal(branch, 0, heads, False, form.columns, form.columns[:0])
        super().__init__(branch, len(heads), layout, rollback, Slots((kept_tokens,), (None,), places=self.places))

    def _slots(self, tokens: int) -> int:
        return min(tokens, self.before) if self.since < self.before else bisect_left(self.tokens, tokens)

    @property
    def _most(self) -> int:
        return self.before if self.since < self.before else len(self.tokens)

    def at_once(self, seen: int) -> int:
        return WHOLE_SEQUENCE

    def columns(self, seen: int, count: int) -> int:
        return self._slots(seen + count)

    def needed(self, seen: int) -> int:
        all_before = self.since < self.before and seen - self.rollback < self.before
        return self.rows.shape[1] * (min(seen, self.before) if all_before else bisect_left(self.tokens, seen))

    def span(self, seen: int) -> range:
        if self.since < self.before or not self.tokens:
            return super().span(seen)
        return range(self.tokens[0], self.tokens[-1] + 1)

    def extend(self, seen: int, new: Tensor) -> list[Block]:
        self._append(seen, new)
        queries = range(seen, seen + new.shape[3])
        slots = self._slots(queries.stop)  # a bias has no positions of tokens that were taken back
        stored = self.rows[:, :, :, :slots]
        keys: Positions = range(slots) if self.since < self.before or self.places is None else self.places[:slots]
        unseen: Tensor | None = None
        if not (len(queries) == 1 and self.sees_all and self.since == self.before):
            unseen = unseen_by(self.branch, queries, keys, self.all_heads, self.heads, stored.device)
        return [Block(self.heads, slice(None), stored, queries, keys, unseen)]

    def make_room(self, seen: int) -> bool:
        if not self.sees_all or self.since < self.before:
            return False
        self._reserve(self._slots(seen + 1), self._most)
        return True

    def append_last(self, seen: int, key: Tensor, value: Tensor) -> None:
        self.latest = start = seen - key.shape[1]
        self.since = self.before if seen - self.rollback >= self.before else 0
        self._append(start, stacked(key, value))

    def needed_from(self, length: int) -> int:
        return 0

    def can_go_back(self, seen: int, length: int) -> bool:
        return length == 0 or length >= self.since

    def go_back(self, seen: int, length: int) -> None:
        if length == 0:
            self.since = self.latest = 0

    def fits(self, seen: int, slots: int, saved: int) -> bool:
        within = self.since in (0, self.before) and self.since <= seen <= self.latest
        return within and not saved and self._slots(self.latest) <= slots <= self._most

    def _append(self, seen: int, new: Tensor) -> None:
        if self.since < self.before <= seen - self.rollback:  # the last token that sees all will not come again
            with torch.inference_mode(False):
                self.rows, self.since = self.rows[:, :, :, self.places], self.before
        stop = seen + new.shape[3]
        self.latest = max(self.latest, stop)
        slots = slice(self._slots(seen), self._slots(stop))
        if slots.start == slots.stop:
            return
        self._reserve(slots.stop, self._most)
        if self.since < self.before or self.places is None:
            self.rows[:, :, :, slots] = new[:, self.heads, :, slots.start - seen : slots.stop - seen]
        else:
            self.rows[:, :, :, slots] = new[:, self.heads][:, :, :, self.places[slots] - seen]
