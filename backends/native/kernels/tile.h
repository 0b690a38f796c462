/* A tile of scores: some vectors of rows with some packed columns, and what is computed with them. Included once for each KIND.
 *
 *     FORWARD   packed_rows[0] . packed_columns[0] -> scores -> online_softmax_step -> slot_sums[0] += P . added_columns[1]
 *     BACKWARD  packed_rows[0] . packed_columns[0] -> scores = P; packed_rows[1] . packed_columns[1] -> score_gradients = dS
 *               slot_sums[0] += dS . added_columns[0]; slot_sums[1] += P . added_columns[1]; column_sums += dS^T . plain_rows
 *
 * KIND pairs rounds P and dS to bf16, in pairs of columns and, as gradient_rows, of rows, before they are added.
 */

/* Scores and their maxima, but for softmax_factor and, where that is the scale, the bias; `count` rows are in use. Returns
 * whether some are left out, which are in the maxima. */
static int N(score_pairs)(
    const Task *task, int64_t first, int64_t count, int vectors, int64_t from, int64_t to, REAL bias, REAL *max
) {
    const Scratch *s = &task->s;
    const Problem *p = task->p;
    const int64_t units = UNITS(p->dim), rows = first * round_up(units, PANEL);
    int masked = 0;
    N(compute_scores)(vectors, s->scores, max, s->columns[0], s->packed_rows[0] + rows, from, to, units);
    if (!is_scaled_alone(p))
        N(score_tile)(task, first, count, vectors, from, to, bias, max);
    for (int i = 0; i < task->own; i++)
        N(mask_relation)(&s->relation[i], s->scores, max, first, count, from, to);
    for (int i = task->own; i < task->relations; i++)
        masked |= N(mask_shown)(&s->relation[i], s->scores, first, count, from, to);
    return masked;
}

/* Scores to probabilities, which add values to the sums of their rows. */
static void N(add_values)(
    const Task *task, int64_t first, int vectors, int64_t from, int64_t to, REAL bias, int masked, REAL *max
) {
    const Scratch *s = &task->s;
    const Problem *p = task->p;
    const int64_t apart = task->padded_dim * N(LANES), count = vectors * N(LANES);
    REAL rescale[TILE_ROWS], *sums = s->slot_sums[0] + first * task->padded_dim;
    if (masked)
        N(mask_scores)(s->scores, max, s->slot_first + first, s->slot_last + first, s->column_position, from, to, count);
    N(online_softmax_step)(
        s->scores, max, s->slot_max + first, s->slot_sum + first, rescale, from, to, count, N(softmax_factor)(p) * LOG2_E, bias * LOG2_E
    );
    if (p->dropout)
        N(drop_weights)(UNIT, s->scores, s->kept, from, to, count);
    N(add_to_rows)(vectors, sums, apart, rescale, s->scores, N(added)(s, 1), from, to, p->dim);
}

/* Scores to P, and dS, of the columns from .. to - 1, as they are added. */
static void N(compute_gradients)(
    const Task *task, int64_t first, int64_t count, int vectors, int64_t from, int64_t to, REAL bias, int masked
) {
    const Scratch *s = &task->s;
    const Problem *p = task->p;
    const int64_t units = UNITS(p->dim), lanes = vectors * N(LANES);
    REAL *rows = s->packed_rows[1] + first * round_up(units, PANEL);
    N(compute_products)(vectors, s->score_gradients, s->columns[1], rows, from, to, units);
    if (p->dropout)
        N(drop_weights)(1, s->score_gradients, s->kept, from, to, lanes);
    N(softmax_backward_step)(
        s->scores, s->score_gradients, s->column_lse, s->column_delta, s->slot_first + first, s->slot_last + first, s->column_position,
        masked, from, to, lanes, N(softmax_factor)(p), bias, (REAL)p->keep_scale
    );
    if (p->dbias)
        N(sum_bias_gradient)(task, first, count, from, to);
    if (p->softcap > 0)
        N(uncap_gradients)(task, vectors, from, to);
    if (p->dropout)
        N(drop_weights)(1, s->scores, s->kept, from, to, lanes);
#if UNIT == 2
    pair_lanes(s->gradient_rows, s->score_gradients, from, to, count);
    pair_lines(s->score_gradients, from, to, lanes), pair_lines(s->scores, from, to, lanes);
#endif
}

/* dS and P add to the sums of dk and dv, those of the rows, and of dq, those of the columns. */
static void N(add_gradients)(const Task *task, int64_t first, int64_t count, int vectors, int64_t from, int64_t to) {
    const Scratch *s = &task->s;
    const int64_t apart = task->padded_dim * N(LANES), sums = first * task->padded_dim, dim = task->p->dim;
    REAL ones[TILE_ROWS];
    for (int r = 0; r < TILE_ROWS; r++)
        ones[r] = 1;
    N(add_to_rows)(vectors, s->slot_sums[0] + sums, apart, ones, s->score_gradients, N(added)(s, 0), from, to, dim);
    N(add_to_rows)(vectors, s->slot_sums[1] + sums, apart, ones, s->scores, N(added)(s, 1), from, to, dim);
    N(add_to_columns)(s->column_sums, s->gradient_rows, s->plain_rows + sums / UNIT, task->padded_dim, from, to, count, dim);
}

/* A tile of scores, and all that is computed with them: gradients in steps of columns that stay in the nearest cache. `masked`:
 * some rows do not see some columns, by their positions. */
static void N(attend_tile)(
    const Task *task, int64_t first, int64_t count, int vectors, int64_t from, int64_t to, REAL bias, int masked
) {
    const int64_t step = task->phase == FORWARD ? to - from : N(STEP_COLUMNS);
    const REAL left = is_scaled_alone(task->p) ? bias : 0; /* for the softmax to add */
    REAL max[TILE_ROWS];
    for (int64_t k = from; k < to; k += step) {
        const int64_t end = lesser(k + step, to);
        for (int r = 0; r < TILE_ROWS; r++)
            max[r] = -(REAL)INFINITY;
        int unseen = masked | N(score_pairs)(task, first, count, vectors, k, end, bias, max);
        if (task->p->dropout)
            N(mask_tile)(task, first, vectors, k, end);
        if (task->phase == FORWARD)
            N(add_values)(task, first, vectors, k, end, left, unseen, max);
        else
            N(compute_gradients)(task, first, count, vectors, k, end, left, unseen);
    }
    if (task->phase == BACKWARD)
        N(add_gradients)(task, first, count, vectors, from, to);
}
