/* Blocks of a pattern whose branches are neighborhoods on one grid alone: bricks of cells in the place of consecutive rows.
 *
 * What is seen around a block is packed for it once more: less, the rounder the block is. A side has whole steps, so that a
 * block has cells of all residue classes, and these in patches as high as wide. Row r of a brick, row-major in it, is the token
 * of its cell.
 */
#ifndef DILKIT_NATIVE_BRICKS_H
#define DILKIT_NATIVE_BRICKS_H

#include "native.h"

static inline int64_t cells_of(const int64_t sides[3]) { return sides[0] * sides[1] * sides[2]; }

/* The coordinate on axis d of cell `index`, row-major, of a box of these sides. */
static inline int64_t coordinate_in(const int64_t sides[3], int64_t index, int d) {
    return index / (d == 0 ? sides[1] * sides[2] : d == 1 ? sides[2] : 1) % sides[d];
}

/* Whether the blocks of a phase are bricks. */
static inline int has_bricks(const Problem *p) { return p->bricks.sides[0] > 0; }

/* Whether bricks may be blocks: of neighborhoods on one grid, without an order of rows that matters. */
static inline int is_one_grid(const Problem *p) {
    for (int64_t b = 0; b < p->branches; b++)
        if (p->kind[b] != GRID || memcmp(p->grid[b].size, p->grid[0].size, sizeof p->grid[0].size))
            return 0;
    return p->branches && !p->causal && p->is_square && !p->first_row && !p->lengths && (p->bias == NO_BIAS || p->positions.data);
}

/* The side that is the shortest beside the cells that are seen around it, of those that can be twice as long; or -1. */
static inline int side_to_double(const Grid *grid, const int64_t sides[3], int64_t rows) {
    int shortest = -1;
    for (int d = 0; d < 3; d++) {
        int64_t around = (grid->kernel[d] - 1) * grid->step[d];
        if (sides[d] >= grid->size[d] || 2 * cells_of(sides) > rows)
            continue;
        if (shortest < 0 || sides[d] * (grid->kernel[shortest] - 1) * grid->step[shortest] < sides[shortest] * around)
            shortest = d;
    }
    return shortest;
}

/* The side of so many bricks that are about the same, at most `most`: where it fits, pairs of cells of a residue class are
 * whole. */
static inline int64_t even_side(const Grid *grid, int d, int64_t across, int64_t most) {
    const int64_t side = parts_of(grid->size[d], across), pairs = round_up(side, 2 * grid->step[d]);
    return lesser(pairs <= most ? pairs : round_up(side, grid->step[d]), grid->size[d]);
}

/* Bricks of up to `rows` cells, of about the same size; none where a cell of each residue class is more. */
static inline Bricks choose_bricks(const Problem *p, int64_t rows) {
    const Grid *grid = &p->grid[0];
    Bricks bricks = {{0}, {0}};
    int64_t sides[3];
    for (int d = 0; d < 3; d++)
        sides[d] = lesser(grid->step[d], grid->size[d]);
    if (cells_of(sides) > rows)
        return bricks;
    for (int d; (d = side_to_double(grid, sides, rows)) >= 0;)
        sides[d] = lesser(2 * sides[d], round_up(grid->size[d], grid->step[d]));
    for (int d = 0; d < 3; d++)
        sides[d] = even_side(grid, d, parts_of(grid->size[d], sides[d]), sides[d]);
    for (int d = 0; d < 3; d++) {
        int64_t across = parts_of(grid->size[d], sides[d]), longer = across > 1 ? even_side(grid, d, across - 1, grid->size[d]) : sides[d];
        sides[d] = cells_of(sides) / sides[d] * longer <= rows ? longer : sides[d];
    }
    for (int d = 0; d < 3; d++)
        bricks.sides[d] = sides[d], bricks.across[d] = parts_of(grid->size[d], sides[d]);
    return bricks;
}

/* The first cell of a brick, and its sides. */
typedef struct {
    int64_t first[3], sides[3];
} Brick;

static inline Brick brick_at(const Problem *p, const Bricks *bricks, int64_t index) {
    Brick brick;
    for (int d = 0; d < 3; d++) {
        brick.first[d] = coordinate_in(bricks->across, index, d) * bricks->sides[d];
        brick.sides[d] = lesser(bricks->sides[d], p->grid[0].size[d] - brick.first[d]);
    }
    return brick;
}

#endif
