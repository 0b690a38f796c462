/* Neighborhoods on a grid: the rows of a block patch by patch, each with the box of columns around it. Included once for each KIND.
 *
 *     block of rows: cells of the grid       patch: a tile of rows                box: the cells that some row of the patch sees
 *
 *          . . x x x x x x x x                 +---+---+---+---+                    + - - - - +
 *          x x x x x x x x x x                 |   |   |   |   |                    | +---+   |     its lines are the segments from
 *          x x x x x x x x x x                 +---+---+---+---+                    | |   |   |     which next_tile takes columns
 *          x x x x . . . . . .                 |   |   |   |   |                    | +---+   |
 *                                              +---+---+---+---+                    + - - - - +
 *
 * With a step, each residue class of cells is a grid of its own. What a row of the patch does not see of the box is masked
 * (relation.h). The shape of a patch is the one with the least to compute: of 48 rows in a plane, about 7 x 7.
 */

/* The rows of a patch that are in the block, as one list; return its slots. */
static int64_t N(collect_patch)(const Task *task, const Axis axes[3], const Box *patch, RowList *list) {
    *list = (RowList){.set = 1};
    for (int64_t z = patch->first[0]; z <= patch->last[0]; z++)
        for (int64_t y = patch->first[1]; y <= patch->last[1]; y++)
            for (int64_t x = patch->first[2]; x <= patch->last[2]; x++) {
                int64_t row = position_in(axes, patch, z, y, x);
                if (row >= task->start && row < task->stop && !N(hidden)(task, row))
                    N(add_row)(task, list, row);
            }
    return N(end_list)(task, list);
}

/* A list of rows with some lines of the box around them. */
static void N(attend_lines)(Task *task, const Segment *lines, int count, const RowList *list, int64_t slots) {
    if (!count)
        return;
    task->runs = ~(uint64_t)0 >> (MAX_BRANCHES - count);
    N(attend_row_lists)(task, lines, list, 1, slots);
    task->runs = 0;
}

/* The rows of a patch with the box around it, MAX_BRANCHES of its lines at a time. */
static void N(attend_patch)(Task *task, const Axis axes[3], const Box *patch) {
    const Box box = box_around(axes, patch, task->phase == BACKWARD);
    Segment lines[MAX_BRANCHES];
    RowList list = {0};
    int64_t slots = 0;
    int count = 0;
    for (int64_t z = box.first[0]; z <= box.last[0]; z++)
        for (int64_t y = box.first[1]; y <= box.last[1]; y++) {
            int64_t start = position_in(axes, &box, z, y, box.first[2]), stop = position_in(axes, &box, z, y, box.last[2]) + 1;
            if (start >= task->last_column || stop <= task->first_column)
                continue;
            if (!slots && !(slots = N(collect_patch)(task, axes, patch, &list)))
                return;
            lines[count++] = (Segment){start, stop, axes[2].step};
            if (count == MAX_BRANCHES)
                N(attend_lines)(task, lines, count, &list, slots), count = 0;
        }
    N(attend_lines)(task, lines, count, &list, slots);
}

/* What patches of such a shape cost, which cover so many cells: columns, each packed once and scored for some vectors of rows. */
static int64_t N(cost_of_patches)(const Task *task, const Axis axes[3], const int64_t cells[3], const int64_t shape[3]) {
    int64_t rows = task->p->shared_heads, columns = 1, patches = 1;
    for (int d = 0; d < 3; d++) {
        rows *= shape[d], patches *= parts_of(cells[d], shape[d]);
        columns *= lesser(shape[d] + axes[d].kernel - 1, axes[d].longest);
    }
    return patches * columns * (2 * parts_of(rows, N(LANES)) + 1);
}

/* The shape of the cheapest patches that cover so many cells. */
static void N(choose_shape)(const Task *task, const Axis axes[3], const int64_t cells[3], int64_t best[3]) {
    const int64_t most = greater(TILE_ROWS / task->p->shared_heads, 1);
    int64_t least = INT64_MAX;
    for (int64_t z = 1; z <= lesser(cells[0], most); z++)
        for (int64_t y = 1; y <= lesser(cells[1], most / z); y++) {
            const int64_t shape[3] = {z, y, lesser(cells[2], most / (z * y))}, cost = N(cost_of_patches)(task, axes, cells, shape);
            if (cost < least)
                least = cost, memcpy(best, shape, sizeof shape);
        }
}

/* The rows of one residue class that are in `part` of the grid, patch by patch. */
static void N(attend_class)(Task *task, const Axis axes[3], const Box *part) {
    int64_t cells[3], shape[3] = {1, 1, 1};
    for (int d = 0; d < 3; d++)
        cells[d] = part->last[d] - part->first[d] + 1;
    N(choose_shape)(task, axes, cells, shape);
    Box patch = *part;
    for (int64_t z = part->first[0]; z <= part->last[0]; z += shape[0])
        for (int64_t y = part->first[1]; y <= part->last[1]; y += shape[1])
            for (int64_t x = part->first[2]; x <= part->last[2]; x += shape[2]) {
                const int64_t first[3] = {z, y, x};
                for (int d = 0; d < 3; d++)
                    patch.first[d] = first[d], patch.last[d] = lesser(first[d] + shape[d] - 1, part->last[d]);
                N(attend_patch)(task, axes, &patch);
            }
}

/* The first and last coordinates of the cells of a block: whole lines, unless the block is within one. */
static void N(coordinates_of_block)(const Task *task, const Axis axes[3], int64_t low[3], int64_t high[3]) {
    for (int d = 0, whole = 0; d < 3; d++) {
        int64_t first = coordinate_of(&axes[d], task->start), last = coordinate_of(&axes[d], task->stop - 1);
        low[d] = whole ? 0 : first, high[d] = whole ? axes[d].size - 1 : last;
        whole |= first != last;
    }
}

/* A branch of GRID: one residue class after the other, of those that have a cell among the rows. */
static void N(attend_neighborhood)(Task *task, const Grid *grid) {
    Axis axes[3];
    int64_t low[3], high[3], classes[3];
    set_axes(grid, axes);
    N(coordinates_of_block)(task, axes, low, high);
    for (int d = 0; d < 3; d++)
        classes[d] = lesser(axes[d].step, high[d] - low[d] + 1);
    for (int64_t i = 0; i < classes[0] * classes[1] * classes[2]; i++) {
        const int64_t at[3] = {i / (classes[1] * classes[2]), i / classes[2] % classes[1], i % classes[2]};
        Box part;
        for (int d = 0; d < 3; d++) {
            part.residue[d] = (low[d] + at[d]) % axes[d].step, part.first[d] = (low[d] + at[d]) / axes[d].step;
            part.last[d] = (high[d] - part.residue[d]) / axes[d].step;
        }
        N(attend_class)(task, axes, &part);
    }
}
