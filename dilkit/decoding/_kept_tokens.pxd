from libc.stdint cimport int64_t

from dilkit.decoding._checked cimport FIRST_HEAD, HEAD_STEP, HEADS, ROW, ROWS

cdef struct Seen:
    int64_t count  # of the kept tokens that a row sees
    int64_t index, step  # that of the first, and from one to the next
    int64_t token, every  # the same of the tokens; `every` 0: they are not at equal distances

cdef class KeptTokens:
    cdef readonly object branch
    cdef readonly int64_t place, head, head_step, heads, total
    cdef readonly bint masked, by_pairs
    cdef public object unserved, listed  # what `spans.py` has computed of it: a mask, and the tokens of the first indices
    cdef tuple arguments  # of which it was made, for copies

    cdef int64_t before_token(self, int64_t token) noexcept
    cdef Seen seen_by(self, int64_t row) noexcept
    cdef int64_t needed_from(self, int64_t row) noexcept
    cdef int64_t most(self, int64_t rollback) noexcept
    cdef int64_t at_once(self, int64_t row) noexcept

cdef class OfRuns(KeptTokens):
    cdef const int64_t[:, ::1] rows, columns
    cdef const int64_t[::1] before_run  # kept tokens before each run
    cdef int64_t end  # after the last row that sees them


cdef inline void place(int64_t *line, int64_t number, int64_t offset, int64_t sequence, int64_t head) noexcept:
    """Set a tensor, the offset, and the strides of sequence and head."""
    line[0], line[1], line[2], line[3] = number, offset, sequence, head


cdef inline void serve(int64_t *line, int64_t row, int64_t rows, KeptTokens kept) noexcept:
    """Set the query rows, or new rows, and the heads of a span or write."""
    line[ROW], line[ROWS], line[FIRST_HEAD], line[HEAD_STEP], line[HEADS] = row, rows, kept.head, kept.head_step, kept.heads
