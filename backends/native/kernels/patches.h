/* Boxes of a grid that are cut into patches, and which patches see which cells around them.
 *
 *     +---+---+                   a a|b b b b|c c          along the last axis: a is seen by the patches on the left, c by those
 *     | 0 | 1 |                   ---+-------+---          on the right, b by both; likewise on the other axes
 *     +---+---+                   d d|e e e e|f f
 */
#ifndef DILKIT_NATIVE_PATCHES_H
#define DILKIT_NATIVE_PATCHES_H

#include "grid.h"
#include "visibility.h"

enum { MAX_SEGMENTS = 512 }; /* of the cells around a box that its patches go through together */

/* How a box is cut: cells of a patch on each axis, and patches. Each is a row list. */
typedef struct {
    int64_t patch[3], patches[3];
} Cut;

/* A side of a box, along one axis: what the patches at each place see on this axis, and their lists. */
typedef struct {
    int64_t places;
    Interval sees[MAX_ROW_LISTS];
    uint64_t lists[MAX_ROW_LISTS];
} Side;

/* The patch of a list: those at an end of a box may have fewer cells, or none. */
static inline Box patch_of(const Box *box, const Cut *cut, int64_t list) {
    Box patch = *box;
    for (int d = 0; d < 3; d++) {
        patch.first[d] = box->first[d] + coordinate_in(cut->patches, list, d) * cut->patch[d];
        patch.last[d] = lesser(patch.first[d] + cut->patch[d] - 1, box->last[d]);
    }
    return patch;
}

static inline Side side_of(const Axis *axis, const Box *box, const Cut *cut, int d, int by_key) {
    Side side = {.places = parts_of(box->last[d] - box->first[d] + 1, cut->patch[d])};
    for (int64_t i = 0; i < side.places; i++) {
        int64_t first = box->first[d] + i * cut->patch[d], last = lesser(first + cut->patch[d] - 1, box->last[d]);
        side.sees[i] = (Interval){neighbors(axis, (Cell){box->residue[d], first}, by_key).first,
                                  neighbors(axis, (Cell){box->residue[d], last}, by_key).last};
    }
    for (int64_t list = 0; list < cells_of(cut->patches); list++)
        side.lists[coordinate_in(cut->patches, list, d)] |= (uint64_t)1 << list;
    return side;
}

static inline uint64_t lists_seeing(const Side *side, int64_t at) {
    uint64_t lists = 0;
    for (int64_t i = 0; i < side->places; i++)
        if (side->sees[i].first <= at && at <= side->sees[i].last)
            lists |= side->lists[i];
    return lists;
}

/* The cells along an axis in intervals that the same lists see. */
typedef struct {
    int count;
    Interval cells[2 * MAX_ROW_LISTS];
    uint64_t lists[2 * MAX_ROW_LISTS];
} Along;

static inline Along cells_along(const Side *side) {
    Along along = {.count = 0};
    for (int64_t x = side->sees[0].first; x <= side->sees[side->places - 1].last; x++) {
        uint64_t lists = lists_seeing(side, x);
        if (!along.count || along.lists[along.count - 1] != lists)
            along.cells[along.count] = (Interval){x, x}, along.lists[along.count++] = lists;
        along.cells[along.count - 1].last = x;
    }
    return along;
}

#endif
