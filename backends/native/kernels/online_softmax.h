/* The softmax of a tile of scores (columns, rows): one online softmax step, and its backward step. Included once for each KIND.
 *
 *     forward    down the tile, a vector lane is a row:   scores s := exp(t - max), sum; t = factor * s + bias is never stored
 *     backward   down the tile:                           scores := P, gradients := P * (gradients - delta)
 *
 * Forward, scores and maxima are to base 2, t log2 e: exp(t - max) is 2**(factor * s - offset), a multiply-add and a polynomial.
 * An lse is to base e, and so is what a backward pass takes it from.
 *
 * No exponent may be far above 0. `offset` is rounded and the product within the multiply-add is not: forward, scores that are
 * huge are rounded first. A backward pass takes 0 for an exponent above 0, and results.h gives it a large lse less its rounding.
 */

/* True if a row's maximum is huge: scores are then rounded here, to factor * s + bias in the place of s. */
static inline int N(round_huge)(REAL *scores, int64_t apart, int64_t from, int64_t to, Vector max, REAL factor, REAL bias) {
    const Lanes huge = (Lanes)(N(vector_max)(max, -max) > HUGE_SCORE);
    INTEGER any = 0;
    for (int l = 0; l < N(LANES); l++)
        any |= huge[l];
    for (int64_t k = from; any && k < to; k++)
        N(store_vector)(scores + k * apart, factor * N(load_vector)(scores + k * apart) + bias);
    return any != 0;
}

/* s := -inf outside first[r] <= column_position[k] <= last[r]; max = the maximum over k. */
static void N(mask_scores)(
    REAL *restrict scores, REAL *restrict max, const REAL *restrict first, const REAL *restrict last,
    const REAL *restrict column_position, int64_t from, int64_t to, int64_t count
) {
    const Vector never = N(broadcast)(-(REAL)INFINITY);
    for (int64_t r = 0; r < count; r += N(LANES)) {
        Vector most = never, low = N(load_vector)(first + r), high = N(load_vector)(last + r);
        for (int64_t k = from; k < to; k++) {
            REAL *at = scores + k * TILE_ROWS + r;
            Vector column = N(broadcast)(column_position[k]);
            Vector t = N(select)((Lanes)((column > high) | (column < low)), never, N(load_vector)(at));
            most = N(vector_max)(t, most);
            N(store_vector)(at, t);
        }
        N(store_vector)(max + r, most);
    }
}

/* One online softmax step, of `max`, the maximum of s in the tile:
 *
 *     u = factor * s + bias    m' = max(m, max_k u)    P = 2**(u - m')    rescale = 2**(m - m')    l' = rescale * l + sum_k P
 *
 * A row that has seen nothing keeps m = -inf, l = 0. KIND pairs packs the P of two columns into one number.
 */
static void N(online_softmax_step)(
    REAL *restrict scores, const REAL *restrict max, REAL *restrict running_max, REAL *restrict running_sum, REAL *restrict rescale,
    int64_t from, int64_t to, int64_t count, REAL factor, REAL bias
) {
    const Vector never = N(broadcast)(-(REAL)INFINITY);
    for (int64_t r = 0; r < count; r += N(LANES)) {
        Vector old = N(load_vector)(running_max + r), most = N(vector_max)(factor * N(load_vector)(max + r) + bias, old);
        Vector base = N(select)((Lanes)(most == never), N(broadcast)(0), most), sum = N(broadcast)(0), ratio = N(exp2)(old - base);
        const int rounded = N(round_huge)(scores + r, TILE_ROWS, from, to, base, factor, bias);
        const REAL left = rounded ? 1 : factor;
        Vector offset = rounded ? base : base - bias;
        for (int64_t k = from; k < to; k += UNIT) {
            Vector p = N(exp2)(left * N(load_vector)(scores + k * TILE_ROWS + r) - offset);
            sum += p;
#if UNIT == 2
            Vector odd = N(exp2)(left * N(load_vector)(scores + (k + 1) * TILE_ROWS + r) - offset);
            sum += odd;
            p = make_pairs(p, odd);
#endif
            N(store_vector)(scores + k / UNIT * TILE_ROWS + r, p);
        }
        N(store_vector)(rescale + r, ratio);
        N(store_vector)(running_max + r, most);
        N(store_vector)(running_sum + r, ratio * N(load_vector)(running_sum + r) + sum);
    }
}

/* Scores s to P = exp(t - lse), and dP in `gradients` to dS = P * (keep_scale * dP - delta), but for the factor that scores have.
 * lse and delta belong to the queries, the columns. If `masked`, a row sees only first[r] <= column_position[k] <= last[r].
 */
static void N(softmax_backward_step)(
    REAL *restrict scores, REAL *restrict gradients, const REAL *lse, const REAL *delta, const REAL *restrict first,
    const REAL *restrict last, const REAL *restrict column_position, int masked, int64_t from, int64_t to, int64_t count,
    REAL factor, REAL bias, REAL keep_scale
) {
    for (int64_t r = 0; r < count; r += N(LANES)) {
        Vector low = N(load_vector)(first + r), high = N(load_vector)(last + r);
        for (int64_t k = from; k < to; k++) {
            REAL *s = scores + k * TILE_ROWS + r, *g = gradients + k * TILE_ROWS + r;
            Vector below = N(vector_max)(N(broadcast)(0), lse[k] - (factor * N(load_vector)(s) + bias));
            Vector p = N(exp)(-below), ds = p * (N(load_vector)(g) * keep_scale - delta[k]);
            if (masked) {
                Vector column = N(broadcast)(column_position[k]);
                Lanes unseen = (Lanes)((column > high) | (column < low));
                p = (Vector)(~unseen & (Lanes)p), ds = (Vector)(~unseen & (Lanes)ds);
            }
            N(store_vector)(s, p);
            N(store_vector)(g, ds);
        }
    }
}
