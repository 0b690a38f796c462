"""Decoding: attention of new rows over the keys that they can still see."""

from dilkit.decoding.cache import DilatedCache as DilatedCache
from dilkit.decoding.paged_cache import PagedCache as PagedCache
from dilkit.decoding.pages import PoolFullError as PoolFullError

__all__ = ["DilatedCache", "PagedCache", "PoolFullError"]
