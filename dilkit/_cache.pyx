# cython: language_level=3
"""The cache behind `dilkit.plan`: values by key, bounded in bytes, the least recently used ones dropped first.

    key --> dict --> Entry(value, size)        a hit is one look-up, and moves the entry to the newest end
                       |  older / newer
    oldest  <--> ... <--> newest               a miss adds an entry there, and drops from the oldest end

A hit takes no lock: between its look-up and the new links no Python code runs, so the GIL makes it one step. Whatever adds or
drops entries holds the lock, because hashing and comparing keys may run Python code and let other threads in.
"""

from collections import namedtuple
from threading import RLock

ENTRY_BYTES = 1024

CacheInfo = namedtuple("CacheInfo", "hits misses entries bytes limit")


cdef class Entry:
    """One value, in a ring of entries from the oldest to the newest that is closed by `ByteLRU.ends`."""

    cdef object key, value
    cdef Py_ssize_t size
    cdef Entry older, newer
    cdef bint is_linked

    cdef void link_before(self, Entry newer) noexcept:
        self.older, self.newer = newer.older, newer
        self.older.newer = newer.older = self
        self.is_linked = True

    cdef void unlink(self) noexcept:
        self.older.newer, self.newer.older = self.newer, self.older
        self.older = self.newer = None
        self.is_linked = False


cdef class ByteLRU:
    """Values by key, with `sum(value.nbytes + ENTRY_BYTES) <= limit()` after every insertion. Safe for threads.

    `limit()` is called at each miss and never at a hit, so a new limit takes effect with the next miss. A value larger than
    the limit is returned and not kept; a limit of 0 keeps nothing.
    """

    cdef object limit, lock
    cdef dict entries
    cdef Entry ends
    cdef Py_ssize_t bytes, hits, misses

    def __init__(self, limit):
        self.limit, self.lock, self.entries = limit, RLock(), {}
        self.ends = Entry()
        self.ends.older = self.ends.newer = self.ends

    def get(self, key, make, *arguments):
        """The value that is kept under `key`, or else `make(*arguments)`, which is then kept. The value needs `nbytes`.

        All callers that find a value share one object. Start the key with a name of your own, as all users share the cache.

        `make` runs outside the lock and may use the cache itself. Threads that miss the same key together each call it, and the
        first value is kept: making it twice is cheaper than a lock that a fork or a nested call could leave held.
        """
        cdef Entry entry = self.entries.get(key)
        if entry is None:
            self.misses += 1
            return self.keep(key, make(*arguments), self.limit())
        self.hits += 1
        if entry.is_linked and entry.newer is not self.ends:  # not while another thread drops it
            entry.unlink()
            entry.link_before(self.ends)
        return entry.value

    def renew_lock(self):
        """For a child process: a thread of its parent may have held the lock at the fork, and is not there to release it."""
        self.lock = RLock()

    def info(self):
        """The counts since the start or the last `clear()`."""
        limit = self.limit()
        with self.lock:
            return CacheInfo(self.hits, self.misses, len(self.entries), self.bytes, limit)

    def clear(self):
        """Drop every value and set the counts to 0. Values in use elsewhere stay valid."""
        cdef Entry entry
        with self.lock:
            dropped = list(self.entries.values())
            for entry in dropped:
                self.drop(entry)
            self.hits = self.misses = 0

    cdef object keep(self, key, value, limit):
        cdef Entry entry = Entry(), present
        cdef list dropped = []  # values are freed when the lock is: that may run Python code
        size = value.nbytes + ENTRY_BYTES
        with self.lock:
            if size > limit:
                present = self.entries.get(key, entry)
            else:
                entry.key, entry.value, entry.size = key, value, size
                present = self.entries.setdefault(key, entry)
                if present is entry:
                    entry.link_before(self.ends)
                    self.bytes += entry.size
            while self.bytes > limit and self.ends.newer is not self.ends:
                dropped.append(self.ends.newer)
                self.drop(self.ends.newer)
        return value if present is entry else present.value

    cdef drop(self, Entry entry):
        if entry.is_linked:
            entry.unlink()
            self.bytes -= entry.size
        self.entries.pop(entry.key, None)
