/* The results of a task, from its accumulators to memory. Included once for each KIND.
 *
 *     FORWARD     slot_sums -> accumulator -> out, lse; without accumulator where they are all
 *     DELTA       rowsum(dout * out) -> delta
 *     BACKWARD    slot_sums -> dk +=, dv +=; column_sums -> dq +=
 */

/* Where (batch, head, row) lies in lse and delta. */
static int64_t N(lse_index)(const Task *task, int64_t row, int64_t head) {
    return (task->batch * task->p->heads + head) * task->p->lse_head + row * task->p->step;
}

/* The lse of a query; +inf for one that sees nothing: exp(... - inf) = 0. A large lse is less by what rounding made of it and of
 * the scores: the key that a row sees almost alone then has a weight of 1, not of 2 to a rounding error. */
static REAL N(query_lse)(const Task *task, int64_t row) {
    REAL lse = N(numbers)(task->p->lse)[N(lse_index)(task, row, task->head)], size = lse < 0 ? -lse : lse;
    return lse == -(REAL)INFINITY ? (REAL)INFINITY : size > LARGE_LSE ? lse - 3 * EPSILON * size : lse;
}

enum { N(ROWS_AHEAD) = 16 }; /* memory is asked for so many rows of out before they are written */

/* The position and the head of a line of the block. */
static inline int64_t N(place_of_line)(const Task *task, int64_t line, int64_t *head) {
    const int64_t row = N(row_of)(task->p, line);
    *head = task->head + line - row * task->p->shared_heads;
    return N(position)(task, row);
}

static inline void N(prefetch_output)(const Task *task, int64_t line) {
    int64_t head, row = N(place_of_line)(task, line, &head);
    for (int64_t byte = 0; byte < task->row_bytes; byte += 64)
        __builtin_prefetch(row_address(&task->p->out, task->batch, row, head) + byte, 1, 3);
}

/* The results of a line with sums relative to 2**max, not yet over `total`; where that is 0, `sums` may be anything. */
static inline void N(write_line)(const Task *task, int64_t line, REAL *sums, REAL max, REAL total) {
    const Problem *p = task->p;
    int64_t head, row = N(place_of_line)(task, line, &head);
    REAL factor = (REAL)p->keep_scale / total;
    for (int64_t d = 0; d < p->dim; d++)
        sums[d] = total == 0 ? 0 : factor * sums[d];
    R(store)(row_address(&p->out, task->batch, row, head), sums, p->dim, p->dtype);
    N(numbers)(p->lse)[N(lse_index)(task, row, head)] = total == 0 ? -(REAL)INFINITY : max * (REAL)LN_2 + R(LOG)(total);
}

/* The results of all lines that have none yet. */
static void N(write_output)(const Task *task) {
    const Scratch *s = &task->s;
    const int64_t lines = (task->stop - task->start) * task->p->shared_heads;
    for (int64_t r = 0; r < lines; r++) {
        if (s->row_sum[r] == IS_WRITTEN)
            continue;
        if (r + N(ROWS_AHEAD) < lines)
            N(prefetch_output)(task, r + N(ROWS_AHEAD));
        N(write_line)(task, r, s->accumulator + r * task->padded_dim, s->row_max[r], s->row_sum[r]);
    }
}

/* a . b in DELTA_PARTS sums side by side: in a single one each addition would wait for the one before. */
static double N(dot)(const REAL *a, const REAL *b, int64_t dim) {
    double part[DELTA_PARTS] = {0}, sum = 0;
    int64_t d = 0;
    for (; d + DELTA_PARTS <= dim; d += DELTA_PARTS)
        for (int i = 0; i < DELTA_PARTS; i++)
            part[i] += (double)a[d + i] * (double)b[d + i];
    for (; d < dim; d++)
        part[d % DELTA_PARTS] += (double)a[d] * (double)b[d];
    for (int i = 0; i < DELTA_PARTS; i++)
        sum += part[i];
    return sum;
}

static void N(compute_delta)(const Task *task) {
    const Problem *p = task->p;
    REAL *delta = N(numbers)(p->delta), *dout = task->s.packed_columns[0], *out = task->s.packed_columns[1];
    for (int64_t r = 0; r < task->stop - task->start; r++) {
        const int64_t row = N(position)(task, r);
        R(load)(dout, row_address(&p->dout, task->batch, row, task->head), p->dim, p->dtype);
        R(load)(out, row_address(&p->out, task->batch, row, task->head), p->dim, p->dtype);
        delta[N(lse_index)(task, row, task->head)] = (REAL)N(dot)(dout, out, p->dim);
    }
}

/* to[row, head] += factor * sums, and sums = 0. */
static void N(add_to_gradient)(const Task *task, const TensorView *to, int64_t row, int64_t head, REAL *sums, REAL factor) {
    REAL *line = N(numbers)(row_address(to, task->batch, row, head));
    for (int64_t d = 0; d < task->p->dim; d++) {
        line[d] += factor * sums[d];
        sums[d] = 0;
    }
}

/* Add the columns of a tile, which are queries here, to dq. Columns that fill the last register block have summed up zeros,
 * which a NaN in the rows makes NaN: the next tile must not find them. */
static void N(add_columns_to_dq)(const Task *task, const ColumnTile *tile) {
    int64_t filled = round_up(tile->count, REGISTER_ROWS), width = task->padded_dim;
    for (int64_t k = 0; k < tile->count; k++) {
        REAL *sums = task->s.column_sums + k * width;
        N(add_to_gradient)(task, &task->p->dq, tile->column[k], task->head, sums, (REAL)task->p->scale);
    }
    N(clear)(task->s.column_sums + tile->count * width, (filled - tile->count) * width);
}

/* accumulator = accumulator * 2**(m - m') + sums * 2**(m_slot - m'), m' = max(m, m_slot), for the row of a slot. */
static void N(merge_softmax)(const Task *task, int64_t row, REAL slot_max, REAL slot_sum, const REAL *sums) {
    const Scratch *s = &task->s;
    REAL *accumulator = s->accumulator + row * task->padded_dim, ours = 0, theirs = 1, max = slot_max;
    if (slot_sum == 0)
        return;
    if (s->row_sum[row] == 0) {
        memcpy(accumulator, sums, (size_t)task->p->dim * sizeof(REAL));
    } else {
        max = s->row_max[row] > slot_max ? s->row_max[row] : slot_max;
        ours = (REAL)exp2(s->row_max[row] - max), theirs = (REAL)exp2(slot_max - max);
        for (int64_t d = 0; d < task->p->dim; d++)
            accumulator[d] = ours * accumulator[d] + theirs * sums[d];
    }
    s->row_max[row] = max, s->row_sum[row] = ours * s->row_sum[row] + theirs * slot_sum;
}

static void N(merge_slot)(const Task *task, int a, int64_t slot, REAL *sums) {
    const Scratch *s = &task->s;
    int64_t row = s->slot_line[slot];
    if (row == N(lines)(task->p))
        return;
    if (task->merged_once && s->slot_sum[slot] != 0) {
        N(write_line)(task, row, sums, s->slot_max[slot], s->slot_sum[slot]);
        s->row_sum[row] = IS_WRITTEN;
    } else if (task->phase == FORWARD)
        N(merge_softmax)(task, row, s->slot_max[slot], s->slot_sum[slot], sums);
    else
        N(add_to_gradient)(task, a ? &task->p->dv : &task->p->dk, N(position)(task, row), task->kv_head, sums, (REAL)(a ? task->p->keep_scale : task->p->scale));
}

/* The sums of slots go to the accumulators of their rows; in BACKWARD, where rows are keys, to dk and dv. */
__attribute__((noinline)) static void N(merge_slots)(const Task *task, int64_t slots) {
    const Scratch *s = &task->s;
    const int64_t width = task->padded_dim;
    REAL *lines = s->packed_columns[0];
    for (int64_t first = 0; first < slots; first += N(LANES)) {
        for (int64_t i = first; task->merged_once && i < first + N(LANES); i++)
            if (s->slot_line[i] < N(lines)(task->p))
                N(prefetch_output)(task, s->slot_line[i]);
        for (int a = 0; a < task->sums; a++) {
            for (int64_t d = 0; d < width; d += N(LANES))
                N(transpose_square)(lines + d, width, s->slot_sums[a] + first * width + d * N(LANES), N(LANES));
            for (int64_t i = 0; i < N(LANES); i++)
                N(merge_slot)(task, a, first + i, lines + i * width);
        }
    }
}
