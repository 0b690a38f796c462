# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Tables of steps of one row of each sequence: `StepTables` of a `DilatedCache`, `LastRows` of a cache of all tokens.

`StepTables` are kept, and changed in place from step to step:

    store 0    spans 0 and 1    write 0
    store 1    spans 2 and 3    write 1      a store has up to two spans, the arcs of a ring; one that sees nothing has 0 rows

`LastRows` makes them anew for each call, whose sequences have lengths of their own:

    Segments    the kept keys of its segment, of the heads that keep the row     a span, `rate` rows apart
    Band        every `rate`-th key of the window                                a span, `rate` rows apart
    Global      the global columns before it; all keys, if it sees all           a span for each run

In C: they are filled in at every step, for each branch.
"""

from libc.stdint cimport int64_t
from libc.string cimport memcpy, memset

import numpy as np

from dilkit.decoding._checked cimport (
    HEAD_STEP, HEADS, FIRST_HEAD, KEY, KEY_HEAD, KEY_OFFSET, KEY_ROW, KEY_SEQUENCE, PAGE_STEP, PAGES, POSITION, POSITION_STEP, POSITIONS,
    QUERY_POSITION, ROW, ROWS, SEEN, SPAN_COLUMNS, TO_KEY, TO_KEY_OFFSET, TO_VALUE, TO_VALUE_OFFSET, UNSEEN, VALUE, VALUE_OFFSET, VALUE_ROW,
    WRITE_COLUMNS
)
from dilkit.decoding._kept_tokens cimport KeptTokens, OfGlobal, Seen, place, serve
from dilkit.decoding._kept_tokens import kept_of_form

cdef enum:
    ARCS = 2


cdef class Lines:
    """A span and a write of the rows of `kept`, in the way in which they lie in a store, as if the row were in slot 0."""

    cdef KeptTokens kept
    cdef object unseen
    cdef int64_t[SPAN_COLUMNS] span
    cdef int64_t[WRITE_COLUMNS] write

    cdef int lay_out(self, int64_t first, int64_t heads, int64_t batch, int64_t sequence) except -1:
        """In a store of so many `heads`, of which its own are from `first` on; `sequence`: numbers of all slots of a head."""
        cdef int64_t i, head = batch * sequence
        memset(self.span, 0, sizeof(self.span))
        serve(self.span, 0, batch, self.kept)
        serve(self.write, 0, batch, self.kept)
        for i in range(2):
            place(&self.span[VALUE if i else KEY], 0, (first + i * heads) * head, sequence, head)
            place(&self.write[TO_VALUE if i else TO_KEY], 0, (first + i * heads) * head, sequence, head)
        self.span[POSITIONS] = self.span[UNSEEN] = self.span[PAGES] = -1
        return 0


cdef class Slots:
    """The memory of a store, and in which slots the rows of several `KeptTokens` are, whose heads lie one after the other.

    The row of index i is in slot i; of a segment in slot `i mod round`; of a ring, which has `most` slots at most, in `i mod count`.
    `length`: of segments. `unseen`: of each of `kept`, as in `Step.unseen`, or None. `places`: the tokens of all rows, where they are
    at no equal distances. `latest`: the token after the last that was stored, taken back or not.
    """

    cdef readonly object rows
    cdef readonly int64_t count
    cdef public int64_t latest
    cdef tuple arguments
    cdef list lines
    cdef object places
    cdef int64_t length, most, width

    def __init__(self, tuple kept=(), tuple unseen=(), int64_t length=0, int64_t most=0, places=None):
        cdef Lines lines
        self.arguments, self.lines = (kept, unseen, length, most, places), []
        self.length, self.most, self.places = length, most, places
        for one, hidden in zip(kept, unseen):
            lines = Lines()
            lines.kept, lines.unseen = one, hidden
            self.lines.append(lines)

    def __reduce__(self):
        return slots_again, (self.arguments, self.rows, self.latest)

    def lay_out(self, rows):
        cdef Lines lines
        cdef int64_t first = 0
        _, heads, batch, self.count, self.width = rows.shape
        self.rows = rows
        for lines in self.lines:
            lines.lay_out(first, heads, batch, self.count * self.width)
            first += lines.kept.heads

    cdef int64_t slot_of(self, KeptTokens kept, int64_t index) noexcept:
        cdef int64_t round = self.count if self.most else kept.round
        return index % round if round else index

    cdef bint goes_on(self, int64_t seen) noexcept:
        """True if the row after `seen` asks nothing of the store but a slot, as nearly all of segments and rings."""
        cdef int64_t tokens = max(self.latest, seen + 1)
        return min(tokens, self.most) <= self.count if self.most else self.length > 0 and seen % self.length > 0


def slots_again(arguments, rows, latest):
    slots = Slots(*arguments)
    slots.lay_out(rows)
    slots.latest = latest
    return slots


cdef class StepTables:

    cdef readonly object spans, writes
    cdef readonly tuple positions, unseen
    cdef int64_t[:, ::1] span_lines, write_lines

    def __init__(self, Py_ssize_t stores):
        self.spans, self.writes = np.zeros((stores * ARCS, SPAN_COLUMNS), np.int64), np.zeros((stores, WRITE_COLUMNS), np.int64)
        self.span_lines, self.write_lines = self.spans, self.writes
        self.positions = self.unseen = ()

    def begin(self):
        cdef Py_ssize_t i
        for i in range(self.span_lines.shape[0]):
            self.span_lines[i, SEEN] = 0
        for i in range(self.write_lines.shape[0]):
            self.write_lines[i, HEADS] = 0
        self.positions = self.unseen = ()

    def go_on(self, list stores, Py_ssize_t number, Py_ssize_t stop, int64_t seen):
        """`add` the slots of stores from `number` to `stop - 1`, as long as these go on; returns the number of one that is to be asked."""
        cdef Slots slots
        while number < stop:
            slots = stores[number]
            if not slots.goes_on(seen) or not self.add(number, slots, seen):
                break
            number += 1
        return number

    cpdef bint add(self, Py_ssize_t number, Slots slots, int64_t seen) except -1:
        """The row after `seen` goes to its slot of store `number`, and sees what the store says; False where it has no such slot."""
        cdef Lines lines
        cdef Seen s
        cdef int64_t index, slot
        for lines in slots.lines:
            index = lines.kept.before_token(seen)
            if lines.kept.before_token(seen + 1) > index:
                slot = slots.slot_of(lines.kept, index)
                if slot >= slots.count:
                    return False
                self.write(number, lines, slot * slots.width)
            s = lines.kept.seen_by(seen)
            if s.count:
                self.see_slots(number, lines, slots, s, seen)
        slots.latest = max(slots.latest, seen + 1)
        return True

    cdef int write(self, Py_ssize_t number, Lines lines, int64_t offset) except -1:
        cdef int64_t *line = &self.write_lines[number, 0]
        memcpy(line, lines.write, sizeof(lines.write))
        line[TO_KEY] = line[TO_VALUE] = number
        line[TO_KEY_OFFSET] += offset
        line[TO_VALUE_OFFSET] += offset
        return 0

    cdef int see_slots(self, Py_ssize_t number, Lines lines, Slots slots, Seen s, int64_t query) except -1:
        """Add what a row sees: of a ring, up to its end, and from its beginning on."""
        cdef int64_t slot = slots.slot_of(lines.kept, s.index), before = s.count
        if slots.most:
            before = min(s.count, (slots.count - 1 - slot) // s.step + 1)
        self.see(ARCS * number, lines, slots.width, s, slot, query)
        self.span_lines[ARCS * number, SEEN] = before
        if before < s.count:
            s.index, s.token, s.count = s.index + before * s.step, s.token + before * s.every, s.count - before
            self.see(ARCS * number + 1, lines, slots.width, s, slots.slot_of(lines.kept, s.index), query)
        if not s.every:
            self.place(number, slots.places[: s.count])
        if lines.unseen is not None:
            self.leave_out(number, lines.unseen)
        return 0

    cdef int see(self, Py_ssize_t at, Lines lines, int64_t width, Seen s, int64_t slot, int64_t query) except -1:
        cdef int64_t *line = &self.span_lines[at, 0]
        memcpy(line, lines.span, sizeof(lines.span))
        line[SEEN], line[QUERY_POSITION], line[POSITION], line[POSITION_STEP] = s.count, query, s.token, s.every
        line[KEY] = line[VALUE] = at // ARCS
        line[KEY_ROW] = line[VALUE_ROW] = s.step * width
        line[KEY_OFFSET] += slot * width
        line[VALUE_OFFSET] += slot * width
        return 0

    def see_part(self, Py_ssize_t number, stored, heads, int64_t query, tokens, unseen):
        """The row of token `query` sees `stored` `(2, heads, batch, slots, width)` of `tokens`, but not what is `unseen`."""
        cdef int64_t *line = &self.span_lines[ARCS * number, 0]
        line[ROW], line[ROWS], line[FIRST_HEAD], line[HEAD_STEP] = 0, stored.shape[2], heads.start, heads.step or 1
        line[HEADS], line[SEEN], line[QUERY_POSITION] = stored.shape[1], stored.shape[3], query
        line[UNSEEN] = line[PAGES] = -1
        of_all, line[KEY_HEAD], line[KEY_SEQUENCE], line[KEY_ROW], _ = stored.stride()
        line[KEY], line[KEY_OFFSET] = number, stored.storage_offset()
        memcpy(line + VALUE, line + KEY, 5 * sizeof(int64_t))
        line[VALUE_OFFSET] += <int64_t>of_all
        if isinstance(tokens, range):
            line[POSITION], line[POSITION_STEP], line[POSITIONS] = tokens.start, tokens.step, -1
        else:
            self.place(number, tokens.contiguous())
        if unseen is not None:
            self.leave_out(number, unseen)

    def place(self, Py_ssize_t number, positions):
        self.span_lines[ARCS * number, POSITIONS] = len(self.positions)
        self.positions += (positions,)

    def leave_out(self, Py_ssize_t number, unseen):
        self.span_lines[ARCS * number, UNSEEN] = len(self.unseen)
        self.unseen += (unseen,)


cdef class LastRows:
    """The tables of a step over caches of all tokens `(batch, capacity, kv_heads, head_dim)`, the stored tensors 0 and 1.

    `kept`: what is seen, of whole key/value heads. `strides`: of the keys and of the values, those of sequence, token and head.
    """

    cdef tuple kept
    cdef KeptTokens new
    cdef int64_t[2][3] strides
    cdef Py_ssize_t most

    def __init__(self, tuple kept, int64_t kv_heads, strides):
        cdef Py_ssize_t i
        self.kept, self.new, self.most = kept, KeptTokens(None, 0, range(kv_heads), False), sum(map(most_spans, kept))
        for i in range(2):
            self.strides[i][0], self.strides[i][1], self.strides[i][2] = strides[i]

    def tables(self, list lengths, bint written):
        """The spans of one row of each sequence, which is the last of so many, and its writes, if it is `written`."""
        cdef bint together = lengths.count(lengths[0]) == len(lengths)
        cdef int64_t rows = len(lengths) if together else 1, last
        cdef Py_ssize_t b, sequences = 1 if together else len(lengths), spans = 0
        cdef KeptTokens kept
        all_spans = np.zeros((sequences * self.most, SPAN_COLUMNS), np.int64)
        all_writes = np.zeros((sequences if written else 0, WRITE_COLUMNS), np.int64)
        cdef int64_t[:, ::1] span = all_spans, write = all_writes
        for b in range(sequences):
            last = <int64_t>lengths[b] - 1
            if written:
                serve(&write[b, 0], b, rows, self.new)
                self.put(&write[b, TO_KEY], self.new, b, last, 0)
                self.put(&write[b, TO_VALUE], self.new, b, last, 1)
            for kept in self.kept:
                spans = self.see(span, spans, kept, b, rows, last)
        return all_spans[:spans], all_writes

    cdef Py_ssize_t see(self, int64_t[:, ::1] span, Py_ssize_t number, KeptTokens kept, int64_t b, int64_t rows, int64_t last):
        """Add what the last row of sequence `b` sees as span `number`, if it is anything; returns the number of the next."""
        cdef Seen s = kept.seen_by(last)
        cdef const int64_t[:, ::1] runs
        cdef Py_ssize_t i
        if s.count and s.every:
            self.set_span(&span[number, 0], kept, b, rows, last, s)
            return number + 1
        if s.count:
            runs = (<OfGlobal>kept).columns
            for i in range(runs.shape[0]):
                if runs[i, 0] <= last:
                    s.token, s.every, s.count = runs[i, 0], 1, min(runs[i, 1], last + 1) - runs[i, 0]
                    self.set_span(&span[number, 0], kept, b, rows, last, s)
                    number += 1
        return number

    cdef void set_span(self, int64_t *line, KeptTokens kept, int64_t b, int64_t rows, int64_t query, Seen s) noexcept:
        serve(line, b, rows, kept)
        self.put(line + KEY, kept, b, s.token, 0)
        self.put(line + VALUE, kept, b, s.token, 1)
        line[KEY_ROW], line[VALUE_ROW] = s.every * self.strides[0][1], s.every * self.strides[1][1]
        line[SEEN], line[QUERY_POSITION], line[POSITION], line[POSITION_STEP] = s.count, query, s.token, s.every
        line[POSITIONS] = line[UNSEEN] = line[PAGES] = -1
        line[PAGE_STEP] = 1

    cdef void put(self, int64_t *at, KeptTokens kept, int64_t b, int64_t token, int64_t number) noexcept:
        cdef int64_t *stride = self.strides[number]
        place(at, number, b * stride[0] + token * stride[1] + kept.head * stride[2], stride[0], kept.head_step * stride[2])


def most_spans(kept):
    return len((<OfGlobal>kept).columns) if isinstance(kept, OfGlobal) else 1


def last_rows_of(forms, group, kv_heads, strides):
    """`LastRows` of these forms; None where one shows a part of the heads of a group, or leaves out keys one by one."""
    tokens = ()
    for form in forms:
        of_form = kept_of_form(form, group) if form.without_rows is form.without_columns is None and not form.without else ()
        if not of_form or any([one.masked for one in of_form]):
            return None
        tokens += of_form
    return LastRows(tokens, kv_heads, strides)
