"""Decoding: attention of new rows over the keys that they can still see."""

from dilkit.decoding.cache import DilatedCache as DilatedCache
from dilkit.decoding.paged_attention import PoolFullError as PoolFullError
from dilkit.decoding.paged_cache import PagedCache as PagedCache

__all__ = ["DilatedCache", "PagedCache", "PoolFullError"]
