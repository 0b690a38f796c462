/* Packing: rows and columns of tensors, of any stride, dtype and alignment, to the layouts that matmul.h reads.
 * Included once for each KIND.
 *
 *     q (k), dout (v)  -- rows of slot_row[] -->       pack_rows     packed_rows[0], [1]      (row vectors, padded dim, LANES)
 *                                                                    plain_rows               (slots, padded dim), if fused
 *     k (q), v (dout)  -- tile->column[] -->           pack_columns  packed_columns[0], [1]   (dim panels, TILE_COLUMNS, PANEL)
 *     v, KIND pairs    -- two columns at a time -->    pack_column_pairs  packed_columns[1]   the same, a unit has a number of each
 *     lse, delta       -- tile->column[] -->           pack_tile     column_lse, column_delta, in BACKWARD_KEY
 *
 * In parentheses: BACKWARD_KEY. Columns are packed once for all row lists that are at hand.
 */

/* The units done .. done + PANEL - 1 of a row, with zeros beyond its end. */
static inline void N(load_panel)(REAL *to, const char *row, int64_t done, const Problem *p) {
    const char *from = row + done * UNIT * N(element_bytes)(p);
    int64_t left = p->dim - done * UNIT;
    if (left >= PANEL * UNIT && N(element_bytes)(p) * UNIT == sizeof(REAL)) {
        for (int i = 0; i < PANEL; i += N(LANES))
            N(store_vector)(to + i, N(load_vector)((const REAL *)(const void *)from + i));
        return;
    }
    left = left < PANEL * UNIT ? left : PANEL * UNIT;
    memset(to, 0, PANEL * sizeof(REAL));
#if UNIT == 2
    memcpy(to, from, (size_t)left * 2);
#else
    R(load)(to, from, left, p->dtype);
#endif
}

/* The rows of the slots, transposed; 0 where a slot is empty. */
__attribute__((noinline)) static void N(pack_rows)(const Task *task, int which, int64_t slots) {
    const Problem *p = task->p;
    const int64_t width = round_up(UNITS(p->dim), PANEL);
    REAL *lines = task->s.packed_columns[0];
    for (int64_t first = 0; first < slots; first += N(LANES)) {
        for (int64_t i = 0; i < N(LANES); i++) {
            int64_t row = task->s.slot_row[first + i];
            const char *from = row_address(&task->row_tensor[which], task->batch, task->start + row, task->row_head);
            for (int64_t done = 0; row < p->block_rows && done < width; done += PANEL)
                N(load_panel)(lines + i * width + done, from, done, p);
            if (row == p->block_rows)
                memset(lines + i * width, 0, (size_t)width * sizeof(REAL));
        }
        for (int64_t done = 0; done < width; done += N(LANES))
            N(transpose_square)(task->s.packed_rows[which] + first * width + done * N(LANES), N(LANES), lines + done, width);
        if (task->fused && which == 0)
            memcpy(task->s.plain_rows + first * width, lines, (size_t)(N(LANES) * width) * sizeof(REAL));
    }
}

static const char *N(column_address)(const Task *task, int which, int64_t column) {
    return row_address(&task->column_tensor[which], task->batch, column, task->column_head);
}

/* Columns far apart are each a miss, of the cache and of the pages: ask for many at once. */
static void N(prefetch_column)(const Task *task, int which, int64_t column) {
    const char *from = N(column_address)(task, which, column);
    for (int64_t byte = 0; byte < task->row_bytes; byte += 64)
        __builtin_prefetch(from + byte);
}

/* The columns of a tile, in panels along dim; 0 after the last column up to a whole register block, and after `dim` numbers. */
__attribute__((noinline)) static void N(pack_columns)(const Task *task, int which, const ColumnTile *tile) {
    const int64_t width = round_up(UNITS(task->p->dim), PANEL), last = round_up(tile->count, REGISTER_ROWS);
    for (int64_t k = 0; k < last; k++) {
        REAL *to = task->s.packed_columns[which] + k * PANEL;
        if (k < tile->count && which == 0)
            N(prefetch_column)(task, 1, tile->column[k]);
        for (int64_t done = 0; done < width; done += PANEL)
            if (k < tile->count)
                N(load_panel)(to + done * TILE_COLUMNS, N(column_address)(task, which, tile->column[k]), done, task->p);
            else
                memset(to + done * TILE_COLUMNS, 0, PANEL * sizeof(REAL));
    }
}

#if UNIT == 2
/* Numbers done .. done + PANEL - 1 of a column, each in a lane, with zeros beyond its end; zeros if there is no such column. */
static inline Lanes N(load_halves)(const Task *task, const ColumnTile *tile, int64_t k, int64_t done) {
    uint16_t halves __attribute__((vector_size(2 * PANEL))) = {0};
    int64_t left = k < tile->count ? task->p->dim - done : 0;
    if (left >= PANEL)
        memcpy(&halves, N(column_address)(task, 1, tile->column[k]) + 2 * done, sizeof halves);
    else if (left > 0)
        memcpy(&halves, N(column_address)(task, 1, tile->column[k]) + 2 * done, (size_t)left * 2);
    return __builtin_convertvector(halves, Lanes);
}

/* The values of a tile two columns at a time: a unit has the same number of both, 0 after the last column. For tile registers, a
 * line is a number of PANEL such pairs. */
__attribute__((noinline)) static void N(pack_column_pairs)(const Task *task, const ColumnTile *tile) {
    for (int64_t done = 0; done < task->padded_dim; done += PANEL) {
        REAL *panel = task->s.packed_columns[1] + done * TILE_COLUMNS;
        for (int64_t k = 0; k < round_up(tile->count, REGISTER_ROWS); k += 2) {
            Lanes even = N(load_halves)(task, tile, k, done), odd = N(load_halves)(task, tile, k + 1, done);
            N(store_vector)(panel + k / 2 * PANEL, (Vector)(even | odd << 16));
        }
#ifdef BF16_TILES
        for (int64_t k = 0; k < round_up(tile->count, REGISTER_ROWS); k += 2 * PANEL)
            N(transpose_square)(panel + k / 2 * PANEL, PANEL, panel + k / 2 * PANEL, PANEL);
#endif
    }
}
#endif

/* Pack the columns of a tile, with the numbers that belong to each of them. */
static void N(pack_tile)(const Task *task, const ColumnTile *tile) {
    const Scratch *s = &task->s;
    const REAL seen = task->phase == BACKWARD_KEY ? (REAL)INFINITY : -(REAL)INFINITY;
    for (int64_t k = tile->count; k < round_up(tile->count, REGISTER_ROWS); k++)
        s->column_position[k] = -seen, s->column_lse[k] = s->column_delta[k] = 0;
    for (int64_t k = 0; k < tile->count; k++) {
        N(prefetch_column)(task, 0, tile->column[k]);
        s->column_position[k] = task->p->causal ? (REAL)(tile->column[k] - task->start) : seen;
        if (task->phase == BACKWARD_KEY) {
            s->column_lse[k] = N(query_lse)(task, tile->column[k]);
            s->column_delta[k] = ((const REAL *)(const void *)task->p->delta)[N(lse_index)(task, tile->column[k])];
        }
    }
    N(pack_columns)(task, 0, tile);
#if UNIT == 2
    N(pack_column_pairs)(task, tile);
#else
    N(pack_columns)(task, 1, tile);
#endif
}
