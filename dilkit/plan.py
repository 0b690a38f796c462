"""The pattern cache: what was prepared for a call (backend, problem, layout, index tables, token orders), bounded in bytes.

There is one cache for the process, with the limit `DILKIT_CACHE_BYTES`.

    >>> from dilkit import plan
    >>> class Table:
    ...     nbytes = 4096
    >>> table = plan.cached(("my table", 16), Table)
    >>> plan.cached(("my table", 16), Table) is table
    True
"""

from __future__ import annotations

import os

from dilkit import environment
from dilkit._cache import ENTRY_BYTES as ENTRY_BYTES, ByteLRU as ByteLRU, CacheInfo as CacheInfo

_CACHE = ByteLRU(environment.cache_bytes)
if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_CACHE.renew_lock)

# The methods themselves: a function around them would take as long as a hit does.
cached = _CACHE.get
cache_info = _CACHE.info
cache_clear = _CACHE.clear
