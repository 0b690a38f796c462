/* Codes of points along a curve, and points of codes: the arguments of a conversion, and the code for each instruction set. */
#ifndef DILKIT_POINTS_H
#define DILKIT_POINTS_H

#include <stdint.h>

/* A strided column of integers of 1, 2, 4 or 8 bytes, `stride` bytes apart. */
typedef struct {
    char *data;
    int64_t stride;
    int size;
    uint64_t least, most; /* `least` is subtracted from each number; the result is at most `most`, a power of two less one */
} Column;

typedef struct {
    int ndim, bits, is_oriented; /* is_oriented: the orientation changes (Hilbert); the last bit of a digit is then a parity */
    uint8_t start;               /* the state before the first level */
    const uint8_t *transitions;  /* (256,): see kernel.h */
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
