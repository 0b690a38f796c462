# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""`KeptTokens`: which tokens of a branch are kept for some key/value heads, in order, and which of these a row sees.

DilatedSegment(6, 2), heads of offset 1     token    0 1 2 3 4 5 | 6 7 8 9 ...
                                            index      0   1   2     3   4         row 9 sees 3, 4: those of its segment

A branch is one or several of these; no key/value head is in two that show it the same key. Where an index lies is for caches to say: in
a slot of a ring or in a page (`_streams.pyx`), or at its token where all are kept (`_tables.pyx`). In C: it is asked at every step, for each
branch.
"""

from libc.stdint cimport int64_t

import math
from collections import defaultdict

import numpy as np

from dilkit.pattern.checks import WHOLE_SEQUENCE
from dilkit.pattern.lowering import Band, Global, Segments, forms_of
from dilkit.pattern.runs import UNBOUNDED

ROWS_AT_ONCE = 64
"""Rows of a chunk that are held against a window together: so many rows more may be kept for them."""

NONE = range(0)
cdef Seen NOTHING = Seen(0, 0, 1, 0, 1)
cdef int64_t NO_LIMIT = UNBOUNDED


cdef inline int64_t shares(int64_t number, int64_t size) noexcept:
    """Divide and round up; 0 for none."""
    return (number - 1) // size + 1 if number > 0 else 0


cdef bint is_in(const int64_t[:, ::1] runs, int64_t token) noexcept:
    cdef Py_ssize_t i
    for i in range(runs.shape[0]):
        if runs[i, 0] <= token < runs[i, 1]:
            return True
    return False


cdef class KeptTokens:
    """Tokens of `branch`, number `place` of the pattern, that are kept for the key/value heads `head`, `head + head_step`, ..., `heads` of them.

    `masked`: whether some query heads see only a part of `seen`, or nothing of it, by the pairs of the branch; `by_pairs`:
    which part differs from row to row. `total`: of all tokens that are ever kept; 0: of any number.
    """

    def __cinit__(self, *arguments):
        self.arguments = arguments

    def __init__(self, branch, int64_t place, heads, bint masked, bint by_pairs=False):
        self.branch, self.place, self.masked, self.by_pairs, self.total = branch, place, masked, by_pairs, 0
        self.head, self.head_step, self.heads = heads.start, heads.step, len(heads)

    def __reduce__(self):
        return type(self), self.arguments

    cdef int64_t before_token(self, int64_t token) noexcept:
        return token

    cdef Seen seen_by(self, int64_t row) noexcept:
        return Seen(row + 1, 0, 1, 0, 1)

    cdef int64_t needed_from(self, int64_t row) noexcept:
        return 0

    cdef int64_t most(self, int64_t rollback) noexcept:
        """Count the kept tokens that are ever needed, at most, by rows that come one by one."""
        return self.total or NO_LIMIT

    cdef int64_t at_once(self, int64_t row) noexcept:
        """Count the rows from `row` on that may come together without many more being needed."""
        return ROWS_AT_ONCE

    def before(self, int64_t token):
        return self.before_token(token)

    def tokens(self, indices):
        return indices

    def seen(self, int64_t row):
        """Return the indices that the row of token `row` sees, of those before it and its own."""
        cdef Seen s = self.seen_by(row)
        return range(s.index, s.index + s.count * s.step, s.step)

    def needed(self, int64_t row):
        """Return the first index that a row from `row` on sees, or that of the next to come if none of these is seen."""
        return self.needed_from(row)

    def needed_after_crop(self, int64_t row):
        """Return the first index that a row from `row` on sees, or one before it to which a cache can be cropped."""
        return self.needed_from(row)


cdef class OfSegments(KeptTokens):
    """`offset`, `offset + rate`, ... of each segment of `length` tokens: `round` of them."""

    cdef int64_t length, rate, offset, round

    def __init__(self, branch, int64_t place, heads, bint masked, int64_t length, int64_t rate, int64_t offset):
        KeptTokens.__init__(self, branch, place, heads, masked)
        self.length, self.rate, self.offset, self.round = length, rate, offset, shares(length - offset, rate)

    cdef int64_t before_token(self, int64_t token) noexcept:
        return token // self.length * self.round + shares(token % self.length - self.offset, self.rate)

    cdef Seen seen_by(self, int64_t row) noexcept:
        cdef int64_t segment = row // self.length, place = row % self.length - self.offset
        if place < 0 or place % self.rate:
            return NOTHING
        return Seen(place // self.rate + 1, segment * self.round, 1, segment * self.length + self.offset, self.rate)

    cdef int64_t needed_from(self, int64_t row) noexcept:
        cdef bint is_over = row % self.length > self.offset + (self.round - 1) * self.rate
        return (row // self.length + is_over) * self.round

    def needed_after_crop(self, int64_t row):
        return row // self.length * self.round  # within the open segment

    cdef int64_t most(self, int64_t rollback) noexcept:
        return self.round + shares(rollback, self.rate)

    cdef int64_t at_once(self, int64_t row) noexcept:
        return min(self.length - row % self.length, ROWS_AT_ONCE)

    def tokens(self, indices):
        if not indices or not self.round:
            return NONE
        (segment, slot), last = divmod(indices[0], self.round), indices[len(indices) - 1] // self.round
        if segment == last:
            first = segment * self.length + self.offset + slot * self.rate
            return range(first, first + len(indices) * indices.step * self.rate, indices.step * self.rate)
        segments, slots = np.divmod(np.arange(indices.start, indices.stop, indices.step), self.round)
        return np.asarray(segments * self.length + self.offset + slots * self.rate, np.int64)


cdef class OfBand(KeptTokens):
    """All tokens; a row sees those at distances `first`, `first + rate`, ... up to `back`, multiples of `rate`."""

    cdef int64_t nearest, back, rate

    def __init__(self, branch, int64_t place, heads, bint masked, int64_t first, int64_t back, int64_t rate, bint by_pairs=False):
        KeptTokens.__init__(self, branch, place, heads, masked, by_pairs)
        self.nearest, self.back, self.rate = shares(first, rate), back, rate

    cdef Seen seen_by(self, int64_t row) noexcept:
        cdef int64_t farthest = (row if row < self.back else self.back) // self.rate, token = row - farthest * self.rate
        return Seen(farthest - self.nearest + 1, token, self.rate, token, self.rate) if self.nearest <= farthest else NOTHING

    cdef int64_t needed_from(self, int64_t row) noexcept:
        return max(0, row - self.back // self.rate * self.rate)

    cdef int64_t most(self, int64_t rollback) noexcept:
        return min(self.back, NO_LIMIT) // self.rate * self.rate + max(rollback, 1)


cdef class OfRuns(KeptTokens):
    """Tokens of the runs `columns`, such as global ones. All rows see them, or only `rows`, which are runs, too."""

    def __init__(self, branch, int64_t place, heads, bint masked, columns, rows=None):
        KeptTokens.__init__(self, branch, place, heads, masked)
        counts = np.concatenate([[0], np.cumsum(columns[:, 1] - columns[:, 0])])
        self.columns, self.before_run, self.total = columns, counts, counts[len(counts) - 1]
        self.rows, self.end = rows, NO_LIMIT if rows is None else rows.max()

    cdef int64_t before_token(self, int64_t token) noexcept:
        cdef int64_t low = 0, high = self.columns.shape[0], middle
        while low < high:
            middle = (low + high) // 2
            if self.columns[middle, 0] < token:
                low = middle + 1
            else:
                high = middle
        return self.before_run[low - 1] + min(token, self.columns[low - 1, 1]) - self.columns[low - 1, 0] if low else 0

    cdef Seen seen_by(self, int64_t row) noexcept:
        cdef int64_t count = self.before_token(row + 1) if self.rows is None or is_in(self.rows, row) else 0
        return Seen(count, 0, 1, self.columns[0, 0], 1 if count <= self.before_run[1] else 0) if count else NOTHING

    cdef int64_t needed_from(self, int64_t row) noexcept:
        return 0 if row < self.end else self.total

    def tokens(self, indices):
        if indices.stop <= self.before_run[1]:
            first = self.columns[0, 0]
            return range(first + indices.start, first + indices.stop, indices.step)
        index = np.arange(indices.start, indices.stop, indices.step)
        run = np.searchsorted(self.before_run, index, "right") - 1
        return np.asarray(self.columns)[run, 0] + index - np.asarray(self.before_run)[run]


def kept_tokens(pattern, given):
    """Return the kept tokens of all branches, in their order, for the heads at hand."""
    return tuple([kept for place, branch in enumerate(pattern.branches) for kept in of_branch(branch, place, given)])


def of_branch(branch, place, given):
    # forms of an evaluated branch are those of one length: the sequence grows, so the branch itself is asked for pairs
    forms = [] if branch.is_evaluated else forms_of(branch, given, WHOLE_SEQUENCE)
    kept = kept_of_form(forms[0], given.group, branch, place) if len(forms) == 1 and forms[0].without_rows is None else ()
    served = branch.served(given)
    heads = range(served.start // given.group, -(-served.stop // given.group))
    if not kept and forms and all([isinstance(form, Band) for form in forms]):
        return (OfBand(branch, place, heads, True, 0, max([band.back for band in forms]), math.gcd(*[band.rate for band in forms]), True),)
    return kept or (KeptTokens(branch, place, heads, True, True),)


def kept_of_form(form, group, branch=None, place=0):
    """Return the kept tokens of one form, of which nothing is left out; none where it is to be asked pair by pair."""
    heads = range(form.heads[0] // group, -(-form.heads[1] // group))
    shared = branch, place, heads, form.heads[0] % group or form.heads[1] % group
    if isinstance(form, Segments) and form.shares_offsets(group):
        return kept_of_segments(form, group, branch, place)
    if isinstance(form, Global):
        others = between(form.columns, form.rows.max()) if len(form.rows) else form.rows
        return tuple([OfRuns(*shared, *runs) for runs in ((form.columns,), (others, form.rows)) if len(runs[0])])
    return (OfBand(*shared, form.first, form.back, form.rate),) if isinstance(form, Band) else ()


def between(runs, end):
    """Return the runs of the tokens before `end` that are in none of `runs`, which ascend."""
    starts, stops = np.append(0, runs[:, 1]), np.append(runs[:, 0], end)
    stops = np.minimum(stops, end)
    return np.ascontiguousarray(np.stack((starts, stops), 1)[starts < stops])


def kept_of_segments(form, group, branch=None, place=0):
    """Return one for the heads of each offset, which are a rate apart, or side by side. `form` gives those of a key/value head the same."""
    by_offset = defaultdict(list)
    for head in range(form.heads[0] // group, -(-form.heads[1] // group)):
        by_offset[form.offsets[max(head * group - form.heads[0], 0)]].append(head)
    kept, masked = [], form.heads[0] % group or form.heads[1] % group
    for offset, heads in sorted(by_offset.items()):
        step = heads[1] - heads[0] if len(heads) > 1 else 1
        kept.append(OfSegments(branch, place, range(heads[0], heads[len(heads) - 1] + 1, step), masked, form.length, form.rate, offset))
    return tuple(kept)
