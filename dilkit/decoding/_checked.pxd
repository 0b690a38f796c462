from libc.stdint cimport int64_t

from dilkit.op._facts cimport Facts

cdef struct StoredTensor:
    char *data
    int64_t reach  # elements from the first to the end of the last

cdef class Checked:
    """A step of which everything was held against the memory of its tensors."""

    cdef Facts query, key, value
    cdef bint has_new
    cdef int64_t rows, heads, kv_heads, dim
    cdef int64_t width  # elements of a stored row
    cdef int64_t tokens  # that have a position; 0 where positions are numbers in a sequence, or of no account
    cdef int64_t tensors
    cdef StoredTensor *stored
    cdef const int64_t[:, ::1] spans, writes
    cdef const int64_t[::1] pages

cdef Checked checked(step, problem)
