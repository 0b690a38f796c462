/* Token orders of grids: Hilbert, Morton, tiles, snake. `out` has one element of `bytes` bytes, 4 or 8, for each cell. */
#ifndef DILKIT_CURVES_H
#define DILKIT_CURVES_H

#include <stdint.h>

/* Computes the tables of Hilbert's curve. Call it once, before the others. */
void curves_prepare(void);

/* Hilbert's curve through a square or cube of sides 1 << bits: out[d] = row-major index of the d-th cell. */
void curves_hilbert(void *out, int bytes, int ndim, int bits, int threads);

/* Its inverse: out[row-major index of the d-th cell] = d. */
void curves_hilbert_rank(void *out, int bytes, int ndim, int bits, int threads);

/* The cells of a box by ascending Morton code, whose digits have the bit of the first axis highest. 0: no memory. */
int curves_morton(void *out, int bytes, const int64_t shape[3], int threads);

/* Tiles in row-major order, and the cells of each tile in row-major order. Tiles at the far sides may be smaller. No side of a
 * tile is longer than the box. */
void curves_tiles(void *out, int bytes, const int64_t shape[3], const int64_t tile[3]);

/* Row after row, every other one backwards, and every other plane from its last row: each step is one cell long. */
void curves_snake(void *out, int bytes, const int64_t shape[3]);

#endif
