cdef enum:  # columns of spans, as in step.py
    ROW, ROWS, FIRST_HEAD, HEAD_STEP, HEADS, SEEN
    KEY, KEY_OFFSET, KEY_SEQUENCE, KEY_HEAD, KEY_ROW
    VALUE, VALUE_OFFSET, VALUE_SEQUENCE, VALUE_HEAD, VALUE_ROW
    QUERY_POSITION, POSITION, POSITION_STEP, POSITIONS, UNSEEN, SPAN_COLUMNS

cdef enum:  # columns of writes, of which the first five are those of spans
    TO_KEY = 5
    TO_KEY_OFFSET = 6
    TO_VALUE = 9
    TO_VALUE_OFFSET = 10
    WRITE_COLUMNS = 13
