/* One item of work: the rows of a span, list by list; for each list the columns it sees, tile by tile. Included once a type. */
#define Scratch N(Scratch)
#define Work N(Work)

/* What one thread works in. Two operands a side: queries and output gradients on one, keys and values on the other. */
typedef struct {
    REAL *sums[2];                     /* (span + 1, padded dim): what rows add up; the last row is spare */
    REAL *rows[2];                     /* packed rows of a list */
    REAL *columns[2];                  /* packed columns of a tile */
    REAL *scores, *gradients;          /* of a tile */
    REAL *most, *total;                /* (span + TILE_ROWS,), by place in the list: running maximum and sum, or lse and delta */
    REAL *row_place;                   /* (span + TILE_ROWS,): positions, counted from the start of the span */
    REAL *place, *bias, *lse, *delta;  /* (TILE_COLUMNS,) */
    REAL *max, *sum;                   /* (span + 1,), by row: the softmax so far */
    int64_t *list, *column;            /* rows of a list, from the start of the span; positions of a tile's columns */
    uint64_t *set;                     /* (span,): the branches that a row takes part in */
    int *times;
} Scratch;

typedef struct {
    const Problem *p;
    Scratch s;
    int phase, accumulators;
    int64_t batch, head, kv_head, start, stop, padded;
    Rows row[2], column[2];            /* what is packed as rows and as columns; columns[1] meets rows[1] in the backward */
    int64_t row_head, column_head;
} Work;

static char *N(carve)(char **at, size_t count, size_t size) {
    char *here = *at;
    *at += (count * size + 63) / 64 * 64;
    return here;
}

/* The bytes of a thread's scratch; lays it out in `memory` if `s` is not NULL. */
static size_t N(scratch)(const Problem *p, Scratch *s, char *memory) {
    size_t span = (size_t)p->span, padded = (size_t)(p->dim + PANEL - 1) / PANEL * PANEL, dim = (size_t)p->dim;
    char *at = memory;
    Scratch unused;
    s = s ? s : &unused;
#define CARVE(count, type) (type *)(void *)N(carve)(&at, count, sizeof(type))
    for (int i = 0; i < 2; i++) {
        s->sums[i] = CARVE((span + 1) * padded, REAL);
        s->rows[i] = CARVE((span + PANEL) * dim, REAL);
        s->columns[i] = CARVE(TILE_COLUMNS * padded, REAL);
    }
    s->scores = CARVE(TILE_COLUMNS * TILE_ROWS, REAL), s->gradients = CARVE(TILE_COLUMNS * TILE_ROWS, REAL);
    s->most = CARVE(span + TILE_ROWS, REAL), s->total = CARVE(span + TILE_ROWS, REAL);
    s->row_place = CARVE(span + TILE_ROWS, REAL);
    s->place = CARVE(TILE_COLUMNS, REAL), s->bias = CARVE(TILE_COLUMNS, REAL);
    s->lse = CARVE(TILE_COLUMNS, REAL), s->delta = CARVE(TILE_COLUMNS, REAL);
    s->max = CARVE(span + 1, REAL), s->sum = CARVE(span + 1, REAL);
    s->list = CARVE(span, int64_t), s->column = CARVE(TILE_COLUMNS, int64_t);
    s->set = CARVE(span, uint64_t), s->times = CARVE(TILE_COLUMNS, int);
#undef CARVE
    return (size_t)(at - memory);
}

/* Rows of a list, transposed into panels; rows that fill the last panel are 0. */
static void N(pack_rows)(const Work *w, int which, int64_t count) {
    const Problem *p = w->p;
    REAL *to = w->s.rows[which], *line = w->s.columns[0];
    for (int64_t r = 0; r < (count + PANEL - 1) / PANEL * PANEL; r++) {
        REAL *place = to + r / PANEL * PANEL * p->dim + r % PANEL;
        if (r < count)
            N(load)(line, row_of(&w->row[which], w->batch, w->start + w->s.list[r], w->row_head), p->dim, p->dtype);
        for (int64_t d = 0; d < p->dim; d++)
            place[d * PANEL] = r < count ? line[d] : 0;
    }
}

/* The columns of a tile, in panels along dim, with zeros after `count` columns up to a whole block and after `dim` numbers. */
static void N(pack_columns)(const Work *w, int which, int64_t count) {
    const Problem *p = w->p;
    for (int64_t k = 0; k < (count + BLOCK_ROWS - 1) / BLOCK_ROWS * BLOCK_ROWS; k++) {
        const char *from = k < count ? row_of(&w->column[which], w->batch, w->s.column[k], w->column_head) : NULL;
        for (int64_t done = 0; done < p->dim; done += PANEL) {
            REAL *to = w->s.columns[which] + done * TILE_COLUMNS + k * PANEL;
            int64_t rest = from ? p->dim - done : 0;
            if (rest >= PANEL) {
                N(load)(to, from + done * (p->dtype == FLOAT64 ? 8 : p->dtype == FLOAT32 ? 4 : 2), PANEL, p->dtype);
                continue;
            }
            if (rest)
                N(load)(to, from + done * (p->dtype == FLOAT64 ? 8 : p->dtype == FLOAT32 ? 4 : 2), rest, p->dtype);
            memset(to + rest, 0, (size_t)(PANEL - rest) * sizeof(REAL));
        }
    }
}

/* Where (batch, head, row) lies in lse and delta. */
static int64_t N(place_of)(const Work *w, int64_t row) { return (w->batch * w->p->heads + w->head) * w->p->seq + row; }

/* exp(... - inf) = 0: a query that sees nothing has no gradient. */
static REAL N(lse_of)(const Work *w, int64_t row) {
    REAL lse = ((const REAL *)(const void *)w->p->lse)[N(place_of)(w, row)];
    return lse == -(REAL)INFINITY ? (REAL)INFINITY : lse;
}

/* Pack the columns of a tile, with what belongs to each of them. */
static void N(open_tile)(const Work *w, int64_t count) {
    const Scratch *s = &w->s;
    for (int64_t k = 0; k < TILE_COLUMNS; k++) {
        s->bias[k] = k < count ? (s->times[k] > 1 ? (REAL)log(s->times[k]) : 0) : -(REAL)INFINITY;
        s->place[k] = k < count ? (REAL)(s->column[k] - w->start) : 0;
        if (w->phase == BACKWARD_KEY) {
            s->lse[k] = k < count ? N(lse_of)(w, s->column[k]) : (REAL)INFINITY;
            s->delta[k] = k < count ? ((const REAL *)(const void *)w->p->delta)[N(place_of)(w, s->column[k])] : 0;
        }
    }
    N(pack_columns)(w, 0, count);
    N(pack_columns)(w, 1, count);
}

/* A tile of scores: rows first .. first + count - 1 of the list with columns from .. to - 1, whole blocks of them. */
static void N(tile)(const Work *w, int64_t first, int64_t count, int64_t from, int64_t to, int masked) {
    const Scratch *s = &w->s;
    const Problem *p = w->p;
    const REAL scale = (REAL)p->scale, *place = s->row_place + first;
    int64_t panels = (count + PANEL - 1) / PANEL, offset = first * p->dim;
    REAL *sums[2][TILE_ROWS], factor[TILE_ROWS];
    for (int r = 0; r < TILE_ROWS; r++)
        factor[r] = 1;
    for (int a = 0; a < w->accumulators; a++)
        for (int64_t r = 0; r < TILE_ROWS; r++)
            sums[a][r] = s->sums[a] + (r < count ? s->list[first + r] : p->span) * w->padded;
    N(multiply)(s->scores, s->columns[0], s->rows[0] + offset, from, to, panels, p->dim);
    if (w->phase == FORWARD) {
        N(soften)(s->scores, s->most + first, s->total + first, factor, place, s->place, s->bias, scale, masked, from, to,
                  panels * PANEL);
        N(accumulate)(sums[0], factor, s->scores, s->columns[1], from, to, count, p->dim);
        return;
    }
    N(multiply)(s->gradients, s->columns[1], s->rows[1] + offset, from, to, panels, p->dim);
    int by_column = w->phase == BACKWARD_KEY;
    const REAL *lse = by_column ? s->lse : s->most + first, *delta = by_column ? s->delta : s->total + first;
    N(differentiate)(s->scores, s->gradients, lse, delta, by_column, place, s->place, s->bias, scale, by_column ? -masked : masked,
                     from, to, panels * PANEL);
    N(accumulate)(sums[0], factor, s->gradients, s->columns[0], from, to, count, p->dim);
    if (w->accumulators == 2)
        N(accumulate)(sums[1], factor, s->scores, s->columns[1], from, to, count, p->dim);
}

/* All rows of the list with a tile's columns; under causality, only the columns that some row of a tile sees. */
static void N(tiles)(const Work *w, int64_t rows, int64_t count) {
    const Scratch *s = &w->s;
    int backwards = w->phase == BACKWARD_KEY;
    for (int64_t first = 0; first < rows; first += TILE_ROWS) {
        int64_t size = rows - first < TILE_ROWS ? rows - first : TILE_ROWS, from = 0, to = count;
        int masked = 0;
        if (w->p->causal) {
            REAL low = s->row_place[first], high = s->row_place[first + size - 1];
            while (to > from && (backwards ? s->place[to - 1] < low : s->place[to - 1] > high))
                to--;
            while (from < to && (backwards ? s->place[from] < low : s->place[from] > high))
                from++;
        }
        int64_t left = from / BLOCK_ROWS * BLOCK_ROWS, right = (to + BLOCK_ROWS - 1) / BLOCK_ROWS * BLOCK_ROWS;
        if (w->p->causal)
            for (int64_t k = left; k < right; k++)
                masked |= backwards ? s->place[k] < s->row_place[first + size - 1] : s->place[k] > s->row_place[first];
        if (from < to)
            N(tile)(w, first, size, left, right, masked);
    }
}

/* A list of `rows` rows that take part in the branches `set`. */
static void N(attend)(const Work *w, const Segment *segments, uint64_t set, int64_t rows) {
    const Scratch *s = &w->s;
    const Problem *p = w->p;
    int64_t panel_end = (rows + PANEL - 1) / PANEL * PANEL, count;
    for (int64_t r = 0; r < panel_end; r++) {
        int64_t row = r < rows ? s->list[r] : p->span;
        s->row_place[r] = (REAL)row;
        if (w->phase == BACKWARD_QUERY)
            s->most[r] = r < rows ? N(lse_of)(w, w->start + row) : (REAL)INFINITY;
        else
            s->most[r] = r < rows ? s->max[row] : -(REAL)INFINITY;
        s->total[r] = r < rows ? s->sum[row] : 0;
    }
    N(pack_rows)(w, 0, rows);
    if (w->phase != FORWARD)
        N(pack_rows)(w, 1, rows);
    Columns columns = {.segments = segments, .left = set, .at = -1, .to = p->seq, .once = p->once, .mask_row = p->mask_row};
    if (p->causal && w->phase == BACKWARD_KEY)
        columns.from = w->start + s->list[0];
    else if (p->causal)
        columns.to = w->start + s->list[rows - 1] + 1;
    if (p->mask && w->phase != BACKWARD_KEY)
        columns.mask = p->mask + w->batch * p->mask_batch;
    while ((count = next_columns(&columns, TILE_COLUMNS, s->column, s->times))) {
        N(open_tile)(w, count);
        N(tiles)(w, rows, count);
    }
    for (int64_t r = 0; w->phase == FORWARD && r < rows; r++)
        s->max[s->list[r]] = s->most[r], s->sum[s->list[r]] = s->total[r];
}

/* The rows of a cell, in which no segment ends, gathered into lists by the branches that they take part in. */
static void N(cell)(const Work *w, const Segment *segments, uint64_t served, int64_t start, int64_t stop) {
    const Scratch *s = &w->s;
    const Problem *p = w->p;
    const char *mask = p->mask && w->phase == BACKWARD_KEY ? p->mask + w->batch * p->mask_batch : NULL;
    for (int64_t x = start; x < stop; x++)
        s->set[x - start] = mask && mask[x * p->mask_row] ? 0 : branches_of(segments, served, x);
    for (int64_t i = 0; i < stop - start; i++) {
        uint64_t set = s->set[i];
        int64_t rows = 0;
        if (!set)
            continue;
        for (int64_t j = i; j < stop - start; j++)
            if (s->set[j] == set) {
                s->list[rows++] = start + j - w->start;
                s->set[j] = 0;
            }
        N(attend)(w, segments, set, rows);
    }
}

/* All that the rows of the span see through the branches of one query head. */
static void N(walk)(const Work *w) {
    const Problem *p = w->p;
    Segment segments[MAX_BRANCHES];
    for (int64_t g = 0; g < p->groups; g++) {
        uint64_t served = serving(p, p->group[g], w->head);
        for (int64_t at = w->start; served && at < w->stop;) {
            int64_t stop = open_cell(p, served, w->head, at, w->stop, segments);
            N(cell)(w, segments, served, at, stop);
            at = stop;
        }
    }
}

static void N(finish_forward)(const Work *w) {
    const Scratch *s = &w->s;
    REAL *lse = (REAL *)(void *)w->p->lse;
    for (int64_t r = 0; r < w->stop - w->start; r++) {
        REAL total = s->sum[r], *sums = s->sums[0] + r * w->padded, factor = total == 0 ? 0 : 1 / total;
        for (int64_t d = 0; d < w->p->dim; d++)
            sums[d] *= factor;
        N(store)(row_of(&w->p->out, w->batch, w->start + r, w->head), sums, w->p->dim, w->p->dtype);
        lse[N(place_of)(w, w->start + r)] = total == 0 ? -(REAL)INFINITY : s->max[r] + (REAL)log((double)total);
    }
}

/* delta = dout . out of the span's rows, kept for the gradients of the keys as well. */
static void N(start_query)(const Work *w) {
    const Problem *p = w->p;
    REAL *delta = (REAL *)(void *)p->delta, *dout = w->s.columns[0], *out = w->s.columns[1];
    for (int64_t r = 0; r < w->stop - w->start; r++) {
        double sum = 0;
        N(load)(dout, row_of(&p->dout, w->batch, w->start + r, w->head), p->dim, p->dtype);
        N(load)(out, row_of(&p->out, w->batch, w->start + r, w->head), p->dim, p->dtype);
        for (int64_t d = 0; d < p->dim; d++)
            sum += (double)dout[d] * (double)out[d];
        delta[N(place_of)(w, w->start + r)] = w->s.sum[r] = (REAL)sum;
    }
}

static void N(finish)(const Work *w, const Rows *to, int which, int64_t head) {
    for (int64_t r = 0; r < w->stop - w->start; r++)
        N(store)(row_of(to, w->batch, w->start + r, head), w->s.sums[which] + r * w->padded, w->p->dim, w->p->dtype);
}

/* Items count spans fastest, the last span first: under causality it has the most to do; then heads, then batch elements. */
static void N(item)(const Problem *p, int phase, int64_t index, void *memory) {
    int64_t spans = (p->seq + p->span - 1) / p->span, group = p->heads / p->kv_heads;
    int64_t span = spans - 1 - index % spans, head = index / spans, heads = phase == BACKWARD_KEY ? p->kv_heads : p->heads;
    Work w = {.p = p, .phase = phase, .batch = head / heads, .start = span * p->span};
    w.head = head % heads, w.kv_head = phase == BACKWARD_KEY ? w.head : w.head / group;
    w.stop = w.start + p->span < p->seq ? w.start + p->span : p->seq;
    w.padded = (p->dim + PANEL - 1) / PANEL * PANEL;
    w.accumulators = phase == BACKWARD_KEY ? 2 : 1;
    N(scratch)(p, &w.s, memory);
    for (int a = 0; a < w.accumulators; a++)
        memset(w.s.sums[a], 0, (size_t)((p->span + 1) * w.padded) * sizeof(REAL));
    for (int64_t r = 0; r < p->span; r++)
        w.s.max[r] = -(REAL)INFINITY, w.s.sum[r] = 0;
    Rows queries[2] = {p->q, p->dout}, keys[2] = {p->k, p->v};
    memcpy(w.row, phase == BACKWARD_KEY ? keys : queries, sizeof w.row);
    memcpy(w.column, phase == BACKWARD_KEY ? queries : keys, sizeof w.column);
    w.row_head = w.head, w.column_head = w.kv_head;
    if (phase == BACKWARD_KEY) {
        w.row_head = w.kv_head;
        for (w.head = w.kv_head * group; w.head < (w.kv_head + 1) * group; w.head++) {
            w.column_head = w.head;
            N(walk)(&w);
        }
        N(finish)(&w, &p->dk, 0, w.kv_head);
        N(finish)(&w, &p->dv, 1, w.kv_head);
        return;
    }
    if (phase == BACKWARD_QUERY)
        N(start_query)(&w);
    N(walk)(&w);
    if (phase == FORWARD)
        N(finish_forward)(&w);
    else
        N(finish)(&w, &p->dq, 0, w.head);
}

#undef Scratch
#undef Work
#undef PANEL
#undef Vector
#undef Lanes
