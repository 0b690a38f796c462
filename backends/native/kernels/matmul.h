/* The matrix products of a tile, blocked in registers. Included once for each KIND.
 *
 *     scores (TILE_COLUMNS, TILE_ROWS)            accumulator of a row or column (padded dim)
 *
 *              rows: panels of PANEL                        dim: panels of PANEL
 *             +---------+---------+                        +---------+---------+
 *     columns | 12 x 2v | 12 x 2v |                   rows | 12 x 2v | 12 x 2v |     one register block: REGISTER_ROWS broadcast
 *             +---------+---------+                        +---------+---------+     units x REGISTER_VECTORS vectors, summed up
 *             | 12 x 2v | 12 x 2v |                        | 12 x 2v | 12 x 2v |     by one rank-one update for each k
 *             +---------+---------+                        +---------+---------+
 *         matmul_scores: k runs over dim                   matmul_accumulate: k runs over the columns (or rows) of the tile
 *
 * Packed columns are (dim panels, TILE_COLUMNS, PANEL): units of them are broadcast, or vectors of them read. Packed rows are
 * transposed, (row panels, dim, PANEL). A unit is a number; in KIND pairs it is a pair of bf16 in the place of one, and then the
 * `dim` of scores, and the columns that accumulators sum over, are counted in pairs.
 */
#undef PANEL
#define PANEL (REGISTER_VECTORS * N(LANES))

#if UNIT == 1
#define ADD_PRODUCT(sum, a, x) ((sum) + (a) * (x))
#else
#define ADD_PRODUCT(sum, a, x) add_pair_products(sum, a, x)
#endif

/* sum[i] += a[i * apart] * b, for the units and the vectors of a register block. */
__attribute__((always_inline)) static inline void N(rank_one_update)(
    Vector sum[REGISTER_ROWS][REGISTER_VECTORS], const REAL *a, int64_t apart, const REAL *b
) {
    Vector x[REGISTER_VECTORS];
#pragma GCC unroll 4
    for (int v = 0; v < REGISTER_VECTORS; v++)
        x[v] = N(load_vector)(b + v * N(LANES));
#pragma GCC unroll 16
    for (int i = 0; i < REGISTER_ROWS; i++)
#pragma GCC unroll 4
        for (int v = 0; v < REGISTER_VECTORS; v++)
            sum[i][v] = ADD_PRODUCT(sum[i][v], a[i * apart], x[v]);
}

/* scores[k, r] = columns[k] . rows[r], for k in from .. to - 1 rounded up to whole register blocks, `from` a multiple of
 * REGISTER_ROWS, and r in `panels` row panels. */
static void N(matmul_scores)(
    REAL *restrict scores, const REAL *restrict columns, const REAL *restrict rows, int64_t from, int64_t to, int64_t panels,
    int64_t dim
) {
    for (int64_t k = from; k < to; k += REGISTER_ROWS)
        for (int64_t panel = 0; panel < panels; panel++) {
            Vector sum[REGISTER_ROWS][REGISTER_VECTORS] = {{{0}}};
            const REAL *b = rows + panel * dim * PANEL;
            for (int64_t done = 0; done < dim; done += PANEL) {
                const REAL *a = columns + (done * TILE_COLUMNS + k * PANEL);
                int64_t count = dim - done < PANEL ? dim - done : PANEL;
                for (int64_t d = 0; d < count; d++, a++, b += PANEL)
                    N(rank_one_update)(sum, a, PANEL, b);
            }
            REAL *to_scores = scores + k * TILE_ROWS + panel * PANEL;
#pragma GCC unroll 16
            for (int i = 0; i < REGISTER_ROWS; i++)
#pragma GCC unroll 4
                for (int v = 0; v < REGISTER_VECTORS; v++)
                    N(store_vector)(to_scores + i * TILE_ROWS + v * N(LANES), sum[i][v]);
        }
}

/* accumulator[r] = rescale[r] * accumulator[r] + sum over k in from .. to - 1 of weights[k * step + r * across] * columns[k], r < count.
 *
 * `accumulator` are pointers to rows of padded length, a multiple of REGISTER_ROWS of them: beyond `count` they may point at a spare
 * row. `columns` come in panels of `height` columns. A tile is summed up by itself: fewer roundings than one long sum.
 */
__attribute__((always_inline)) static inline void N(matmul_accumulate)(
    REAL *const *accumulator, const REAL *rescale, const REAL *restrict weights, int64_t step, int64_t across,
    const REAL *restrict columns, int64_t height, int64_t from, int64_t to, int64_t count, int64_t dim
) {
    for (int64_t done = 0; done < dim; done += PANEL)
        for (int64_t r = 0; r < count; r += REGISTER_ROWS) {
            Vector sum[REGISTER_ROWS][REGISTER_VECTORS] = {{{0}}};
            const REAL *a = weights + from * step + r * across, *b = columns + (done * height + from * PANEL);
            for (int64_t k = from; k < to; k++, a += step, b += PANEL)
                N(rank_one_update)(sum, a, across, b);
#pragma GCC unroll 16
            for (int i = 0; i < REGISTER_ROWS; i++)
#pragma GCC unroll 4
                for (int v = 0; v < REGISTER_VECTORS; v++) {
                    REAL *at = accumulator[r + i] + done + v * N(LANES);
                    N(store_vector)(at, rescale[r + i] * N(load_vector)(at) + sum[i][v]);
                }
        }
}

/* Rows accumulate the columns from .. to - 1 of a tile, with weights[k, r]. */
static void N(accumulate_rows)(
    REAL *const *accumulator, const REAL *rescale, const REAL *weights, const REAL *columns, int64_t from, int64_t to, int64_t count,
    int64_t dim
) {
    N(matmul_accumulate)(
        accumulator, rescale, weights, TILE_ROWS, 1, columns, TILE_COLUMNS, from / UNIT, (to + UNIT - 1) / UNIT, count, dim
    );
}

/* Columns accumulate rows, packed in panels of `height` rows, with weights[column, row]. */
static void N(accumulate_columns)(
    REAL *const *accumulator, const REAL *rescale, const REAL *weights, const REAL *rows, int64_t height, int64_t row_count,
    int64_t count, int64_t dim
) {
    N(matmul_accumulate)(accumulator, rescale, weights, 1, TILE_ROWS, rows, height, 0, row_count, count, dim);
}

#undef ADD_PRODUCT
