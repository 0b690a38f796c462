"""The keys and values of one branch's open segment, head by head.

slot s of a head with offset o  =  position  start of the segment + o + s * dilation_rate

stored heads, by offset     slots ->
offset 0: heads 0, 2        | 0 | 2 | 4 | 6 |        heads of one offset lie side by side, so that a row's step
offset 1: heads 1, 3        | 1 | 3 | 5 | 7 |        reads one block of memory, and all of it is seen
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dilkit.pattern import DilatedSegment, Pattern

_FIRST_SLOTS = 64


@dataclass(frozen=True)
class Layout:
    """What all tensors of a cache have in common."""

    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    def empty(self, heads: int, slots: int) -> Tensor:
        """Memory for keys or values `(heads, batch, slots, head_dim)`; zeros, so that what is saved of it is never arbitrary."""
        with torch.inference_mode(False):  # a tensor made in inference mode could not be written to outside of it
            return torch.zeros(heads, self.batch, slots, self.head_dim, dtype=self.dtype, device=self.device)


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


class OpenSegment:
    """What a cache keeps for one branch: rows of the segment that the next token is in, none of earlier ones.

    `offsets` `(kv_heads, group)`: of each query head; -1 where the branch does not serve it. `partly`: whether it serves some
    but not all query heads of a key/value head.
    """

    def __init__(self, pattern: Pattern, branch: DilatedSegment, layout: Layout) -> None:
        self.length, self.rate, self.layout = branch.segment_length, branch.dilation_rate, layout
        group, kv_heads = layout.heads // layout.kv_heads, layout.kv_heads
        by_offset: dict[int, list[int]] = defaultdict(list)
        served = [[branch.serves(head * group + i) for i in range(group)] for head in range(kv_heads)]
        offsets = [pattern.head_offset(self.rate, head, kv_heads) for head in range(kv_heads)]
        for head, offset in enumerate(offsets):
            if any(served[head]):
                by_offset[offset].append(head)
        self.partly = any(any(row) and not all(row) for row in served)
        table = [[o if serves else -1 for serves in row] for o, row in zip(offsets, served, strict=True)]
        with torch.inference_mode(False):
            self.offsets = torch.tensor(table, device=layout.device)
        self.classes: dict[int, HeadClass] = {}
        stored = 0
        for offset, heads in sorted(by_offset.items()):
            step = heads[1] - heads[0] if len(heads) > 1 else 1  # r heads apart, or side by side, by the pattern's offset
            self.classes[offset] = HeadClass(slice(heads[0], heads[-1] + 1, step), slice(stored, stored + len(heads)))
            stored += len(heads)
        self.keys, self.values = (layout.empty(stored, 0) for _ in range(2))

    def tokens(self, seen: int) -> int:
        """Tokens of the open segment, after `seen` tokens in all."""
        return seen % self.length

    def rows(self, seen: int) -> Iterator[tuple[HeadClass, int]]:
        """How many rows of each class some later row can still see, after `seen` tokens in all."""
        tokens = self.tokens(seen)
        for offset, heads in self.classes.items():
            last = self.length - 1 - (self.length - 1 - offset) % self.rate  # the last row of a segment that they keep
            yield heads, self.slots(offset, tokens) if tokens <= last else 0

    def slots(self, offset: int, tokens: int) -> int:
        """How many of the first `tokens` tokens of a segment a head with this offset keeps."""
        return max(0, -(-(tokens - offset) // self.rate))

    def parts(self, seen: int, count: int) -> list[Part]:
        """The `count` rows after `seen`, all of one segment, by the class of heads that keeps them."""
        tokens, rate = self.tokens(seen), self.rate
        found = []
        for row in range(min(rate, count)):
            slot, offset = divmod(tokens + row, rate)
            if (heads := self.classes.get(offset)) is not None:
                found.append(Part(heads, slice(row, None, rate), slot, -(-(count - row) // rate)))
        return found

    def append(self, parts: list[Part], key: Tensor, value: Tensor) -> None:
        """Store the rows `parts` of a chunk's `key` and `value` `(kv_heads, batch, rows, head_dim)`."""
        self._reserve(max((part.end for part in parts), default=0))
        for part in parts:
            for kept, new in ((self.keys, key), (self.values, value)):
                kept[part.of.stored, :, part.first : part.end] = new[part.of.heads, :, part.rows]

    def append_last(self, seen: int, key: Tensor, value: Tensor) -> None:
        """Store what is in the open segment, after `seen` tokens in all, of a chunk that began where a segment does."""
        if tokens := self.tokens(seen):
            new = (x[:, x.shape[1] - tokens :].permute(2, 0, 1, 3) for x in (key, value))
            self.append(self.parts(seen - tokens, tokens), *new)

    def _reserve(self, slots: int) -> None:
        """Room for so many slots: twice what there was, but never more than a segment has."""
        if slots > (held := self.keys.shape[2]):
            room = min(-(-self.length // self.rate), max(slots, 2 * held, _FIRST_SLOTS))
            self.keys, self.values = self._grown(self.keys, room), self._grown(self.values, room)

    def _grown(self, rows: Tensor, slots: int) -> Tensor:
        grown = self.layout.empty(len(rows), slots)
        grown[:, :, : rows.shape[2]] = rows
        return grown
