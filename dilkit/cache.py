"""A cache bounded in bytes: the least recently used values leave first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import RLock
from typing import Any, NamedTuple, Protocol, TypeVar

ENTRY_BYTES = 1024
"""Charged for each entry on top of its `nbytes`: key, objects and array headers. It bounds the number of tiny values too."""


class Measured(Protocol):
    """A value that knows how many bytes of data it holds."""

    @property
    def nbytes(self) -> int: ...


V = TypeVar("V", bound=Measured)


class CacheInfo(NamedTuple):
    """Calls answered from the cache (`hits`) and not (`misses`); `entries` held, the `bytes` charged for them, the `limit`."""

    hits: int
    misses: int
    entries: int
    bytes: int
    limit: int


class ByteLRU:
    """Values by key, with `sum(value.nbytes + ENTRY_BYTES) <= limit()` after every insertion. Safe for threads.

    `limit()` is asked at each miss, never at a hit, so a new limit takes effect with the next miss. A value larger than
    the limit is returned and not kept; a limit of 0 keeps nothing.
    """

    def __init__(self, limit: Callable[[], int]) -> None:
        self._limit = limit
        self._lock = RLock()
        self._entries: OrderedDict[Hashable, tuple[int, Any]] = OrderedDict()
        self._hits = self._misses = self._bytes = 0

    def get(self, key: Hashable, make: Callable[[], V]) -> V:
        """The value kept under `key`, or `make()`, which is then kept. All callers that find a value kept share that one object.

        `make` runs outside the lock and may use the cache itself. Threads that miss the same key together each run it, and
        the first to finish is kept: making twice is cheaper than a lock that a fork or a nested call could leave held.
        """
        with self._lock:
            if (entry := self._entries.get(key)) is not None:
                self._entries.move_to_end(key)
                self._hits += 1
                kept: V = entry[1]
                return kept
            self._misses += 1
        return self._keep(key, make(), self._limit())

    def info(self) -> CacheInfo:
        """The counts since the start or the last `clear()`."""
        limit = self._limit()
        with self._lock:
            return CacheInfo(self._hits, self._misses, len(self._entries), self._bytes, limit)

    def clear(self) -> None:
        """Drop every value and set the counts to 0. Values in use elsewhere stay valid."""
        with self._lock:
            self._entries.clear()
            self._hits = self._misses = self._bytes = 0

    def _keep(self, key: Hashable, value: V, limit: int) -> V:
        size = value.nbytes + ENTRY_BYTES
        with self._lock:
            if key in self._entries:
                value = self._entries[key][1]
            elif size <= limit:
                self._entries[key] = size, value
                self._bytes += size
            while self._bytes > limit:
                self._bytes -= self._entries.popitem(last=False)[1][0]
            return value
