/* The softmax of a tile of scores: one online softmax step, and its backward step. Included once for each KIND.
 *
 *     scores (TILE_COLUMNS, TILE_ROWS): a vector lane is a row, so the max and the sum of a row run down a lane
 *
 *                    row r            forward:   for each vector of rows
 *               +--+--+--+--+                      down the tile:  t = scale * s + bias, running max
 *      column k |  |  |  |  |                      down the tile:  scores := exp(t - max), sum
 *               |  |  |  |  |                      running_max, running_sum, rescale of these rows
 *               +--+--+--+--+            backward: scores := P, gradients := P * (gradients - delta)
 *
 * accumulate_rows multiplies the accumulators of the rows by `rescale` and adds P times the values.
 */

/* One online softmax step: scores to probabilities relative to the new maximum, and the factor for what was summed up before.
 *
 *     t = scale * s + bias    m' = max(m, max_k t)    P = exp(t - m')    rescale = exp(m - m')    l' = rescale * l + sum_k P
 *
 * m is running_max, l running_sum. `masked`: a row does not see the columns with column_position[k] > row_position[r]. A row that
 * has seen nothing keeps m = -inf, l = 0. KIND pairs packs the P of two columns into one number.
 */
static void N(online_softmax_step)(
    REAL *restrict scores, REAL *restrict running_max, REAL *restrict running_sum, REAL *restrict rescale,
    const REAL *restrict row_position, const REAL *restrict column_position, REAL scale, REAL bias, int masked, int64_t from,
    int64_t to, int64_t count
) {
    const Vector never = N(broadcast)(-(REAL)INFINITY);
    for (int64_t r = 0; r < count; r += N(LANES)) {
        Vector old = N(load_vector)(running_max + r), max = old, rows = N(load_vector)(row_position + r), sum = N(broadcast)(0);
        for (int64_t k = from; k < to; k++) {
            Vector t = N(load_vector)(scores + k * TILE_ROWS + r) * scale + bias;
            if (masked)
                t = N(select)((Lanes)(N(broadcast)(column_position[k]) > rows), never, t);
            max = N(vector_max)(t, max);
            N(store_vector)(scores + k * TILE_ROWS + r, t);
        }
        Vector base = N(select)((Lanes)(max == never), N(broadcast)(0), max);
        for (int64_t k = from; k < to; k += UNIT) {
            Vector p = N(exp)(N(load_vector)(scores + k * TILE_ROWS + r) - base);
            sum += p;
#if UNIT == 2
            Vector odd = N(broadcast)(0);
            if (k + 1 < to)
                odd = N(exp)(N(load_vector)(scores + (k + 1) * TILE_ROWS + r) - base);
            sum += odd;
            p = make_pairs(p, odd);
#endif
            N(store_vector)(scores + k / UNIT * TILE_ROWS + r, p);
        }
        Vector f = N(exp)(old - base);
        N(store_vector)(rescale + r, f);
        N(store_vector)(running_max + r, max);
        N(store_vector)(running_sum + r, f * N(load_vector)(running_sum + r) + sum);
    }
}

/* Scores to probabilities, and gradients of probabilities to gradients of scores but for the factor scale.
 *
 *     P = exp(scale * s + bias - lse)          dS = P * (dP - delta)          dP is in `gradients`, and dS afterwards
 *
 * lse and delta belong to the queries, which are the rows (`by_column` 0) or the columns. A row does not see the columns with
 * column_position[k] > row_position[r] (`masked` 1) or column_position[k] < row_position[r] (`masked` -1).
 */
static void N(softmax_backward_step)(
    REAL *restrict scores, REAL *restrict gradients, const REAL *lse, const REAL *delta, int by_column,
    const REAL *restrict row_position, const REAL *restrict column_position, REAL scale, REAL bias, int masked, int64_t from,
    int64_t to, int64_t count
) {
    for (int64_t r = 0; r < count; r += N(LANES)) {
        Vector rows = N(load_vector)(row_position + r), row_lse = N(broadcast)(0), row_delta = row_lse;
        if (!by_column)
            row_lse = bias - N(load_vector)(lse + r), row_delta = N(load_vector)(delta + r);
        for (int64_t k = from; k < to; k++) {
            REAL *s = scores + k * TILE_ROWS + r, *g = gradients + k * TILE_ROWS + r;
            Vector l = by_column ? N(broadcast)(bias - lse[k]) : row_lse, d = by_column ? N(broadcast)(delta[k]) : row_delta;
            Vector p = N(exp)(N(load_vector)(s) * scale + l);
            if (masked) {
                Lanes unseen = masked > 0 ? N(broadcast)(column_position[k]) > rows : N(broadcast)(column_position[k]) < rows;
                p = (Vector)(~unseen & (Lanes)p);
            }
            N(store_vector)(s, p);
            N(store_vector)(g, p * (N(load_vector)(g) - d));
        }
    }
}
