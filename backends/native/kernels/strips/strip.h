/* A strip: the cells whose rows are attended to together, and the cells that they see, plane by plane along its first axis. A line
 * of a plane is packed from `fold` lines of the grid, cell by cell, so that what a group of rows sees of it is consecutive:
 *
 *     y = 0    a a a a . .        of a group A of 2 x 2 rows and a kernel of 3 x 3, with y of two lines of the grid:
 *     y = 1    a A A a . .        a0 a1  a0 a1  a0 a1  a0 a1  .0 .1  ...
 */
#ifndef DILKIT_NATIVE_STRIPS_STRIP_H
#define DILKIT_NATIVE_STRIPS_STRIP_H

#include "strips/cut.h"

/* Axes in the order of the cut: along the strip, across it and folded, across it and along lines. Coordinates are in a residue class. */
typedef struct {
    Axis axes[3];
    Box box;          /* the cells of the rows */
    Interval sees[3]; /* and those that they see */
    int64_t fold, first_line;       /* the first line of the grid that a plane has room for */
    int64_t lines, width;           /* of a plane, and of a line in cells */
    int64_t planes;                 /* that are packed at a time */
    int64_t vectors, groups;        /* of a line, the vectors that a group sees; the groups across it */
    int apart;                      /* see StripCut */
    int64_t row_step[3], first_row; /* row of the brick = first_row + the sum of coordinate * row_step */
} Strip;

/* The cells that a coordinate on an axis of the strip sees, counted from `from` on. */
static inline Interval seen_on(const Strip *strip, int d, int64_t at, int64_t from) {
    const Interval seen = neighbors(&strip->axes[d], (Cell){strip->box.residue[d], at}, 0);
    return (Interval){seen.first - from, seen.last - from};
}

/* Set what a strip has on its axis i, which is axis d of the grid. */
static inline void set_axis(Strip *strip, int i, const Axis *axis, int d, const Box *box, const Brick *brick) {
    const int64_t inner[3] = {brick->sides[1] * brick->sides[2], brick->sides[2], 1};
    strip->axes[i] = *axis;
    strip->box.residue[i] = box->residue[d], strip->box.first[i] = box->first[d], strip->box.last[i] = box->last[d];
    strip->sees[i] = (Interval){seen_on(strip, i, box->first[d], 0).first, seen_on(strip, i, box->last[d], 0).last};
    strip->row_step[i] = axis->step * inner[d], strip->first_row += (box->residue[d] - brick->first[d]) * inner[d];
}

/* The strip of the rows of a box. Lines begin where those of a kernel that no edge holds back do: as few of them as can be. */
static inline Strip strip_of(const Axis axes[3], const Box *box, const StripCut *cut, const Brick *brick, int64_t lanes) {
    Strip strip = {.fold = cut->group[0], .apart = cut->apart};
    for (int i = 0; i < 3; i++)
        set_axis(&strip, i, &axes[cut->axis[i]], cut->axis[i], box, brick);
    const int64_t held_back = strip.box.first[1] - strip.axes[1].back - strip.sees[1].first;
    strip.first_line = strip.sees[1].first - (strip.fold - held_back % strip.fold) % strip.fold;
    strip.lines = parts_of(strip.sees[1].last - strip.first_line + 1, strip.fold);
    strip.width = width_of_line(&strip.axes[2], cut->group, cut->side[1], lanes);
    strip.vectors = vectors_seen(&strip.axes[2], cut->group, lanes), strip.groups = cut->side[1] / cut->group[1];
    strip.planes = cells_around(&strip.axes[0], 1);
    return strip;
}

/* The number of a line among those that are packed at a time. */
static inline int64_t line_at(const Strip *strip, int64_t plane, int64_t line) { return plane % strip->planes * strip->lines + line; }

/* The rows from a cell of a line to the one that is packed next in its place: of the next plane, or else of the next line. */
static inline int64_t rows_ahead(const Strip *strip, int64_t plane, int64_t line) {
    if (plane < strip->sees[0].last)
        return strip->axes[0].step * strip->axes[0].inner;
    return line + 1 < strip->lines ? strip->fold * strip->axes[1].step * strip->axes[1].inner : 0;
}

/* The row of the brick whose cell has these coordinates. */
static inline int64_t row_of_cell(const Strip *strip, int64_t plane, int64_t y, int64_t x) {
    return strip->first_row + plane * strip->row_step[0] + y * strip->row_step[1] + x * strip->row_step[2];
}

#endif
