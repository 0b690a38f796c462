/* The matrix products of a tile, blocked in registers. Included once for each KIND.
 *
 *     One register block: REGISTER_ROWS broadcast units x up to ROW_VECTORS vectors of sums; for each k a rank-one update.
 *
 *     compute_scores    scores (columns, rows)      k over dim       columns broadcast, rows read
 *     add_to_rows       slot_sums (dim, rows)       k over columns   columns broadcast, weights read
 *     add_to_columns    column_sums (columns, dim)  k over rows      weights broadcast, rows read
 *
 * A unit is a number; in KIND pairs it is a pair of bf16, and then the `dim` of scores, the columns that slot_sums run over, and
 * the rows that column_sums run over, are counted in pairs. A tile is summed up by itself: fewer roundings than one long sum.
 */
enum { N(LIST_STEP) = N(LANES) };         /* rows of a list are filled up to a multiple of it */
enum { N(STEP_COLUMNS) = TILE_COLUMNS }; /* of a tile, in the backward pass */

#if UNIT == 1
#define ADD_PRODUCT(sum, a, x) ((sum) + (a) * (x))
#else
#define ADD_PRODUCT(sum, a, x) add_pair_products(sum, a, x)
#endif

/* The vectors of the next register block, when `left` are left: as many as there is room for, but 4 are 2 and 2. */
static inline int N(block_vectors)(int64_t left) { return left == 4 || left == 2 ? 2 : left == 1 ? 1 : ROW_VECTORS; }

/* sum[i][v] += a[i * apart] * b[v], for every k: a moves on by a_step and b, whose vectors are b_apart apart, by b_step. */
__attribute__((always_inline)) static inline void N(rank_one_updates)(
    Vector sum[REGISTER_ROWS][ROW_VECTORS], const int vectors, const REAL *a, const int64_t a_apart, const int64_t a_step,
    const REAL *b, int64_t b_apart, int64_t b_step, int64_t count
) {
    for (int64_t k = 0; k < count; k++, a += a_step, b += b_step) {
        Vector x[ROW_VECTORS];
#pragma GCC unroll 3
        for (int v = 0; v < vectors; v++)
            x[v] = N(load_vector)(b + v * b_apart);
#pragma GCC unroll 8
        for (int i = 0; i < REGISTER_ROWS; i++)
#pragma GCC unroll 3
            for (int v = 0; v < vectors; v++)
                sum[i][v] = ADD_PRODUCT(sum[i][v], a[i * a_apart], x[v]);
    }
}

/* scores[k, r] = columns[k] . rows[r], for k in from .. to - 1, both multiples of REGISTER_ROWS, and so many vectors of rows;
 * max[r] = the maximum over k, unless `max` is NULL. */
__attribute__((always_inline)) static inline void N(compute_scores_of)(
    const int vectors, const int packed, REAL *restrict scores, REAL *restrict max, Columns columns, const REAL *restrict rows,
    int64_t from, int64_t to, int64_t units
) {
    const int64_t apart = round_up(units, PANEL) * N(LANES), column = packed ? PANEL : columns.column;
    for (int64_t k = from; k < to; k += REGISTER_ROWS) {
        Vector sum[REGISTER_ROWS][ROW_VECTORS] = {{{0}}};
        for (int64_t done = 0; done < units; done += PANEL) {
            const REAL *a = columns.at + (done * (packed ? TILE_COLUMNS : 1) + k * column), *b = rows + done * N(LANES);
            N(rank_one_updates)(sum, vectors, a, column, 1, b, apart, N(LANES), units - done < PANEL ? units - done : PANEL);
        }
#pragma GCC unroll 3
        for (int v = 0; v < vectors; v++) {
            Vector most = max ? N(load_vector)(max + v * N(LANES)) : (Vector){0};
#pragma GCC unroll 8
            for (int i = 0; i < REGISTER_ROWS; i++) {
                most = N(vector_max)(sum[i][v], most);
                N(store_vector)(scores + (k + i) * TILE_ROWS + v * N(LANES), sum[i][v]);
            }
            if (max)
                N(store_vector)(max + v * N(LANES), most);
        }
    }
}

/* sums[d, r] = rescale[r] * sums[d, r] + sum over k of weights[k, r] * columns[k, d], for d below `dim`, rounded up to
 * REGISTER_ROWS; vectors of rows lie `apart` numbers apart in `sums`. */
__attribute__((always_inline)) static inline void N(add_to_rows_of)(
    const int vectors, const int packed, REAL *restrict sums, int64_t apart, const REAL *restrict rescale, const REAL *restrict weights,
    Columns columns, int64_t from, int64_t to, int64_t dim
) {
    const int64_t column = packed ? PANEL : columns.column;
    for (int64_t d = 0; d < dim; d += REGISTER_ROWS) {
        Vector sum[REGISTER_ROWS][ROW_VECTORS] = {{{0}}};
        const REAL *a = columns.at + (d / PANEL * PANEL * (packed ? TILE_COLUMNS : 1) + from * column + d % PANEL);
        N(rank_one_updates)(sum, vectors, a, 1, column, weights + from * TILE_ROWS, N(LANES), TILE_ROWS, to - from);
#pragma GCC unroll 3
        for (int v = 0; v < vectors; v++) {
            Vector factor = N(load_vector)(rescale + v * N(LANES));
#pragma GCC unroll 8
            for (int i = 0; i < REGISTER_ROWS; i++) {
                REAL *at = sums + v * apart + (d + i) * N(LANES);
                N(store_vector)(at, factor * N(load_vector)(at) + sum[i][v]);
            }
        }
    }
}

/* sums[k, d] += sum over r below `count` units of weights[k, r] * rows[r, d]. Rows are `width` numbers apart. */
__attribute__((always_inline)) static inline void N(add_to_columns_of)(
    const int vectors, REAL *restrict sums, const REAL *restrict weights, const REAL *restrict rows, int64_t width, int64_t from,
    int64_t to, int64_t count
) {
    for (int64_t k = from; k < to; k += REGISTER_ROWS) {
        Vector sum[REGISTER_ROWS][ROW_VECTORS] = {{{0}}};
        N(rank_one_updates)(sum, vectors, weights + k * TILE_ROWS, TILE_ROWS, 1, rows, N(LANES), width, count);
#pragma GCC unroll 8
        for (int i = 0; i < REGISTER_ROWS; i++)
#pragma GCC unroll 3
            for (int v = 0; v < vectors; v++) {
                REAL *at = sums + (k + i) * width + v * N(LANES);
                N(store_vector)(at, N(load_vector)(at) + sum[i][v]);
            }
    }
}

/* The compiler sees `vectors` as a constant, so that all sums stay in registers. */
#define FOR_VECTORS(function, vectors, ...)  \
    switch (vectors) {                       \
    case 1: function(1, __VA_ARGS__); break; \
    case 2: function(2, __VA_ARGS__); break; \
    default: function(ROW_VECTORS, __VA_ARGS__); \
    }

/* And whether they are packed, so that strides are constants where they can be. */
#define FOR_COLUMNS(function, vectors, columns, ...)     \
    if ((columns).column == PANEL)                       \
        FOR_VECTORS(function, vectors, 1, __VA_ARGS__)   \
    else                                                 \
        FOR_VECTORS(function, vectors, 0, __VA_ARGS__)

static void N(compute_scores)(
    int vectors, REAL *restrict scores, REAL *restrict max, Columns columns, const REAL *restrict rows, int64_t from, int64_t to,
    int64_t units
) {
    FOR_COLUMNS(N(compute_scores_of), vectors, columns, scores, max, columns, rows, from, to, units)
}

static void N(compute_products)(
    int vectors, REAL *restrict products, Columns columns, const REAL *restrict rows, int64_t from, int64_t to, int64_t units
) {
    FOR_COLUMNS(N(compute_scores_of), vectors, columns, products, NULL, columns, rows, from, to, units)
}

static void N(add_to_rows)(
    int vectors, REAL *restrict sums, int64_t apart, const REAL *restrict rescale, const REAL *restrict weights, Columns columns,
    int64_t from, int64_t to, int64_t dim
) {
    FOR_COLUMNS(N(add_to_rows_of), vectors, columns, sums, apart, rescale, weights, columns, from / UNIT, to / UNIT, dim)
}

static void N(add_to_columns)(
    REAL *restrict sums, const REAL *restrict weights, const REAL *restrict rows, int64_t width, int64_t from, int64_t to,
    int64_t count, int64_t dim
) {
    int64_t all = (dim + N(LANES) - 1) / N(LANES);
    for (int64_t done = 0; done < all; done += N(block_vectors)(all - done)) {
        int64_t d = done * N(LANES);
        FOR_VECTORS(N(add_to_columns_of), N(block_vectors)(all - done), sums + d, weights, rows + d, width, from, to, (count + UNIT - 1) / UNIT)
    }
}

#undef ADD_PRODUCT
#undef FOR_COLUMNS
#undef FOR_VECTORS
