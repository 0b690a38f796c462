from libc.stdint cimport int64_t

from dilkit.op._facts cimport Facts

cdef enum:  # columns of spans, as in protocol.py
    ROW, ROWS, FIRST_HEAD, HEAD_STEP, HEADS, SEEN
    KEY, KEY_OFFSET, KEY_SEQUENCE, KEY_HEAD, KEY_ROW
    VALUE, VALUE_OFFSET, VALUE_SEQUENCE, VALUE_HEAD, VALUE_ROW
    QUERY_POSITION, POSITION, POSITION_STEP, POSITIONS, UNSEEN, PAGES, PAGE_ROWS, PAGE, PAGE_FIRST, PAGE_STEP, SPAN_COLUMNS

cdef enum:  # columns of writes, of which the first five are those of spans
    TO_KEY = 5
    TO_KEY_OFFSET = 6
    TO_VALUE = 9
    TO_VALUE_OFFSET = 10
    WRITE_COLUMNS = 13

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
