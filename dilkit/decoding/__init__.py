"""Decoding: attention of new rows over the keys that they can still see."""

from dilkit.decoding.cache import DilatedCache as DilatedCache

__all__ = ["DilatedCache"]
