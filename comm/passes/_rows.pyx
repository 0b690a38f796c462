# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Loops over rows. They write into arrays that the caller allocates, and hold no lock while they run."""

from libc.math cimport INFINITY, exp, log
from libc.stdint cimport int64_t

ctypedef fused number:
    float
    double


def expand_runs(int64_t[::1] rows, const int64_t[:, ::1] runs, int64_t batch):
    """Write out runs of row numbers, all of them for batch 0, then for batch 1, and so on.

    A run `(start, step, count, width, batch_step)` is, for batch b, the numbers `b * batch_step + start + i * step + j` with
    `0 <= i < count` and `0 <= j < width`, i before j. `rows` must hold `batch * sum(count * width)` numbers.
    """
    cdef int64_t place = 0, b, i, j, first
    cdef Py_ssize_t run
    with nogil:
        for b in range(batch):
            for run in range(runs.shape[0]):
                first = runs[run, 0] + b * runs[run, 4]
                for i in range(runs[run, 2]):
                    for j in range(runs[run, 3]):
                        rows[place] = first + j
                        place += 1
                    first += runs[run, 1]


def merge(
    number[:, ::1] out, number[::1] lse, const int64_t[::1] rows, const number[:, ::1] more, const number[::1] more_lse
):
    """Merge partial results: `lse' = log(exp(lse) + exp(more_lse))`, `out' = exp(lse - lse') out + exp(more_lse - lse') more`.

    Row i of `more`, `(n, head_dim)`, goes to row `rows[i]` of `out`. The same bits wherever a row stands, which vectorised
    exponentials do not give: their last few are computed in another way.
    """
    cdef Py_ssize_t i, j, row
    cdef double most, old, new, total
    cdef number keep, add
    with nogil:
        for i in range(rows.shape[0]):
            row = rows[i]
            most = lse[row] if lse[row] > more_lse[i] else more_lse[i]
            if most == -INFINITY:
                continue
            old, new = exp(lse[row] - most), exp(more_lse[i] - most)
            total = old + new
            lse[row] = <number>(most + log(total))
            keep, add = <number>(old / total), <number>(new / total)
            for j in range(out.shape[1]):
                out[row, j] = keep * out[row, j] + add * more[i, j]
