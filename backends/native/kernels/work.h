/* What one thread works in, and how rows and columns get in and out of it. Included once a kind. */
#define Scratch N(Scratch)
#define Work N(Work)

#undef UNITS
#define UNITS(count) (((count) + UNIT - 1) / UNIT)

/* What one thread works in. Two operands a side: queries and output gradients on one, keys and values on the other. A place is
 * where a row is packed; rows are counted from the start of the span, and one more row is spare. */
typedef struct {
    REAL *sums[2];               /* (span + 1, padded dim): what rows add up */
    REAL *rows[2];               /* packed rows, (places, dim) */
    REAL *columns[2];            /* packed columns of a tile */
    REAL *lines;                 /* rows[0] packed as columns are */
    REAL *turned;                /* (TILE_COLUMNS + 1, padded dim): what columns add up, the last one spare */
    REAL *scores, *gradients;    /* of a tile */
    REAL *most, *total;          /* (places + TILE_ROWS,): running maximum and sum, or logsumexp and delta */
    REAL *row_place;             /* (places + TILE_ROWS,): rows as numbers */
    REAL *place, *lse, *delta;   /* (TILE_COLUMNS,): columns as numbers, from the start of the span; theirs of the queries */
    REAL *max, *sum;             /* (span + 1,), by row: the softmax so far */
    int64_t *row;                /* (places,) */
    uint64_t *set;               /* (span,): the branches that a row takes part in */
    Stream *stream;
} Scratch;

typedef struct {
    const Problem *p;
    Scratch s;
    int phase, accumulators, fused;
    int64_t batch, head, kv_head, start, stop, padded, row_bytes;
    Rows row[2], column[2];            /* what is packed as rows and as columns; columns[1] meets rows[1] in the backward */
    int64_t row_head, column_head, first_column, last_column; /* only the columns first_column .. last_column - 1 */
} Work;

static inline int64_t N(number_bytes)(const Problem *p) { return p->dtype == FLOAT64 ? 8 : p->dtype == FLOAT32 ? 4 : 2; }

static char *N(carve)(char **at, size_t count, size_t size) {
    char *here = *at;
    *at += (count * size + 63) / 64 * 64;
    return here;
}

static int64_t N(places)(const Problem *p) { return (p->span + PANEL - 1) / PANEL * PANEL + LISTS * PANEL; }

/* The bytes of a thread's scratch in a phase; lays it out in `memory` if `s` is not NULL. */
static size_t N(scratch)(const Problem *p, int phase, Scratch *s, char *memory) {
    size_t span = (size_t)p->span, places = (size_t)N(places)(p), dim = (size_t)p->dim, padded = (dim + PANEL - 1) / PANEL * PANEL;
    int fused = phase == BACKWARD_KEY && p->blocks;
    char *at = memory;
    Scratch unused;
    s = s ? s : &unused;
#define CARVE(count, type) (type *)(void *)N(carve)(&at, count, sizeof(type))
    for (int i = 0; i < 2; i++) {
        s->sums[i] = CARVE(i == 0 || phase == BACKWARD_KEY ? (span + 1) * padded : 0, REAL);
        s->rows[i] = CARVE(i == 0 || phase != FORWARD ? places * dim : 0, REAL);
        s->columns[i] = CARVE(TILE_COLUMNS * padded, REAL);
    }
    s->lines = CARVE(fused ? places * padded : 0, REAL), s->turned = CARVE(fused ? (TILE_COLUMNS + 1) * padded : 0, REAL);
    s->scores = CARVE(TILE_COLUMNS * TILE_ROWS, REAL);
    s->gradients = CARVE(phase != FORWARD ? TILE_COLUMNS * TILE_ROWS : 0, REAL);
    s->most = CARVE(places + TILE_ROWS, REAL), s->total = CARVE(places + TILE_ROWS, REAL);
    s->row_place = CARVE(places + TILE_ROWS, REAL);
    s->place = CARVE(TILE_COLUMNS, REAL), s->lse = CARVE(TILE_COLUMNS, REAL), s->delta = CARVE(TILE_COLUMNS, REAL);
    s->max = CARVE(span + 1, REAL), s->sum = CARVE(span + 1, REAL);
    s->row = CARVE(places, int64_t), s->set = CARVE(span, uint64_t), s->stream = CARVE(1, Stream);
#undef CARVE
    return (size_t)(at - memory);
}

/* Units first .. first + count - 1 of a row. */
static inline void N(load_units)(REAL *to, const char *from, int64_t first, int64_t count, const Problem *p) {
#if UNIT == 1
    R(load)(to, from + first * N(number_bytes)(p), count, p->dtype);
#else
    int64_t numbers = p->dim - 2 * first < 2 * count ? p->dim - 2 * first : 2 * count;
    to[count - 1] = 0;
    memcpy(to, from + 4 * first, (size_t)numbers * 2);
#endif
}

/* All places transposed into panels; 0 where a place has no row. */
static void N(pack_rows)(const Work *w, int which, int64_t places) {
    const Problem *p = w->p;
    const int64_t units = UNITS(p->dim);
    REAL *to = w->s.rows[which], *line = w->s.columns[0];
    for (int64_t r = 0; r < places; r++) {
        REAL *place = to + r / PANEL * PANEL * units + r % PANEL;
        int64_t row = w->s.row[r];
        if (row < p->span)
            N(load_units)(line, row_of(&w->row[which], w->batch, w->start + row, w->row_head), 0, units, p);
        for (int64_t d = 0; d < units; d++)
            place[d * PANEL] = row < p->span ? line[d] : 0;
        for (int64_t d = 0; w->fused && which == 0 && d < w->padded; d++)
            w->s.lines[d / PANEL * PANEL * places + r * PANEL + d % PANEL] = row < p->span && d < p->dim ? line[d] : 0;
    }
}

static const char *N(column_at)(const Work *w, int which, int64_t column) {
    return row_of(&w->column[which], w->batch, column, w->column_head);
}

/* Rows far apart are each a miss, of the cache and of the pages: ask for many at once. */
static void N(fetch_column)(const Work *w, int which, int64_t column) {
    const char *from = N(column_at)(w, which, column);
    for (int64_t byte = 0; byte < w->row_bytes; byte += 64)
        __builtin_prefetch(from + byte);
}

/* The columns of a tile, in panels along dim, with zeros after the last column up to a whole block and after `dim` numbers. */
static void N(pack_columns)(const Work *w, int which, const Columns *columns) {
    const int64_t units = UNITS(w->p->dim);
    for (int64_t k = 0; k < (columns->count + BLOCK_ROWS - 1) / BLOCK_ROWS * BLOCK_ROWS; k++) {
        const char *from = k < columns->count ? N(column_at)(w, which, columns->column[k]) : NULL;
        if (from && which == 0)
            N(fetch_column)(w, 1, columns->column[k]);
        for (int64_t done = 0; done < units; done += PANEL) {
            REAL *to = w->s.columns[which] + done * TILE_COLUMNS + k * PANEL;
            int64_t rest = from ? units - done : 0;
            if (rest >= PANEL) {
                N(load_units)(to, from, done, PANEL, w->p);
                continue;
            }
            if (rest)
                N(load_units)(to, from, done, rest, w->p);
            memset(to + rest, 0, (size_t)(PANEL - rest) * sizeof(REAL));
        }
    }
}

#if UNIT == 2
/* Columns two by two: a unit has the same number of both, 0 after the last column. */
static void N(pack_pairs)(const Work *w, const Columns *columns) {
    for (int64_t k = 0; k < columns->count; k += 2) {
        const char *even = N(column_at)(w, 1, columns->column[k]), *odd = NULL;
        if (k + 1 < columns->count)
            odd = N(column_at)(w, 1, columns->column[k + 1]);
        for (int64_t d = 0; d < w->padded; d++) {
            uint16_t low = 0, high = 0;
            if (d < w->p->dim)
                memcpy(&low, even + 2 * d, 2);
            if (d < w->p->dim && odd)
                memcpy(&high, odd + 2 * d, 2);
            w->s.columns[1][d / PANEL * PANEL * TILE_COLUMNS + k / 2 * PANEL + d % PANEL] = from_bits((uint32_t)high << 16 | low);
        }
    }
}
#endif

/* Where (batch, head, row) lies in lse and delta. */
static int64_t N(place_of)(const Work *w, int64_t row) { return (w->batch * w->p->heads + w->head) * w->p->seq + row; }

/* exp(... - inf) = 0: a query that sees nothing has no gradient. */
static REAL N(lse_of)(const Work *w, int64_t row) {
    REAL lse = ((const REAL *)(const void *)w->p->lse)[N(place_of)(w, row)];
    return lse == -(REAL)INFINITY ? (REAL)INFINITY : lse;
}

/* Pack the columns of a tile, with what belongs to each of them. */
static void N(open_tile)(const Work *w, const Columns *columns) {
    const Scratch *s = &w->s;
    for (int64_t k = 0; k < columns->count; k++) {
        N(fetch_column)(w, 0, columns->column[k]);
        s->place[k] = (REAL)(columns->column[k] - w->start);
        if (w->phase == BACKWARD_KEY) {
            s->lse[k] = N(lse_of)(w, columns->column[k]);
            s->delta[k] = ((const REAL *)(const void *)w->p->delta)[N(place_of)(w, columns->column[k])];
        }
    }
    N(pack_columns)(w, 0, columns);
#if UNIT == 2
    N(pack_pairs)(w, columns);
#else
    N(pack_columns)(w, 1, columns);
#endif
}

/* to[row, head] += factor * sums, and begin the sums anew. */
static void N(add)(const Work *w, const Rows *to, int64_t row, int64_t head, REAL *sums, REAL factor) {
    REAL *line = (REAL *)(void *)row_of(to, w->batch, row, head);
    for (int64_t d = 0; d < w->p->dim; d++) {
        line[d] += factor * sums[d];
        sums[d] = 0;
    }
}

/* Add to dq what the rows gave to the tile's columns. */
static void N(close_tile)(const Work *w, const Columns *columns) {
    for (int64_t k = 0; k < columns->count; k++)
        N(add)(w, &w->p->dq, columns->column[k], w->head, w->s.turned + k * w->padded, (REAL)w->p->scale);
}

/* Add to dk and dv what the columns gave to the rows. */
static void N(close_rows)(const Work *w, int64_t places) {
    for (int64_t i = 0; i < places; i++) {
        int64_t row = w->s.row[i];
        if (row == w->p->span)
            continue;
        N(add)(w, &w->p->dk, w->start + row, w->kv_head, w->s.sums[0] + row * w->padded, (REAL)w->p->scale);
        N(add)(w, &w->p->dv, w->start + row, w->kv_head, w->s.sums[1] + row * w->padded, 1);
    }
}
