# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""The loops over rows of dilkit.plan. They write into arrays that the caller allocates, and hold no lock while they run."""

from libc.stdint cimport int32_t, int64_t

ctypedef fused integer:
    int32_t
    int64_t


def fill_segments(
    integer[::1] rows,
    integer[:, ::1] pointers,
    const int64_t[::1] offsets,
    int64_t seq,
    int64_t segment_length,
    int64_t dilation_rate,
):
    """Write the rows kept by each offset, segment by segment, and where each (offset, segment) starts.

    `rows`, `(kept,)`, must be as long as all offsets keep rows; `pointers` is `(offsets, segments + 1)`; each offset is below
    `dilation_rate`. `segment_length` and `dilation_rate` must be at most `seq` (1 if there are no tokens): then no sum overflows.
    """
    cdef int64_t at = 0
    cdef Py_ssize_t o, s
    with nogil:
        for o in range(offsets.shape[0]):
            for s in range(pointers.shape[1] - 1):
                pointers[o, s] = <integer>at
                at = _keep(rows, at, s * segment_length, min(segment_length, seq - s * segment_length), offsets[o], dilation_rate)
            pointers[o, pointers.shape[1] - 1] = <integer>at


cdef inline int64_t _keep(
    integer[::1] rows, int64_t at, int64_t start, int64_t length, int64_t offset, int64_t rate
) noexcept nogil:
    """Write `start + offset, start + offset + rate, ...` below `start + length` from `rows[at]` on; return the place after them."""
    cdef int64_t k, kept = 0
    if offset < length:
        kept = (length - offset - 1) // rate + 1
    for k in range(kept):
        rows[at + k] = <integer>(start + offset + k * rate)
    return at + kept
