/* Relations: which pairs of a tile a branch shows, by one interval of numbers for each row. Included once for each KIND.
 *
 *     related(row r, column k)  =  on each axis  first[r] <= place[k] <= last[r]
 *
 *     load_slots   row positions     --- relate_row --->     first, last    (slots,)
 *     pack_tile    column positions  --- relate_column --->  place          (TILE_COLUMNS,)
 *     attend_tile  scores            --- mask_relations ---> scores, -inf where a pair is not seen
 *
 * Numbers on an axis: residue * longest + at (grid.h), so that no interval reaches from one residue class into another.
 */
typedef struct {
    int axes;
    Axis axis[3];
    INTEGER *first[3], *last[3], *place[3];
} N(Relation);

#define Relation N(Relation)

static void N(relate_row)(const Relation *relation, int by_key, int64_t slot, int64_t x) {
    for (int d = 0; d < relation->axes; d++) {
        const Axis *axis = &relation->axis[d];
        Cell cell = cell_of(axis, x);
        Interval seen = neighbors(axis, cell, by_key);
        relation->first[d][slot] = (INTEGER)(cell.residue * axis->longest + seen.first);
        relation->last[d][slot] = (INTEGER)(cell.residue * axis->longest + seen.last);
    }
}

static void N(relate_column)(const Relation *relation, int64_t k, int64_t x) {
    for (int d = 0; d < relation->axes; d++) {
        Cell cell = cell_of(&relation->axis[d], x);
        relation->place[d][k] = (INTEGER)(cell.residue * relation->axis[d].longest + cell.at);
    }
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

/* A tile of scores: `rows` of slots from `first` on, with the columns from .. to - 1. -inf where a pair is not related on an axis. */
static void N(mask_axis)(
    REAL *restrict scores, const INTEGER *restrict first, const INTEGER *restrict last, const INTEGER *restrict place, int64_t from,
    int64_t to, int64_t rows
) {
    const Vector never = N(broadcast)(-(REAL)INFINITY);
    for (int64_t r = 0; r < rows; r += N(LANES)) {
        Lanes low = N(load_lanes)(first + r), high = N(load_lanes)(last + r);
        for (int64_t k = from; k < to; k++) {
            REAL *at = scores + k * TILE_ROWS + r;
            Lanes column = place[k] - (Lanes){0};
            N(store_vector)(at, N(select)((Lanes)((column > high) | (column < low)), never, N(load_vector)(at)));
        }
    }
}

/* Leave only the related pairs of a tile: on the axes where some row does not see some column. Whether there was one. */
static int N(mask_relation)(const Relation *relation, REAL *scores, int64_t slot, int64_t count, int64_t from, int64_t to, int64_t columns) {
    int masked = 0;
    for (int d = 0; d < relation->axes; d++) {
        const INTEGER *first = relation->first[d] + slot, *last = relation->last[d] + slot;
        INTEGER unused, low, high, least, most;
        N(find_range)(first, count, &unused, &low);
        N(find_range)(last, count, &high, &unused);
        N(find_range)(relation->place[d] + from, lesser(to, columns) - from, &least, &most);
        if (least >= low && most <= high)
            continue;
        N(mask_axis)(scores, first, last, relation->place[d], from, to, round_up(count, N(LANES)));
        masked = 1;
    }
    return masked;
}
