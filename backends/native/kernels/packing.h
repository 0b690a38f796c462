/* Packing: rows and columns of tensors, of any stride, dtype and alignment, to the layouts that matmul.h reads. Included once for
 * each KIND.
 *
 *     pack_rows      q (in BACKWARD k, v)       rows of slot_line[]   -> packed_rows; plain_rows in BACKWARD
 *     pack_columns   k, v (q, dout)             tile->column[]        -> packed_columns; columns where they lie as read
 *     pair_columns   packed columns             two at a time         -> added_columns, in KIND pairs
 *
 * Columns are packed once for all row lists that are at hand.
 */

/* LANES half numbers as REAL, in vectors what load_float does one by one. */
__attribute__((always_inline)) static inline Vector N(load_half_vector)(const char *from, const int dtype) {
    uint16_t halves __attribute__((vector_size(2 * N(LANES))));
    memcpy(&halves, from, sizeof halves);
    Lanes bits = __builtin_convertvector(halves, Lanes), rest = (bits & 0x7fff) << 13;
    if (dtype == BFLOAT16)
        return (Vector)(bits << 16);
    return (Vector)((Lanes)((Vector)rest * (REAL)0x1p112) | ((rest >= 0x0f800000) & 0x7f800000) | (bits & 0x8000) << 16);
}

/* The units done .. done + PANEL - 1 of a row of `dim` numbers, with zeros beyond its end. */
__attribute__((always_inline)) static inline void N(load_panel)(REAL *to, const char *row, int64_t done, int64_t dim, int dtype) {
    const int64_t bytes = UNIT == 2 ? 2 : bytes_of(dtype);
    const char *from = row + done * UNIT * bytes;
    int64_t left = dim - done * UNIT;
    if (left >= PANEL * UNIT && bytes * UNIT == sizeof(REAL)) {
        for (int i = 0; i < PANEL; i += N(LANES))
            N(store_vector)(to + i, N(load_vector)(N(numbers)(from) + i));
        return;
    }
    left = left < PANEL * UNIT ? left : PANEL * UNIT;
    N(clear)(to, PANEL);
#if UNIT == 2
    memcpy(to, from, (size_t)left * 2);
#else
    R(load)(to, from, left, dtype);
#endif
}

/* LANES rows as they are, from the slot `first` on; in KIND pairs, two at a time. */
static inline void N(keep_rows)(const Task *task, int64_t first, const REAL *lines, int64_t width) {
    REAL *plain = task->s.plain_rows + first / UNIT * task->padded_dim;
#if UNIT == 1
    memcpy(plain, lines, (size_t)(N(LANES) * width) * sizeof(REAL));
#else
    for (int64_t i = 0; i < N(LANES); i += 2)
        for (int64_t done = 0; done < task->padded_dim; done += PANEL)
            N(store_vector)(plain + i / 2 * task->padded_dim + done, pair_halves(lines + i * width, lines + (i + 1) * width, done));
#endif
}

static const char *N(row_of_slot)(const Task *task, int which, int64_t slot) {
    const int64_t line = task->s.slot_line[slot], row = N(row_of)(task->p, line), head = line - row * task->p->shared_heads;
    return row_address(&task->row_tensor[which], task->batch, N(position)(task, row), task->row_head + head);
}

static void N(prefetch_rows)(const Task *task, int which, int64_t first, int64_t slots) {
    for (int64_t i = first; i < lesser(first + N(LANES), slots); i++)
        for (int64_t byte = 0; task->s.slot_line[i] < N(lines)(task->p) && byte < task->row_bytes; byte += 64)
            __builtin_prefetch(N(row_of_slot)(task, which, i) + byte, 0, 3);
}

/* Whether rows of a tensor can be transposed from where they lie: numbers as computed with, in whole panels. */
static int N(lie_as_computed)(const Task *task, const TensorView *tensor) {
    return UNIT == 1 && bytes_of(task->p->dtype) == sizeof(REAL) && task->p->dim % PANEL == 0 && (uintptr_t)tensor->data % sizeof(REAL) == 0;
}

/* LANES rows from the slot `first` on, one after the other in `lines`; 0 where a slot is empty. */
static void N(load_rows)(const Task *task, int which, int64_t first, int64_t width, REAL *lines) {
    for (int64_t i = 0; i < N(LANES); i++) {
        int is_empty = task->s.slot_line[first + i] == N(lines)(task->p);
        const char *from = N(row_of_slot)(task, which, first + i);
        for (int64_t done = 0; !is_empty && done < width; done += PANEL)
            N(load_panel)(lines + i * width + done, from, done, task->p->dim, task->p->dtype);
        if (is_empty)
            N(clear)(lines + i * width, width);
    }
}

/* The rows of the slots, transposed; 0 where a slot is empty. In BACKWARD they are kept as they are, too. */
__attribute__((noinline)) static void N(pack_rows)(const Task *task, int which, int64_t slots) {
    const int64_t width = round_up(UNITS(task->p->dim), PANEL);
    const int kept = task->phase == BACKWARD && which == 0, in_place = !kept && N(lie_as_computed)(task, &task->row_tensor[which]);
    REAL *lines = task->s.packed_columns[0];
    const REAL *row[N(LANES)];
    if (in_place)
        N(clear)(lines, width); /* the row of an empty slot */
    for (int64_t first = 0; first < slots; first += N(LANES)) {
        N(prefetch_rows)(task, which, first + N(LANES), slots);
        if (!in_place)
            N(load_rows)(task, which, first, width, lines);
        for (int64_t i = 0; i < N(LANES); i++) {
            int is_empty = task->s.slot_line[first + i] == N(lines)(task->p);
            row[i] = !in_place ? lines + i * width : is_empty ? lines : N(numbers)(N(row_of_slot)(task, which, first + i));
        }
        for (int64_t done = 0; done < width; done += N(LANES))
            N(transpose_lines)(task->s.packed_rows[which] + first * width + done * N(LANES), N(LANES), row, done);
        if (kept)
            N(keep_rows)(task, first, lines, width);
    }
}

/* Ask for the columns of the next tile: the memory has all the time that this one takes. */
static void N(prefetch_columns)(const Task *task, int which) {
    const TensorView *tensor = &task->column_tensor[which];
    const ColumnTile *tile = task->s.tiles->ahead;
    const char *base = row_address(tensor, task->batch, 0, task->column_head);
    for (int64_t k = 0; tile && k < tile->count; k++)
        for (int64_t byte = 0; byte < task->row_bytes; byte += 64)
            __builtin_prefetch(base + tile->column[k] * tensor->row + byte, 0, 2);
}

/* Whether products can read the columns of a tile where they lie: one right behind the other, in whole register blocks. */
static inline int N(lie_as_read)(const Task *task, int which, const ColumnTile *tile) {
    const TensorView *tensor = &task->column_tensor[which];
    int64_t dim = task->p->dim, count = tile->count, k = 0;
    if (!N(lie_as_computed)(task, tensor) || dim == PANEL || count % REGISTER_ROWS || tensor->row != dim * (int64_t)sizeof(REAL))
        return 0;
    while (k < count && tile->column[k] == tile->column[0] + k)
        k++;
    return k == count;
}

/* Columns of whole panels; half numbers are widened, but for KIND pairs. The compiler sees the dtype. */
__attribute__((always_inline)) static inline void N(pack_panels)(
    const int dtype, REAL *packed, const ColumnTile *tile, const char *base, int64_t row, int64_t width
) {
    const int is_half = UNIT == 1 && (dtype == BFLOAT16 || dtype == FLOAT16);
    const int64_t bytes = is_half ? 2 : sizeof(REAL);
    for (int64_t k = 0; k < tile->count; k++) {
        const char *from = base + tile->column[k] * row;
        REAL *to = packed + k * PANEL;
        for (int64_t done = 0; done < width; done += PANEL, to += PANEL * TILE_COLUMNS, from += PANEL * bytes)
#pragma GCC unroll 16
            for (int64_t i = 0; i < PANEL; i += N(LANES)) {
                const char *at = from + i * bytes;
                N(store_vector)(to + i, is_half ? N(load_half_vector)(at, dtype) : N(load_vector)(N(numbers)(at)));
            }
    }
}

/* The columns of a tile, in panels along dim, with zeros up to a whole register block. */
__attribute__((noinline)) static void N(pack_columns)(const Task *task, int which, const ColumnTile *tile) {
    const TensorView *tensor = &task->column_tensor[which];
    const char *base = row_address(tensor, task->batch, 0, task->column_head);
    const int64_t dim = task->p->dim, row = tensor->row, width = round_up(UNITS(dim), PANEL), count = tile->count;
    const int dtype = task->p->dtype;
    REAL *packed = task->s.packed_columns[which];
    task->s.columns[which] = (Columns){packed, PANEL};
    if (N(lie_as_read)(task, which, tile)) {
        task->s.columns[which] = (Columns){N(numbers)(base + tile->column[0] * row), dim};
        return N(prefetch_columns)(task, which);
    }
    const int whole = dim % (PANEL * UNIT) == 0;
    if (whole && UNIT == 1 && dtype == BFLOAT16)
        N(pack_panels)(BFLOAT16, packed, tile, base, row, width);
    else if (whole && UNIT == 1 && dtype == FLOAT16)
        N(pack_panels)(FLOAT16, packed, tile, base, row, width);
    else if (whole)
        N(pack_panels)(FLOAT32, packed, tile, base, row, width);
    for (int64_t k = 0; !whole && k < count; k++)
        for (int64_t done = 0; done < width; done += PANEL)
            N(load_panel)(packed + k * PANEL + done * TILE_COLUMNS, base + tile->column[k] * row, done, dim, dtype);
    for (int64_t k = count; k < round_up(count, REGISTER_ROWS); k++)
        for (int64_t done = 0; done < width; done += PANEL)
            N(clear)(packed + k * PANEL + done * TILE_COLUMNS, PANEL);
    N(prefetch_columns)(task, which);
}

#if UNIT == 2
/* Packed columns two at a time. For tile registers, a line is a number of PANEL such pairs. */
__attribute__((noinline)) static void N(pair_columns)(const Task *task, int which, const ColumnTile *tile) {
    for (int64_t done = 0; done < task->padded_dim; done += PANEL) {
        const REAL *from = task->s.packed_columns[which] + done / (2 * PANEL) * PANEL * TILE_COLUMNS;
        REAL *panel = task->s.added_columns[which] + done * TILE_COLUMNS;
        for (int64_t k = 0; k < round_up(tile->count, REGISTER_ROWS); k += 2)
            N(store_vector)(panel + k / 2 * PANEL, pair_halves(from + k * PANEL, from + (k + 1) * PANEL, done % (2 * PANEL)));
#ifdef BF16_TILES
        for (int64_t k = 0; k < round_up(tile->count, REGISTER_ROWS); k += 2 * PANEL)
            N(transpose_square)(panel + k / 2 * PANEL, PANEL, panel + k / 2 * PANEL, PANEL);
#endif
    }
}
#endif

/* Place the columns of a tile, with the numbers that belong to each of them. */
static void N(place_columns)(const Task *task, const ColumnTile *tile) {
    const Scratch *s = &task->s;
    for (int64_t k = tile->count; k < round_up(tile->count, REGISTER_ROWS); k++)
        s->column_position[k] = (REAL)INFINITY, s->column_lse[k] = s->column_delta[k] = 0; /* beyond what any row sees */
    for (int64_t k = 0; task->p->bias != NO_BIAS && k < round_up(tile->count, REGISTER_ROWS); k++)
        N(place_column)(task, k, tile->column[k < tile->count ? k : 0]);
    for (int n = 0; n < task->relations; n++)
        N(relate_columns)(&s->relation[n], n < task->own, tile);
    for (int64_t k = 0; k < tile->count; k++) {
        s->column_position[k] = (REAL)(tile->column[k] - task->start);
        if (task->phase == BACKWARD) {
            s->column_lse[k] = N(query_lse)(task, tile->column[k]);
            s->column_delta[k] = N(numbers)(task->p->delta)[N(lse_index)(task, tile->column[k], task->head)];
        }
    }
}

static void N(pack_tile)(const Task *task, const ColumnTile *tile) {
    N(place_columns)(task, tile);
    N(pack_columns)(task, 0, tile);
    N(pack_columns)(task, 1, tile);
#if UNIT == 2
    if (task->phase == BACKWARD)
        N(pair_columns)(task, 0, tile);
    N(pair_columns)(task, 1, tile);
#endif
}
