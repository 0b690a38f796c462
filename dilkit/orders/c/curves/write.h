/* Writing token orders: blocks of cells into an array of int32 or int64, by one thread or several.
 *
 *   hilbert.c, boxes.c: which block comes next --> put_blocks, put_ranks, put_line --> stage (8 KB) --streamed--> out
 *                                                          ^                          only for outputs beyond the caches
 *                              BlockTable: the cells of each kind of block, + the index of its first cell
 *
 * A block is at most 512 cells of a grid, 1 << bits along a side. A cell within a block is one number: its coordinates, `bits`
 * bits each, that of the last axis lowest. In two dimensions a block has depth 1.
 */
#ifndef DILKIT_CURVES_WRITE_H
#define DILKIT_CURVES_WRITE_H

#include <stdint.h>

enum { BLOCK_CELLS = 512 };

typedef struct {
    char *data;
    int bytes;  /* of an element: 4 or 8 */
    int stream; /* larger than the caches: whole cache lines are written directly to memory */
} Output;

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

Output output_of(void *data, int bytes, int64_t count);

/* An array of elements as wide as those of `out`, with the same alignment within a cache line, so that aligned loads become
 * aligned stores. `data` is NULL if there is no memory; the caller frees `memory`. */
typedef struct {
    char *data;
    void *memory;
} BlockTable;

BlockTable new_block_table(const Output *out, int64_t count);

/* out[at + i] = origin + cell_index(cell[i]) */
void put_cells(const Output *out, int64_t at, const Grid *grid, const uint16_t *cell, int64_t origin, int64_t count);

/* Blocks one after the other: out[at + i * cells + j] = table[i][j] + by[i]; up to BLOCK_CELLS cells, as wide as those of
 * `out`. */
void put_blocks(const Output *out, int64_t at, const void *const *table, const int64_t *by, int64_t cells, int64_t blocks);

/* A row through neighbouring blocks: out[at + i * width + j] = first[i] + rank[i][row + j]; `width` is 8 or 16. */
void put_ranks(
    const Output *out, int64_t at, const int64_t *first, const uint16_t *const *rank, int64_t row, int width, int64_t blocks);

/* out[at + i] = from + i * step */
void put_line(const Output *out, int64_t at, int64_t from, int64_t step, int64_t count);

typedef void (*Work)(const void *task, int64_t first, int64_t last);

/* Calls work(task, first, last) for ranges that together are [0, units), in up to `threads` threads, which end with the call.
 * Below a few million `cells` one thread does all. */
void in_threads(Work work, const void *task, int64_t units, int64_t cells, int threads);

#endif
