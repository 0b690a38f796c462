# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""`LastRows`: the tables of a step of one row of each sequence over caches of all tokens.

They are made again for each call, whose sequences have lengths of their own:

    Segments    the kept keys of its segment, of the heads that keep the row     a span, `rate` rows apart
    Band        every `rate`-th key of the window                                a span, `rate` rows apart
    Global      the global columns before it; all keys, if it sees all           a span for each run

In C: they are filled in at every step, for each branch.
"""

from libc.stdint cimport int64_t

import numpy as np

from dilkit.decoding._checked cimport (
    KEY, KEY_ROW, PAGE_STEP, PAGES, POSITION, POSITION_STEP, POSITIONS, QUERY_POSITION, SEEN, SPAN_COLUMNS, TO_KEY, TO_VALUE, UNSEEN, VALUE,
    VALUE_ROW, WRITE_COLUMNS
)
from dilkit.decoding._kept_tokens cimport KeptTokens, OfRuns, Seen, place, serve
from dilkit.decoding._kept_tokens import kept_of_form


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
            runs = (<OfRuns>kept).columns
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
    return len((<OfRuns>kept).columns) if isinstance(kept, OfRuns) else 1


def last_rows_of(forms, group, kv_heads, strides):
    """`LastRows` of these forms; None where one shows a part of the heads of a group, or leaves out keys one by one."""
    tokens = ()
    for form in forms:
        of_form = kept_of_form(form, group) if form.without_rows is form.without_columns is None and not form.without else ()
        if not of_form or any([one.masked for one in of_form]):
            return None
        tokens += of_form
    return LastRows(tokens, kv_heads, strides)
