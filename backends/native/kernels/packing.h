/* Packing: rows and columns of tensors, of any stride, dtype and alignment, to the layouts that matmul.h reads.
 * Included once for each KIND.
 *
 *     q (k), dout (v)  -- rows of slot_row[] -->       pack_rows     packed_rows[0], [1]      (row panels, dim, PANEL), transposed
 *                                                                    rows_as_columns          (dim panels, slots, PANEL), if fused
 *     k (q), v (dout)  -- tile->column[] -->           pack_columns  packed_columns[0], [1]   (dim panels, TILE_COLUMNS, PANEL)
 *     v, KIND pairs    -- two columns at a time -->    pack_column_pairs  packed_columns[1]   the same, a unit has a number of each
 *     lse, delta       -- tile->column[] -->           pack_tile     column_lse, column_delta, in BACKWARD_KEY
 *
 * In parentheses: BACKWARD_KEY. Columns are packed once for all row lists that are at hand.
 */

/* Units first .. first + count - 1 of a row. */
static inline void N(load_units)(REAL *to, const char *from, int64_t first, int64_t count, const Problem *p) {
#if UNIT == 1
    R(load)(to, from + first * N(element_bytes)(p), count, p->dtype);
#else
    int64_t numbers = p->dim - 2 * first < 2 * count ? p->dim - 2 * first : 2 * count;
    to[count - 1] = 0;
    memcpy(to, from + 4 * first, (size_t)numbers * 2);
#endif
}

/* The rows of the slots, transposed into panels; 0 where a slot is empty. */
static void N(pack_rows)(const Task *task, int which, int64_t slots) {
    const Problem *p = task->p;
    const int64_t units = UNITS(p->dim);
    REAL *to = task->s.packed_rows[which], *line = task->s.packed_columns[0];
    for (int64_t r = 0; r < slots; r++) {
        REAL *slot = to + r / PANEL * PANEL * units + r % PANEL;
        int64_t row = task->s.slot_row[r];
        if (row < p->block_rows)
            N(load_units)(line, row_address(&task->row_tensor[which], task->batch, task->start + row, task->row_head), 0, units, p);
        for (int64_t d = 0; d < units; d++)
            slot[d * PANEL] = row < p->block_rows ? line[d] : 0;
        for (int64_t d = 0; task->fused && which == 0 && d < task->padded_dim; d++)
            task->s.rows_as_columns[d / PANEL * PANEL * slots + r * PANEL + d % PANEL] =
                row < p->block_rows && d < p->dim ? line[d] : 0;
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
static void N(pack_columns)(const Task *task, int which, const ColumnTile *tile) {
    const int64_t units = UNITS(task->p->dim);
    for (int64_t k = 0; k < (tile->count + REGISTER_ROWS - 1) / REGISTER_ROWS * REGISTER_ROWS; k++) {
        const char *from = k < tile->count ? N(column_address)(task, which, tile->column[k]) : NULL;
        if (from && which == 0)
            N(prefetch_column)(task, 1, tile->column[k]);
        for (int64_t done = 0; done < units; done += PANEL) {
            REAL *to = task->s.packed_columns[which] + done * TILE_COLUMNS + k * PANEL;
            int64_t rest = from ? units - done : 0;
            if (rest >= PANEL) {
                N(load_units)(to, from, done, PANEL, task->p);
                continue;
            }
            if (rest)
                N(load_units)(to, from, done, rest, task->p);
            memset(to + rest, 0, (size_t)(PANEL - rest) * sizeof(REAL));
        }
    }
}

#if UNIT == 2
/* The values of a tile two columns at a time: a unit has the same number of both, 0 after the last column. */
static void N(pack_column_pairs)(const Task *task, const ColumnTile *tile) {
    for (int64_t k = 0; k < tile->count; k += 2) {
        const char *even = N(column_address)(task, 1, tile->column[k]), *odd = NULL;
        if (k + 1 < tile->count)
            odd = N(column_address)(task, 1, tile->column[k + 1]);
        for (int64_t d = 0; d < task->padded_dim; d++) {
            uint16_t low = 0, high = 0;
            if (d < task->p->dim)
                memcpy(&low, even + 2 * d, 2);
            if (d < task->p->dim && odd)
                memcpy(&high, odd + 2 * d, 2);
            REAL *to = task->s.packed_columns[1] + d / PANEL * PANEL * TILE_COLUMNS + k / 2 * PANEL + d % PANEL;
            *to = from_bits((uint32_t)high << 16 | low);
        }
    }
}
#endif

/* Pack the columns of a tile, with the numbers that belong to each of them. */
static void N(pack_tile)(const Task *task, const ColumnTile *tile) {
    const Scratch *s = &task->s;
    for (int64_t k = 0; k < tile->count; k++) {
        N(prefetch_column)(task, 0, tile->column[k]);
        s->column_position[k] = (REAL)(tile->column[k] - task->start);
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
