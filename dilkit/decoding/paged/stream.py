"""`Stream`: the rows that one sequence keeps of one branch for some heads, as a queue of pages.

index of a row      0 1 2 3 | 4 5 6 7 | 8 9 . .       `room` = 4 rows a page
pages               (given back)  p7       p2         `base` = 4: new rows come at the end; pages that no row sees any more go
                                                      back to the pool from the front
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dilkit.decoding._kept_tokens import KeptTokens
from dilkit.decoding.paged.pool import PagePool
from dilkit.decoding.stored import encoded


class Stream:
    """Rows `base` to `stop - 1` of `kept`, of which those before `first` are not at hand; `width`: numbers of a head's row."""

    def __init__(self, kept: KeptTokens, pool: PagePool, width: int) -> None:
        self.kept, self.pool, self.width = kept, pool, width
        self.row = kept.heads * width
        self.room = pool.rows.shape[2] // self.row
        self.base = self.first = self.stop = 0
        self.pages: list[int] = []

    def pages_for(self, stop: int) -> int:
        """How many pages must be free for rows up to `stop`."""
        if stop <= self.stop:
            return 0
        base = self.base if self.pages else self.stop // self.room * self.room
        return -(-(stop - base) // self.room) - len(self.pages) + self._shares_last()

    def extend(self, stop: int) -> None:
        """Make room for rows up to `stop`."""
        if not self.pages:
            self.base, self.first = self.stop // self.room * self.room, self.stop
        elif self._shares_last():
            self.pages[-1] = self.pool.own(self.pages[-1])
        while self.base + len(self.pages) * self.room < stop:
            self.pages.append(self.pool.take())
        self.stop = stop

    def begin(self, first: int) -> None:
        """Nothing before row `first` will be seen, which comes next."""
        self.clear()
        self.first = self.stop = first

    def _shares_last(self) -> bool:
        """Whether the next row goes to a page that others hold, too."""
        partly = (self.stop - self.base) % self.room > 0
        return bool(self.pages) and partly and self.pool.is_shared(self.pages[-1])

    def forget_before(self, first: int) -> None:
        """No row before `first` will be seen again."""
        self.first = max(self.first, min(first, self.stop))
        while self.pages and self.base + self.room <= self.first:
            self.pool.release((self.pages.pop(0),))
            self.base += self.room

    def crop(self, stop: int) -> None:
        """Forget the rows from `stop` on."""
        keep = max(0, -(-(stop - self.base) // self.room))
        self.pool.release(self.pages[keep:])
        del self.pages[keep:]
        self.stop = stop

    def clear(self) -> None:
        """Give all pages back: nothing has been stored."""
        self.pool.release(self.pages)
        self.pages.clear()
        self.base = self.first = self.stop = 0

    def fork(self) -> Stream:
        """A stream with the same rows in the same pages."""
        other = Stream(self.kept, self.pool, self.width)
        other.base, other.first, other.stop, other.pages = self.base, self.first, self.stop, list(self.pages)
        self.pool.hold(other.pages)
        return other

    def offset(self, index: int) -> int:
        """Where a row is among the numbers of the pool."""
        page, place = divmod(index - self.base, self.room)
        return self.pages[page] * self.pool.numbers + place * self.row

    def put(self, first: int, key: Tensor, value: Tensor) -> None:
        """Store rows `(count, heads, head_dim)` as those from `first` on, for which there is room."""
        number, place = np.divmod(np.arange(first, first + len(key)) - self.base, self.room)
        pages, places = torch.from_numpy(np.array(self.pages, np.int64)[number]), torch.from_numpy(place)
        size = 2, self.pool.pages, self.room, self.kept.heads, self.width
        paged = self.pool.rows[:, :, : self.room * self.row].view(size)
        for stored, rows in zip(paged, (key, value), strict=True):
            stored[pages, places] = encoded(rows, stored.dtype)
