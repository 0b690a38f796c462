/* Hilbert's curve through a square or a cube, block by block.
 *
 * In each quarter or octant of the grid, the curve of k bits is the curve of k - 1 bits with its axes permuted and some of them
 * reversed: its frame. The states are the frames that arise: 4 in two dimensions, 24 in three. How the curve goes through a block
 * of 16 x 16 or 8 x 8 x 8 cells in each state, and in which states it goes through its cells if these are blocks themselves, is
 * tabulated once. A curve is followed from the coarsest block to the finest ones, which differ from the table in their place only.
 */
#include <stdlib.h>
#include <string.h>

#include "curves.h"
#include "write.h"

enum { STATES = 24, BATCH = 64, BEAM = 256 };

/* Axis a of the outer curve is axis `axis[a]` of the inner one, reversed if bit a of `flips` is set. */
typedef struct {
    uint8_t axis[3], flips;
} Frame;

typedef struct {
    int ndim, bits, states;             /* a block has 1 << bits cells along a side */
    uint8_t before[STATES];             /* the state in whose first quarter or octant the curve is in this state */
    uint16_t cell[STATES][BLOCK_CELLS]; /* along the curve -> row-major */
    uint16_t rank[STATES][BLOCK_CELLS]; /* its inverse */
    uint8_t inner[STATES][BLOCK_CELLS]; /* along the curve -> the state in that cell, if it is a block */
} Tables;

static Tables square = {.ndim = 2, .bits = 4}, cube = {.ndim = 3, .bits = 3};

/* The frames of the parts in the curve's order, which is that of the reflected binary code. */
static const Frame QUARTERS[4] = {{{1, 0}, 0}, {{0, 1}, 0}, {{0, 1}, 0}, {{1, 0}, 3}};
static const Frame OCTANTS[8] = {
    {{1, 2, 0}, 0}, {{1, 0, 2}, 0}, {{0, 1, 2}, 0}, {{2, 1, 0}, 5}, {{2, 1, 0}, 0}, {{0, 1, 2}, 0}, {{1, 0, 2}, 3}, {{1, 2, 0}, 5},
};

static Frame combined(Frame outer, Frame inner, int ndim) {
    Frame frame = {{0}, 0};
    for (int a = 0; a < ndim; a++) {
        int axis = outer.axis[a];
        frame.axis[a] = inner.axis[axis];
        frame.flips |= (uint8_t)(((outer.flips >> a ^ inner.flips >> axis) & 1) << a);
    }
    return frame;
}

static int state_of(Frame frame, Frame *known, int *states) {
    int state = 0;
    while (state < *states && memcmp(&known[state], &frame, sizeof frame))
        state++;
    if (state == *states)
        known[(*states)++] = frame;
    return state;
}

/* The part of the grid, one bit for each axis, the first axis highest, that the curve in `frame` visits as its `number`-th. */
static int part_at(Frame frame, int number, int ndim) {
    int code = number ^ number >> 1, part = 0;
    for (int a = 0; a < ndim; a++)
        part |= ((code >> (ndim - 1 - frame.axis[a]) ^ frame.flips >> a) & 1) << (ndim - 1 - a);
    return part;
}

static void tabulate(Tables *tables, const Frame *parts) {
    int ndim = tables->ndim, bits = tables->bits, states = 1;
    Frame frame[STATES] = {{{0, 1, ndim == 3 ? 2 : 0}, 0}};
    uint8_t inner[STATES][8];
    for (int s = 0; s < states; s++)
        for (int i = 0; i < 1 << ndim; i++)
            inner[s][i] = (uint8_t)state_of(combined(frame[s], parts[i], ndim), frame, &states);
    for (int s = 0; s < states; s++) {
        tables->before[inner[s][0]] = (uint8_t)s;
        for (int i = 0; i < 1 << ndim * bits; i++) {
            int state = s, cell = 0;
            for (int bit = bits - 1; bit >= 0; bit--) {
                int number = i >> bit * ndim & ((1 << ndim) - 1), part = part_at(frame[state], number, ndim);
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
    const Tables *tables;
    Target out;
    Grid grid;
    const char *table; /* the blocks in all states, as put_blocks takes them; NULL: not worth making, or no memory */
    int64_t side;      /* blocks along a side */
    int levels, start; /* levels of blocks, and the state of the coarsest one */
} Curve;

/* A grid that is no whole number of levels is the first corner of one that is. */
static Curve curve_of(void *out, int bytes, int ndim, int bits) {
    Curve curve = {.tables = ndim == 2 ? &square : &cube, .out = target_of(out, bytes, (int64_t)1 << ndim * bits)};
    int block_bits = curve.tables->bits;
    curve.grid = (Grid){block_bits, ndim == 3 ? (int64_t)1 << 2 * bits : 0, (int64_t)1 << bits};
    curve.levels = bits > 0 ? (bits - 1) / block_bits + 1 : 1;
    curve.side = bits > block_bits ? (int64_t)1 << (bits - block_bits) : 1;
    for (int bit = bits; bit < curve.levels * block_bits; bit++)
        curve.start = curve.tables->before[curve.start];
    return curve;
}

static inline int64_t cells_of(const Tables *tables) { return (int64_t)1 << tables->ndim * tables->bits; }

/* The state and the place of the block of blocks that a block is in. */
static int descend(const Curve *curve, int64_t block, int64_t *origin) {
    const Tables *tables = curve->tables;
    int state = curve->start;
    *origin = 0;
    for (int level = curve->levels - 1; level > 1; level--) {
        int64_t i = block >> (level - 1) * tables->ndim * tables->bits & (cells_of(tables) - 1);
        *origin += place(&curve->grid, tables->cell[state][i]) << level * tables->bits;
        state = tables->inner[state][i];
    }
    return state;
}

/* Blocks [first, last) along the curve. */
static void write_blocks(const void *task, int64_t first, int64_t last) {
    const Curve *curve = task;
    const Tables *tables = curve->tables;
    const void *table[BATCH];
    int64_t by[BATCH], cells = cells_of(tables), origin;
    for (int64_t block = first, stop; block < last; block = stop) {
        int outer = descend(curve, block, &origin);
        stop = (block / BATCH + 1) * BATCH < last ? (block / BATCH + 1) * BATCH : last;
        for (int64_t i = block; i < stop; i++) {
            int64_t cell = place(&curve->grid, tables->cell[outer][i & (cells - 1)]), state = tables->inner[outer][i & (cells - 1)];
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
    const Tables *tables = curve.tables;
    int64_t count = (int64_t)1 << ndim * bits, cells = cells_of(tables);
    if (curve.levels == 1) {
        put_cells(&curve.out, 0, &curve.grid, tables->cell[curve.start], 0, count);
        return;
    }
    Table table = {NULL, NULL};
    if (count / cells > tables->states)
        table = new_table(&curve.out, tables->states * cells);
    Target made = {table.data, bytes, 0};
    for (int s = 0; table.data && s < tables->states; s++)
        put_cells(&made, s * cells, &curve.grid, tables->cell[s], 0, cells);
    curve.table = table.data;
    in_shares(write_blocks, &curve, count / cells, count, threads);
    free(table.memory);
}

/* The blocks from `block` on along the last axis: the number of each one's first cell along the curve, and the ranks within it. */
static void ascend(const Curve *curve, const int64_t block[3], int64_t blocks, int64_t *first, const uint16_t **rank) {
    const Tables *tables = curve->tables;
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

/* Beams of blocks along the last axis: [first, last) of them, row-major. */
static void write_beams(const void *task, int64_t first, int64_t last) {
    const Curve *curve = task;
    const Tables *tables = curve->tables;
    int bits = tables->bits, width = 1 << bits;
    int64_t start[BEAM];
    const uint16_t *rank[BEAM];
    for (int64_t beam = first; beam < last; beam++) {
        int64_t block[3] = {beam / curve->side, beam % curve->side, 0}, some = curve->side < BEAM ? curve->side : BEAM;
        for (; block[2] < curve->side; block[2] += some) {
            ascend(curve, block, some, start, rank);
            int64_t corner = (block[0] * curve->grid.plane + block[1] * curve->grid.row + block[2]) << bits;
            for (int64_t row = 0; row < cells_of(tables); row += width)
                put_ranks(&curve->out, corner + place(&curve->grid, row), start, rank, row, width, some);
        }
    }
}

void curves_hilbert_rank(void *out, int bytes, int ndim, int bits, int threads) {
    Curve curve = curve_of(out, bytes, ndim, bits);
    int64_t count = (int64_t)1 << ndim * bits;
    if (curve.levels > 1) {
        in_shares(write_beams, &curve, ndim == 3 ? curve.side * curve.side : curve.side, count, threads);
        return;
    }
    for (int64_t i = 0; i < count; i++)
        put_line(&curve.out, place(&curve.grid, curve.tables->cell[curve.start][i]), i, 0, 1);
}
