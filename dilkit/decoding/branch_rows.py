"""`BranchRows`: the keys and values that a cache keeps for one branch."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from dilkit.decoding._tables import Slots
from dilkit.decoding.block import Block
from dilkit.decoding.layout import Layout
from dilkit.pattern import Branch

FIRST_SLOTS = 64


class BranchRows(ABC):
    """What a cache keeps for one branch: `rows` in `slots`, which say what a single row sees of them.

    `latest`: the token after the last that was stored, whether it was taken back or not. `since`: the first token of which all
    that later rows see is at hand. `saved`: what is kept beside `rows` for going back.
    """

    def __init__(self, branch: Branch, heads: int, layout: Layout, rollback: int, slots: Slots) -> None:
        self.branch, self.rollback, self.since, self.slots = branch, rollback, 0, slots
        with torch.inference_mode(False):  # a tensor made in inference mode could not be written to outside of it
            shape = (2, heads, layout.batch, 0, layout.width)
            self.rows = self.saved = torch.zeros(shape, dtype=layout.stored, device=layout.device)

    @abstractmethod
    def at_once(self, seen: int) -> int:
        """How many of the rows after `seen` may be taken together."""

    @abstractmethod
    def columns(self, seen: int, count: int) -> int:
        """How many slots so many rows after `seen` are held against, at most."""

    @abstractmethod
    def needed(self, seen: int) -> int:
        """Rows of all heads that some row from `seen - rollback` on can see, of `seen` tokens."""

    def span(self, seen: int) -> range:
        """From the first to the last token that the row after `seen` can see in the branch, or more."""
        return range(seen + 1)

    @abstractmethod
    def extend(self, seen: int, new: Tensor) -> list[Block]:
        """Store what the branch keeps of the rows after `seen`, and say what they see.

        `new` `(2, batch, rows, kv_heads, head_dim)`: keys and values of `at_once` rows at most.
        """

    def make_room(self, seen: int) -> bool:
        """Make room for the row after `seen`. False, and nothing is done, where only `extend` says what it sees."""
        return False

    @property
    def rows(self) -> Tensor:
        """Keys and values `(2, heads, batch, slots, width)`."""
        return self.slots.rows

    @rows.setter
    def rows(self, rows: Tensor) -> None:
        self.slots.lay_out(rows)

    @property
    def latest(self) -> int:
        return self.slots.latest

    @latest.setter
    def latest(self, latest: int) -> None:
        self.slots.latest = latest

    @abstractmethod
    def append_last(self, seen: int, key: Tensor, value: Tensor) -> None:
        """Of a chunk that sees none of the rows before and ends after `seen` tokens, store what later rows see."""

    @abstractmethod
    def needed_from(self, length: int) -> int:
        """The first token that a row from `length` on sees, before all that it could see without the branch's pattern."""

    @abstractmethod
    def can_go_back(self, seen: int, length: int) -> bool:
        """Whether the rows are at hand, of `seen` tokens, that are seen after the first `length` of them."""

    @abstractmethod
    def go_back(self, seen: int, length: int) -> None:
        """Forget all tokens of `seen` but the first `length`."""

    @abstractmethod
    def fits(self, seen: int, slots: int, saved: int) -> bool:
        """Whether so many slots, with `since` and `latest`, can be what was kept after `seen` tokens."""

    def reorder(self, indices: Tensor) -> None:
        """Take the sequences `indices` instead."""
        with torch.inference_mode(False):
            self.rows, self.saved = (x.index_select(2, indices) for x in (self.rows, self.saved))

    def _grown(self, slots: int) -> Tensor:
        """Zeros like `rows`, with so many slots."""
        with torch.inference_mode(False):
            return self.rows.new_zeros(*self.rows.shape[:3], slots, self.rows.shape[4])
