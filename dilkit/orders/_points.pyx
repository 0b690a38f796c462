# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Codes of points along a curve and back (C code in c/points), and sorting by codes. The GIL is released meanwhile."""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t, uintptr_t

import numpy as np


cdef extern from "points.h" nogil:
    ctypedef struct Column:
        char *data
        int64_t stride
        int size
        uint64_t least, most

    ctypedef struct Points:
        int ndim, bits, is_oriented
        uint8_t start
        const uint8_t *transitions
        int64_t count
        Column axis[3]
        Column code

    ctypedef struct PointsKernel:
        const char *name
        int (*runs_here)()
        int64_t (*encode)(const Points *points) noexcept nogil
        int64_t (*decode)(const Points *points) noexcept nogil


cdef extern from *:
    """
    #include "points.h"
    static const PointsKernel *const points_kernels[] = {
    #ifdef HAVE_AVX512
        &points_avx512,
    #endif
    #ifdef HAVE_AVX2
        &points_avx2,
    #endif
        &points_generic,
    };
    enum { POINTS_KERNELS = sizeof points_kernels / sizeof *points_kernels };
    """
    const PointsKernel *const points_kernels[]
    int POINTS_KERNELS


def instruction_sets():
    """The names of the instruction sets that this machine can run, the fastest first."""
    return tuple(points_kernels[i].name.decode() for i in range(POINTS_KERNELS) if points_kernels[i].runs_here())


cdef const PointsKernel *kernel_of(str name) except NULL:
    cdef int i
    for i in range(POINTS_KERNELS):
        if points_kernels[i].name.decode() == name and points_kernels[i].runs_here():
            return points_kernels[i]
    raise ValueError(f"instruction set {name!r} is none of those that this machine can run: {', '.join(instruction_sets())}")


cdef Column column(tuple place):
    cdef Column made
    made.data = <char *><uintptr_t>place[0]
    made.stride, made.size, made.least, made.most = place[1], place[2], place[3] & 0xFFFFFFFFFFFFFFFF, place[4]
    return made


cdef Points points_of(const uint8_t[::1] transitions, int start, int is_oriented, int bits, int64_t count, axes, tuple code):
    cdef Points p
    p.ndim, p.bits, p.is_oriented, p.start, p.transitions, p.count = len(axes), bits, is_oriented, start, &transitions[0], count
    for k in range(len(axes)):
        p.axis[k] = column(axes[k])
    p.code = column(code)
    return p


def convert(str isa, bint decoding, transitions, int start, int is_oriented, int bits, int64_t count, axes, code):
    """Write the codes of `count` points, or if `decoding` the points of codes.

    Return the index of a first point out of range, in which case it stops, else `count`. `axes` and `code`: column addresses
    (dilkit.orders.point_arrays).
    """
    cdef Points p = points_of(transitions, start, is_oriented, bits, count, axes, code)
    cdef const PointsKernel *kernel = kernel_of(isa)
    cdef int64_t end
    with nogil:
        end = kernel.decode(&p) if decoding else kernel.encode(&p)
    return end


ctypedef fused code_t:
    uint32_t
    int64_t

ctypedef fused index_t:
    int32_t
    int64_t

ctypedef fused target_t:
    int32_t
    int64_t
    uint64_t

cdef enum:
    DIGIT = 11


def argsort(const code_t[::1] codes, index_t[::1] perm):
    """Write the stable order of codes, 0 or more, into `perm`.

    Radix sort, the last digits first, of the bits between the lowest and the highest in which codes differ. An item is a stretch
    of these bits above the code's index, so that it moves as one word; where they are too many for that, codes are sorted by the
    last stretch, then by the next.
    """
    cdef int64_t count = codes.shape[0], i, source
    cdef int index_bits = len(bin(count)) - 2, low, high, width, digits, bits, d
    cdef uint64_t differ = 0, part
    cdef bint again = False
    items, spare = np.empty(count, np.uint64), np.empty(count, np.uint64)
    cdef uint64_t[::1] here = items, there = spare
    with nogil:
        for i in range(count):
            differ |= <uint64_t>(codes[i] ^ codes[0])
    low, high = len(bin(differ & -differ)) - 3, len(bin(differ | 1)) - 2
    while low < high:
        width = min(high - low, 64 - index_bits)
        digits = (width + DIGIT - 1) // DIGIT
        bits = (width + digits - 1) // digits
        part = (<uint64_t>1 << width) - 1
        with nogil:
            for i in range(count):
                source = perm[i] if again else i
                here[i] = (<uint64_t>codes[source] >> low & part) << index_bits | <uint64_t>source
            for d in range(digits - 1):
                scatter(here, there, index_bits + d * bits, bits, <uint64_t>-1)
                here, there = there, here
            scatter(here, perm, index_bits + (digits - 1) * bits, bits, (<uint64_t>1 << index_bits) - 1)
        low, again = low + width, True


cdef void scatter(const uint64_t[::1] items, target_t[::1] to, int shift, int bits, uint64_t kept) noexcept nogil:
    """Write what is `kept` of items, in the order of `bits` of their bits from `shift` on."""
    cdef int64_t[1 << DIGIT] place
    cdef int64_t i, start = 0, here, buckets = <int64_t>1 << bits, mask = buckets - 1
    for i in range(buckets):
        place[i] = 0
    for i in range(items.shape[0]):
        place[items[i] >> shift & mask] += 1
    for i in range(buckets):
        here = place[i]
        place[i] = start
        start += here
    for i in range(items.shape[0]):
        here = items[i] >> shift & mask
        to[place[here]] = <target_t>(items[i] & kept)
        place[here] += 1
