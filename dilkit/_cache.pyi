from collections.abc import Callable, Hashable
from typing import NamedTuple, ParamSpec, Protocol, TypeVar

ENTRY_BYTES: int
"""Charged for each entry on top of its `nbytes`: key, objects and array headers. It bounds the number of tiny values too."""

class HasBytes(Protocol):
    """A value that knows how many bytes of data it holds."""

    @property
    def nbytes(self) -> int: ...

P = ParamSpec("P")
V = TypeVar("V", bound=HasBytes)

class CacheInfo(NamedTuple):
    """Calls answered from the cache (`hits`) and not (`misses`); `entries` held, the `bytes` charged for them, the `limit`."""

    hits: int
    misses: int
    entries: int
    bytes: int
    limit: int

class ByteLRU:
    def __init__(self, limit: Callable[[], int]) -> None: ...
    def get(self, key: Hashable, make: Callable[P, V], *arguments: P.args, **no_keywords: P.kwargs) -> V: ...
    def renew_lock(self) -> None: ...
    def info(self) -> CacheInfo: ...
    def clear(self) -> None: ...
