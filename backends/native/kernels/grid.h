/* A dimension of a grid: which cells along it see each other.
 *
 *     position of a token      x = (c0 * size1 + c1) * size2 + c2             coordinates c0, c1, c2, row-major
 *     Cell on an axis          residue = c mod step, at = c / step            cells of a residue class stand next to each other
 *
 *     a class of 9 cells, kernel 5:      sees    [*.....]                     0 sees 0 .. 4: the kernel moves back from the edge
 *                                        seen    [..*.......]                 2 is seen by 0 .. 4, and 4 by 0 .. 8 but for those whose
 *                                                                             kernels an edge holds back
 *                                        cut     [*..]                        0 sees 0 .. 2: the kernel stays, and is cut off
 *                                        shared  [.*]                         by 2: 0 sees what 1 sees, and 2 what 3 sees
 *                                        causal  [*]                          8 sees 4 .. 8, and 1 sees 0 and 1
 */
#ifndef DILKIT_NATIVE_GRID_H
#define DILKIT_NATIVE_GRID_H

#include "blocks.h"

typedef struct {
    int64_t size, step, kernel, inner; /* `inner`: the tokens from one coordinate to the next */
    int64_t longest;                   /* cells of a residue class, at most */
    int cut;                           /* whether edges cut kernels off, which else move back from them */
    int causal;                        /* whether kernels end at their cell */
    int64_t shared, leader, back;      /* cells that share a kernel, the place among them of its own, and its cells before that */
    double per_inner, per_size, per_step, per_shared;
} Axis;

typedef struct {
    int64_t residue, at;
} Cell;

typedef struct {
    int64_t first, last;
} Interval;

static inline Axis axis_of(int64_t size, int64_t step, int64_t kernel, int64_t inner, int cut) {
    return (Axis){
        .size = size, .step = step, .kernel = kernel, .inner = inner, .longest = parts_of(size, step), .cut = cut, .shared = 1,
        .back = kernel / 2, .per_inner = 1.0 / (double)inner, .per_size = 1.0 / (double)size, .per_step = 1.0 / (double)step, .per_shared = 1,
    };
}

/* x / divisor rounded down, for 0 <= x < 2**50: half a unit more keeps what is a multiple of the divisor from falling below it. */
static inline int64_t quotient(int64_t x, double per_divisor) { return (int64_t)(((double)x + 0.5) * per_divisor); }

static inline int64_t coordinate_of(const Axis *axis, int64_t x) {
    int64_t line = quotient(x, axis->per_inner);
    return line - quotient(line, axis->per_size) * axis->size;
}

static inline Cell cell_of(const Axis *axis, int64_t x) {
    int64_t coordinate = coordinate_of(axis, x), at = quotient(coordinate, axis->per_step);
    return (Cell){coordinate - at * axis->step, at};
}

/* The cells of the same residue class, of so many, that a cell sees: the kernel of the leader of those that share one. */
static inline Interval cells_seen(const Axis *axis, int64_t at, int64_t cells) {
    const int64_t group = axis->shared > 1 ? quotient(at, axis->per_shared) * axis->shared : at;
    int64_t first = lesser(group + axis->leader, cells - 1) - axis->back;
    if (axis->causal)
        return (Interval){greater(first, 0), at};
    if (axis->cut)
        return (Interval){greater(first, 0), lesser(first + axis->kernel, cells) - 1};
    first = lesser(greater(first, 0), cells - axis->kernel);
    return (Interval){first, first + axis->kernel - 1};
}

/* The cells that see a cell: from the first group whose kernel ends at it or later to the last one whose begins there or before. */
static inline Interval cells_seeing(const Axis *axis, int64_t at, int64_t cells) {
    const int64_t shared = axis->shared, least = at - axis->kernel + 1 + axis->back - axis->leader, most = at + axis->back - axis->leader;
    const int moves = !axis->cut && !axis->causal;
    Interval seeing = {least <= 0 || (moves && at < axis->kernel) ? 0 : least, most};
    if (shared > 1) /* `most` is at least 0: so many cells as a kernel has share it, at most */
        seeing.first = quotient(seeing.first + shared - 1, axis->per_shared) * shared, seeing.last = (quotient(most, axis->per_shared) + 1) * shared - 1;
    if (axis->causal)
        seeing.first = at;
    if (seeing.last >= cells || at + axis->back >= cells - 1 || (moves && at >= cells - axis->kernel))
        seeing.last = cells - 1;
    return seeing;
}

/* The cells of the same residue class that a cell sees, or, `by_key`, is seen by. */
static inline Interval neighbors(const Axis *axis, Cell cell, int by_key) {
    const int64_t cells = quotient(axis->size - cell.residue - 1, axis->per_step) + 1;
    return by_key ? cells_seeing(axis, cell.at, cells) : cells_seen(axis, cell.at, cells);
}

/* The cells of the same residue class that are at most `kernel` away: of a band. */
static inline Interval nearby(const Axis *axis, Cell cell) {
    int64_t cells = quotient(axis->size - cell.residue - 1, axis->per_step) + 1;
    return (Interval){greater(cell.at - axis->kernel, 0), lesser(cell.at + axis->kernel, cells - 1)};
}

/* Cells of a class that a cell sees, as places on the axis: no interval of places is in two classes. */
static inline Interval places_in_class(const Axis *axis, Cell cell, Interval cells) {
    const int64_t place = cell.residue * axis->longest;
    return (Interval){place + cells.first, place + cells.last};
}

/* The axes of a grid, the last coordinate's last. */
static inline void set_axes(const Grid *grid, Axis axes[3]) {
    for (int64_t d = 2, inner = 1; d >= 0; inner *= grid->size[d--]) {
        Axis *axis = &axes[d];
        *axis = axis_of(grid->size[d], grid->step[d], grid->kernel[d], inner, (int)grid->cut);
        axis->causal = (int)grid->causal[d], axis->shared = grid->shared[d], axis->per_shared = 1.0 / (double)axis->shared;
        axis->leader = axis->causal ? axis->shared - 1 : axis->shared / 2;
        axis->back = axis->causal ? axis->kernel - 1 : axis->kernel / 2;
    }
}

/* Cells of one residue class: first and last coordinate on each axis. */
typedef struct {
    int64_t residue[3], first[3], last[3];
} Box;

/* The position of a cell of a box's class. */
static inline int64_t position_in(const Axis axes[3], const Box *box, int64_t z, int64_t y, int64_t x) {
    return (z * axes[0].step + box->residue[0]) * axes[0].inner + (y * axes[1].step + box->residue[1]) * axes[1].inner
           + (x * axes[2].step + box->residue[2]) * axes[2].inner;
}

#endif
