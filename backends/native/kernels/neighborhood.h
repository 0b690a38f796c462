/* Neighborhoods on a grid: the rows of a block patch by patch, each with the cells around it as columns. Included once for each
 * KIND.
 *
 * A patch is a row list, of as many rows as products take together; several are a box, whose columns are packed once
 * (patches.h). With a step, each residue class of cells is a grid of its own. What a row does not see of the columns around its
 * patch is masked (relation.h). Patches and boxes have the shapes with the least to compute: of 16 rows in a plane, 4 x 4. What
 * fewer rows see together is less: where a query sees what its branch says and nothing else, rows go in groups of 4 (strips/).
 */

#if UNIT == 1
#include "strips/attention.h"
#endif

/* The row of the block that is a cell of a patch, or -1. */
static inline int64_t N(row_at)(const Task *task, const Axis axes[3], const Box *patch, int64_t z, int64_t y, int64_t x) {
    const Brick *brick = &task->brick;
    if (has_bricks(task->p)) {
        const int64_t at[3] = {z, y, x};
        int64_t row = 0;
        for (int d = 0; d < 3; d++)
            row = row * brick->sides[d] + at[d] * axes[d].step + patch->residue[d] - brick->first[d];
        return row;
    }
    const int64_t position = position_in(axes, patch, z, y, x);
    return position >= task->start && position < task->stop ? position - task->start : -1;
}

/* What the cells of a patch at a coordinate on axis d see, as places. */
static inline Interval N(places_seen)(const Task *task, const Axis axes[3], const Box *patch, int d, int64_t at) {
    const Cell cell = {patch->residue[d], at};
    return places_in_class(&axes[d], cell, neighbors(&axes[d], cell, task->phase == BACKWARD));
}

/* The slots first .. end - 1 see so many places on each axis. */
static void N(relate_slots)(const Task *task, int64_t first, int64_t end, const Interval seen[3]) {
    const Relation *relation = &task->s.relation[0];
    for (int d = 0; d < relation->axes; d++)
        for (int64_t slot = first; slot < end; slot++)
            N(set_seen)(relation, d, slot, seen[relation->of_grid[d]]);
}

/* The rows of a patch that are in the block, as a list from the slot `first` on; return the next free slot. */
static int64_t N(collect_patch)(const Task *task, const Axis axes[3], const Box *patch, int64_t first, RowList *list) {
    const Interval nowhere = {N(NOWHERE), N(NOWHERE)};
    Interval seen[3];
    *list = (RowList){.first = first};
    for (int64_t z = patch->first[0]; z <= patch->last[0]; z++) {
        seen[0] = N(places_seen)(task, axes, patch, 0, z);
        for (int64_t y = patch->first[1]; y <= patch->last[1]; y++) {
            seen[1] = N(places_seen)(task, axes, patch, 1, y);
            for (int64_t x = patch->first[2]; x <= patch->last[2]; x++) {
                int64_t row = N(row_at)(task, axes, patch, z, y, x), slot = first + list->count;
                if (row < 0 || N(hidden)(task, N(position)(task, row)))
                    continue;
                N(add_row)(task, list, row);
                seen[2] = N(places_seen)(task, axes, patch, 2, x);
                N(relate_slots)(task, slot, first + list->count, seen);
            }
        }
    }
    int64_t end = N(end_list)(task, list);
    N(relate_slots)(task, first + list->count, end, (Interval[3]){nowhere, nowhere, nowhere});
    return end;
}

/* The patches of a box, a list each; return their slots. */
static int64_t N(collect_box)(const Task *task, const Axis axes[3], const Box *box, const Cut *cut, RowList *lists) {
    int64_t slots = 0;
    for (int64_t list = 0; list < cells_of(cut->patches); list++) {
        const Box patch = patch_of(box, cut, list);
        slots = N(collect_patch)(task, axes, &patch, slots, &lists[list]);
        lists[list].set = (uint64_t)1 << list;
    }
    return slots;
}

/* A box of patches, and the columns around it that have been found so far. */
typedef struct {
    const Axis *axes;
    const Box *box;
    const Cut *cut;
    int64_t slots, count;
    RowList lists[MAX_ROW_LISTS];
    Segment segments[MAX_SEGMENTS];
} N(Around);

static void N(attend_around)(Task *task, N(Around) *around) {
    if (!around->slots)
        around->slots = N(collect_box)(task, around->axes, around->box, around->cut, around->lists);
    task->segments = around->slots ? around->count : 0;
    if (task->segments)
        N(attend_row_lists)(task, around->segments, around->lists, (int)cells_of(around->cut->patches), around->slots);
    task->segments = around->count = 0;
}

/* The place of the cells of the box's class at a coordinate on axis d. */
static inline int32_t N(place_at)(const N(Around) *around, int d, int64_t at) {
    return (int32_t)(around->box->residue[d] * around->axes[d].longest + at);
}

/* A line of columns, of which the lists `seeing` see those that they see on the last axis, `along`. */
static void N(add_line)(Task *task, N(Around) *around, const Along *along, int64_t z, int64_t y, uint64_t seeing) {
    const Axis *axis = &around->axes[2];
    const int64_t line = position_in(around->axes, around->box, z, y, 0);
    for (int i = 0; i < along->count; i++) {
        const int64_t start = line + along->cells[i].first * axis->step, stop = line + along->cells[i].last * axis->step + 1;
        if (!(along->lists[i] & seeing) || start >= task->last_column || stop <= task->first_column)
            continue;
        around->segments[around->count++] = (Segment){start, stop, axis->step, along->lists[i] & seeing, {
            N(place_at)(around, 0, z), N(place_at)(around, 1, y), N(place_at)(around, 2, along->cells[i].first),
        }};
        if (around->count == MAX_SEGMENTS)
            N(attend_around)(task, around);
    }
}

static void N(attend_box)(Task *task, const Axis axes[3], const Box *box, const Cut *cut) {
    N(Around) around;
    Side sides[3];
    around.axes = axes, around.box = box, around.cut = cut, around.slots = around.count = 0;
    for (int d = 0; d < 3; d++)
        sides[d] = side_of(&axes[d], box, cut, d, task->phase == BACKWARD);
    const Along along = cells_along(&sides[2]);
    const int64_t lines = (sides[0].sees[sides[0].places - 1].last - sides[0].sees[0].first + 1)
                          * (sides[1].sees[sides[1].places - 1].last - sides[1].sees[0].first + 1);
    const int merged_once = task->merged_once;
    task->merged_once &= lines * along.count <= MAX_SEGMENTS;
    for (int64_t z = sides[0].sees[0].first; z <= sides[0].sees[sides[0].places - 1].last; z++)
        for (int64_t y = sides[1].sees[0].first; y <= sides[1].sees[sides[1].places - 1].last; y++)
            N(add_line)(task, &around, &along, z, y, lists_seeing(&sides[0], z) & lists_seeing(&sides[1], y));
    if (around.count)
        N(attend_around)(task, &around);
    task->merged_once = merged_once;
}

/* The cost of boxes so cut: columns, each packed once for a box, which takes about as long as to score it for a vector of
 * rows. */
static int64_t N(cost_of_cut)(const Task *task, const Axis axes[3], const int64_t cells[3], const Cut *cut) {
    int64_t rows = task->p->shared_heads, columns = 1, patches = 1, around = 1, boxes = 1;
    for (int d = 0; d < 3; d++) {
        rows *= cut->patch[d], patches *= parts_of(cells[d], cut->patch[d]), boxes *= parts_of(cells[d], cut->patch[d] * cut->patches[d]);
        columns *= lesser(cut->patch[d] + axes[d].kernel - 1, axes[d].longest);
        around *= lesser(cut->patch[d] * cut->patches[d] + axes[d].kernel - 1, axes[d].longest);
    }
    return patches * columns * parts_of(rows, N(LANES)) + boxes * around;
}

/* The cheapest of the shapes with a product up to `most`, at most `bounds`. */
static void N(choose_part)(
    const Task *task, const Axis axes[3], const int64_t cells[3], const int64_t bounds[3], int64_t most, const Cut *cut, int64_t part[3]
) {
    int64_t least = INT64_MAX, best[3] = {1, 1, 1};
    for (int64_t z = 1; z <= lesser(bounds[0], most); z++)
        for (int64_t y = 1; y <= lesser(bounds[1], most / z); y++) {
            part[0] = z, part[1] = y, part[2] = lesser(bounds[2], most / (z * y));
            const int64_t cost = N(cost_of_cut)(task, axes, cells, cut);
            if (cost < least)
                least = cost, memcpy(best, part, sizeof best);
        }
    memcpy(part, best, sizeof best);
}

/* How boxes of the rows of a class are cut: the shape of a patch first, then as many of them as share columns. */
static Cut N(choose_cut)(const Task *task, const Axis axes[3], const int64_t cells[3]) {
    Cut cut = {{1, 1, 1}, {1, 1, 1}};
    int64_t across[3];
    N(choose_part)(task, axes, cells, cells, greater(N(LIST_STEP) / task->p->shared_heads, 1), &cut, cut.patch);
    for (int d = 0; d < 3; d++)
        across[d] = parts_of(cells[d], cut.patch[d]);
    N(choose_part)(task, axes, cells, across, MAX_ROW_LISTS, &cut, cut.patches);
    return cut;
}

/* The rows of one residue class that are in `part` of the grid, box by box. */
static void N(attend_boxes)(Task *task, const Axis axes[3], const Box *part, const Cut *cut) {
    int64_t step[3];
    for (int d = 0; d < 3; d++)
        step[d] = cut->patch[d] * cut->patches[d];
    Box box = *part;
    for (int64_t x = part->first[2]; x <= part->last[2]; x += step[2])
        for (int64_t y = part->first[1]; y <= part->last[1]; y += step[1])
            for (int64_t z = part->first[0]; z <= part->last[0]; z += step[0]) {
                const int64_t first[3] = {z, y, x};
                for (int d = 0; d < 3; d++)
                    box.first[d] = first[d], box.last[d] = lesser(first[d] + step[d] - 1, part->last[d]);
                N(attend_box)(task, axes, &box, cut);
            }
}

/* The coordinates of the cells of a block: of consecutive rows whole lines, unless the block is within one. */
static void N(coordinates_of_block)(const Task *task, const Axis axes[3], int64_t low[3], int64_t high[3]) {
    const Brick *brick = &task->brick;
    if (has_bricks(task->p)) {
        for (int d = 0; d < 3; d++)
            low[d] = brick->first[d], high[d] = brick->first[d] + brick->sides[d] - 1;
        return;
    }
    for (int d = 0, whole = 0; d < 3; d++) {
        int64_t first = coordinate_of(&axes[d], task->start), last = coordinate_of(&axes[d], task->stop - 1);
        low[d] = whole ? 0 : first, high[d] = whole ? axes[d].size - 1 : last;
        whole |= first != last;
    }
}

/* A branch of GRID: one residue class after the other, of those that have a cell among the rows; the first has the most. They are cut
 * into boxes, or into strips where these cost less; products of bf16 pairs are faster in boxes. */
static void N(attend_neighborhood)(Task *task, const Grid *grid) {
    Axis axes[3];
    int64_t low[3], high[3], classes[3], cells[3];
    set_axes(grid, axes);
    N(coordinates_of_block)(task, axes, low, high);
    for (int d = 0; d < 3; d++)
        classes[d] = lesser(axes[d].step, high[d] - low[d] + 1), cells[d] = parts_of(high[d] - low[d] + 1, axes[d].step);
    const Cut boxes = N(choose_cut)(task, axes, cells);
#if UNIT == 1
    StripCut strips = {.cost = -1};
    const int is_shared = axes[0].shared > 1 || axes[1].shared > 1 || axes[2].shared > 1; /* then lines do not begin where kernels do */
    if (has_strips(task->p, task->phase) && !is_shared)
        strips = choose_strips(axes, cells, most_cells(task->p), N(LANES));
    if (strips.cost * GROUP_ROWS > N(cost_of_cut)(task, axes, cells, &boxes))
        strips.cost = -1;
#endif
    for (int64_t i = 0; i < cells_of(classes); i++) {
        Box part;
        for (int d = 0; d < 3; d++) {
            const int64_t first = low[d] + coordinate_in(classes, i, d);
            part.residue[d] = first % axes[d].step, part.first[d] = first / axes[d].step;
            part.last[d] = (high[d] - part.residue[d]) / axes[d].step;
        }
#if UNIT == 1
        if (strips.cost >= 0) {
            N(attend_strips)(task, axes, &part, &strips);
            continue;
        }
#endif
        N(attend_boxes)(task, axes, &part, &boxes);
    }
}
