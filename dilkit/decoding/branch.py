"""Which tokens of a segment a branch keeps for which key/value heads.

slot s of a head with offset o  =  position  start of the segment + o + s * dilation_rate
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dilkit.decoding._kept_tokens import kept_of_segments
from dilkit.decoding.layout import Layout
from dilkit.pattern.lowering import Segments


@dataclass(frozen=True)
class HeadClass:
    """The key/value heads of one offset: which they are, and where they are stored."""

    heads: slice
    stored: slice

    def __len__(self) -> int:
        return int(self.stored.stop - self.stored.start)


@dataclass(frozen=True)
class Part:
    """Those rows of a chunk, within one segment, that one class of heads keeps: `count` of them, from slot `first` on."""

    of: HeadClass
    rows: slice
    first: int
    count: int

    @property
    def end(self) -> int:
        """Slots that the last of these rows sees, and with them all of the class that there are."""
        return self.first + self.count


class KeptHeads:
    """A form with the heads of a cache.

    `tokens`: of each offset, what its heads keep; `classes`: where these are stored, in the order of offsets. `offsets`
    `(kv_heads, group)`: of each query head; -1 where the form does not serve it. `partly`: whether it serves some but not all
    query heads of a key/value head; `unseen`: of each of `tokens` then, those that it does not, as in `Step.unseen`.
    """

    def __init__(self, form: Segments, layout: Layout) -> None:
        self.length, self.rate = form.length, form.rate
        start, stop = form.heads
        of_heads = [-1] * start + list(form.offsets) + [-1] * (layout.heads - stop)
        with torch.inference_mode(False):
            self.offsets = torch.tensor(of_heads, device=layout.device).view(layout.kv_heads, -1)
        self.tokens = tuple(kept_of_segments(form, layout.heads // layout.kv_heads))
        self.partly = any(one.masked for one in self.tokens)
        self.classes: dict[int, HeadClass] = {}
        self.heads = 0
        for one in self.tokens:
            heads = slice(one.head, one.head + (one.heads - 1) * one.head_step + 1, one.head_step)
            self.classes[one.offset] = HeadClass(heads, slice(self.heads, self.heads + one.heads))
            self.heads += one.heads
        hidden = [(self.offsets[of.heads, :, None] < 0) if self.partly else None for of in self.classes.values()]
        self.unseen: tuple[Tensor | None, ...] = tuple(hidden)

    def slots(self, offset: int, tokens: int) -> int:
        """How many of the first `tokens` tokens of a segment a head with this offset keeps."""
        return max(0, -(-(tokens - offset) // self.rate))

    def visible(self, offset: int, tokens: int, row: int) -> int:
        """How many of them the rows of the segment from `row` on can see: all, or none if no such row is kept."""
        last = self.length - 1 - (self.length - 1 - offset) % self.rate  # of the rows that a segment keeps
        return self.slots(offset, tokens) if row <= last else 0

    def parts(self, seen: int, count: int) -> list[Part]:
        """The `count` rows after `seen`, all of one segment, by the class of heads that keeps them."""
        tokens, rate = seen % self.length, self.rate
        pieces = []
        for row in range(min(rate, count)):
            slot, offset = divmod(tokens + row, rate)
            if (heads := self.classes.get(offset)) is not None:
                pieces.append(Part(heads, slice(row, None, rate), slot, -(-(count - row) // rate)))
        return pieces
