"""What is worked out once for a pattern, a length and a number of heads, and kept: index tables and whatever backends derive."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from dilkit import environment
from dilkit.cache import ByteLRU, CacheInfo, V

_CACHE = ByteLRU(environment.cache_bytes)


def cached(key: Hashable, make: Callable[[], V]) -> V:
    """`make()`, kept under `key` in the one cache of the process, which `DILKIT_CACHE_BYTES` bounds.

    Start the key with a name of your own (`("sdpa", pattern, seq)`): all users share the cache. The value needs `nbytes`.
    """
    return _CACHE.get(key, make)


def cache_info() -> CacheInfo:
    """Hits, misses, entries, bytes and limit of the cache."""
    return _CACHE.info()


def cache_clear() -> None:
    """Empty the cache and its counts."""
    _CACHE.clear()
