/* Hilbert's curve through a square or a cube, block by block.
 *
 *   coarsest block --inner[state]--> ... --> block of 16 x 16 or 8 x 8 x 8 cells --cell[state] + first cell--> out[d]
 *
 *   put_blocks --> shifted_32 / shifted_64 (write_loops.h) --> out            outputs that fit into the caches
 *                                                          --> stage --> out  larger ones, by non-temporal stores of cache lines
 *
 * In each quarter or octant of the grid, the curve of k bits is the curve of k - 1 bits with its axes permuted and some of them
 * reversed: its orientation. The states are the orientations that occur: 4 in two dimensions, 24 in three. HilbertTables hold,
 * for each state, the path of the curve through a block (`cell`), and the state in each of its cells if these are blocks
 * themselves (`inner`). A cell within a block is one number: its coordinates, `bits` bits each, that of the last axis lowest.
 */
#include "curves.h"

#include <stdlib.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
enum { STREAMS = 1 };
#else
enum { STREAMS = 0 };
#endif

/* The widest instructions are chosen at run time: a wheel is compiled for the oldest machine. */
#if defined(__has_attribute)
#if defined(__x86_64__) && defined(__GLIBC__) && __has_attribute(target_clones)
#define WIDEST __attribute__((target_clones("avx2", "default")))
#endif
#endif
#ifndef WIDEST
#define WIDEST
#endif

enum { STATES = 24, BATCH = 64, BLOCK_CELLS = 512 };
enum { VECTOR = 32, LINE = 64, STAGED_BYTES = 8 * 1024, STREAMED_BYTES = 1 << 25 };

/* Axis a of the outer curve is axis `axis[a]` of the inner one, reversed if bit a of `flips` is set. */
typedef struct {
    uint8_t axis[3], flips;
} Orientation;

typedef struct {
    int ndim, bits, states;             /* a block has 1 << bits cells along a side */
    uint8_t before[STATES];             /* the state of a curve whose first quarter or octant has this state */
    uint16_t cell[STATES][BLOCK_CELLS]; /* along the curve -> row-major */
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
            tables->inner[s][i] = (uint8_t)state;
        }
    }
    tables->states = states;
}

void curves_prepare(void) {
    tabulate(&square, QUARTERS);
    tabulate(&cube, OCTANTS);
}

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

#define LANES(type) ((int)(VECTOR / sizeof(type)))
#define INTEGER int32_t
#define NAMED(name) name##_32
#include "write_loops.h"
#define INTEGER int64_t
#define NAMED(name) name##_64
#include "write_loops.h"

/* A buffer for elements that are streamed afterwards: a streamed cache line is not read first, and evicts no other line. */
typedef struct {
    _Alignas(LINE) char bytes[LINE + STAGED_BYTES];
} Stage;

static void stream(char *to, const char *from, int64_t bytes) {
#ifdef __SSE2__
    int64_t head = (int64_t)(-(uintptr_t)to % LINE), tail;
    if (head > bytes)
        head = bytes;
    tail = (bytes - head) % LINE;
    memcpy(to, from, (size_t)head);
    for (int64_t at = head; at < bytes - tail; at += LINE) {
        __m128i line[4]; /* the whole line in one go: a line written in parts goes to memory several times */
        for (int i = 0; i < 4; i++)
            line[i] = _mm_load_si128((const __m128i *)(from + at) + i);
        for (int i = 0; i < 4; i++)
            _mm_stream_si128((__m128i *)(to + at) + i, line[i]);
    }
    memcpy(to + bytes - tail, from + bytes - tail, (size_t)tail);
#else
    memcpy(to, from, (size_t)bytes);
#endif
}

typedef struct {
    const HilbertTables *tables;
    Grid grid;
    char *out, *table; /* the blocks in all states, as put_blocks needs them; NULL: too few blocks for it, or no memory */
    int bytes;         /* of an element: 4 or 8 */
    int stream;        /* larger than the caches: whole cache lines are written directly to memory */
    int levels, start; /* levels of blocks, and the state of the coarsest one */
} Curve;

/* out[i] = origin + cell_index(cell[i]) */
static void put_cells(const Curve *curve, char *out, const uint16_t *cell, int64_t origin, int64_t count) {
    if (curve->bytes == 4)
        cells_32((void *)out, &curve->grid, cell, origin, count);
    else
        cells_64((void *)out, &curve->grid, cell, origin, count);
}

/* Blocks one after the other: to[i * cells + j] = table[i][j] + by[i] */
static void put_blocks(const Curve *curve, char *to, const void *const *table, const int64_t *by, int64_t cells, int64_t blocks) {
    Stage stage;
    int64_t bytes = cells * curve->bytes, most = curve->stream ? STAGED_BYTES / bytes : blocks;
    for (int64_t i = 0, some; i < blocks; i += some, to += some * bytes) {
        some = blocks - i < most ? blocks - i : most;
        char *where = curve->stream ? stage.bytes + (uintptr_t)to % LINE : to; /* of the same alignment in a cache line */
        if (curve->bytes == 4)
            shifted_32((void *)where, table + i, by + i, cells, some);
        else
            shifted_64((void *)where, table + i, by + i, cells, some);
        if (curve->stream)
            stream(to, where, some * bytes);
    }
}

/* A grid whose bits are not a multiple of the bits of a block is the first corner of one whose bits are. */
static Curve curve_of(void *out, int bytes, int ndim, int bits) {
    Curve curve = {.tables = ndim == 2 ? &square : &cube, .out = out, .bytes = bytes};
    int block_bits = curve.tables->bits;
    curve.stream = STREAMS && (int64_t)1 << ndim * bits >= STREAMED_BYTES / bytes;
    curve.grid = (Grid){block_bits, ndim == 3 ? (int64_t)1 << 2 * bits : 0, (int64_t)1 << bits};
    curve.levels = bits > 0 ? (bits - 1) / block_bits + 1 : 1;
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
                table[i - block] = curve->table + state * cells * curve->bytes;
            else
                put_cells(curve, curve->out + i * cells * curve->bytes, tables->cell[state], by[i - block], cells);
        }
        if (curve->table)
            put_blocks(curve, curve->out + block * cells * curve->bytes, table, by, cells, stop - block);
    }
}

void curves_hilbert(void *out, int bytes, int ndim, int bits, int threads) {
    Curve curve = curve_of(out, bytes, ndim, bits);
    const HilbertTables *tables = curve.tables;
    int64_t count = (int64_t)1 << ndim * bits, cells = cells_of(tables);
    if (curve.levels == 1) {
        put_cells(&curve, out, tables->cell[curve.start], 0, count);
        return;
    }
    char *memory = count / cells > tables->states ? malloc((size_t)(tables->states * cells * bytes) + 2 * LINE) : NULL;
    if (memory) { /* with the alignment of `out` in a cache line, so that aligned loads become aligned stores */
        curve.table = memory + LINE - (uintptr_t)memory % LINE + (uintptr_t)out % LINE;
        for (int s = 0; s < tables->states; s++)
            put_cells(&curve, curve.table + s * cells * bytes, tables->cell[s], 0, cells);
    }
    in_threads(write_blocks, &curve, count / cells, count, threads);
    free(memory);
}
