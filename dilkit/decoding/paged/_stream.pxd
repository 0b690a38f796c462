from libc.stdint cimport int64_t

from dilkit.decoding._kept_tokens cimport KeptTokens

cdef class Numbers:
    cdef int64_t *at
    cdef int64_t count, room

    cdef int64_t *more(self, int64_t count) except NULL
    cdef int forget_first(self, int64_t count) noexcept

cdef class Stream:
    cdef readonly KeptTokens kept
    cdef readonly object pool
    cdef readonly int64_t width, row, room, base, first, stop
    cdef Numbers numbers
    cdef int64_t listed  # where its pages are among those of a call; -1: nowhere

    cpdef int extend(self, int64_t stop) except -1
    cpdef int64_t offset(self, int64_t index) except -1
    cdef int64_t pages_for(self, int64_t stop) except -1
    cdef bint shares_last(self) except -1
    cdef int forget_before(self, int64_t first) except -1
