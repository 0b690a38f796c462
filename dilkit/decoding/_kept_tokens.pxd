from libc.stdint cimport int64_t

from dilkit.decoding._checked cimport FIRST_HEAD, HEAD_STEP, HEADS, ROW, ROWS

cdef struct Seen:
    int64_t count  # of the kept tokens that a row sees
    int64_t index, step  # that of the first, and from one to the next
    int64_t token, every  # the same of the tokens; `every` 0: they are not at equal distances

cdef class KeptTokens:
    cdef readonly object branch
    cdef readonly int64_t place, head, head_step, heads
    cdef readonly bint masked
    cdef tuple arguments  # of which it was made, for copies
    cdef int64_t round  # indices of a round, at whose end all are forgotten; 0: none is

    cdef int64_t before_token(self, int64_t token) noexcept
    cdef Seen seen_by(self, int64_t row) noexcept
    cdef int64_t needed_from(self, int64_t row) noexcept

cdef class OfGlobal(KeptTokens):
    cdef const int64_t[:, ::1] rows, columns
    cdef const int64_t[::1] places


cdef inline void place(int64_t *line, int64_t number, int64_t offset, int64_t sequence, int64_t head) noexcept:
    """Set a tensor, the offset, and the strides of sequence and head."""
    line[0], line[1], line[2], line[3] = number, offset, sequence, head


cdef inline void serve(int64_t *line, int64_t row, int64_t rows, KeptTokens kept) noexcept:
    """Set the query rows, or new rows, and the heads of a span or write."""
    line[ROW], line[ROWS], line[FIRST_HEAD], line[HEAD_STEP], line[HEADS] = row, rows, kept.head, kept.head_step, kept.heads
