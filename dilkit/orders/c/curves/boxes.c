/* Token orders of boxes of any size: Morton, tiles, and snake.
 *
 *   box --> outer blocks (blocks of blocks) --> blocks of at most 512 cells --> Batch of 64 blocks --put_blocks--> out
 *               in Morton order                    one BlockTable entry for each `cut`
 *
 * All blocks (or tiles) of a box are whole, except the last one along each axis. `cut` has a bit for each axis along which a
 * block is the last one: blocks with the same `cut` differ only in their position.
 */
#include <stdlib.h>

#include "curves.h"
#include "write.h"

enum { CUTS = 8, BATCH = 64 };

static inline int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }

/* Consecutive blocks of one size, which are written by one call of put_blocks. */
typedef struct {
    const Output *out;
    int64_t at, cells, blocks, by[BATCH];
    const void *table[BATCH];
} Batch;

static void write_batch(Batch *batch) {
    if (batch->blocks)
        put_blocks(batch->out, batch->at, batch->table, batch->by, batch->cells, batch->blocks);
    batch->at += batch->cells * batch->blocks;
    batch->blocks = 0;
}

static inline void add_block(Batch *batch, const void *table, int64_t by, int64_t cells) {
    if (batch->blocks == BATCH || batch->cells != cells) {
        write_batch(batch);
        batch->cells = cells;
    }
    batch->table[batch->blocks] = table;
    batch->by[batch->blocks++] = by;
}

/* The cells of a block by ascending Morton code: whole blocks, and those that are cut. */
typedef struct {
    int cuts; /* the axes along which the last block is not whole */
    int64_t count[CUTS];
    uint16_t cell[CUTS][BLOCK_CELLS];
} Blocks;

typedef struct {
    Output out;
    Grid grid;
    int ndim;
    int64_t shape[3], last[3]; /* last: of the blocks along an axis, the position of the last one in its outer block */
    Blocks inner, outer;       /* blocks of cells, and blocks of blocks */
    const char *table;         /* the blocks of all cuts, as put_blocks takes them */
} Morton;

/* Lists the cells by code, which has a digit of `ndim` bits for each level, whereas a cell has `bits` bits for each axis. */
static void list_cells(Blocks *blocks, const int64_t shape[3], int ndim, int bits) {
    uint16_t all[BLOCK_CELLS] = {0};
    int count = 1, mask = (1 << bits) - 1;
    for (int i = 0; i < ndim * bits; i++)
        for (int j = 0, half = count; j < half; j++)
            all[count++] = (uint16_t)(all[j] | 1 << (i % ndim * bits + i / ndim));
    blocks->cuts = 0;
    for (int a = 0; a < 3; a++)
        blocks->cuts |= ((shape[a] & mask) != 0) << a;
    for (int cut = 0; cut < CUTS; cut++) {
        if (cut & ~blocks->cuts)
            continue;
        int64_t last[3], listed = 0;
        for (int a = 0; a < 3; a++)
            last[a] = cut >> a & 1 ? (shape[a] - 1) & mask : mask;
        for (int i = 0; i < count; i++) {
            int cell = all[i];
            blocks->cell[cut][listed] = (uint16_t)cell;
            listed += cell >> 2 * bits <= last[0] && (cell >> bits & mask) <= last[1] && (cell & mask) <= last[2];
        }
        blocks->count[cut] = listed;
    }
}

/* Write an outer block, or the part of it that is inside the box. */
static void write_outer(const Morton *morton, const int64_t corner[3], int64_t at) {
    const Grid *grid = &morton->grid;
    int bits = grid->bits, mask = (1 << bits) - 1, cut = 0;
    int64_t start = corner[0] * grid->plane + corner[1] * grid->row + corner[2];
    for (int a = 0; a < 3; a++)
        cut |= (morton->shape[a] - corner[a] <= (int64_t)1 << 2 * bits) << a;
    const uint16_t *blocks = morton->outer.cell[cut & morton->outer.cuts];
    Batch batch = {.out = &morton->out, .at = at};
    for (int64_t i = 0; i < morton->outer.count[cut & morton->outer.cuts]; i++) {
        int block = blocks[i], own = 0;
        for (int a = 0; a < 3; a++)
            own |= ((block >> (2 - a) * bits & mask) == morton->last[a]) << a;
        own &= cut & morton->inner.cuts;
        int64_t by = start + (cell_index(grid, block) << bits), cells = morton->inner.count[own];
        add_block(&batch, morton->table + own * BLOCK_CELLS * morton->out.bytes, by, cells);
    }
    write_batch(&batch);
}

/* Writes those blocks of blocks that start in [first, last), of a cube of 1 << level of them along a side. What is outside of the
 * box does not count. The cube starts at `at` on the curve; returned is where it ends. */
static int64_t write_range(const Morton *morton, int level, const int64_t corner[3], int64_t at, int64_t first, int64_t last) {
    int64_t side = (int64_t)1 << (level + 2 * morton->grid.bits), count = 1;
    for (int a = 0; a < 3; a++)
        count *= min_of(side, morton->shape[a] - corner[a]);
    int64_t end = at + count;
    if (end <= first || at >= last)
        return end;
    if (level == 0) {
        if (at >= first)
            write_outer(morton, corner, at);
        return end;
    }
    for (int part = 0; part < 1 << morton->ndim; part++) {
        int64_t inner[3];
        int inside = 1;
        for (int a = 0; a < 3; a++) {
            inner[a] = corner[a] + (part >> (2 - a) & 1) * (side >> 1);
            inside &= inner[a] < morton->shape[a];
        }
        if (inside)
            at = write_range(morton, level - 1, inner, at, first, last);
    }
    return end;
}

static void write_cell_range(const void *task, int64_t first, int64_t last) {
    const Morton *morton = task;
    int level = 0;
    for (int a = 0; a < 3; a++)
        while (morton->shape[a] > (int64_t)1 << (level + 2 * morton->grid.bits))
            level++;
    write_range(morton, level, (const int64_t[3]){0, 0, 0}, 0, first, last);
}

int curves_morton(void *out, int bytes, const int64_t shape[3], int threads) {
    int ndim = shape[0] == 1 ? 2 : 3, bits = ndim == 2 ? 4 : 3;
    int64_t count = shape[0] * shape[1] * shape[2], blocks[3];
    Morton morton = {.out = output_of(out, bytes, count), .grid = {bits, shape[1] * shape[2], shape[2]}, .ndim = ndim};
    BlockTable table = new_block_table(&morton.out, CUTS * BLOCK_CELLS);
    if (!table.data)
        return 0;
    for (int a = 0; a < 3; a++) {
        morton.shape[a] = shape[a];
        blocks[a] = ((shape[a] - 1) >> bits) + 1;
        morton.last[a] = (blocks[a] - 1) & ((1 << bits) - 1);
    }
    list_cells(&morton.inner, shape, ndim, bits);
    list_cells(&morton.outer, blocks, ndim, bits);
    Output made = {table.data, bytes, 0};
    for (int cut = 0; cut < CUTS; cut++)
        if (!(cut & ~morton.inner.cuts))
            put_cells(&made, cut * BLOCK_CELLS, &morton.grid, morton.inner.cell[cut], 0, morton.inner.count[cut]);
    morton.table = table.data;
    in_threads(write_cell_range, &morton, count, count, threads);
    free(table.memory);
    return 1;
}

/* A box of `sides` cells within one of `shape`, row-major; `first` is the row-major index of its first cell. */
static void put_box(const Output *out, int64_t at, const int64_t shape[3], const int64_t sides[3], int64_t first) {
    for (int64_t z = 0; z < sides[0]; z++)
        for (int64_t y = 0; y < sides[1]; y++, at += sides[2])
            put_line(out, at, first + (z * shape[1] + y) * shape[2], 1, sides[2]);
}

/* The sides of a tile: the remainder of the box along the axes where it is the last one. */
static int64_t sides_of(int cut, const int64_t shape[3], const int64_t tile[3], int64_t sides[3]) {
    for (int a = 0; a < 3; a++)
        sides[a] = cut >> a & 1 ? (shape[a] - 1) % tile[a] + 1 : tile[a];
    return sides[0] * sides[1] * sides[2];
}

/* The cells of a tile for each `cut`, as put_blocks needs them; no table if tiles are too large for it. */
static BlockTable tabulate(const Output *out, const int64_t shape[3], const int64_t tile[3]) {
    BlockTable table = {NULL, NULL};
    if (tile[0] * tile[1] * tile[2] <= BLOCK_CELLS)
        table = new_block_table(out, CUTS * BLOCK_CELLS);
    Output made = {table.data, out->bytes, 0};
    for (int cut = 0; table.data && cut < CUTS; cut++) {
        int64_t sides[3];
        sides_of(cut, shape, tile, sides);
        put_box(&made, cut * BLOCK_CELLS, shape, sides, 0);
    }
    return table;
}

void curves_tiles(void *out, int bytes, const int64_t shape[3], const int64_t tile[3]) {
    Output target = output_of(out, bytes, shape[0] * shape[1] * shape[2]);
    BlockTable table = tabulate(&target, shape, tile);
    Batch batch = {.out = &target};
    int64_t sides[3], corner[3];
    for (corner[0] = 0; corner[0] < shape[0]; corner[0] += tile[0])
        for (corner[1] = 0; corner[1] < shape[1]; corner[1] += tile[1])
            for (corner[2] = 0; corner[2] < shape[2]; corner[2] += tile[2]) {
                int cut = 0;
                for (int a = 0; a < 3; a++)
                    cut |= (shape[a] - corner[a] <= tile[a]) << a;
                int64_t first = (corner[0] * shape[1] + corner[1]) * shape[2] + corner[2];
                int64_t cells = sides_of(cut, shape, tile, sides);
                if (table.data)
                    add_block(&batch, table.data + cut * BLOCK_CELLS * bytes, first, cells);
                else {
                    put_box(&target, batch.at, shape, sides, first);
                    batch.at += cells;
                }
            }
    write_batch(&batch);
    free(table.memory);
}

void curves_snake(void *out, int bytes, const int64_t shape[3]) {
    int64_t rows = shape[0] * shape[1], length = shape[2];
    Output target = output_of(out, bytes, rows * length);
    for (int64_t i = 0; i < rows; i++) {
        int64_t z = i / shape[1], y = i % shape[1], row = z * shape[1] + (z % 2 ? shape[1] - 1 - y : y);
        put_line(&target, i * length, row * length + (i % 2 ? length - 1 : 0), i % 2 ? -1 : 1, length);
    }
}
