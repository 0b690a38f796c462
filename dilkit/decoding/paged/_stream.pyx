# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""`Stream`: the rows that one sequence keeps of one branch for some heads, as a queue of pages.

index of a row      0 1 2 3 | 4 5 6 7 | 8 9 . .       `room` = 4 rows a page
pages               (given back)  p7       p2         `base` = 4: new rows come at the end; pages that no row sees any more go
                                                      back to the pool from the front

In C: a call goes through those of all its sequences.
"""

from libc.stdint cimport int64_t
from libc.stdlib cimport free, realloc
from libc.string cimport memmove, memset

import numpy as np
import torch

from dilkit.decoding._kept_tokens cimport KeptTokens
from dilkit.decoding.stored import encoded


cdef inline int64_t pages_of(int64_t rows, int64_t room) noexcept:
    """How many pages so many rows take."""
    return (rows - 1) // room + 1 if rows > 0 else 0


cdef class Numbers:
    """Numbers one after the other, which come at the end and go at either."""

    def __dealloc__(self):
        free(self.at)

    cdef int64_t *more(self, int64_t count) except NULL:
        """The place of so many more, which are 0."""
        cdef int64_t *moved
        cdef int64_t room = max(self.count + count, 2 * self.room, 8)
        if self.count + count > self.room:
            moved = <int64_t *>realloc(self.at, room * sizeof(int64_t))
            if moved is NULL:
                raise MemoryError
            self.at, self.room = moved, room
        memset(self.at + self.count, 0, count * sizeof(int64_t))
        self.count += count
        return self.at + self.count - count

    cdef int forget_first(self, int64_t count) noexcept:
        self.count -= count
        memmove(self.at, self.at + count, self.count * sizeof(int64_t))
        return 0


cdef class Stream:
    """Rows `base` to `stop - 1` of `kept`, of which those before `first` are not at hand; `width`: numbers of a head's row."""

    def __init__(self, KeptTokens kept, pool, int64_t width):
        self.kept, self.pool, self.width, self.numbers, self.listed = kept, pool, width, Numbers(), -1
        self.row = kept.heads * width
        self.room = <int64_t>pool.rows.shape[2] // self.row

    def __reduce__(self):
        return stream_again, (self.kept, self.pool, self.width, self.base, self.first, self.stop, self.pages)

    @property
    def pages(self):
        """The numbers of its pages."""
        cdef int64_t i
        return [self.numbers.at[i] for i in range(self.numbers.count)]

    cdef int64_t pages_for(self, int64_t stop) except -1:
        """How many pages must be free for rows up to `stop`."""
        cdef int64_t base = self.base if self.numbers.count else self.stop // self.room * self.room
        if stop <= self.stop:
            return 0
        return pages_of(stop - base, self.room) - self.numbers.count + self.shares_last()

    cpdef int extend(self, int64_t stop) except -1:
        """Make room for rows up to `stop`."""
        if self.numbers.count == 0:
            self.base, self.first = self.stop // self.room * self.room, self.stop
        elif self.shares_last():
            self.numbers.at[self.numbers.count - 1] = self.pool.own(self.numbers.at[self.numbers.count - 1])
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
        """Whether the next row goes to a page that others hold, too."""
        cdef bint partly = (self.stop - self.base) % self.room > 0
        return self.numbers.count > 0 and partly and self.pool.is_shared(self.numbers.at[self.numbers.count - 1])

    cdef int forget_before(self, int64_t first) except -1:
        """No row before `first` will be seen again."""
        cdef int64_t i, over
        self.first = max(self.first, min(first, self.stop))
        over = min((self.first - self.base) // self.room, self.numbers.count)
        if over > 0:
            self.pool.release([self.numbers.at[i] for i in range(over)])
            self.numbers.forget_first(over)
            self.base += over * self.room
        return 0

    def crop(self, int64_t stop):
        """Forget the rows from `stop` on."""
        cdef int64_t i, keep = min(pages_of(stop - self.base, self.room), self.numbers.count)
        self.pool.release([self.numbers.at[i] for i in range(keep, self.numbers.count)])
        self.numbers.count, self.stop = keep, stop

    def clear(self):
        """Give all pages back: nothing has been stored."""
        self.pool.release(self.pages)
        self.numbers.count = self.base = self.first = self.stop = 0

    def fork(self):
        """A stream with the same rows in the same pages."""
        self.pool.hold(self.pages)
        return stream_again(self.kept, self.pool, self.width, self.base, self.first, self.stop, self.pages)

    cpdef int64_t offset(self, int64_t index) except -1:
        """Where a row is among the numbers of the pool."""
        cdef int64_t place = index - self.base
        return self.numbers.at[place // self.room] * <int64_t>self.pool.numbers + place % self.room * self.row

    def put(self, int64_t first, key, value):
        """Store rows `(count, heads, head_dim)` as those from `first` on, for which there is room."""
        number, place = np.divmod(np.arange(first, first + len(key)) - self.base, self.room)
        pages, places = torch.from_numpy(np.array(self.pages, np.int64)[number]), torch.from_numpy(place)
        size = 2, self.pool.pages, self.room, self.kept.heads, self.width
        paged = self.pool.rows[:, :, : self.room * self.row].view(size)
        for stored, rows in zip(paged, (key, value)):
            stored[pages, places] = encoded(rows, stored.dtype)


def stream_again(kept, pool, width, int64_t base, int64_t first, int64_t stop, pages):
    """A stream as another was."""
    cdef Stream stream = Stream(kept, pool, width)
    stream.base, stream.first, stream.stop = base, first, stop
    for page in pages:
        stream.numbers.more(1)[0] = page
    return stream


def pages_for(tuple streams, int64_t stop):
    """How many pages must be free for the tokens before `stop`."""
    cdef Stream stream
    cdef int64_t total = 0
    for stream in streams:
        total += stream.pages_for(stream.kept.before_token(stop))
    return total


def forget_before(tuple streams, int64_t row):
    """Give the pages back that no row from `row` on sees."""
    cdef Stream stream
    for stream in streams:
        stream.forget_before(stream.kept.needed_from(row))
