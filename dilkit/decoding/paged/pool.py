"""`PagePool`: memory for rows, in pages of one size, of which several sequences may hold the same."""

from __future__ import annotations

from collections.abc import Iterable

import torch


class PoolFullError(ValueError):
    """A call needs more pages than are free. A ValueError; nothing has been changed.

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
    """Pages of so many numbers each, for keys and for values.

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
        """How many there are."""
        return len(self._holders)

    @property
    def free(self) -> int:
        """How many nobody holds."""
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
        """A page that nobody else holds."""
        self.check_free(1)
        page = self._free.pop()
        self._holders[page] = 1
        return page

    def hold(self, pages: Iterable[int]) -> None:
        """These pages, which somebody holds, have one more holder."""
        for page in pages:
            self._holders[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """These pages have one holder less; without any they are free."""
        for page in pages:
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free.append(page)

    def is_shared(self, page: int) -> bool:
        """Whether several hold it."""
        return self._holders[page] > 1

    def own(self, page: int) -> int:
        """A copy of a page, which is released."""
        copy = self.take()
        self.rows[:, copy] = self.rows[:, page]
        self.release((page,))
        return copy
