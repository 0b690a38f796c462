/* Few rows: a tile of columns against rows one by one, with keys and values read where they lie: vectors are along head_dim, then
 * along the columns. Included once for each KIND. In row vectors of a global token, or a row for each query head that shares the
 * keys, most lanes would compute nothing, behind a copy of every key that is read once. FORWARD alone.
 */

/* Whether the lists have so few rows, in the mean, and a row sees the columns between two positions. */
static int N(are_few)(const Task *task, const RowList *lists, int count) {
    int64_t rows = 0;
    for (int i = 0; i < count; i++)
        rows += lists[i].count;
    return task->phase == FORWARD && rows <= FEW_ROWS * count && !task->relations && !task->p->dropout && !N(has_scores)(task->p);
}

/* The rows of the slots as they are, one after the other, and 0 in their sums. */
static void N(load_few)(const Task *task, int64_t slots) {
    const Problem *p = task->p;
    for (int64_t i = 0; i < slots; i++) {
        REAL *to = task->s.packed_rows[0] + i * task->padded_dim;
        if (task->s.slot_line[i] == N(lines)(p))
            continue;
        N(clear)(to, task->padded_dim);
        R(load)(to, N(row_of_slot)(task, 0, i), p->dim, p->dtype);
        N(clear)(task->s.slot_sums[0] + i * task->padded_dim, task->padded_dim);
    }
}

/* The numbers of a row of `dim` from `done` on, as many as a vector has, with zeros beyond its end. */
__attribute__((always_inline)) static inline Vector N(load_numbers)(const char *row, int64_t done, int64_t dim, const int dtype) {
    const int64_t bytes = bytes_of(dtype), left = dim - done;
    const char *from = row + done * bytes;
    if (left >= N(LANES))
        return bytes == sizeof(REAL) ? N(load_vector)(N(numbers)(from)) : N(load_half_vector)(from, dtype);
    REAL numbers[N(LANES)] = {0};
    R(load)(numbers, from, left, dtype);
    return N(load_vector)(numbers);
}

/* Lane i of the result is the sum of the lanes of x[i]. */
__attribute__((always_inline)) static inline Vector N(sum_lanes)(Vector x[N(LANES)]) {
#pragma GCC unroll 4
    for (int bit = 1; bit < N(LANES); bit *= 2) {
        Lanes low = N(lane_numbers)() + (((N(lane_numbers)() & bit) != 0) & (N(LANES) - bit)), high = low + bit;
#pragma GCC unroll 16
        for (int i = 0; i < N(LANES); i += 2 * bit)
            x[i] = SHUFFLE(x[i], x[i + bit], low) + SHUFFLE(x[i], x[i + bit], high);
    }
    return x[0];
}

/* scores[k - from] = (scale * q . k + bias) log2 e, -inf up to a whole vector; returns the maximum in each lane. */
__attribute__((always_inline)) static inline Vector N(score_columns_of)(
    const int dtype, const Task *task, REAL *restrict scores, const REAL *restrict query, const int64_t *column, int64_t from, int64_t to,
    REAL bias
) {
    const char *base = row_address(&task->column_tensor[0], task->batch, 0, task->column_head);
    const int64_t row = task->column_tensor[0].row, dim = task->p->dim;
    const REAL scale = (REAL)task->p->scale * LOG2_E;
    Vector most = N(broadcast)(-(REAL)INFINITY);
    for (int64_t k = from; k < to; k += N(LANES)) {
        Vector x[N(LANES)];
        Lanes unseen = {0};
        for (int i = 0; i < N(LANES); i++) {
            const char *key = base + column[k + i < to ? k + i : k] * row;
            Vector sum = {0};
            for (int64_t d = 0; d < dim; d += N(LANES))
                sum += N(load_vector)(query + d) * N(load_numbers)(key, d, dim, dtype);
            x[i] = sum, unseen[i] = k + i < to ? 0 : -1;
        }
        Vector t = N(select)(unseen, N(broadcast)(-(REAL)INFINITY), N(sum_lanes)(x) * scale + bias * LOG2_E);
        most = N(vector_max)(t, most);
        N(store_vector)(scores + k - from, t);
    }
    return most;
}

/* The same scores, of products that are summed up in the order of matmul.h, as a backward pass does: the exponent of a large
 * score there would else be off by what roundings differ. */
__attribute__((noinline)) static REAL N(score_in_order)(
    const Task *task, REAL *restrict scores, const REAL *restrict query, const int64_t *column, int64_t from, int64_t to, REAL bias
) {
    const Problem *p = task->p;
    REAL *key = task->s.packed_columns[0], most = -(REAL)INFINITY;
    for (int64_t k = from; k < to; k++) {
        REAL sum = 0;
        R(load)(key, row_address(&task->column_tensor[0], task->batch, column[k], task->column_head), p->dim, p->dtype);
        for (int64_t d = 0; d < p->dim; d++)
            sum += query[d] * key[d];
        REAL t = scores[k - from] = sum * ((REAL)p->scale * LOG2_E) + bias * LOG2_E;
        most = t > most ? t : most;
    }
    return most;
}

/* sums += sum over k in from .. to - 1 of weights[k - from] * v[k]. */
__attribute__((always_inline)) static inline void N(add_values_of)(
    const int dtype, const Task *task, REAL *restrict sums, const REAL *restrict weights, const int64_t *column, int64_t from, int64_t to
) {
    const char *base = row_address(&task->column_tensor[1], task->batch, 0, task->column_head);
    const int64_t row = task->column_tensor[1].row, dim = task->p->dim;
    int64_t k = from;
    for (; k + COLUMNS_TOGETHER <= to; k += COLUMNS_TOGETHER)
        for (int64_t d = 0; d < dim; d += N(LANES)) {
            Vector sum = {0};
#pragma GCC unroll 8
            for (int i = 0; i < COLUMNS_TOGETHER; i++)
                sum += weights[k + i - from] * N(load_numbers)(base + column[k + i] * row, d, dim, dtype);
            N(store_vector)(sums + d, N(load_vector)(sums + d) + sum);
        }
    for (; k < to; k++)
        for (int64_t d = 0; d < dim; d += N(LANES))
            N(store_vector)(sums + d, N(load_vector)(sums + d) + weights[k - from] * N(load_numbers)(base + column[k] * row, d, dim, dtype));
}

/* The compiler sees the dtype as a constant. */
#define FOR_DTYPE(function, dtype, ...)                                                                               \
    (sizeof(REAL) == 8 ? function(FLOAT64, __VA_ARGS__) : (dtype) == FLOAT32 ? function(FLOAT32, __VA_ARGS__)         \
     : (dtype) == BFLOAT16 ? function(BFLOAT16, __VA_ARGS__) : function(FLOAT16, __VA_ARGS__))

/* One online softmax step of the row in a slot with columns from .. to - 1 of a tile, as in online_softmax.h. */
static void N(attend_row)(const Task *task, int64_t slot, const ColumnTile *tile, int64_t from, int64_t to, REAL bias) {
    const Scratch *s = &task->s;
    const int dtype = task->p->dtype;
    REAL *query = s->packed_rows[0] + slot * task->padded_dim, *sums = s->slot_sums[0] + slot * task->padded_dim;
    Vector maxima = FOR_DTYPE(N(score_columns_of), dtype, task, s->scores, query, tile->column, from, to, bias), total = {0};
    REAL max = s->slot_max[slot], most = -(REAL)INFINITY, sum = 0;
    for (int i = 0; i < N(LANES); i++)
        most = maxima[i] > most ? maxima[i] : most;
    if (most > LARGE_LSE || most < -LARGE_LSE)
        most = N(score_in_order)(task, s->scores, query, tile->column, from, to, bias);
    max = most > max ? most : max;
    Vector base = N(broadcast)(max == -(REAL)INFINITY ? 0 : max), factor = N(exp2)(s->slot_max[slot] - base);
    for (int64_t k = 0; k < to - from; k += N(LANES)) {
        Vector p = N(exp2)(N(load_vector)(s->scores + k) - base);
        N(store_vector)(s->scores + k, p);
        total += p;
    }
    for (int i = 0; i < N(LANES); i++)
        sum += total[i];
    for (int64_t d = 0; d < task->padded_dim; d += N(LANES))
        N(store_vector)(sums + d, factor * N(load_vector)(sums + d));
    FOR_DTYPE(N(add_values_of), dtype, task, sums, s->scores, tile->column, from, to);
    s->slot_max[slot] = max, s->slot_sum[slot] = factor[0] * s->slot_sum[slot] + sum;
}

static void N(attend_few)(const Task *task, const RowList *list, const ColumnTile *tile, REAL bias) {
    const Scratch *s = &task->s;
    for (int64_t slot = list->first; slot < list->first + list->count; slot++) {
        int64_t from = 0, to = tile->count;
        while (from < to && s->column_position[from] < s->slot_first[slot])
            from++;
        while (to > from && s->column_position[to - 1] > s->slot_last[slot])
            to--;
        if (from < to)
            N(attend_row)(task, slot, tile, from, to, bias);
    }
}

#undef FOR_DTYPE
