# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""`StepTables`: the tables of a cache's steps, of one row of each sequence, which are kept and changed in place from step to step.

    store 0    spans 0 and 1    write 0
    store 1    spans 2 and 3    write 1      a store has up to two spans, the arcs of a ring; one that sees nothing has 0 rows

In C: they are filled in at every step, for each branch.
"""

from libc.stdint cimport int64_t
from libc.string cimport memcpy, memset

import numpy as np

cdef enum:
    ARCS = 2


cdef class Lines:
    """A span and a write of heads that lie side by side in a store, as if the row were in slot 0.

    `rows` `(2, heads, batch, slots, width)` of the store, tensor `number` of a step, where `heads` are stored as `stored`. A row sees
    every so-many-th slot, in which are tokens so far apart.
    """

    cdef int64_t[SPAN_COLUMNS] span
    cdef int64_t[WRITE_COLUMNS] write
    cdef int64_t width

    def __init__(self, rows, int64_t number, heads, stored, int64_t every=1, int64_t apart=1):
        cdef int64_t count, batch, slots, i
        cdef int64_t[5] served
        _, count, batch, slots, self.width = rows.shape
        served[0], served[1], served[2], served[3], served[4] = 0, batch, heads.start, heads.step or 1, stored.stop - stored.start
        memset(self.span, 0, sizeof(self.span))
        memcpy(self.span, served, sizeof(served))
        memcpy(self.write, served, sizeof(served))
        for i in range(2):
            place(&self.span[VALUE if i else KEY], number, (stored.start + i * count) * batch * slots * self.width, slots * self.width, batch)
            place(&self.write[TO_VALUE if i else TO_KEY], number, (stored.start + i * count) * batch * slots * self.width, slots * self.width, batch)
        self.span[KEY_ROW] = self.span[VALUE_ROW] = every * self.width
        self.span[POSITION_STEP] = apart
        self.span[POSITIONS] = self.span[UNSEEN] = self.span[PAGES] = -1


cdef int place(int64_t *at, int64_t number, int64_t offset, int64_t sequence, int64_t batch) except -1:
    """The tensor, the offset, and the strides of sequence and head."""
    at[0], at[1], at[2], at[3] = number, offset, sequence, batch * sequence
    return 0


cdef class StepTables:
    """Spans and writes of so many stores, and the tensors beside them."""

    cdef readonly object spans, writes
    cdef readonly tuple positions, unseen
    cdef int64_t[:, ::1] span_lines, write_lines

    def __init__(self, Py_ssize_t stores):
        self.spans, self.writes = np.zeros((stores * ARCS, SPAN_COLUMNS), np.int64), np.zeros((stores, WRITE_COLUMNS), np.int64)
        self.span_lines, self.write_lines = self.spans, self.writes
        self.positions = self.unseen = ()

    def begin(self):
        """Nothing is seen and nothing written."""
        cdef Py_ssize_t i
        for i in range(self.span_lines.shape[0]):
            self.span_lines[i, SEEN] = 0
        for i in range(self.write_lines.shape[0]):
            self.write_lines[i, HEADS] = 0
        self.positions = self.unseen = ()

    def write(self, Py_ssize_t number, Lines lines, int64_t slot):
        """Store `number` keeps the new row, in `slot`."""
        cdef int64_t *line = &self.write_lines[number, 0]
        memcpy(line, lines.write, sizeof(lines.write))
        line[TO_KEY_OFFSET] += slot * lines.width
        line[TO_VALUE_OFFSET] += slot * lines.width

    def see(self, Py_ssize_t number, Lines lines, int64_t seen, int64_t query, int64_t token, int64_t slot=0, Py_ssize_t arc=0):
        """The row of token `query` sees so many rows of store `number`, from that of `token` on, which is in `slot`."""
        cdef int64_t *line = &self.span_lines[ARCS * number + arc, 0]
        memcpy(line, lines.span, sizeof(lines.span))
        line[SEEN], line[QUERY_POSITION], line[POSITION] = seen, query, token
        line[KEY_OFFSET] += slot * lines.width
        line[VALUE_OFFSET] += slot * lines.width

    def see_part(self, Py_ssize_t number, stored, heads, int64_t query, tokens, unseen):
        """The row of token `query` sees what is `stored` `(2, heads, batch, slots, width)` of `tokens`, a part of the rows of a store.

        But not what is `unseen`, as in `Step.unseen`; None: all.
        """
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
        """The positions of the rows that are seen of store `number`."""
        self.span_lines[ARCS * number, POSITIONS] = len(self.positions)
        self.positions += (positions,)

    def leave_out(self, Py_ssize_t number, unseen):
        """What is not seen of the first span of store `number`, as in `Step.unseen`."""
        self.span_lines[ARCS * number, UNSEEN] = len(self.unseen)
        self.unseen += (unseen,)
