# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Rows in pages: `Stream`, a queue of pages with the rows that a sequence keeps of a branch, and `SpanTables`, what a call sees of them.

index of a row      0 1 2 3 | 4 5 6 7 | 8 9 . .       `room` = 4 rows a page
pages               (given back)  p7       p2         `base` = 4: new rows come at the end; pages that no row sees any more go
                                                      back to the pool from the front

In C: a call goes through those of all its sequences.
"""

from libc.stdint cimport int64_t
from libc.stdlib cimport free, realloc
from libc.string cimport memcpy, memmove, memset

import numpy as np
import torch

from dilkit.decoding._checked cimport (
    KEY, KEY_ROW, PAGE, PAGE_FIRST, PAGE_ROWS, PAGE_STEP, PAGES, POSITION, POSITION_STEP, POSITIONS, QUERY_POSITION, SEEN, SPAN_COLUMNS,
    TO_KEY, TO_VALUE, UNSEEN, VALUE, VALUE_ROW, WRITE_COLUMNS
)
from dilkit.decoding._kept_tokens cimport KeptTokens, Seen, place, serve
from dilkit.decoding.layout import encoded

cdef enum:
    KEYS, VALUES  # the numbers of the stored tensors of a step


cdef inline int64_t pages_of(int64_t rows, int64_t room) noexcept:
    return (rows - 1) // room + 1 if rows > 0 else 0


cdef class Numbers:
    """Numbers one after the other, which come at the end and go at either."""

    cdef int64_t *start
    cdef int64_t count, room

    def __dealloc__(self):
        free(self.start)

    cdef int64_t *more(self, int64_t count) except NULL:
        """The place of so many more, which are 0."""
        cdef int64_t *moved
        cdef int64_t room = max(self.count + count, 2 * self.room, 8)
        if self.count + count > self.room:
            moved = <int64_t *>realloc(self.start, room * sizeof(int64_t))
            if moved is NULL:
                raise MemoryError
            self.start, self.room = moved, room
        memset(self.start + self.count, 0, count * sizeof(int64_t))
        self.count += count
        return self.start + self.count - count

    cdef object array(self):
        cdef int64_t[::1] copied
        array = np.empty(self.count, np.int64)
        if self.count:
            copied = array
            memcpy(&copied[0], self.start, self.count * sizeof(int64_t))
        return array

    cdef int forget_first(self, int64_t count) noexcept:
        self.count -= count
        memmove(self.start, self.start + count, self.count * sizeof(int64_t))
        return 0


cdef class Stream:
    """Rows `base` to `stop - 1` of `kept`, of which those before `first` are not at hand; `width`: numbers of a head's row."""

    cdef readonly KeptTokens kept
    cdef readonly object pool
    cdef readonly int64_t width, row, room, base, first, stop
    cdef Numbers numbers
    cdef int64_t listed  # where its pages are among those of a call; -1: nowhere

    def __init__(self, KeptTokens kept, pool, int64_t width):
        self.kept, self.pool, self.width, self.numbers, self.listed = kept, pool, width, Numbers(), -1
        self.row = kept.heads * width
        self.room = <int64_t>pool.rows.shape[2] // self.row

    def __reduce__(self):
        return stream_again, (self.kept, self.pool, self.width, self.base, self.first, self.stop, self.pages)

    @property
    def pages(self):
        return self.numbers.array().tolist()

    cdef int64_t pages_for(self, int64_t stop) except -1:
        """Count the pages that must be free for rows up to `stop`."""
        cdef int64_t base = self.base if self.numbers.count else self.stop // self.room * self.room
        if stop <= self.stop:
            return 0
        return pages_of(stop - base, self.room) - self.numbers.count + self.shares_last()

    cpdef int extend(self, int64_t stop) except -1:
        if self.numbers.count == 0:
            self.base, self.first = self.stop // self.room * self.room, self.stop
        elif self.shares_last():
            self.numbers.start[self.numbers.count - 1] = self.pool.own(self.numbers.start[self.numbers.count - 1])
        while self.base + self.numbers.count * self.room < stop:
            page = self.pool.take()
            self.numbers.more(1)[0] = page
        self.stop = stop
        return 0

    def begin(self, int64_t first):
        """Nothing before row `first` will be seen, which comes next."""
        self.clear()
        self.first = self.stop = first

    cdef bint shares_last(self) except -1:
        """True if the next row goes to a page that others hold, too."""
        cdef bint partly = (self.stop - self.base) % self.room > 0
        return self.numbers.count > 0 and partly and self.pool.is_shared(self.numbers.start[self.numbers.count - 1])

    cdef int forget_before(self, int64_t first) except -1:
        """No row before `first` will be seen again."""
        cdef int64_t i, over
        self.first = max(self.first, min(first, self.stop))
        over = min((self.first - self.base) // self.room, self.numbers.count)
        if over > 0:
            self.pool.release([self.numbers.start[i] for i in range(over)])
            self.numbers.forget_first(over)
            self.base += over * self.room
        return 0

    def crop(self, int64_t stop):
        cdef int64_t i, keep = min(pages_of(stop - self.base, self.room), self.numbers.count)
        self.pool.release([self.numbers.start[i] for i in range(keep, self.numbers.count)])
        self.numbers.count, self.stop = keep, stop

    def clear(self):
        """Give all pages back: nothing has been stored."""
        self.pool.release(self.pages)
        self.numbers.count = self.base = self.first = self.stop = 0

    def fork(self):
        self.pool.hold(self.pages)
        return stream_again(self.kept, self.pool, self.width, self.base, self.first, self.stop, self.pages)

    cdef int64_t offset(self, int64_t index) except -1:
        """Return the place of a row among the numbers of the pool."""
        cdef int64_t place = index - self.base
        return self.numbers.start[place // self.room] * <int64_t>self.pool.numbers + place % self.room * self.row

    def put(self, int64_t first, key, value):
        """Store rows `(count, heads, head_dim)` as those from `first` on, for which there is room."""
        number, place = np.divmod(np.arange(first, first + len(key)) - self.base, self.room)
        pages, places = torch.from_numpy(self.numbers.array()[number]), torch.from_numpy(place)
        size = 2, self.pool.pages, self.room, self.kept.heads, self.width
        paged = self.pool.rows[:, :, : self.room * self.row].view(size)
        for stored, rows in zip(paged, (key, value)):
            stored[pages, places] = encoded(rows, stored.dtype)


def stream_again(kept, pool, width, int64_t base, int64_t first, int64_t stop, pages):
    cdef Stream stream = Stream(kept, pool, width)
    stream.base, stream.first, stream.stop = base, first, stop
    for page in pages:
        stream.numbers.more(1)[0] = page
    return stream


def pages_for(tuple streams, int64_t stop):
    cdef Stream stream
    cdef int64_t total = 0
    for stream in streams:
        total += stream.pages_for(stream.kept.before_token(stop))
    return total


def forget_before(tuple streams, int64_t row):
    cdef Stream stream
    for stream in streams:
        stream.forget_before(stream.kept.needed_from(row))


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
        return self.span_numbers.array().reshape(-1, SPAN_COLUMNS)

    @property
    def writes(self):
        return self.write_numbers.array().reshape(-1, WRITE_COLUMNS)

    @property
    def pages(self):
        return self.page_numbers.array()

    def add(self, tuple streams, int64_t token, int64_t row, int64_t count):
        """Take in the tokens from `token` on as the query rows from `row` on.

        Returns the spans with tokens at no equal distances, or pairs that are not seen, each with its stream and the token of its row.
        """
        cdef Stream stream
        cdef int64_t i
        cdef Seen s
        unfinished = []
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
                        unfinished.append((self.span_numbers.count // SPAN_COLUMNS - 1, stream, token + i))
        return unfinished

    cdef int write(self, Stream stream, int64_t row, int64_t token) except -1:
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
                memcpy(self.page_numbers.more(stream.numbers.count), stream.numbers.start, stream.numbers.count * sizeof(int64_t))
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
        self.span_numbers.start[span * SPAN_COLUMNS + POSITIONS] = positions

    def leave_out(self, int64_t span, int64_t unseen):
        self.span_numbers.start[span * SPAN_COLUMNS + UNSEEN] = unseen
