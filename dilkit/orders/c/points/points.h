/* Codes of points along a curve, and points of codes: what the parts of the C code share. */
#ifndef DILKIT_POINTS_H
#define DILKIT_POINTS_H

#include <stdint.h>

/* Whole numbers of 1, 2, 4 or 8 bytes, `stride` bytes apart. */
typedef struct {
    char *data;
    int64_t stride;
    int size;
    uint64_t least, most; /* numbers are counted from `least`, and are then `most` at most: a power of two less one */
} Column;

typedef struct {
    int ndim, bits, turning; /* turning: whether the curve turns, and the parity of a level's bits is its digit's last bit */
    uint8_t start;          /* the state before the first level */
    const uint8_t *turns;   /* (256,): see points_kernel.h */
    int64_t count;
    Column axis[3], code;
} Points;

/* The code of one instruction set. Both return the index of a first point out of range, or `count` if all are within. */
typedef struct {
    const char *name;
    int (*runs_here)(void);
    int64_t (*encode)(const Points *points), (*decode)(const Points *points);
} PointsKernel;

extern const PointsKernel points_generic;
#ifdef HAVE_AVX2
extern const PointsKernel points_avx2;
#endif
#ifdef HAVE_AVX512
extern const PointsKernel points_avx512;
#endif

#endif
