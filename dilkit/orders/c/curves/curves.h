/* Hilbert curves through grids. `out` has one element of `bytes` bytes, 4 or 8, for each cell. */
#ifndef DILKIT_CURVES_H
#define DILKIT_CURVES_H

#include <stdint.h>

/* Computes the tables of Hilbert's curve. Call it once, before the others. */
void curves_prepare(void);

/* Hilbert's curve through a square or cube of sides 1 << bits: out[d] = row-major index of the d-th cell. */
void curves_hilbert(void *out, int bytes, int ndim, int bits);

/* The generalised Hilbert curve through a box of any sides. */
void curves_generalised_hilbert(void *out, int bytes, const int64_t shape[3]);

#endif
