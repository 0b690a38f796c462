/* Packing: rows and columns of tensors, of any stride, dtype and alignment, to the layouts that matmul.h reads.
 * Included once for each KIND.
 *
 *     q (k), dout (v)  -- rows of slot_line[] -->      pack_rows     packed_rows[0], [1]      (row vectors, padded dim, LANES)
 *                                                                    plain_rows               (slots, padded dim), in BACKWARD
 *     k (q), v (dout)  -- tile->column[] -->           pack_columns  packed_columns[0], [1]   (dim panels, TILE_COLUMNS, PANEL)
 *     v, KIND pairs    -- two columns at a time -->    pack_column_pairs  packed_columns[1]   the same, a unit has a number of each
 *     lse, delta       -- tile->column[] -->           pack_tile     column_lse, column_delta, in BACKWARD
 *
 * In parentheses: BACKWARD. Columns are packed once for all row lists that are at hand.
 */

/* The units done .. done + PANEL - 1 of a row of `dim` numbers, with zeros beyond its end. */
__attribute__((always_inline)) static inline void N(load_panel)(REAL *to, const char *row, int64_t done, int64_t dim, int dtype) {
    const int64_t bytes = dtype == FLOAT64 ? 8 : dtype == FLOAT32 ? 4 : 2;
    const char *from = row + done * UNIT * bytes;
    int64_t left = dim - done * UNIT;
    if (left >= PANEL * UNIT && bytes * UNIT == sizeof(REAL)) {
        for (int i = 0; i < PANEL; i += N(LANES))
            N(store_vector)(to + i, N(load_vector)((const REAL *)(const void *)from + i));
        return;
    }
    left = left < PANEL * UNIT ? left : PANEL * UNIT;
    memset(to, 0, PANEL * sizeof(REAL));
#if UNIT == 2
    memcpy(to, from, (size_t)left * 2);
#else
    R(load)(to, from, left, dtype);
#endif
}

/* The rows of the slots, transposed; 0 where a slot is empty. */
__attribute__((noinline)) static void N(pack_rows)(const Task *task, int which, int64_t slots) {
    const Problem *p = task->p;
    const int64_t width = round_up(UNITS(p->dim), PANEL);
    REAL *lines = task->s.packed_columns[0];
    for (int64_t first = 0; first < slots; first += N(LANES)) {
        for (int64_t i = 0; i < N(LANES); i++) {
            int64_t line = task->s.slot_line[first + i], row = N(row_of)(p, line), head = line - row * p->shared_heads;
            const char *from = row_address(&task->row_tensor[which], task->batch, task->start + row, task->row_head + head);
            for (int64_t done = 0; line < N(lines)(p) && done < width; done += PANEL)
                N(load_panel)(lines + i * width + done, from, done, p->dim, p->dtype);
            if (line == N(lines)(p))
                memset(lines + i * width, 0, (size_t)width * sizeof(REAL));
        }
        for (int64_t done = 0; done < width; done += N(LANES))
            N(transpose_square)(task->s.packed_rows[which] + first * width + done * N(LANES), N(LANES), lines + done, width);
        if (task->phase == BACKWARD && which == 0)
            memcpy(task->s.plain_rows + first * width, lines, (size_t)(N(LANES) * width) * sizeof(REAL));
    }
}

/* Ask for the columns that the next tile of the same set will have, if it goes on as this one: the memory has all the time that
 * this tile takes. */
static void N(prefetch_columns)(const Task *task, int which, const ColumnTile *tile) {
    const TensorView *tensor = &task->column_tensor[which];
    const char *base = row_address(tensor, task->batch, 0, task->column_head);
    const int64_t row = tensor->row, bytes = task->row_bytes, *column = tile->column;
    const int64_t ahead = tile->count > 1 ? column[tile->count - 1] - column[0] + column[1] - column[0] : task->last_column;
    for (int64_t k = 0; k < tile->count && column[k] + ahead < task->last_column; k++)
        for (int64_t byte = 0; byte < bytes; byte += 64)
            __builtin_prefetch(base + (column[k] + ahead) * row + byte, 0, 2);
}

/* The columns of a tile, in panels along dim; 0 after the last column up to a whole register block, and after `dim` numbers. */
__attribute__((noinline)) static void N(pack_columns)(const Task *task, int which, const ColumnTile *tile) {
    const TensorView *tensor = &task->column_tensor[which];
    const char *base = row_address(tensor, task->batch, 0, task->column_head);
    const int64_t dim = task->p->dim, row = tensor->row, width = round_up(UNITS(dim), PANEL), count = tile->count;
    const int dtype = task->p->dtype;
    REAL *packed = task->s.packed_columns[which];
    for (int64_t k = 0; k < count; k++)
        for (int64_t done = 0; done < width; done += PANEL)
            N(load_panel)(packed + k * PANEL + done * TILE_COLUMNS, base + tile->column[k] * row, done, dim, dtype);
    for (int64_t k = count; k < round_up(count, REGISTER_ROWS); k++)
        for (int64_t done = 0; done < width; done += PANEL)
            memset(packed + k * PANEL + done * TILE_COLUMNS, 0, PANEL * sizeof(REAL));
    N(prefetch_columns)(task, which, tile);
}

#if UNIT == 2
/* Numbers done .. done + PANEL - 1 of a column, each in a lane, with zeros beyond its end; zeros if there is no such column. */
static inline Lanes N(load_halves)(const Task *task, const ColumnTile *tile, int64_t k, int64_t done) {
    uint16_t halves __attribute__((vector_size(2 * PANEL))) = {0};
    if (k < tile->count) {
        const char *from = row_address(&task->column_tensor[1], task->batch, tile->column[k], task->column_head) + 2 * done;
        int64_t left = task->p->dim - done;
        if (left >= PANEL)
            memcpy(&halves, from, sizeof halves);
        else if (left > 0)
            memcpy(&halves, from, (size_t)left * 2);
    }
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
    N(prefetch_columns)(task, 1, tile);
}
#endif

/* Place the columns of a tile, with the numbers that belong to each of them. */
static void N(place_columns)(const Task *task, const ColumnTile *tile) {
    const Scratch *s = &task->s;
    for (int64_t k = tile->count; k < round_up(tile->count, REGISTER_ROWS); k++)
        s->column_position[k] = (REAL)INFINITY, s->column_lse[k] = s->column_delta[k] = 0; /* beyond what any row sees */
    for (int64_t k = 0; task->p->bias != NO_BIAS && k < round_up(tile->count, REGISTER_ROWS); k++)
        N(place_column)(task, k, tile->column[k < tile->count ? k : 0]);
    for (int64_t k = 0; k < tile->count; k++) {
        s->column_position[k] = (REAL)(tile->column[k] - task->start);
        for (int n = 0; n < task->relations; n++)
            N(relate_column)(&s->relation[n], k, tile->column[k]);
        if (task->phase == BACKWARD) {
            s->column_lse[k] = N(query_lse)(task, tile->column[k]);
            s->column_delta[k] = ((const REAL *)(const void *)task->p->delta)[N(lse_index)(task, tile->column[k], task->head)];
        }
    }
}

/* Pack the columns of a tile. */
static void N(pack_tile)(const Task *task, const ColumnTile *tile) {
    N(place_columns)(task, tile);
    N(pack_columns)(task, 0, tile);
#if UNIT == 2
    N(pack_column_pairs)(task, tile);
#else
    N(pack_columns)(task, 1, tile);
#endif
}
