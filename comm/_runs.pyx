# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""The loop over rows of dilkit.comm.tables. It writes into an array that the caller allocates, and holds no lock while it runs."""

from libc.stdint cimport int64_t


def expand(int64_t[::1] rows, const int64_t[:, ::1] runs, int64_t batch):
    """Write out runs of row numbers, all of them for batch 0, then for batch 1, and so on.

    A run `(start, step, count, width, batch_step)` is, for batch b, the numbers `b * batch_step + start + i * step + j` with
    `0 <= i < count` and `0 <= j < width`, i before j. `rows` must hold `batch * sum(count * width)` numbers.
    """
    cdef int64_t at = 0, b, i, j, first
    cdef Py_ssize_t run
    with nogil:
        for b in range(batch):
            for run in range(runs.shape[0]):
                first = runs[run, 0] + b * runs[run, 4]
                for i in range(runs[run, 2]):
                    for j in range(runs[run, 3]):
                        rows[at] = first + j
                        at += 1
                    first += runs[run, 1]
