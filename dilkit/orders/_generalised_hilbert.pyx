# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""The generalised Hilbert curve through any rectangle or cuboid. The C code is in c/generalised_hilbert."""

from libc.stdint cimport int32_t, int64_t

ctypedef fused integer:
    int32_t
    int64_t

cdef extern from "generalised_hilbert.h" nogil:
    void generalised_hilbert_curve(void *out, int bytes, const int64_t *shape, int threads)


def generalised_hilbert(integer[::1] out, shape, int threads=1):
    """Write `out[d]` = row-major index of the d-th cell along the curve, which starts at cell 0 and steps to a neighbour each time.

    `out`, int32 or int64, must be as long as `shape` has cells; `shape` is one to three sides of at least 1. Up to `threads` threads
    write, one for every two million cells at most, which end with the call: the result is the same for any number. ValueError: sides or a length that do not fit.
    """
    cdef int64_t sides[3]
    cdef int64_t cells = 1
    cdef Py_ssize_t axis
    if not 1 <= len(shape) <= 3 or min(shape) < 1:
        raise ValueError(f"shape is {shape!r}, must be one to three sides of at least 1")
    wanted = 1
    for axis, side in enumerate((1,) * (3 - len(shape)) + tuple(shape)):
        wanted *= side
        if wanted > out.shape[0]:
            break
        sides[axis] = side
    if wanted != out.shape[0]:
        raise ValueError(f"out has {out.shape[0]} elements, must have one for each cell of shape {shape!r}")
    if integer is int32_t and wanted > 1 << 31:
        raise ValueError(f"out is int32, which cannot hold the cells of shape {shape!r}: use int64")
    if threads < 1:
        raise ValueError(f"threads is {threads}, must be at least 1")
    with nogil:
        generalised_hilbert_curve(&out[0], sizeof(integer), sides, threads)
