/* Relations: which pairs of a tile a branch shows, by one interval of numbers for each row. Included once for each KIND.
 *
 *     related(row r, column k)  =  on each axis  first[r] <= place[k] <= last[r]
 *
 *     load_slots   row positions     --- relate_row --->     first, last    (slots,)
 *     pack_tile    column positions  --- relate_columns -->  place          (TILE_COLUMNS,)
 *     attend_tile  scores            --- mask_relation ----> scores, -inf where a pair is not related: a neighborhood
 *                                    --- mask_shown -------> scores, -inf where it is: what other branches show, so that it counts once
 *
 *     SEGMENTS     one axis, the segments: the row's own; none for a row or column that is not kept
 *     BAND, GRID   residue * longest + at (grid.h), so that no interval reaches from one residue class into another
 */
typedef struct {
    int kind, axes;
    int64_t offset; /* of SEGMENTS, whose axis has segments as `inner` and the rate as `step` */
    Axis axis[3];
    INTEGER *first[3], *last[3], *place[3];
} N(Relation);

#define Relation N(Relation)

/* The segment that keeps a position, or -1. */
static inline int64_t N(segment_of)(const Relation *relation, int64_t x) {
    const Axis *axis = &relation->axis[0];
    int64_t segment = quotient(x, axis->per_inner), from = x - segment * axis->inner - relation->offset;
    return from >= 0 && quotient(from, axis->per_step) * axis->step == from ? segment : -1;
}

/* The row in a slot; x = -1: an empty slot, which is related to nothing. */
__attribute__((noinline)) static void N(relate_row)(const Relation *relation, int by_key, int64_t slot, int64_t x) {
    for (int d = 0; d < relation->axes; d++) {
        const Axis *axis = &relation->axis[d];
        Interval seen = {INT32_MAX, -2};
        if (x >= 0 && relation->kind == SEGMENTS) {
            int64_t segment = N(segment_of)(relation, x);
            seen = segment < 0 ? seen : (Interval){segment, segment};
        } else if (x >= 0) {
            Cell cell = cell_of(axis, x);
            seen = relation->kind == BAND ? nearby(axis, cell) : neighbors(axis, cell, by_key);
            seen.first += cell.residue * axis->longest, seen.last += cell.residue * axis->longest;
        }
        relation->first[d][slot] = (INTEGER)seen.first, relation->last[d][slot] = (INTEGER)seen.last;
    }
}

static inline void N(relate_column)(const Relation *relation, int64_t k, int64_t x) {
    for (int d = 0; d < relation->axes; d++) {
        Cell cell = relation->kind == SEGMENTS ? (Cell){0, N(segment_of)(relation, x)} : cell_of(&relation->axis[d], x);
        relation->place[d][k] = (INTEGER)(cell.residue * relation->axis[d].longest + cell.at);
    }
}

/* Place the columns of a tile, and those that fill its last register block: beyond what any row sees. A column that is a step further on
 * the last axis, and on the same line, takes no division. */
__attribute__((noinline)) static void N(relate_columns)(const Relation *relation, const int64_t *column, int64_t count) {
    const int last = relation->axes - 1;
    const Axis axis = relation->axis[last];
    int64_t left = 0; /* cells of the line beyond that of the column before */
    for (int64_t k = 0; k < count; k++) {
        if (left > 0 && column[k] == column[k - 1] + axis.step) {
            for (int d = 0; d < last; d++)
                relation->place[d][k] = relation->place[d][k - 1];
            relation->place[last][k] = relation->place[last][k - 1] + 1, left--;
            continue;
        }
        N(relate_column)(relation, k, column[k]);
        left = relation->kind == SEGMENTS ? 0 : quotient(axis.size - 1 - coordinate_of(&axis, column[k]), axis.per_step);
    }
    for (int d = 0; d < relation->axes; d++)
        for (int64_t k = count; k < round_up(count, REGISTER_ROWS); k++)
            relation->place[d][k] = d ? relation->place[d][0] : INT32_MAX;
}

/* The least and the greatest of some numbers. */
static inline void N(find_range)(const INTEGER *numbers, int64_t count, INTEGER *least, INTEGER *most) {
    INTEGER low = numbers[0], high = low;
    for (int64_t i = 1; i < count; i++) {
        low = numbers[i] < low ? numbers[i] : low;
        high = numbers[i] > high ? numbers[i] : high;
    }
    *least = low, *most = high;
}

static inline Lanes N(load_lanes)(const INTEGER *from) {
    Lanes x;
    memcpy(&x, from, sizeof x);
    return x;
}

/* Of a tile of scores, with `rows` of slots and the columns from .. to - 1: -inf where a pair is not related on one of some axes, and the
 * maximum over the columns. */
__attribute__((always_inline)) static inline void N(mask_axes_of)(
    const int axes, REAL *restrict scores, REAL *restrict max, const INTEGER *const *first, const INTEGER *const *last,
    const INTEGER *const *place, int64_t from, int64_t to, int64_t rows
) {
    const Vector never = N(broadcast)(-(REAL)INFINITY);
    for (int64_t r = 0; r < rows; r += N(LANES)) {
        Lanes low[3], high[3];
        Vector most = never;
        for (int d = 0; d < axes; d++)
            low[d] = N(load_lanes)(first[d] + r), high[d] = N(load_lanes)(last[d] + r);
        for (int64_t k = from; k < to; k++) {
            REAL *at = scores + k * TILE_ROWS + r;
            Lanes unseen = {0};
            for (int d = 0; d < axes; d++) {
                Lanes column = place[d][k] - (Lanes){0};
                unseen |= (Lanes)(column > high[d]) | (Lanes)(column < low[d]);
            }
            Vector t = N(select)(unseen, never, N(load_vector)(at));
            most = N(vector_max)(t, most);
            N(store_vector)(at, t);
        }
        N(store_vector)(max + r, most);
    }
}

/* Leave only the related pairs of a tile: on the axes where some row does not see some column. The maximum of each row anew. */
__attribute__((noinline)) static void N(mask_relation)(
    const Relation *relation, REAL *scores, REAL *max, int64_t slot, int64_t count, int64_t from, int64_t to
) {
    const INTEGER *first[3], *last[3], *place[3];
    const int64_t rows = round_up(count, N(LANES));
    int axes = 0;
    for (int d = 0; d < relation->axes; d++) {
        INTEGER unused, low, high, least, most;
        first[axes] = relation->first[d] + slot, last[axes] = relation->last[d] + slot, place[axes] = relation->place[d];
        N(find_range)(first[axes], count, &unused, &low);
        N(find_range)(last[axes], count, &high, &unused);
        N(find_range)(place[axes] + from, to - from, &least, &most);
        axes += least < low || most > high;
    }
    if (axes == 1)
        N(mask_axes_of)(1, scores, max, first, last, place, from, to, rows);
    else if (axes == 2)
        N(mask_axes_of)(2, scores, max, first, last, place, from, to, rows);
    else if (axes == 3)
        N(mask_axes_of)(3, scores, max, first, last, place, from, to, rows);
}

/* Leave out the related pairs of a tile. Whether there may be one. */
__attribute__((noinline)) static int N(mask_shown)(
    const Relation *relation, REAL *scores, int64_t slot, int64_t count, int64_t from, int64_t to, int64_t columns
) {
    const Vector never = N(broadcast)(-(REAL)INFINITY);
    for (int d = 0; d < relation->axes; d++) {
        INTEGER unused, low, high, least, most;
        N(find_range)(relation->first[d] + slot, count, &low, &unused);
        N(find_range)(relation->last[d] + slot, count, &unused, &high);
        N(find_range)(relation->place[d] + from, lesser(to, columns) - from, &least, &most);
        if (most < low || least > high)
            return 0;
    }
    for (int64_t r = 0; r < count; r += N(LANES))
        for (int64_t k = from; k < to; k++) {
            REAL *at = scores + k * TILE_ROWS + r;
            Lanes shown = ~(Lanes){0};
            for (int d = 0; d < relation->axes; d++) {
                Lanes column = relation->place[d][k] - (Lanes){0};
                shown &= (Lanes)(column >= N(load_lanes)(relation->first[d] + slot + r));
                shown &= (Lanes)(column <= N(load_lanes)(relation->last[d] + slot + r));
            }
            N(store_vector)(at, N(select)(shown, never, N(load_vector)(at)));
        }
    return 1;
}
