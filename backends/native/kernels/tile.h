/* The two matrix products of a tile, blocked in registers: BLOCK_ROWS broadcast units times BLOCK_VECTORS vectors. A unit is a
 * number, or a pair of bf16 in the place of one; then `dim` of scores and the columns of sums are counted in pairs.
 *
 * Columns are packed in panels (dim panels, TILE_COLUMNS, PANEL), both broadcast from and read as vectors. Rows are packed
 * transposed, (row panels, dim, PANEL). Scores lie as (TILE_COLUMNS, TILE_ROWS): a lane is a row, so that the softmax of a
 * row runs down a lane.
 */
#undef PANEL
#define PANEL (BLOCK_VECTORS * N(LANES))

#if UNIT == 1
#define PLUS_PRODUCT(sum, a, x) ((sum) + (a) * (x))
#else
#define PLUS_PRODUCT(sum, a, x) plus_products(sum, a, x)
#endif

/* sum[i] += a[i * apart] * b, for the units of a block and a panel of vectors. */
__attribute__((always_inline)) static inline void N(add_products)(
    Vector sum[BLOCK_ROWS][BLOCK_VECTORS], const REAL *a, int64_t apart, const REAL *b
) {
    Vector x[BLOCK_VECTORS];
#pragma GCC unroll 4
    for (int v = 0; v < BLOCK_VECTORS; v++)
        x[v] = N(get)(b + v * N(LANES));
#pragma GCC unroll 16
    for (int i = 0; i < BLOCK_ROWS; i++)
#pragma GCC unroll 4
        for (int v = 0; v < BLOCK_VECTORS; v++)
            sum[i][v] = PLUS_PRODUCT(sum[i][v], a[i * apart], x[v]);
}

/* scores[k, r] = columns[k] . rows[r] for whole blocks of k in from .. to - 1, `from` a multiple of BLOCK_ROWS, and r in
 * `panels` row panels. */
static void N(multiply)(
    REAL *restrict scores, const REAL *restrict columns, const REAL *restrict rows, int64_t from, int64_t to, int64_t panels,
    int64_t dim
) {
    for (int64_t k = from; k < to; k += BLOCK_ROWS)
        for (int64_t panel = 0; panel < panels; panel++) {
            Vector sum[BLOCK_ROWS][BLOCK_VECTORS] = {{{0}}};
            const REAL *b = rows + panel * dim * PANEL;
            for (int64_t done = 0; done < dim; done += PANEL) {
                const REAL *a = columns + (done * TILE_COLUMNS + k * PANEL);
                int64_t count = dim - done < PANEL ? dim - done : PANEL;
                for (int64_t d = 0; d < count; d++, a++, b += PANEL)
                    N(add_products)(sum, a, PANEL, b);
            }
            REAL *to_scores = scores + k * TILE_ROWS + panel * PANEL;
#pragma GCC unroll 16
            for (int i = 0; i < BLOCK_ROWS; i++)
#pragma GCC unroll 4
                for (int v = 0; v < BLOCK_VECTORS; v++)
                    N(put)(to_scores + i * TILE_ROWS + v * N(LANES), sum[i][v]);
        }
}

/* sums[r] = factor[r] * sums[r] + sum over k in from .. to - 1 of weights[k * step + r * across] * columns[k], r < count.
 *
 * `sums` are pointers to rows of padded length, a multiple of BLOCK_ROWS of them: beyond `count` they may point at a spare row.
 * `columns` come in panels of `height` columns. A tile is summed up by itself: fewer roundings than one long sum.
 */
__attribute__((always_inline)) static inline void N(sum_up)(
    REAL *const *sums, const REAL *factor, const REAL *restrict weights, int64_t step, int64_t across,
    const REAL *restrict columns, int64_t height, int64_t from, int64_t to, int64_t count, int64_t dim
) {
    for (int64_t done = 0; done < dim; done += PANEL)
        for (int64_t r = 0; r < count; r += BLOCK_ROWS) {
            Vector sum[BLOCK_ROWS][BLOCK_VECTORS] = {{{0}}};
            const REAL *a = weights + from * step + r * across, *b = columns + (done * height + from * PANEL);
            for (int64_t k = from; k < to; k++, a += step, b += PANEL)
                N(add_products)(sum, a, across, b);
#pragma GCC unroll 16
            for (int i = 0; i < BLOCK_ROWS; i++)
#pragma GCC unroll 4
                for (int v = 0; v < BLOCK_VECTORS; v++) {
                    REAL *at = sums[r + i] + done + v * N(LANES);
                    N(put)(at, factor[r + i] * N(get)(at) + sum[i][v]);
                }
        }
}

/* What rows get from the columns from .. to - 1 of a tile, with weights[k, r]. */
static void N(accumulate)(
    REAL *const *sums, const REAL *factor, const REAL *weights, const REAL *columns, int64_t from, int64_t to, int64_t count,
    int64_t dim
) {
    N(sum_up)(sums, factor, weights, TILE_ROWS, 1, columns, TILE_COLUMNS, from / UNIT, (to + UNIT - 1) / UNIT, count, dim);
}

/* What columns get from rows, in panels of `height` rows, with weights[column, row]. */
static void N(accumulate_columns)(
    REAL *const *sums, const REAL *factor, const REAL *weights, const REAL *rows, int64_t height, int64_t row_count,
    int64_t count, int64_t dim
) {
    N(sum_up)(sums, factor, weights, 1, TILE_ROWS, rows, height, 0, row_count, count, dim);
}

/* Scores to weights of one online softmax step, and by what to scale what was summed up before.
 *
 *     t = scale * s + bias     m' = max(m, max_k t)     w = exp(t - m')     factor = exp(m - m')     l' = factor * l + sum_k w
 *
 * Where place[k] > row_place[r], the column is not seen (`masked`). A row that has seen nothing keeps m = -inf, l = 0.
 */
static void N(soften)(
    REAL *restrict scores, REAL *restrict most, REAL *restrict total, REAL *restrict factor, const REAL *restrict row_place,
    const REAL *restrict place, REAL scale, REAL bias, int masked, int64_t from, int64_t to, int64_t count
) {
    const Vector never = N(all)(-(REAL)INFINITY);
    for (int64_t r = 0; r < count; r += N(LANES)) {
        Vector old = N(get)(most + r), max = old, rows = N(get)(row_place + r), sum = N(all)(0);
        for (int64_t k = from; k < to; k++) {
            Vector t = N(get)(scores + k * TILE_ROWS + r) * scale + bias;
            if (masked)
                t = N(choose)((Lanes)(N(all)(place[k]) > rows), never, t);
            max = N(larger)(t, max);
            N(put)(scores + k * TILE_ROWS + r, t);
        }
        Vector base = N(choose)((Lanes)(max == never), N(all)(0), max);
        for (int64_t k = from; k < to; k += UNIT) {
            Vector w = N(exp)(N(get)(scores + k * TILE_ROWS + r) - base);
            sum += w;
#if UNIT == 2
            Vector other = N(all)(0);
            if (k + 1 < to)
                other = N(exp)(N(get)(scores + (k + 1) * TILE_ROWS + r) - base);
            sum += other;
            w = pair_of(w, other);
#endif
            N(put)(scores + k / UNIT * TILE_ROWS + r, w);
        }
        Vector f = N(exp)(old - base);
        N(put)(factor + r, f);
        N(put)(most + r, max);
        N(put)(total + r, f * N(get)(total + r) + sum);
    }
}

/* Scores to weights, and weights to gradients of scores but for the factor scale, given logsumexp and delta of queries.
 *
 *     w = exp(scale * s + bias - lse)          g = w * (g - delta)
 *
 * Queries are the rows (`by_column` 0) or the columns. A column is not seen where place[k] > row_place[r] (`masked` 1) or
 * place[k] < row_place[r] (`masked` -1).
 */
static void N(differentiate)(
    REAL *restrict scores, REAL *restrict gradients, const REAL *lse, const REAL *delta, int by_column,
    const REAL *restrict row_place, const REAL *restrict place, REAL scale, REAL bias, int masked, int64_t from, int64_t to,
    int64_t count
) {
    for (int64_t r = 0; r < count; r += N(LANES)) {
        Vector rows = N(get)(row_place + r), row_lse = N(all)(0), row_delta = row_lse;
        if (!by_column)
            row_lse = bias - N(get)(lse + r), row_delta = N(get)(delta + r);
        for (int64_t k = from; k < to; k++) {
            REAL *s = scores + k * TILE_ROWS + r, *g = gradients + k * TILE_ROWS + r;
            Vector l = by_column ? N(all)(bias - lse[k]) : row_lse, d = by_column ? N(all)(delta[k]) : row_delta;
            Vector w = N(exp)(N(get)(s) * scale + l);
            if (masked)
                w = (Vector)(~(Lanes)(masked > 0 ? N(all)(place[k]) > rows : N(all)(place[k]) < rows) & (Lanes)w);
            N(put)(s, w);
            N(put)(g, w * (N(get)(g) - d));
        }
    }
}

#undef PLUS_PRODUCT
