# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""`SpanTables`: the spans, the writes and the pages of a call of a `PagedCache`, which sequence after sequence is added to.

    sequence    its rows, one after the other: a write for each stream that keeps one, a span for each that a row sees some of
    pages       of each stream that is seen, once
"""

from libc.stdint cimport int64_t
from libc.string cimport memcpy

import numpy as np

from dilkit.decoding._kept_tokens cimport Seen
from dilkit.decoding._tables cimport (
    KEY, KEY_ROW, PAGE, PAGE_FIRST, PAGE_ROWS, PAGE_STEP, PAGES, POSITION, POSITION_STEP, POSITIONS, QUERY_POSITION, SEEN, SPAN_COLUMNS,
    TO_KEY, TO_VALUE, UNSEEN, VALUE, VALUE_ROW, WRITE_COLUMNS, place, serve
)
from dilkit.decoding.paged._stream cimport Numbers, Stream

cdef enum:
    KEYS, VALUES  # the numbers of the stored tensors of a step


cdef class SpanTables:
    """Each stream has pages of one pool, of `page` numbers each. `once`: a key that several branches show counts once."""

    cdef Numbers span_numbers, write_numbers, page_numbers
    cdef int64_t page
    cdef bint once

    def __init__(self, int64_t page, bint once):
        self.page, self.once = page, once
        self.span_numbers, self.write_numbers, self.page_numbers = Numbers(), Numbers(), Numbers()

    @property
    def spans(self):
        return array_of(self.span_numbers).reshape(-1, SPAN_COLUMNS)

    @property
    def writes(self):
        return array_of(self.write_numbers).reshape(-1, WRITE_COLUMNS)

    @property
    def pages(self):
        return array_of(self.page_numbers)

    def add(self, tuple streams, int64_t token, int64_t row, int64_t count):
        """The query rows from `row` on are those of the tokens from `token` on, so many of them, which now are taken in.

        Returns the spans of which more is to be said, each with its stream and the token of its row: tokens at no equal distances, and
        what the branch shows pair by pair.
        """
        cdef Stream stream
        cdef int64_t i
        cdef Seen s
        further = []
        for stream in streams:
            stream.listed = -1
        for i in range(count):
            for stream in streams:
                self.write(stream, row + i, token + i)
        for i in range(count):
            for stream in streams:
                s = stream.kept.seen_by(token + i)
                if s.count:
                    self.see(stream, row + i, token + i, s)
                    if stream.kept.masked or (self.once and stream.kept.place) or not s.every:
                        further.append((self.span_numbers.count // SPAN_COLUMNS - 1, stream, token + i))
        return further

    cdef int write(self, Stream stream, int64_t row, int64_t token) except -1:
        """Where the new row goes, if the stream keeps it."""
        cdef int64_t index = stream.kept.before_token(token), offset
        cdef int64_t *line
        if stream.kept.before_token(token + 1) > index:
            stream.extend(index + 1)
            line = self.write_numbers.more(WRITE_COLUMNS)
            serve(line, row, 1, stream.kept)
            offset = stream.offset(index)
            place(line + TO_KEY, KEYS, offset, 0, stream.width)
            place(line + TO_VALUE, VALUES, offset, 0, stream.width)
        return 0

    cdef int see(self, Stream stream, int64_t row, int64_t token, Seen s) except -1:
        cdef int64_t *line = self.span_numbers.more(SPAN_COLUMNS)
        if stream.listed < 0:
            stream.listed = self.page_numbers.count
            if stream.numbers.count:
                memcpy(self.page_numbers.more(stream.numbers.count), stream.numbers.at, stream.numbers.count * sizeof(int64_t))
        serve(line, row, 1, stream.kept)
        place(line + KEY, KEYS, 0, 0, stream.width)
        place(line + VALUE, VALUES, 0, 0, stream.width)
        line[KEY_ROW] = line[VALUE_ROW] = stream.row
        line[SEEN], line[QUERY_POSITION], line[POSITION], line[POSITION_STEP] = s.count, token, s.token, s.every
        line[POSITIONS] = line[UNSEEN] = -1
        line[PAGES], line[PAGE_ROWS], line[PAGE] = stream.listed, stream.room, self.page
        line[PAGE_FIRST], line[PAGE_STEP] = s.index - stream.base, s.step
        return 0

    def place(self, int64_t span, int64_t positions):
        """The positions of the rows of a span are those of a tensor of this number."""
        self.span_numbers.at[span * SPAN_COLUMNS + POSITIONS] = positions

    def leave_out(self, int64_t span, int64_t unseen):
        """What is not seen of a span after all is what a tensor of this number says."""
        self.span_numbers.at[span * SPAN_COLUMNS + UNSEEN] = unseen


cdef object array_of(Numbers numbers):
    cdef int64_t[::1] to
    array = np.empty(numbers.count, np.int64)
    if numbers.count:
        to = array
        memcpy(&to[0], numbers.at, numbers.count * sizeof(int64_t))
    return array
