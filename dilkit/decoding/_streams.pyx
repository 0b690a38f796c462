# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""`Stream`: the rows that sequences keep of one `KeptTokens`, in a ring or in pages, and `SpanTables`, what new rows see of them.

index of a row      0 1 2 3 | 4 5 6 7 | 8 9 . .
a ring              the row of index i is in slot i mod `slots`: 8 9 6 7; all sequences of a batch have the same length
pages               (given back)  p7       p2         `base` = 4: new rows come at the end; pages that no row sees any more go
                                                      back to the pool from the front

In C: a step takes tens of microseconds, and a call goes through the streams of all its sequences.
"""

from libc.stdint cimport int64_t
from libc.string cimport memcpy, memmove, memset

import numpy as np
import torch

from dilkit.decoding._checked cimport (
    KEY, KEY_OFFSET, KEY_ROW, PAGE, PAGE_FIRST, PAGE_ROWS, PAGE_STEP, PAGES, POSITION, POSITION_STEP, POSITIONS, QUERY_POSITION, ROW, SEEN,
    SPAN_COLUMNS, TO_KEY, TO_VALUE, UNSEEN, VALUE, VALUE_OFFSET, VALUE_ROW, WRITE_COLUMNS
)
from dilkit.decoding._kept_tokens cimport KeptTokens, Seen, place, serve
from dilkit.decoding.layout import encoded

cdef enum:
    FIRST_SLOTS = 64


cdef inline int64_t pages_of(int64_t rows, int64_t room) noexcept:
    return (rows - 1) // room + 1 if rows > 0 else 0


cdef class Numbers:
    """Lines of so many `columns`, which come at the end and go at either."""

    cdef object lines
    cdef int64_t[:, ::1] view
    cdef int64_t columns, count, room

    def __init__(self, int64_t columns=1):
        self.columns, self.lines = columns, np.zeros((0, columns), np.int64)

    cdef int64_t *more(self, int64_t count) except NULL:
        """The place of so many more, which are 0."""
        if self.count + count > self.room:
            self.room = max(self.count + count, 2 * self.room, 8)
            longer = np.zeros((self.room, self.columns), np.int64)
            longer[: self.count] = self.lines[: self.count]
            self.lines = self.view = longer
        self.count += count
        memset(&self.view[self.count - count, 0], 0, count * self.columns * sizeof(int64_t))
        return &self.view[self.count - count, 0]

    cdef object array(self):
        """The lines, until others come."""
        return self.lines if self.count == self.room else self.lines[: self.count]

    cdef int forget_first(self, int64_t count) except -1:
        self.count -= count
        memmove(&self.view[0, 0], &self.view[count, 0], self.count * self.columns * sizeof(int64_t))
        return 0


cdef class Stream:
    """Rows of `kept` up to index `stop`, of which those before `first` are not at hand; `width`: numbers of a head's row.

    `tensor`: the number of the keys' tensor among those of a call, -1 if it has none yet. The rest is as in a span: the values' tensor
    and offset from the keys', and the strides of sequence, head and row.
    """

    cdef readonly KeptTokens kept
    cdef readonly int64_t width, first, stop
    cdef int64_t tensor, value_tensor, value_offset, sequence, head, row

    cdef int64_t at_hand(self) noexcept:
        return self.first

    cpdef int extend(self, int64_t stop, int64_t needed) except -1:
        """Make room for rows up to `stop`, while those from `needed` on stay."""
        raise NotImplementedError

    cdef int64_t offset(self, int64_t index) except -1:
        """Return the place of a row among the numbers of its tensor."""
        raise NotImplementedError

    cdef int forget_before(self, int64_t first) except -1:
        """No row before `first` will be seen again."""
        raise NotImplementedError

    def can_crop(self, int64_t length):
        """True if all is at hand that rows after the first `length` tokens see."""
        return self.kept.needed_from(length) >= min(self.kept.before_token(length), self.at_hand())

    def count_needed(self, int64_t row, int64_t seen):
        """Count the rows of all heads that a row from `row` on can see, after `seen` tokens."""
        return self.kept.heads * max(0, self.kept.before_token(seen) - max(self.kept.needed_from(row), self.at_hand()))


cdef class Ring(Stream):
    """Slots `rows` `(2, heads, batch, slots, width)` of one pace, which become more with need."""

    cdef readonly object rows
    cdef int64_t rollback, most, slots
    cdef int64_t latest  # after the last index that was stored, taken back or not

    def __init__(self, KeptTokens kept, rows, int64_t rollback):
        self.kept, self.rollback, self.most, self.tensor = kept, rollback, kept.most(rollback), -1
        self.lay_out(rows)

    def __reduce__(self):
        return ring_again, (self.kept, self.rows, self.rollback, self.first, self.stop, self.latest)

    def lay_out(self, rows):
        cdef int64_t batch = rows.shape[2]
        self.rows, self.slots, self.width, self.row = rows, rows.shape[3], rows.shape[4], rows.shape[4]
        self.sequence, self.head = self.slots * self.width, batch * self.slots * self.width
        self.value_offset = self.kept.heads * self.head

    cdef int64_t at_hand(self) noexcept:
        return max(self.first, self.latest - self.slots)

    cdef int64_t offset(self, int64_t index) except -1:
        return index % self.slots * self.width

    cpdef int extend(self, int64_t stop, int64_t needed) except -1:
        cdef int64_t first = min(max(self.at_hand(), needed), self.stop), slots = stop - first
        if slots > self.slots:
            self.move(first, max(slots, min(self.most, max(2 * self.slots, max(slots + 1, FIRST_SLOTS)))))  # + 1: the row after a prompt
        self.stop, self.latest = stop, max(stop, self.latest)
        return 0

    cdef int move(self, int64_t first, int64_t slots) except -1:
        """Lay out the rows from `first` on in so many slots."""
        cdef int64_t index = first, old, new, count
        with torch.inference_mode(False):  # a tensor made in inference mode could not be written to outside of it
            moved = self.rows.new_zeros((*self.rows.shape[:3], slots, self.width))
        while index < self.stop:
            old, new = index % self.slots, index % slots
            count = min(self.stop - index, min(self.slots - old, slots - new))
            moved[:, :, :, new : new + count] = self.rows[:, :, :, old : old + count]
            index += count
        self.lay_out(moved)
        self.first, self.latest = first, self.stop
        return 0

    cdef int forget_before(self, int64_t first) except -1:
        """Only of what will never be seen again as a whole: else slots are taken again."""
        if self.kept.total and first >= self.kept.total and self.slots:
            self.first = self.stop
            self.lay_out(self.rows[:, :, :, :0].clone())
        return 0

    def crop(self, int64_t stop):
        if stop < self.at_hand():
            self.begin(stop)
        self.stop = stop

    def begin(self, int64_t first):
        """Nothing before row `first` will be seen, which comes next. Rows right before it stay until others take their slots."""
        if first != self.stop:
            self.first = self.stop = self.latest = first

    def put(self, int64_t first, key, value):
        """Store rows `(batch, count, heads, head_dim)` as those from `first` on, for which there is room."""
        cdef int64_t start = first % self.slots if self.slots else 0, count = key.shape[1]
        cdef int64_t before = min(count, self.slots - start)
        for stored, rows in zip(self.rows, (key, value)):
            rows = encoded(rows, stored.dtype).permute(2, 0, 1, 3)
            stored[:, :, start : start + before] = rows[:, :, :before]
            stored[:, :, : count - before] = rows[:, :, before:]

    def in_order(self):
        """Return a copy of the rows at hand, `(2, heads, batch, stop - first, width)`."""
        index = torch.arange(self.at_hand(), self.stop, device=self.rows.device)
        return self.rows[:, :, :, index % max(1, self.slots)]

    def restore(self, rows, int64_t stop):
        """Take back what `in_order` returned."""
        cdef int64_t count = rows.shape[3]
        self.begin(stop)
        self.first = stop - count
        with torch.inference_mode(False):
            self.lay_out(rows.detach().roll(self.first % max(1, count), 3))


def ring_again(kept, rows, rollback, int64_t first, int64_t stop, int64_t latest):
    cdef Ring ring = Ring(kept, rows, rollback)
    ring.first, ring.stop, ring.latest = first, stop, latest
    return ring


cdef class PagedStream(Stream):
    """Rows `base` to `stop - 1`, in pages of a pool."""

    cdef readonly object pool
    cdef readonly int64_t room, base
    cdef Numbers numbers
    cdef int64_t listed  # where its pages are among those of a call; -1: nowhere

    def __init__(self, KeptTokens kept, pool, int64_t width):
        self.kept, self.pool, self.width, self.numbers, self.listed = kept, pool, width, Numbers(), -1
        self.row, self.head, self.value_tensor = kept.heads * width, width, 1
        self.room = <int64_t>pool.rows.shape[2] // self.row

    def __reduce__(self):
        return stream_again, (self.kept, self.pool, self.width, self.base, self.first, self.stop, self.pages)

    @property
    def pages(self):
        return self.numbers.array()[:, 0].tolist()

    cdef int64_t page(self, int64_t number) except -1:
        return self.numbers.view[number, 0]

    cdef int64_t pages_for(self, int64_t stop) except -1:
        """Count the pages that must be free for rows up to `stop`."""
        cdef int64_t base = self.base if self.numbers.count else self.stop // self.room * self.room
        if stop <= self.stop:
            return 0
        return pages_of(stop - base, self.room) - self.numbers.count + self.shares_last()

    cpdef int extend(self, int64_t stop, int64_t needed) except -1:
        if self.numbers.count == 0:
            self.base, self.first = self.stop // self.room * self.room, self.stop
        elif self.shares_last():
            self.numbers.view[self.numbers.count - 1, 0] = self.pool.own(self.page(self.numbers.count - 1))
        while self.base + self.numbers.count * self.room < stop:
            page = self.pool.take()
            self.numbers.more(1)[0] = page
        self.stop = stop
        return 0

    cdef bint shares_last(self) except -1:
        """True if the next row goes to a page that others hold, too."""
        cdef bint partly = (self.stop - self.base) % self.room > 0
        return self.numbers.count > 0 and partly and self.pool.is_shared(self.page(self.numbers.count - 1))

    cdef int forget_before(self, int64_t first) except -1:
        cdef int64_t i, over
        self.first = max(self.first, min(first, self.stop))
        over = min((self.first - self.base) // self.room, self.numbers.count)
        if over > 0:
            self.pool.release([self.page(i) for i in range(over)])
            self.numbers.forget_first(over)
            self.base += over * self.room
        return 0

    def crop(self, int64_t stop):
        cdef int64_t i, keep = min(pages_of(stop - self.base, self.room), self.numbers.count)
        self.pool.release([self.page(i) for i in range(keep, self.numbers.count)])
        self.numbers.count, self.stop, self.first = keep, stop, min(self.first, stop)

    def begin(self, int64_t first):
        self.pool.release(self.pages)
        self.numbers.count = self.base = 0
        self.first = self.stop = first

    def fork(self):
        self.pool.hold(self.pages)
        return stream_again(self.kept, self.pool, self.width, self.base, self.first, self.stop, self.pages)

    cdef int64_t offset(self, int64_t index) except -1:
        cdef int64_t place = index - self.base
        return self.page(place // self.room) * <int64_t>self.pool.numbers + place % self.room * self.row

    def put(self, int64_t first, key, value):
        """Store rows `(count, heads, head_dim)` as those from `first` on, for which there is room."""
        number, place = np.divmod(np.arange(first, first + len(key)) - self.base, self.room)
        pages, places = torch.from_numpy(self.numbers.array()[number, 0]), torch.from_numpy(place)
        size = 2, self.pool.pages, self.room, self.kept.heads, self.width
        paged = self.pool.rows[:, :, : self.room * self.row].view(size)
        for stored, rows in zip(paged, (key, value)):
            stored[pages, places] = encoded(rows, stored.dtype)


def stream_again(kept, pool, width, int64_t base, int64_t first, int64_t stop, pages):
    cdef PagedStream stream = PagedStream(kept, pool, width)
    stream.base, stream.first, stream.stop = base, first, stop
    for page in pages:
        stream.numbers.more(1)[0] = page
    return stream


def pages_for(tuple streams, int64_t stop):
    cdef PagedStream stream
    cdef int64_t total = 0
    for stream in streams:
        total += stream.pages_for(stream.kept.before_token(stop))
    return total


def forget_before(tuple streams, int64_t row):
    cdef Stream stream
    for stream in streams:
        stream.forget_before(stream.kept.needed_from(max(0, row)))


def at_once(tuple streams, int64_t row):
    """Return how many rows from `row` on may come together."""
    cdef Stream stream
    return min([stream.kept.at_once(row) for stream in streams])


cdef class SpanTables:
    """Spans and writes of new rows, over streams in pages of `page` numbers, or in rings. `once`: a key that several branches show counts once."""

    cdef Numbers span_lines, write_lines, page_lines, ranges
    cdef int64_t page
    cdef bint once
    cdef list stored  # the rows of rings, in the order of their numbers

    def __init__(self, bint once, int64_t page=0):
        self.page, self.once = page, once
        self.span_lines, self.write_lines, self.page_lines, self.ranges = Numbers(SPAN_COLUMNS), Numbers(WRITE_COLUMNS), Numbers(), Numbers(3)
        self.stored = []

    def take_stored(self):
        """Return the rows of the rings, and hold them no longer."""
        stored, self.stored = tuple(self.stored), []
        return stored

    def clear(self):
        self.span_lines.count = self.write_lines.count = self.page_lines.count = 0
        self.stored = []

    @property
    def spans(self):
        return self.span_lines.array()

    @property
    def writes(self):
        return self.write_lines.array()

    @property
    def pages(self):
        return self.page_lines.array()[:, 0] if self.page else None

    def add(self, tuple streams, int64_t token, int64_t count, int64_t oldest, int64_t row=0, int64_t batch=1):
        """Take in `count` tokens from `token` on of a sequence, or of `batch` of them, which are the query rows from `row` on.

        Several tokens are those of the first sequence: `repeat` adds the others. What a row from `oldest` on sees is kept. Returns the spans
        with tokens at no equal distances, or pairs that are not seen: with the stream, the token of the row, and the indices that it sees.
        """
        cdef Stream stream
        cdef int64_t i, index, stop, together = batch if count == 1 else 1
        cdef Seen s
        cdef bint shown
        unfinished = []
        for stream in streams:
            stop = stream.kept.before_token(token + count)
            if stop > stream.stop:
                stream.extend(stop, stream.kept.needed_from(oldest))
            stream.tensor = -1
        for i in range(count):
            for stream in streams:
                index = stream.kept.before_token(token + i)
                if stream.kept.before_token(token + i + 1) > index:
                    self.write(stream, index, row + i, together)
        for i in range(count):
            self.ranges.count = 0
            for stream in streams:
                s = stream.kept.seen_by(token + i)
                if s.count:
                    shown = self.once and self.is_shown(stream.kept.place, s, token + i)
                    self.see_all(stream, s, token + i, row + i, together, shown, unfinished)
        return unfinished

    cdef bint is_shown(self, int64_t branch, Seen s, int64_t row) except -1:
        """True if a branch before may show some of these tokens to the row."""
        cdef int64_t i, last = s.token + (s.count - 1) * s.every if s.every else row
        cdef int64_t *line
        cdef bint shown = False
        for i in range(self.ranges.count):
            line = &self.ranges.view[i, 0]
            shown = shown or (line[0] < branch and line[1] <= last and s.token <= line[2])
        line = self.ranges.more(1)
        line[0], line[1], line[2] = branch, s.token, last
        return shown

    cdef int write(self, Stream stream, int64_t index, int64_t row, int64_t rows) except -1:
        cdef int64_t offset = stream.offset(index)
        cdef int64_t *line
        self.list_tensor(stream)
        line = self.write_lines.more(1)
        serve(line, row, rows, stream.kept)
        place(line + TO_KEY, stream.tensor, offset, stream.sequence, stream.head)
        place(line + TO_VALUE, stream.tensor + stream.value_tensor, offset + stream.value_offset, stream.sequence, stream.head)
        return 0

    cdef int list_tensor(self, Stream stream) except -1:
        """Give a stream the number of its tensor, or its pages a place among those of the call."""
        cdef PagedStream paged
        if stream.tensor >= 0:
            return 0
        if not self.page:
            stream.tensor = len(self.stored)
            self.stored.append((<Ring>stream).rows)
            return 0
        paged = <PagedStream>stream
        stream.tensor, paged.listed = 0, self.page_lines.count
        if paged.numbers.count:
            memcpy(self.page_lines.more(paged.numbers.count), &paged.numbers.view[0, 0], paged.numbers.count * sizeof(int64_t))
        return 0

    cdef int see_all(self, Stream stream, Seen s, int64_t token, int64_t row, int64_t rows, bint shown, list unfinished) except -1:
        """Add what a row sees: of a ring, up to its end, and from its beginning on."""
        cdef Seen arc = s
        self.list_tensor(stream)
        if not self.page:
            arc.count = min(s.count, ((<Ring>stream).slots - 1 - s.index % (<Ring>stream).slots) // s.step + 1)
        while True:
            self.see(stream, arc, token, row, rows)
            if stream.kept.masked or shown or not s.every:
                indices = range(arc.index, arc.index + arc.count * arc.step, arc.step)
                unfinished.append((self.span_lines.count - 1, stream, token, indices, shown))
            if arc.count == s.count:
                return 0
            s.index, s.token, s.count = s.index + arc.count * s.step, s.token + arc.count * s.every, s.count - arc.count
            arc = s

    cdef int see(self, Stream stream, Seen s, int64_t token, int64_t row, int64_t rows) except -1:
        cdef int64_t offset = 0 if self.page else stream.offset(s.index)
        cdef int64_t *line = self.span_lines.more(1)
        serve(line, row, rows, stream.kept)
        place(line + KEY, stream.tensor, offset, stream.sequence, stream.head)
        place(line + VALUE, stream.tensor + stream.value_tensor, offset + stream.value_offset, stream.sequence, stream.head)
        line[SEEN], line[QUERY_POSITION], line[POSITION], line[POSITION_STEP] = s.count, token, s.token, s.every
        line[POSITIONS] = line[UNSEEN] = line[PAGES] = -1
        line[KEY_ROW] = line[VALUE_ROW] = stream.row
        if self.page:
            line[PAGES], line[PAGE_ROWS], line[PAGE] = (<PagedStream>stream).listed, (<PagedStream>stream).room, self.page
            line[PAGE_FIRST], line[PAGE_STEP] = s.index - (<PagedStream>stream).base, s.step
        else:
            line[KEY_ROW] = line[VALUE_ROW] = s.step * stream.row
        return 0

    def place(self, int64_t span, int64_t positions):
        self.span_lines.view[span, POSITIONS] = positions

    def leave_out(self, int64_t span, int64_t unseen):
        self.span_lines.view[span, UNSEEN] = unseen

    def repeat(self, int64_t batch, int64_t count):
        """Add for the other sequences of a batch, of `count` rows each, what there is of the first: one by one, so that caches help."""
        repeat_lines(self.span_lines, batch, count, KEY, VALUE)
        repeat_lines(self.write_lines, batch, count, TO_KEY, TO_VALUE)


cdef int repeat_lines(Numbers lines, int64_t batch, int64_t count, int key, int value) except -1:
    """`key`, `value`: columns of the tensor, before those of the offset and of the stride of sequences."""
    cdef int64_t b, i, of_one = lines.count
    cdef int64_t *line
    if batch == 0:
        lines.count = 0
    for b in range(1, batch if of_one else 0):
        line = lines.more(of_one)
        memcpy(line, &lines.view[0, 0], of_one * lines.columns * sizeof(int64_t))
        for i in range(of_one):
            line[ROW] += b * count
            line[key + 1] += b * line[key + 2]
            line[value + 1] += b * line[value + 2]
            line += lines.columns
    return 0
