"""`SequenceRows`: what is kept of one sequence."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from torch import Tensor

from dilkit.decoding.paged._stream import Stream, forget_before, pages_for


class SequenceRows:
    """The streams of all branches after `seen` tokens.

    `rollback` tokens before the `longest` length since the sequence was empty can be taken back.
    """

    def __init__(self, streams: Iterable[Stream], rollback: int, seen: int = 0, longest: int = 0) -> None:
        self.streams, self.rollback, self.seen, self.longest = tuple(streams), rollback, seen, longest

    def pages_for(self, count: int) -> int:
        """How many pages must be free for `count` rows more, one after the other."""
        return pages_for(self.streams, self.seen + count)

    def pages_for_prompt(self, count: int) -> int:
        """How many for `append_prompt`, those that are given back before not counted."""
        total = 0
        for stream, indices, begins in self._of_prompt(count):
            if not begins:
                total += pages_for((stream,), self.seen + count)
            elif indices:
                total += -(-indices.stop // stream.room) - indices.start // stream.room
        return total

    def append_prompt(self, key: Tensor, value: Tensor) -> None:
        """Store what later rows see of rows `key` and `value` `(count, kv_heads, head_dim)`, which see none of those before."""
        for stream, indices, begins in self._of_prompt(len(key)):
            kept = stream.kept
            if begins:
                stream.begin(indices.start)
            if indices:
                stream.extend(indices.stop)
                rows, heads = np.asarray(kept.tokens(indices)) - self.seen, slice(kept.head, None, kept.head_step)
                stream.put(indices.start, *(x[rows][:, heads][:, : kept.heads] for x in (key, value)))
        self.see(len(key))

    def _of_prompt(self, count: int) -> Iterator[tuple[Stream, range, bool]]:
        """Each stream with the indices of its rows of a prompt that later rows see; True if they see none before these."""
        row = self._first_again(self.seen + count)
        for stream in self.streams:
            first, begin = stream.kept.needed(row), stream.kept.before(self.seen)
            yield stream, range(max(first, begin), stream.kept.before(self.seen + count)), first >= begin

    def see(self, count: int) -> None:
        """So many rows more have been stored."""
        self.seen += count

    def go_back(self, seen: int) -> None:
        """Forget what came since, where nothing has been given back since."""
        self.seen = seen
        for stream in self.streams:
            stream.crop(min(stream.stop, stream.kept.before(seen)))

    def _first_again(self, row: int) -> int:
        """The first row that may come again when `row` comes next."""
        return max(0, row - self.rollback)

    def forget(self) -> None:
        """Give the pages back that no later row sees."""
        self.longest = max(self.longest, self.seen)
        forget_before(self.streams, self._first_again(self.seen))

    def can_crop(self, length: int) -> bool:
        """Whether the rows are at hand that are seen after the first `length` tokens."""
        return length == 0 or all(stream.kept.needed(length) >= stream.first for stream in self.streams)

    def crop(self, length: int) -> None:
        """Forget all tokens but the first `length`."""
        for stream in self.streams:
            stream.crop(stream.kept.before(length))
            if length == 0:
                stream.clear()
        self.seen, self.longest = length, self.longest if length else 0

    def fork(self) -> SequenceRows:
        """A sequence with the same rows in the same pages."""
        return SequenceRows([stream.fork() for stream in self.streams], self.rollback, self.seen, self.longest)

    def clear(self) -> None:
        """Give all pages back."""
        for stream in self.streams:
            stream.clear()
