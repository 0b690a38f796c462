from libc.stdint cimport int64_t

from dilkit.decoding._kept_tokens cimport KeptTokens

cdef enum:  # columns of spans, as in step.py
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


cdef inline void place(int64_t *at, int64_t number, int64_t offset, int64_t sequence, int64_t head) noexcept:
    """A tensor, the offset, and the strides of sequence and head."""
    at[0], at[1], at[2], at[3] = number, offset, sequence, head


cdef inline void serve(int64_t *line, int64_t row, int64_t rows, KeptTokens kept) noexcept:
    """The query rows, or new rows, and the heads of a span or write."""
    line[ROW], line[ROWS], line[FIRST_HEAD], line[HEAD_STEP], line[HEADS] = row, rows, kept.head, kept.head_step, kept.heads
