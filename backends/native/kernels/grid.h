/* A dimension of a grid: which cells along it see each other.
 *
 *     position of a token      x = (c0 * size1 + c1) * size2 + c2             coordinates c0, c1, c2, row-major
 *     Cell on an axis          residue = c mod step, at = c / step            cells of a residue class stand next to each other
 *
 *     a class of 9 cells, kernel 5:      sees    [*.....]                     0 sees 0 .. 4: the kernel moves back from the edge
 *                                        seen    [..*.......]                 2 is seen by 0 .. 4, and 4 by 0 .. 8 but for those whose
 *                                                                             kernels an edge holds back
 *                                        cut     [*..]                        0 sees 0 .. 2: the kernel stays, and is cut off
 */
#ifndef DILKIT_NATIVE_GRID_H
#define DILKIT_NATIVE_GRID_H

#include "blocks.h"

typedef struct {
    int64_t size, step, kernel, inner; /* `inner`: the tokens from one coordinate to the next */
    int64_t longest;                   /* cells of a residue class, at most */
    int cut;                           /* whether edges cut kernels off, which else move back from them */
    double per_inner, per_size, per_step;
} Axis;

typedef struct {
    int64_t residue, at;
} Cell;

typedef struct {
    int64_t first, last;
} Interval;

static inline Axis axis_of(int64_t size, int64_t step, int64_t kernel, int64_t inner, int cut) {
    return (Axis){size, step, kernel, inner, parts_of(size, step), cut, 1.0 / (double)inner, 1.0 / (double)size, 1.0 / (double)step};
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

/* The cells of the same residue class that a cell sees, or, `by_key`, is seen by. */
static inline Interval neighbors(const Axis *axis, Cell cell, int by_key) {
    int64_t half = axis->kernel / 2, cells = quotient(axis->size - cell.residue - 1, axis->per_step) + 1, end = cells - axis->kernel;
    if (axis->cut)
        return (Interval){greater(cell.at - half, 0), lesser(cell.at + half, cells - 1)};
    if (by_key)
        return (Interval){cell.at < axis->kernel ? 0 : cell.at - half, cell.at >= end ? cells - 1 : cell.at + half};
    int64_t first = lesser(greater(cell.at - half, 0), end);
    return (Interval){first, first + axis->kernel - 1};
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
    for (int64_t d = 2, inner = 1; d >= 0; inner *= grid->size[d--])
        axes[d] = axis_of(grid->size[d], grid->step[d], grid->kernel[d], inner, (int)grid->cut);
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
