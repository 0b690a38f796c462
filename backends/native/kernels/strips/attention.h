/* Neighborhoods on a grid of bricks, strip by strip: for each plane of a strip, what it sees is packed, and then attended to by group
 * after group of rows. Included once for each KIND; FORWARD alone.
 */
#include "strips/group.h"
#include "strips/packing.h"

/* What a group sees: planes, of each the lines, of a line the cells from `cell` on; and of these what each of its rows sees, y
 * and x, counted from the first. */
typedef struct {
    Interval planes, lines, y[GROUP_ROWS], x[GROUP_ROWS];
    int64_t cell, group; /* group: its number across a line */
} N(Sight);

/* The sight of a group, whose cells are those of a box; of rows that it has not, nothing. */
static N(Sight) N(sight_of)(const Strip *strip, const Box *box) {
    const int64_t fold = strip->fold, above = seen_on(strip, 1, box->first[1], strip->first_line).first / fold;
    const int64_t left = seen_on(strip, 2, box->first[2], strip->sees[2].first).first;
    N(Sight) sight = {.planes = seen_on(strip, 0, box->first[0], 0)};
    int i = 0;
    sight.cell = left * fold, sight.group = (box->first[2] - strip->box.first[2]) * fold / GROUP_ROWS;
    for (int64_t y = box->first[1]; y <= box->last[1]; y++) {
        const Interval seen = seen_on(strip, 1, y, strip->first_line + above * fold);
        sight.lines = (Interval){above, above + seen.last / fold};
        for (int64_t x = box->first[2]; x <= box->last[2]; x++, i++)
            sight.y[i] = seen, sight.x[i] = seen_on(strip, 2, x, strip->sees[2].first + left);
    }
    for (; i < GROUP_ROWS; i++)
        sight.y[i] = sight.x[i] = (Interval){0, -1};
    return sight;
}

/* Which lanes of the vectors of a plane the rows see: a lane is a cell of the line lane % fold of the grid. */
static void N(show_group)(const Task *task, const Strip *strip, const N(Sight) *sight) {
    const int shift = __builtin_ctzll((unsigned long long)strip->fold);
    const Lanes lane = N(lane_numbers)(), folded = lane & (INTEGER)(strip->fold - 1), along = lane >> shift;
    INTEGER *seen = task->s.strip_seen;
    for (int64_t line = 0; line <= sight->lines.last - sight->lines.first; line++)
        for (int64_t cell = 0; cell < strip->vectors * N(LANES); cell += N(LANES))
            for (int i = 0; i < GROUP_ROWS; i++, seen += N(LANES)) {
                const Lanes y = folded + (INTEGER)(line * strip->fold), x = along + (INTEGER)(cell >> shift);
                const Lanes in_line = (y >= (INTEGER)sight->y[i].first) & (y <= (INTEGER)sight->y[i].last);
                const Lanes both = in_line & (x >= (INTEGER)sight->x[i].first) & (x <= (INTEGER)sight->x[i].last);
                memcpy(seen, &both, sizeof both);
            }
}

/* Add the vectors of a line that a group sees to some cells, which are attended to where there is no room for more. */
static void N(collect_line)(const Task *task, const Strip *strip, const N(Sight) *sight, int64_t at, const INTEGER *seen, N(Cells) *cells) {
    const int64_t dim = task->padded_dim, first = at * strip->width + sight->cell;
    const REAL *keys = task->s.strip_keys, *values = task->s.strip_values + first * dim;
    keys += strip->apart ? (at * strip->groups + sight->group) * strip->vectors * N(LANES) * dim : at * strip->width * dim + sight->cell;
    for (int64_t j = 0; j < strip->vectors; j++) {
        if (cells->count == N(MOST_VECTORS))
            N(attend_cells)(task, cells), cells->count = 0;
        cells->keys[cells->count] = keys + j * N(LANES) * (strip->apart ? dim : 1);
        cells->values[cells->count] = values + j * N(LANES) * dim;
        cells->seen[cells->count++] = seen + j * GROUP_ROWS * N(LANES);
    }
}

static void N(attend_planes)(const Task *task, const Strip *strip, const N(Sight) *sight) {
    N(Cells) cells;
    cells.count = 0, cells.key_step = strip->apart ? N(LANES) : strip->width;
    for (int64_t plane = sight->planes.first; plane <= sight->planes.last; plane++)
        for (int64_t line = sight->lines.first; line <= sight->lines.last; line++) {
            const INTEGER *seen = task->s.strip_seen + (line - sight->lines.first) * strip->vectors * GROUP_ROWS * N(LANES);
            N(collect_line)(task, strip, sight, line_at(strip, plane, line), seen, &cells);
        }
    N(attend_cells)(task, &cells);
}

static inline const char *N(query_of_row)(const Task *task, int64_t row) {
    return row_address(&task->p->q, task->batch, N(position)(task, row), task->head);
}

/* Ask for where the results of a row go, and for the query that stands in its place in the groups after these. */
static inline void N(prefetch_for_row)(const Task *task, const Strip *strip, int64_t plane, int64_t y, int64_t x) {
    const Box *box = &strip->box;
    N(prefetch_output)(task, row_of_cell(strip, plane, y, x));
    if (y + strip->fold <= box->last[1])
        N(prefetch_row)(task, N(query_of_row)(task, row_of_cell(strip, plane, y + strip->fold, x)), 1);
    else if (plane < box->last[0])
        N(prefetch_row)(task, N(query_of_row)(task, row_of_cell(strip, plane + 1, box->first[1] + (y - box->first[1]) % strip->fold, x)), 1);
}

/* The queries of a group, whose cells are those of a box; 0 in the place of rows that it has not. Return how many it has. */
static int N(load_group)(const Task *task, const Strip *strip, const Box *box) {
    const int in_place = N(lie_as_computed)(task, &task->p->q);
    const int64_t dim = task->padded_dim;
    int count = 0;
    N(clear)(task->s.packed_rows[0], GROUP_ROWS * dim);
    N(clear)(task->s.slot_sums[0], GROUP_ROWS * dim);
    for (int64_t y = box->first[1]; y <= box->last[1]; y++)
        for (int64_t x = box->first[2]; x <= box->last[2]; x++, count++) {
            const int64_t row = task->s.slot_line[count] = row_of_cell(strip, box->first[0], y, x);
            N(copy_row)(task, task->s.packed_rows[0] + count * dim, N(query_of_row)(task, row), in_place);
            N(prefetch_for_row)(task, strip, box->first[0], y, x);
        }
    for (int i = 0; i < GROUP_ROWS; i++)
        task->s.slot_max[i] = -(REAL)INFINITY, task->s.slot_sum[i] = 0;
    return count;
}

/* A group, whose cells are those of a box. Most see what was shown to the one before. */
static void N(attend_group)(const Task *task, const Strip *strip, const Box *box, N(Sight) *shown) {
    const N(Sight) sight = N(sight_of)(strip, box);
    if (memcmp(sight.y, shown->y, sizeof sight.y) || memcmp(sight.x, shown->x, sizeof sight.x))
        N(show_group)(task, strip, &sight), *shown = sight;
    const int count = N(load_group)(task, strip, box);
    N(attend_planes)(task, strip, &sight);
    for (int i = 0; i < count; i++)
        N(merge_slot)(task, 0, i, task->s.slot_sums[0] + i * task->padded_dim);
}

static void N(attend_plane)(const Task *task, const Strip *strip, int64_t plane, N(Sight) *shown) {
    const int64_t *first = strip->box.first, *last = strip->box.last, fold = strip->fold, along = GROUP_ROWS / fold;
    for (int64_t y = first[1]; y <= last[1]; y += fold)
        for (int64_t x = first[2]; x <= last[2]; x += along) {
            const Box box = {.first = {plane, y, x}, .last = {plane, lesser(y + fold - 1, last[1]), lesser(x + along - 1, last[2])}};
            N(attend_group)(task, strip, &box, shown);
        }
}

static void N(attend_strip)(const Task *task, const Strip *strip) {
    N(Sight) shown = {.y = {{0, -2}}}; /* of no group */
    int64_t packed = strip->sees[0].first;
    for (int64_t plane = strip->box.first[0]; plane <= strip->box.last[0]; plane++) {
        for (const int64_t last = seen_on(strip, 0, plane, 0).last; packed <= last; packed++)
            for (int64_t line = 0; line < strip->lines; line++)
                N(pack_line)(task, strip, packed, line);
        N(attend_plane)(task, strip, plane, &shown);
    }
}

/* The cells of a residue class that are in `part` of the grid, strip by strip. */
static void N(attend_strips)(const Task *task, const Axis axes[3], const Box *part, const StripCut *cut) {
    const int folded = cut->axis[1], line = cut->axis[2];
    Box box = *part;
    for (int64_t x = part->first[line]; x <= part->last[line]; x += cut->side[1])
        for (int64_t y = part->first[folded]; y <= part->last[folded]; y += cut->side[0]) {
            box.first[folded] = y, box.last[folded] = lesser(y + cut->side[0] - 1, part->last[folded]);
            box.first[line] = x, box.last[line] = lesser(x + cut->side[1] - 1, part->last[line]);
            const Strip strip = strip_of(axes, &box, cut, &task->brick, N(LANES));
            N(attend_strip)(task, &strip);
        }
}
