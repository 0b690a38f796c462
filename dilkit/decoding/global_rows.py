"""The rows of global tokens, for ever, and before the last that sees all, all rows before it.

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
from dilkit.decoding.block import Block, Positions, unseen_by
from dilkit.decoding.branch_rows import FIRST_SLOTS, BranchRows
from dilkit.decoding.layout import Layout
from dilkit.pattern import Branch
from dilkit.pattern.checks import WHOLE_SEQUENCE
from dilkit.pattern.heads import Heads
from dilkit.pattern.lowering import Global


class GlobalRows(BranchRows):
    """What a cache keeps of global tokens.

    `before`: all rows before this token are kept until it has come, for one that sees them. `since` is 0 until then, and
    `before` when all but the global ones have been left out.
    """

    def __init__(self, branch: Branch, form: Global, given: Heads, layout: Layout, rollback: int) -> None:
        self.given, group, served = given, layout.heads // layout.kv_heads, branch.served(given)
        self.heads = slice(served.start // group, -(-served.stop // group))
        count = self.heads.stop - self.heads.start
        self.sees_all = len(served) == count * group
        runs = [range(start, stop) for start, stop in form.columns.tolist()]
        self.tokens: Sequence[int] = runs[0] if len(runs) == 1 and not runs[0].start else [token for run in runs for token in run]
        first_ones = isinstance(self.tokens, range)
        self.before = 0 if first_ones or not len(form.rows) else self.tokens[-1] + 1
        with torch.inference_mode(False):
            self.places = None if first_ones else torch.tensor(self.tokens, device=layout.device)
        kept = OfGlobal(branch, 0, range(self.heads.start, self.heads.stop), False, form.columns, form.columns[:0])
        super().__init__(branch, count, layout, rollback, Slots((kept,), (None,), places=self.places))

    def _slots(self, tokens: int) -> int:
        """How many of the first `tokens` tokens are kept."""
        if self.since < self.before:
            return min(tokens, self.before)
        return bisect_left(self.tokens, tokens)

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
        queries = range(seen, seen + new.shape[2])
        stored = self.rows[:, :, :, : self._slots(queries.stop)]  # a bias has no positions of tokens that were taken back
        keys = self._keys(stored.shape[3])
        unseen: Tensor | None = None
        if not (len(queries) == 1 and self.sees_all and self.since == self.before):
            unseen = unseen_by(self.branch, queries, keys, self.given, self.heads, stored.device)
        return [Block(self.heads, slice(None), stored, queries, keys, unseen)]

    def make_room(self, seen: int) -> bool:
        if not self.sees_all or self.since < self.before:
            return False
        self._reserve(self._slots(seen + 1))
        return True

    def _keys(self, slots: int) -> Positions:
        return range(slots) if self.since < self.before or self.places is None else self.places[:slots]

    def append_last(self, seen: int, key: Tensor, value: Tensor) -> None:
        self.latest = start = seen - key.shape[1]
        self.since = self.before if seen - self.rollback >= self.before else 0
        self._append(start, torch.stack((key, value)))

    def _append(self, seen: int, new: Tensor) -> None:
        if self.since < self.before <= seen - self.rollback:  # the last token that sees all will not come again
            with torch.inference_mode(False):
                self.rows, self.since = self.rows[:, :, :, self.places], self.before
        count = new.shape[2]
        self.latest = max(self.latest, seen + count)
        first, stop = self._slots(seen), self._slots(seen + count)
        if first == stop:
            return
        self._reserve(stop)
        kept = new[:, :, :, self.heads].permute(0, 3, 1, 2, 4)
        if self.since < self.before or self.places is None:
            self.rows[:, :, :, first:stop] = kept[:, :, :, first - seen : stop - seen]
        else:
            self.rows[:, :, :, first:stop] = kept[:, :, :, self.places[first:stop] - seen]

    def _reserve(self, slots: int) -> None:
        """Room for so many slots: twice what there was, but never more than there will be."""
        if slots <= (held := self.slots.count):
            return
        most = self.before if self.since < self.before else len(self.tokens)
        grown = self._grown(min(most, max(slots, 2 * held, FIRST_SLOTS)))
        grown[:, :, :, :held] = self.rows
        self.rows = grown

    def needed_from(self, length: int) -> int:
        return 0

    def can_go_back(self, seen: int, length: int) -> bool:
        return length == 0 or length >= self.since

    def go_back(self, seen: int, length: int) -> None:
        if length == 0:
            self.since = self.latest = 0

    def fits(self, seen: int, slots: int, saved: int) -> bool:
        most = self.before if self.since < self.before else len(self.tokens)
        within = self.since in (0, self.before) and self.since <= seen <= self.latest
        return within and not saved and self._slots(self.latest) <= slots <= most
