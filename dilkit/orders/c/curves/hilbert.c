/* Hilbert's curve through a square or a cube, block by block.
 *
 *   coarsest block --inner[state]--> ... --> block of 16 x 16 or 8 x 8 x 8 cells --cell[state] + first cell--> out[d]
 *
 * In each quarter or octant of the grid, the curve of k bits is the curve of k - 1 bits with its axes permuted and some of them
 * reversed. The states are the orientations that occur: 4 in two dimensions, 24 in three. A cell within a block is one number: its
 * coordinates, `bits` bits each, that of the last axis lowest.
 */
#include "curves.h"

#include <stdlib.h>

/* The widest instructions are chosen at run time: a wheel is compiled for the oldest machine. */
#if defined(__has_attribute)
#if defined(__x86_64__) && defined(__GLIBC__) && __has_attribute(target_clones)
#define WIDEST __attribute__((target_clones("avx2", "default")))
#endif
#endif
#ifndef WIDEST
#define WIDEST
#endif

/* The strides of a row-major grid, and the bits of a coordinate within a block. */
typedef struct {
    int bits;
    int64_t plane, row;
} Grid;

/* The row-major index of a cell of the block at the grid's start. */
static inline int64_t cell_index(const Grid *grid, int64_t cell) {
    int64_t mask = (1 << grid->bits) - 1;
    return (cell >> 2 * grid->bits) * grid->plane + (cell >> grid->bits & mask) * grid->row + (cell & mask);
}

/* The loops for one integer type. Every index fits into the type of the output, so what makes up an index is narrowed.
 *
 *   cells:   out[i] = origin + row-major offset of cell[i]         shifted: out[i] = table[i] + by
 */
#define LOOPS(INTEGER, CELLS, SHIFTED)                                                                                       \
    WIDEST static void CELLS(INTEGER *restrict out, const Grid *grid, const uint16_t *restrict cell, int64_t origin, int count) { \
        const INTEGER first = (INTEGER)origin, plane = (INTEGER)grid->plane, row = (INTEGER)grid->row;                       \
        const int bits = grid->bits, mask = (1 << bits) - 1;                                                                 \
        for (int i = 0; i < count; i++)                                                                                      \
            out[i] = first + (cell[i] >> 2 * bits) * plane + (cell[i] >> bits & mask) * row + (cell[i] & mask);              \
    }                                                                                                                        \
    WIDEST static void SHIFTED(INTEGER *restrict out, const INTEGER *restrict table, int64_t by, int count) {                \
        for (int i = 0; i < count; i++)                                                                                      \
            out[i] = table[i] + (INTEGER)by;                                                                                 \
    }

LOOPS(int32_t, cells_32, shifted_32)
LOOPS(int64_t, cells_64, shifted_64)

typedef struct {
    const HilbertTables *tables;
    Grid grid;
    char *out, *table; /* the next cells to write, and a block in each state; NULL: too few blocks for that, or no memory */
    int bytes;         /* of an element: 4 or 8 */
} Curve;

static void put_cells(const Curve *curve, char *out, int state, int64_t origin, int count) {
    const uint16_t *cell = curve->tables->cell + (state << curve->tables->ndim * curve->tables->bits);
    if (curve->bytes == 4)
        cells_32((void *)out, &curve->grid, cell, origin, count);
    else
        cells_64((void *)out, &curve->grid, cell, origin, count);
}

static void put_block(const Curve *curve, int state, int64_t origin, int count) {
    const char *from = curve->table + (int64_t)state * count * curve->bytes;
    if (!curve->table)
        put_cells(curve, curve->out, state, origin, count);
    else if (curve->bytes == 4)
        shifted_32((void *)curve->out, (const void *)from, origin, count);
    else
        shifted_64((void *)curve->out, (const void *)from, origin, count);
}

/* The first `count` blocks of a level, of blocks of the level below each, in a block of this state that begins at `origin`. */
static void write_level(Curve *curve, int level, int state, int64_t origin, int count) {
    const HilbertTables *tables = curve->tables;
    const int cells = 1 << tables->ndim * tables->bits;
    for (int i = 0; i < count; i++) {
        int inner = tables->inner[state * cells + i];
        int64_t first = origin + (cell_index(&curve->grid, tables->cell[state * cells + i]) << level * tables->bits);
        if (level > 1)
            write_level(curve, level - 1, inner, first, cells);
        else {
            put_block(curve, inner, first, cells);
            curve->out += (int64_t)cells * curve->bytes;
        }
    }
}

/* A grid whose bits are not a multiple of the bits of a block is the first corner of one whose bits are. */
void curves_hilbert(void *out, int bytes, const HilbertTables *tables, int bits) {
    const int ndim = tables->ndim;
    Curve curve = {tables, {tables->bits, ndim == 3 ? (int64_t)1 << 2 * bits : 0, (int64_t)1 << bits}, out, NULL, bytes};
    const int top = bits > 0 ? (bits - 1) / tables->bits : 0, cells = 1 << ndim * tables->bits;
    const int count = 1 << ndim * (bits - top * tables->bits); /* of the coarsest block, cells or blocks */
    int start = 0;
    for (int bit = bits; bit < (top + 1) * tables->bits; bit++)
        start = tables->before[start];
    if (!top) {
        put_cells(&curve, out, start, 0, count);
        return;
    }
    if (top > 1 || count > tables->states)
        curve.table = malloc((size_t)(tables->states * cells * bytes));
    for (int s = 0; curve.table && s < tables->states; s++)
        put_cells(&curve, curve.table + (int64_t)s * cells * bytes, s, 0, cells);
    write_level(&curve, top, start, 0, count);
    free(curve.table);
}
