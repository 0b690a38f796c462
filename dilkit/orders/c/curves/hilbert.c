/* Hilbert's curve through a square or a cube, block by block.
 *
 *   coarsest block --inner[state]--> ... --> block of 16 x 16 or 8 x 8 x 8 cells --cell[state] + first cell--> out[d]
 *                                                                                --rank[state] + first place--> out[cell]
 *
 * In each quarter or octant of the grid, the curve of k bits is the curve of k - 1 bits with its axes permuted and some of them
 * reversed: its orientation. The states are the orientations that occur: 4 in two dimensions, 24 in three. HilbertTables hold,
 * for each state, the path of the curve through a block (`cell`, its inverse `rank`), and the state in each of its cells if
 * these are blocks themselves (`inner`).
 */
#include <stdlib.h>
#include <string.h>

#include "curves.h"
#include "write.h"

enum { STATES = 24, BATCH = 64, ROW_BATCH = 256 };

/* Axis a of the outer curve is axis `axis[a]` of the inner one, reversed if bit a of `flips` is set. */
typedef struct {
    uint8_t axis[3], flips;
} Orientation;

typedef struct {
    int ndim, bits, states;             /* a block has 1 << bits cells along a side */
    uint8_t before[STATES];             /* the state of a curve whose first quarter or octant has this state */
    uint16_t cell[STATES][BLOCK_CELLS]; /* along the curve -> row-major */
    uint16_t rank[STATES][BLOCK_CELLS]; /* its inverse */
    uint8_t inner[STATES][BLOCK_CELLS]; /* along the curve -> the state in that cell, if it is a block */
} HilbertTables;

static HilbertTables square = {.ndim = 2, .bits = 4}, cube = {.ndim = 3, .bits = 3};

/* The orientations of the parts in the order of the curve, which is that of the reflected binary code (Gray code). */
static const Orientation QUARTERS[4] = {{{1, 0}, 0}, {{0, 1}, 0}, {{0, 1}, 0}, {{1, 0}, 3}};
static const Orientation OCTANTS[8] = {
    {{1, 2, 0}, 0}, {{1, 0, 2}, 0}, {{0, 1, 2}, 0}, {{2, 1, 0}, 5}, {{2, 1, 0}, 0}, {{0, 1, 2}, 0}, {{1, 0, 2}, 3}, {{1, 2, 0}, 5},
};

static Orientation compose(Orientation outer, Orientation inner, int ndim) {
    Orientation orientation = {{0}, 0};
    for (int a = 0; a < ndim; a++) {
        int axis = outer.axis[a];
        orientation.axis[a] = inner.axis[axis];
        orientation.flips |= (uint8_t)(((outer.flips >> a ^ inner.flips >> axis) & 1) << a);
    }
    return orientation;
}

static int state_of(Orientation orientation, Orientation *known, int *states) {
    int state = 0;
    while (state < *states && memcmp(&known[state], &orientation, sizeof orientation))
        state++;
    if (state == *states)
        known[(*states)++] = orientation;
    return state;
}

/* The part of the grid, one bit for each axis, the first axis highest, that the curve in `orientation` visits as its
 * `number`-th. */
static int part_at(Orientation orientation, int number, int ndim) {
    int code = number ^ number >> 1, part = 0;
    for (int a = 0; a < ndim; a++)
        part |= ((code >> (ndim - 1 - orientation.axis[a]) ^ orientation.flips >> a) & 1) << (ndim - 1 - a);
    return part;
}

static void tabulate(HilbertTables *tables, const Orientation *parts) {
    int ndim = tables->ndim, bits = tables->bits, states = 1;
    Orientation orientation[STATES] = {{{0, 1, ndim == 3 ? 2 : 0}, 0}};
    uint8_t inner[STATES][8];
    for (int s = 0; s < states; s++)
        for (int i = 0; i < 1 << ndim; i++)
            inner[s][i] = (uint8_t)state_of(compose(orientation[s], parts[i], ndim), orientation, &states);
    for (int s = 0; s < states; s++) {
        tables->before[inner[s][0]] = (uint8_t)s;
        for (int i = 0; i < 1 << ndim * bits; i++) {
            int state = s, cell = 0;
            for (int bit = bits - 1; bit >= 0; bit--) {
                int number = i >> bit * ndim & ((1 << ndim) - 1), part = part_at(orientation[state], number, ndim);
                for (int a = 0; a < ndim; a++)
                    cell |= (part >> (ndim - 1 - a) & 1) << (bits * (ndim - 1 - a) + bit);
                state = inner[state][number];
            }
            tables->cell[s][i] = (uint16_t)cell;
            tables->rank[s][cell] = (uint16_t)i;
            tables->inner[s][i] = (uint8_t)state;
        }
    }
    tables->states = states;
}

void curves_prepare(void) {
    tabulate(&square, QUARTERS);
    tabulate(&cube, OCTANTS);
}

typedef struct {
    const HilbertTables *tables;
    Output out;
    Grid grid;
    const char *table; /* the blocks in all states, as put_blocks needs them; NULL: too few blocks for it, or no memory */
    int64_t side;      /* blocks along a side */
    int levels, start; /* levels of blocks, and the state of the coarsest one */
} Curve;

/* A grid whose bits are not a multiple of the bits of a block is the first corner of one whose bits are. */
static Curve curve_of(void *out, int bytes, int ndim, int bits) {
    Curve curve = {.tables = ndim == 2 ? &square : &cube, .out = output_of(out, bytes, (int64_t)1 << ndim * bits)};
    int block_bits = curve.tables->bits;
    curve.grid = (Grid){block_bits, ndim == 3 ? (int64_t)1 << 2 * bits : 0, (int64_t)1 << bits};
    curve.levels = bits > 0 ? (bits - 1) / block_bits + 1 : 1;
    curve.side = bits > block_bits ? (int64_t)1 << (bits - block_bits) : 1;
    for (int bit = bits; bit < curve.levels * block_bits; bit++)
        curve.start = curve.tables->before[curve.start];
    return curve;
}

static inline int64_t cells_of(const HilbertTables *tables) { return (int64_t)1 << tables->ndim * tables->bits; }

/* The state of the outer block (block of blocks) that a block is in, and the index of its first cell. */
static int outer_block(const Curve *curve, int64_t block, int64_t *origin) {
    const HilbertTables *tables = curve->tables;
    int state = curve->start;
    *origin = 0;
    for (int level = curve->levels - 1; level > 1; level--) {
        int64_t i = block >> (level - 1) * tables->ndim * tables->bits & (cells_of(tables) - 1);
        *origin += cell_index(&curve->grid, tables->cell[state][i]) << level * tables->bits;
        state = tables->inner[state][i];
    }
    return state;
}

/* Blocks [first, last) along the curve. */
static void write_blocks(const void *task, int64_t first, int64_t last) {
    const Curve *curve = task;
    const HilbertTables *tables = curve->tables;
    const void *table[BATCH];
    int64_t by[BATCH], cells = cells_of(tables), origin;
    for (int64_t block = first, stop; block < last; block = stop) {
        int outer = outer_block(curve, block, &origin);
        stop = (block / BATCH + 1) * BATCH < last ? (block / BATCH + 1) * BATCH : last;
        for (int64_t i = block; i < stop; i++) {
            int64_t inner = i & (cells - 1), state = tables->inner[outer][inner];
            int64_t cell = cell_index(&curve->grid, tables->cell[outer][inner]);
            by[i - block] = origin + (cell << tables->bits);
            if (curve->table)
                table[i - block] = curve->table + state * cells * curve->out.bytes;
            else
                put_cells(&curve->out, i * cells, &curve->grid, tables->cell[state], by[i - block], cells);
        }
        if (curve->table)
            put_blocks(&curve->out, block * cells, table, by, cells, stop - block);
    }
}

void curves_hilbert(void *out, int bytes, int ndim, int bits, int threads) {
    Curve curve = curve_of(out, bytes, ndim, bits);
    const HilbertTables *tables = curve.tables;
    int64_t count = (int64_t)1 << ndim * bits, cells = cells_of(tables);
    if (curve.levels == 1) {
        put_cells(&curve.out, 0, &curve.grid, tables->cell[curve.start], 0, count);
        return;
    }
    BlockTable table = {NULL, NULL};
    if (count / cells > tables->states)
        table = new_block_table(&curve.out, tables->states * cells);
    Output made = {table.data, bytes, 0};
    for (int s = 0; table.data && s < tables->states; s++)
        put_cells(&made, s * cells, &curve.grid, tables->cell[s], 0, cells);
    curve.table = table.data;
    in_threads(write_blocks, &curve, count / cells, count, threads);
    free(table.memory);
}

/* For `blocks` blocks along the last axis from `block` on: the place of each one's first cell on the curve, and the ranks
 * within it. */
static void blocks_of_row(const Curve *curve, const int64_t block[3], int64_t blocks, int64_t *first, const uint16_t **rank) {
    const HilbertTables *tables = curve->tables;
    int bits = tables->bits;
    for (int64_t i = 0; i < blocks; i++) {
        int64_t number = 0, at[3] = {block[0], block[1], block[2] + i};
        int state = curve->start;
        for (int level = curve->levels - 2; level >= 0; level--) {
            int64_t cell = 0;
            for (int a = 0; a < 3; a++)
                cell = cell << bits | (at[a] >> level * bits & ((1 << bits) - 1));
            number = number << tables->ndim * bits | tables->rank[state][cell];
            state = tables->inner[state][tables->rank[state][cell]];
        }
        first[i] = number << tables->ndim * bits;
        rank[i] = tables->rank[state];
    }
}

/* Rows of blocks along the last axis: [first, last) of them, in row-major order. */
static void write_block_rows(const void *task, int64_t first, int64_t last) {
    const Curve *curve = task;
    const HilbertTables *tables = curve->tables;
    int bits = tables->bits, width = 1 << bits;
    int64_t start[ROW_BATCH];
    const uint16_t *rank[ROW_BATCH];
    for (int64_t block_row = first; block_row < last; block_row++) {
        int64_t block[3] = {block_row / curve->side, block_row % curve->side, 0};
        int64_t some = curve->side < ROW_BATCH ? curve->side : ROW_BATCH;
        for (; block[2] < curve->side; block[2] += some) {
            blocks_of_row(curve, block, some, start, rank);
            int64_t corner = (block[0] * curve->grid.plane + block[1] * curve->grid.row + block[2]) << bits;
            for (int64_t row = 0; row < cells_of(tables); row += width)
                put_ranks(&curve->out, corner + cell_index(&curve->grid, row), start, rank, row, width, some);
        }
    }
}

void curves_hilbert_rank(void *out, int bytes, int ndim, int bits, int threads) {
    Curve curve = curve_of(out, bytes, ndim, bits);
    int64_t count = (int64_t)1 << ndim * bits;
    if (curve.levels > 1) {
        in_threads(write_block_rows, &curve, ndim == 3 ? curve.side * curve.side : curve.side, count, threads);
        return;
    }
    for (int64_t i = 0; i < count; i++)
        put_line(&curve.out, cell_index(&curve.grid, curve.tables->cell[curve.start][i]), i, 0, 1);
}
