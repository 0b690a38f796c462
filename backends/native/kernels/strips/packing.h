/* Packing: the cells of a strip's planes, line by line. Included once for each KIND.
 *
 *     strip_keys     (lines, padded_dim, width), transposed; `apart`: (lines, groups across, vectors, padded_dim, LANES)
 *     strip_values   (lines, width, padded_dim)
 *
 * Lines are packed long before some of their cells are seen: memory is asked for the next line, or plane, meanwhile.
 */

/* A row as it is computed with; `in_place`: as it lies, in whole vectors. */
static inline void N(copy_row)(const Task *task, REAL *to, const char *row, int in_place) {
    if (!in_place)
        R(load)(to, row, task->p->dim, task->p->dtype);
    for (int64_t d = 0; in_place && d < task->padded_dim; d += N(LANES))
        N(store_vector)(to + d, N(load_vector)(N(numbers)(row) + d));
}

__attribute__((always_inline)) static inline void N(prefetch_row)(const Task *task, const char *row, const int near) {
    for (int64_t byte = 0; byte < task->row_bytes; byte += 64)
        near ? __builtin_prefetch(row + byte, 0, 3) : __builtin_prefetch(row + byte, 0, 2);
}

/* Pack LANES cells, whose rows of k and v are given, or NULL for 0 in their place. */
static void N(pack_cells)(
    const Task *task, const char *const key[N(LANES)], const char *const value[N(LANES)], REAL *keys, int64_t width, REAL *values
) {
    const int64_t dim = task->padded_dim;
    const int in_place = N(lie_as_computed)(task, &task->p->k) && N(lie_as_computed)(task, &task->p->v);
    REAL *lines = task->s.packed_columns[0];
    const REAL *line[N(LANES)];
    for (int64_t i = 0; i < N(LANES); i++) {
        line[i] = key[i] && in_place ? N(numbers)(key[i]) : lines + i * dim;
        if (!key[i] || !in_place)
            N(clear)(lines + i * dim, dim), N(clear)(values + i * dim, dim);
        if (key[i] && !in_place)
            N(copy_row)(task, lines + i * dim, key[i], 0);
        if (key[i])
            N(copy_row)(task, values + i * dim, value[i], in_place);
    }
    for (int64_t done = 0; done < dim; done += N(LANES))
        N(transpose_lines)(keys + done * width, width, line, done);
}

/* The keys of a packed line once more, for each group what it sees, so that its vectors begin with a line of the cache. */
static void N(part_keys)(const Task *task, const Strip *strip, int64_t line) {
    const int64_t dim = task->padded_dim;
    REAL *keys = task->s.strip_keys + line * strip->groups * strip->vectors * dim * N(LANES);
    for (int64_t x = strip->box.first[2]; x <= strip->box.last[2]; x += GROUP_ROWS / strip->fold)
        for (int64_t j = 0; j < strip->vectors; j++, keys += dim * N(LANES)) {
            const REAL *from = task->s.packed_columns[1] + seen_on(strip, 2, x, strip->sees[2].first).first * strip->fold + j * N(LANES);
            for (int64_t d = 0; d < task->p->dim; d++)
                N(store_vector)(keys + d * N(LANES), N(load_vector)(from + d * strip->width));
        }
}

/* Where LANES cells of a line lie in k and v, NULL for what no row sees. Asks for those that are packed next in their places; if
 * rows are a step apart, which share sets of the nearest cache, in the next one. */
static void N(find_cells)(
    const Task *task, const Strip *strip, int64_t plane, int64_t line, int64_t first, const char *key[N(LANES)], const char *value[N(LANES)]
) {
    const TensorView *k = &task->p->k, *v = &task->p->v;
    const int64_t ahead = rows_ahead(strip, plane, line), step = strip->axes[2].step, x = strip->sees[2].first + first / strip->fold;
    for (int64_t f = 0; f < strip->fold; f++) {
        const int64_t y = strip->first_line + line * strip->fold + f, row = position_in(strip->axes, &strip->box, plane, y, x);
        const int64_t cells = y < strip->sees[1].first || y > strip->sees[1].last ? 0 : strip->sees[2].last - x + 1;
        for (int64_t i = 0, at = f; at < N(LANES); i++, at += strip->fold) {
            key[at] = value[at] = NULL;
            if (i >= cells)
                continue;
            key[at] = row_address(k, task->batch, row + i * step, task->kv_head);
            value[at] = row_address(v, task->batch, row + i * step, task->kv_head);
            if (ahead) {
                N(prefetch_row)(task, key[at] + ahead * k->row, step == 1);
                N(prefetch_row)(task, value[at] + ahead * v->row, step == 1);
            }
        }
    }
}

static void N(pack_line)(const Task *task, const Strip *strip, int64_t plane, int64_t line) {
    const int64_t dim = task->padded_dim, at = line_at(strip, plane, line);
    REAL *keys = strip->apart ? task->s.packed_columns[1] : task->s.strip_keys + at * strip->width * dim;
    const char *key[N(LANES)], *value[N(LANES)];
    for (int64_t cell = 0; cell < strip->width; cell += N(LANES)) {
        N(find_cells)(task, strip, plane, line, cell, key, value);
        N(pack_cells)(task, key, value, keys + cell, strip->width, task->s.strip_values + (at * strip->width + cell) * dim);
    }
    if (strip->apart)
        N(part_keys)(task, strip, at);
}
