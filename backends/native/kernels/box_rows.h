/* The rows of a box of patches, a row list for each patch, and what they see. Included once for each KIND.
 *
 *     a box      +---+---+      collect_box     list 0: its rows in slots  | 0 .. 15 |       first, span of the relation, a number
 *                | 0 | 1 |  --------------->    list 1:                    | 16 .. 31 |      a slot on each axis
 *                +---+---+
 */

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

/* The rows of a patch that are in the block, as a list from the slot `first` on, and what they see; return the next free slot. */
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
    for (int64_t z = 0; z < cut->patches[0]; z++)
        for (int64_t y = 0; y < cut->patches[1]; y++)
            for (int64_t x = 0; x < cut->patches[2]; x++) {
                const Box patch = patch_of(box, cut, z, y, x);
                const int64_t list = list_of_patch(cut, z, y, x);
                slots = N(collect_patch)(task, axes, &patch, slots, &lists[list]);
                lists[list].set = (uint64_t)1 << list;
            }
    return slots;
}
