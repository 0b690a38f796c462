/* Relations: which pairs of a tile a branch shows, by one interval of numbers for each row. Included once for each KIND.
 *
 *     related(row r, column k)  =  on each axis  first[r] <= place[k] <= first[r] + span[r]
 *
 *     relate_row       first, span; of each vector of rows, what all see: low, high
 *     relate_columns   place, and the least and most of a tile
 *     mask_relation    scores, -inf where a pair is not related: a neighborhood
 *     mask_shown       scores, -inf where it is: what other branches show, so that it counts once
 *
 *     SEGMENTS     one axis, the segments: the row's own; none for a row or column that is not kept
 *     BAND, GRID   residue * longest + at (grid.h), so that no interval reaches from one residue class into another
 */
#define Relation N(Relation)
#define Places N(Places)
#define PlaceLanes N(PlaceLanes)

typedef UNSIGNED Places; /* differences of places, of which one below 0 is larger than all others */
typedef Places PlaceLanes __attribute__((vector_size(VECTOR_BYTES)));

typedef struct {
    int kind, axes;
    int64_t offset; /* of SEGMENTS, whose axis has segments as `inner` and the rate as `step` */
    Axis axis[3];
    int of_grid[3]; /* of GRID: the axes of the grid that these are, of which one of a single cell is none */
    INTEGER *first[3], *span[3], *place[3], *low[3], *high[3];
    INTEGER least[3], most[3]; /* of the places of the tile, whose columns are so many */
    int64_t columns;
} Relation;

/* The segment that keeps a position, or -1. */
static inline int64_t N(segment_of)(const Relation *relation, int64_t x) {
    const Axis *axis = &relation->axis[0];
    int64_t segment = quotient(x, axis->per_inner), from = x - segment * axis->inner - relation->offset;
    return from >= 0 && quotient(from, axis->per_step) * axis->step == from ? segment : -1;
}

enum { N(NOWHERE) = INT32_MAX - 1, N(BEYOND) = INT32_MAX }; /* a place of no column; that of what fills the last register block */

static inline void N(set_seen)(const Relation *relation, int d, int64_t slot, Interval seen) {
    relation->first[d][slot] = (INTEGER)seen.first, relation->span[d][slot] = (INTEGER)(seen.last - seen.first);
}

/* The row in a slot; x = -1: an empty slot, which is related to nothing. */
__attribute__((noinline)) static void N(relate_row)(const Relation *relation, int by_key, int64_t slot, int64_t x) {
    for (int d = 0; d < relation->axes; d++) {
        const Axis *axis = &relation->axis[d];
        Interval seen = {N(NOWHERE), N(NOWHERE)};
        if (x >= 0 && relation->kind == SEGMENTS) {
            int64_t segment = N(segment_of)(relation, x);
            seen = segment < 0 ? seen : (Interval){segment, segment};
        } else if (x >= 0) {
            Cell cell = cell_of(axis, x);
            seen = places_in_class(axis, cell, relation->kind == BAND ? nearby(axis, cell) : neighbors(axis, cell, by_key));
        }
        N(set_seen)(relation, d, slot, seen);
    }
}

/* What all rows of each vector of slots see: no column, where one is empty. */
static void N(find_seen_by_all)(const Relation *relation, int64_t slots) {
    for (int d = 0; d < relation->axes; d++)
        for (int64_t first = 0; first < slots; first += N(LANES)) {
            INTEGER low = INT32_MIN, high = INT32_MAX;
            for (int64_t i = first; i < first + N(LANES); i++) {
                const INTEGER from = relation->first[d][i], last = from + relation->span[d][i];
                low = from > low ? from : low, high = last < high ? last : high;
            }
            relation->low[d][first / N(LANES)] = low, relation->high[d][first / N(LANES)] = high;
        }
}

static inline void N(relate_column)(const Relation *relation, int64_t k, int64_t x) {
    for (int d = 0; d < relation->axes; d++) {
        Cell cell = relation->kind == SEGMENTS ? (Cell){0, N(segment_of)(relation, x)} : cell_of(&relation->axis[d], x);
        relation->place[d][k] = (INTEGER)(cell.residue * relation->axis[d].longest + cell.at);
    }
}

/* The places of columns; a column that is a step further on the last axis, and on the same line, takes no division. */
static void N(place_by_position)(const Relation *relation, const int64_t *column, int64_t count) {
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
}

/* Place the columns of a tile, which, if it is `own`, has their places, and those that fill its last register block. */
__attribute__((noinline)) static void N(relate_columns)(Relation *relation, int own, const ColumnTile *tile) {
    const int64_t count = relation->columns = tile->count;
    if (!own)
        N(place_by_position)(relation, tile->column, count);
    for (int d = 0; d < relation->axes; d++) {
        INTEGER *place = relation->place[d], least = INT32_MAX, most = INT32_MIN;
        for (int64_t k = 0; own && k < count; k++)
            place[k] = tile->place[relation->of_grid[d]][k];
        for (int64_t k = 0; k < count; k++)
            least = place[k] < least ? place[k] : least, most = place[k] > most ? place[k] : most;
        relation->least[d] = least, relation->most[d] = most;
        for (int64_t k = count; k < round_up(count, REGISTER_ROWS); k++)
            place[k] = d ? place[0] : N(BEYOND);
    }
}

static inline Lanes N(load_lanes)(const INTEGER *from) {
    Lanes x;
    memcpy(&x, from, sizeof x);
    return x;
}

/* Scores := -inf where a pair is not related on one of some axes; the maximum over the columns. */
__attribute__((always_inline)) static inline void N(mask_axes_of)(
    const int axes, REAL *restrict scores, REAL *restrict max, const INTEGER *const *first, const INTEGER *const *span,
    const INTEGER *const *place, int64_t from, int64_t to, int64_t rows
) {
    const Vector never = N(broadcast)(-(REAL)INFINITY);
    for (int64_t r = 0; r < rows; r += N(LANES)) {
        PlaceLanes low[3], wide[3];
        Vector most = never;
        for (int d = 0; d < axes; d++)
            low[d] = (PlaceLanes)N(load_lanes)(first[d] + r), wide[d] = (PlaceLanes)N(load_lanes)(span[d] + r);
        for (int64_t k = from; k < to; k++) {
            REAL *at = scores + k * TILE_ROWS + r;
            Lanes unseen = {0};
            for (int d = 0; d < axes; d++)
                unseen |= (Lanes)((Places)place[d][k] - low[d] > wide[d]); /* below `low` it is a large number */
            Vector t = N(select)(unseen, never, N(load_vector)(at));
            most = N(vector_max)(t, most);
            N(store_vector)(at, t);
        }
        N(store_vector)(max + r, most);
    }
}

/* Leave only the related pairs of a tile; the maximum of each row anew. Axes on which all rows see all columns are passed
 * over. */
__attribute__((noinline)) static void N(mask_relation)(
    const Relation *relation, REAL *scores, REAL *max, int64_t slot, int64_t count, int64_t from, int64_t to
) {
    const INTEGER *first[3], *span[3], *place[3];
    const int64_t rows = round_up(count, N(LANES));
    int axes = 0;
    for (int d = 0; d < relation->axes; d++) {
        int masked = d == 0 && to > relation->columns;
        for (int64_t v = slot / N(LANES); v < (slot + rows) / N(LANES); v++)
            masked |= relation->least[d] < relation->low[d][v] || relation->most[d] > relation->high[d][v];
        first[axes] = relation->first[d] + slot, span[axes] = relation->span[d] + slot, place[axes] = relation->place[d];
        axes += masked;
    }
    if (axes == 1)
        N(mask_axes_of)(1, scores, max, first, span, place, from, to, rows);
    else if (axes == 2)
        N(mask_axes_of)(2, scores, max, first, span, place, from, to, rows);
    else if (axes == 3)
        N(mask_axes_of)(3, scores, max, first, span, place, from, to, rows);
}

/* Whether some of the rows from `slot` on see some of the columns of the tile on axis d, by the ends of both. */
static int N(may_see)(const Relation *relation, int d, int64_t slot, int64_t count) {
    INTEGER low = INT32_MAX, high = INT32_MIN;
    for (int64_t i = slot; i < slot + count; i++) {
        const INTEGER from = relation->first[d][i], last = from + relation->span[d][i];
        low = from < low ? from : low, high = last > high && from != N(NOWHERE) ? last : high;
    }
    return relation->most[d] >= low && relation->least[d] <= high;
}

/* Leave out the related pairs of a tile. Whether there may be one. */
__attribute__((noinline)) static int N(mask_shown)(
    const Relation *relation, REAL *scores, int64_t slot, int64_t count, int64_t from, int64_t to
) {
    const Vector never = N(broadcast)(-(REAL)INFINITY);
    for (int d = 0; d < relation->axes; d++)
        if (!N(may_see)(relation, d, slot, count))
            return 0;
    for (int64_t r = 0; r < count; r += N(LANES))
        for (int64_t k = from; k < to; k++) {
            REAL *at = scores + k * TILE_ROWS + r;
            Lanes shown = ~(Lanes){0};
            for (int d = 0; d < relation->axes; d++) {
                PlaceLanes low = (PlaceLanes)N(load_lanes)(relation->first[d] + slot + r);
                shown &= (Lanes)((Places)relation->place[d][k] - low <= (PlaceLanes)N(load_lanes)(relation->span[d] + slot + r));
            }
            N(store_vector)(at, N(select)(shown, never, N(load_vector)(at)));
        }
    return 1;
}
