/* Hilbert curves through grids. `out` has one element of `bytes` bytes, 4 or 8, for each cell. */
#ifndef DILKIT_CURVES_H
#define DILKIT_CURVES_H

#include <stdint.h>

/* The path of Hilbert's curve through a block of 1 << bits cells a side, as `dilkit.orders.state_tables.block_tables` has it: in each
 * of the `states` of the curve the cells along it, and its state in each of them if they are blocks themselves. */
typedef struct {
    int ndim, bits, states;
    const uint16_t *cell;
    const uint8_t *inner;
    const uint8_t *before; /* the state of a curve whose first quarter or octant has this state */
} HilbertTables;

/* Hilbert's curve through a square or cube of sides 1 << bits: out[d] = row-major index of the d-th cell. */
void curves_hilbert(void *out, int bytes, const HilbertTables *tables, int bits);

/* The generalised Hilbert curve through a box of any sides. */
void curves_generalised_hilbert(void *out, int bytes, const int64_t shape[3]);

#endif
