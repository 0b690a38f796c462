/* How the cells of a residue class of a grid are cut into strips, whose rows are attended to in groups of 4: in a plane of a
 * strip, 2 x 2, 4 x 1, or 1 x 4.
 *
 * The fewer rows a group has, the less it sees that one of them does not: with a kernel of 13 x 13, of which a row sees 169
 * cells, 4 rows side by side see 13 lines of 16 cells, and a patch of 4 x 4 rows sees 256. The wider a strip, the less is packed
 * for it.
 */
#ifndef DILKIT_NATIVE_STRIPS_CUT_H
#define DILKIT_NATIVE_STRIPS_CUT_H

#include "grid.h"

enum { GROUP_ROWS = 4 };
enum { STRIP_NUMBERS = 1 << 17 }; /* of the keys that are packed at a time, and of the values, at most */
enum { MOST_WIDTH = TILE_COLUMNS }; /* cells of a line */
enum { NEAR_VECTORS = 6 }; /* of cells, that the nearest cache holds with their values */
enum { PACKING = 2 };             /* to pack a vector of cells takes so many times as long as a group takes to attend to it */

/* A cut: the first axis goes along the strips, the second across them, folded, the third across them along lines. `group`: cells
 * on the last two; `side`: those of a strip. */
typedef struct {
    int axis[3];
    int64_t group[2], side[2], cost; /* cost: in vectors of cells that a group attends to, or -1 if there is no such cut */
    int apart; /* whether the keys of a line are packed for each group across it, where a vector begins with a line of the cache */
} StripCut;

/* Whether neighborhoods may go in strips: a query sees what its branch says, and nothing else changes a score. */
static inline int has_strips(const Problem *p, int phase) {
    const int is_plain = !p->mask && !p->dropout && is_scaled_alone(p) && p->relations == 1;
    return phase == FORWARD && has_bricks(p) && is_plain;
}

/* The cells that are packed at a time, at most; keys count once for each group across a line that sees them. */
static inline int64_t most_cells(const Problem *p) { return STRIP_NUMBERS / round_up(p->dim, 16); }

/* The cells around so many, at most. */
static inline int64_t cells_around(const Axis *axis, int64_t cells) { return lesser(cells + axis->kernel - 1, axis->longest); }

/* The vectors of a line that a group sees. */
static inline int64_t vectors_seen(const Axis *axis, const int64_t group[2], int64_t lanes) {
    return parts_of(group[0] * cells_around(axis, group[1]), lanes);
}

/* The cells of a line, which has room for all vectors of the last group. */
static inline int64_t width_of_line(const Axis *axis, const int64_t group[2], int64_t side, int64_t lanes) {
    const int64_t last = group[0] * (side - group[1]) + vectors_seen(axis, group, lanes) * lanes;
    return round_up(greater(group[0] * cells_around(axis, side), last), lanes);
}

/* The lines around so many lines of the grid that are `fold` to a line. */
static inline int64_t lines_around(const Axis *axis, int64_t fold, int64_t cells) {
    return parts_of(cells + axis->kernel - 1, fold);
}

/* The vectors of cells that a group sees. */
static inline int64_t vectors_of_group(const Axis axes[3], const StripCut *cut, int64_t lanes) {
    const int64_t lines = cells_around(&axes[cut->axis[0]], 1) * lines_around(&axes[cut->axis[1]], cut->group[0], cut->group[0]);
    return lines * vectors_seen(&axes[cut->axis[2]], cut->group, lanes);
}

/* What a cut costs, in vectors of cells that a group attends to; -1 if there is no room for what it packs at a time. */
static inline int64_t cost_of_strips(const Axis axes[3], const int64_t cells[3], const StripCut *cut, int64_t most, int64_t lanes) {
    const Axis *along = &axes[cut->axis[0]], *folded = &axes[cut->axis[1]], *line = &axes[cut->axis[2]];
    const int64_t lines = lines_around(folded, cut->group[0], cut->side[0]), width = width_of_line(line, cut->group, cut->side[1], lanes);
    const int64_t keys = cut->apart ? cut->side[1] / cut->group[1] * vectors_seen(line, cut->group, lanes) * lanes : width;
    if (cells_around(along, 1) * lines * greater(keys, width) > most || width > MOST_WIDTH)
        return -1;
    const int64_t seen = vectors_of_group(axes, cut, lanes);
    const int64_t groups = parts_of(cells[cut->axis[1]], cut->group[0]) * parts_of(cells[cut->axis[2]], cut->group[1]);
    const int64_t strips = parts_of(cells[cut->axis[1]], cut->side[0]) * parts_of(cells[cut->axis[2]], cut->side[1]);
    const int64_t packed = lines * (PACKING * width + cut->apart * keys / 2) / lanes;
    return cells[cut->axis[0]] * groups * (seen + 1) + strips * cells_around(along, cells[cut->axis[0]]) * packed;
}

/* The cheapest cut of so many cells of a class: with strips as wide as the class, or a half, a quarter ... of it. */
static inline StripCut choose_strips(const Axis axes[3], const int64_t cells[3], int64_t most, int64_t lanes) {
    StripCut best = {.cost = -1};
    for (int along = 0; along < 2; along++)
        for (int64_t fold = 1; fold <= lesser(GROUP_ROWS, lanes); fold *= 2) {
            StripCut cut = {.axis = {along, 1 - along, 2}, .group = {fold, GROUP_ROWS / fold}};
            cut.apart = vectors_of_group(axes, &cut, lanes) > NEAR_VECTORS;
            for (int64_t parts = 1; parts <= cells[1 - along]; parts *= 2)
                for (int64_t parts_of_line = 1; parts_of_line <= cells[2]; parts_of_line *= 2) {
                    cut.side[0] = round_up(parts_of(cells[1 - along], parts), fold);
                    cut.side[1] = round_up(parts_of(cells[2], parts_of_line), GROUP_ROWS / fold);
                    cut.cost = cost_of_strips(axes, cells, &cut, most, lanes);
                    if (cut.cost >= 0 && (best.cost < 0 || cut.cost < best.cost))
                        best = cut;
                }
        }
    return best;
}

#endif
