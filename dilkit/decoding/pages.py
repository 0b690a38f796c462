"""Pages of a `PagedCache`: the pool, of whose pages several sequences may hold the same, and the rows of a sequence in them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

from dilkit.decoding._pages import Stream, forget_before, pages_for


class PoolFullError(ValueError):
    """ValueError of a call that needs more pages than are free; nothing has been changed.

    Example:

        >>> import torch
        >>> from dilkit import PagedCache, Pattern, PoolFullError
        >>> cache = PagedCache(Pattern.dense(), heads=1, kv_heads=1, head_dim=4, nbytes=4096)  # 8 pages of 16 tokens
        >>> rows = torch.zeros(3, 129, 1, 4).unbind()
        >>> try:
        ...     cache.attend(*rows, [cache.add()], [129])
        ... except PoolFullError as error:
        ...     print(error)
        9 pages are needed and 8 of 8 are free (4096 bytes in all); drop sequences, or make a PagedCache of more bytes (nbytes=)
    """


class PagePool:
    """Memory in pages of so many numbers each, for keys and for values.

    `rows` `(2, pages, numbers)`: page p of keys and page p of values go together. A page is free, or held by one stream or by
    several that began as one.
    """

    def __init__(self, pages: int, numbers: int, dtype: torch.dtype, device: torch.device) -> None:
        self.numbers = numbers
        with torch.inference_mode(False):  # a tensor made in inference mode could not be written to outside of it
            self.rows = torch.zeros(2, pages, numbers, dtype=dtype, device=device)
        self._holders = [0] * pages
        self._free = list(range(pages - 1, -1, -1))

    @property
    def pages(self) -> int:
        """All pages."""
        return len(self._holders)

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    @property
    def nbytes(self) -> int:
        """Bytes of all pages."""
        return self.rows.nbytes

    def check_free(self, needed: int) -> None:
        """Raise `PoolFullError` unless so many pages are free."""
        if needed > self.free:
            raise PoolFullError(
                f"{needed} pages are needed and {self.free} of {self.pages} are free ({self.nbytes} bytes in all); drop "
                "sequences, or make a PagedCache of more bytes (nbytes=)"
            )

    def take(self) -> int:
        """Take a page that nobody else holds."""
        self.check_free(1)
        page = self._free.pop()
        self._holders[page] = 1
        return page

    def hold(self, pages: Iterable[int]) -> None:
        """Add a holder to these pages, which somebody holds."""
        for page in pages:
            self._holders[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Take a holder from these pages; without any they are free."""
        for page in pages:
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free.append(page)

    def is_shared(self, page: int) -> bool:
        """True if several hold it."""
        return self._holders[page] > 1

    def own(self, page: int) -> int:
        """Release a page for a copy of it, which nobody else holds."""
        copy = self.take()
        self.rows[:, copy] = self.rows[:, page]
        self.release((page,))
        return copy


class SequenceRows:
    """Streams of all branches of one sequence, after `seen` tokens.

    `rollback` tokens before the `longest` length since the sequence was empty can be taken back.
    """

    def __init__(self, streams: Iterable[Stream], rollback: int, seen: int = 0, longest: int = 0) -> None:
        self.streams, self.rollback, self.seen, self.longest = tuple(streams), rollback, seen, longest

    def pages_for(self, count: int) -> int:
        """Count the pages that must be free for `count` rows more, one after the other."""
        return pages_for(self.streams, self.seen + count)

    def pages_for_prompt(self, count: int) -> int:
        """Count those for `append_prompt`, without pages that are given back before."""
        total = 0
        for stream, indices, begins in self._prompt_rows(count):
            if not begins:
                total += pages_for((stream,), self.seen + count)
            elif indices:
                total += -(-indices.stop // stream.room) - indices.start // stream.room
        return total

    def append_prompt(self, key: Tensor, value: Tensor) -> None:
        """Store what later rows see of rows `key` and `value` `(count, kv_heads, head_dim)`, which see none of those before."""
        for stream, indices, begins in self._prompt_rows(len(key)):
            kept_tokens = stream.kept
            if begins:
                stream.begin(indices.start)
            if indices:
                stream.extend(indices.stop)
                rows = np.asarray(kept_tokens.tokens(indices)) - self.seen
                heads = slice(kept_tokens.head, None, kept_tokens.head_step)
                stream.put(indices.start, *(x[rows][:, heads][:, : kept_tokens.heads] for x in (key, value)))
        self.seen += len(key)

    def _prompt_rows(self, count: int) -> Iterator[tuple[Stream, range, bool]]:
        """Yield each stream with the indices of its rows of a prompt that later rows see; True if they see none before these."""
        next_row = max(0, self.seen + count - self.rollback)
        for stream in self.streams:
            first, begin = stream.kept.needed(next_row), stream.kept.before(self.seen)
            yield stream, range(max(first, begin), stream.kept.before(self.seen + count)), first >= begin

    def go_back(self, seen: int) -> None:
        """Forget all rows since `seen` tokens, provided that no page was given back since."""
        self.seen = seen
        for stream in self.streams:
            stream.crop(min(stream.stop, stream.kept.before(seen)))

    def forget(self) -> None:
        """Give the pages back that no later row sees."""
        self.longest = max(self.longest, self.seen)
        forget_before(self.streams, max(0, self.seen - self.rollback))

    def can_crop(self, length: int) -> bool:
        """True if the rows are at hand that are seen after the first `length` tokens."""
        return length == 0 or all(stream.kept.needed(length) >= stream.first for stream in self.streams)

    def crop(self, length: int) -> None:
        """Forget all tokens but the first `length`."""
        for stream in self.streams:
            stream.crop(stream.kept.before(length))
            if length == 0:
                stream.clear()
        self.seen, self.longest = length, self.longest if length else 0

    def fork(self) -> SequenceRows:
        """Return a sequence with the same rows in the same pages."""
        return SequenceRows([stream.fork() for stream in self.streams], self.rollback, self.seen, self.longest)

    def clear(self) -> None:
        """Give all pages back."""
        for stream in self.streams:
            stream.clear()
