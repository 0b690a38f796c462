/* One item of work: the rows of a span, list by list; for each list the columns it sees, tile by tile. Included once a type. */
#define Scratch N(Scratch)
#define Work N(Work)

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

/* All places transposed into panels; 0 where a place has no row. */
static void N(pack_rows)(const Work *w, int which, int64_t places) {
    const Problem *p = w->p;
    REAL *to = w->s.rows[which], *line = w->s.columns[0];
    for (int64_t r = 0; r < places; r++) {
        REAL *place = to + r / PANEL * PANEL * p->dim + r % PANEL;
        int64_t row = w->s.row[r];
        if (row < p->span)
            N(load)(line, row_of(&w->row[which], w->batch, w->start + row, w->row_head), p->dim, p->dtype);
        for (int64_t d = 0; d < p->dim; d++)
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
    const Problem *p = w->p;
    const int64_t bytes = w->row_bytes / p->dim;
    for (int64_t k = 0; k < (columns->count + BLOCK_ROWS - 1) / BLOCK_ROWS * BLOCK_ROWS; k++) {
        const char *from = k < columns->count ? N(column_at)(w, which, columns->column[k]) : NULL;
        if (from && which == 0)
            N(fetch_column)(w, 1, columns->column[k]);
        for (int64_t done = 0; done < p->dim; done += PANEL) {
            REAL *to = w->s.columns[which] + done * TILE_COLUMNS + k * PANEL;
            int64_t rest = from ? p->dim - done : 0;
            if (rest >= PANEL) {
                N(load)(to, from + done * bytes, PANEL, p->dtype);
                continue;
            }
            if (rest)
                N(load)(to, from + done * bytes, rest, p->dtype);
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
    N(pack_columns)(w, 1, columns);
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

/* A tile of scores: the rows at places first .. first + count - 1 with the columns from .. to - 1. */
static void N(tile)(const Work *w, int64_t first, int64_t count, int64_t from, int64_t to, REAL bias, int masked, int64_t places) {
    const Scratch *s = &w->s;
    const Problem *p = w->p;
    const REAL scale = (REAL)p->scale, *place = s->row_place + first;
    int64_t panels = (count + PANEL - 1) / PANEL, offset = first * p->dim;
    REAL *sums[2][TILE_ROWS], factor[TILE_ROWS > TILE_COLUMNS ? TILE_ROWS : TILE_COLUMNS];
    for (int a = 0; a < w->accumulators; a++)
        for (int64_t r = 0; r < TILE_ROWS; r++)
            sums[a][r] = s->sums[a] + (r < count ? s->row[first + r] : p->span) * w->padded;
    N(multiply)(s->scores, s->columns[0], s->rows[0] + offset, from, to, panels, p->dim);
    if (w->phase == FORWARD) {
        N(soften)(s->scores, s->most + first, s->total + first, factor, place, s->place, scale, bias, masked, from, to,
                  panels * PANEL);
        N(accumulate)(sums[0], factor, s->scores, s->columns[1], from, to, count, p->dim);
        return;
    }
    for (size_t r = 0; r < sizeof factor / sizeof *factor; r++)
        factor[r] = 1;
    N(multiply)(s->gradients, s->columns[1], s->rows[1] + offset, from, to, panels, p->dim);
    int by_column = w->phase == BACKWARD_KEY;
    const REAL *lse = by_column ? s->lse : s->most + first, *delta = by_column ? s->delta : s->total + first;
    N(differentiate)(s->scores, s->gradients, lse, delta, by_column, place, s->place, scale, bias, by_column ? -masked : masked,
                     from, to, panels * PANEL);
    N(accumulate)(sums[0], factor, s->gradients, s->columns[0], from, to, count, p->dim);
    if (w->accumulators == 2)
        N(accumulate)(sums[1], factor, s->scores, s->columns[1], from, to, count, p->dim);
    if (!w->fused)
        return;
    REAL *turned[TILE_COLUMNS];
    for (int64_t k = 0; k < TILE_COLUMNS; k++)
        turned[k] = s->turned + (k < to - from ? from + k : TILE_COLUMNS) * w->padded;
    N(accumulate_columns)(turned, factor, s->gradients + from * TILE_ROWS, s->lines + first * PANEL, places, count, to - from, p->dim);
}

/* All rows of a list with a tile's columns; under causality, only the columns that some row of a tile sees. */
static void N(tiles)(const Work *w, const List *list, int64_t columns, REAL bias, int64_t places) {
    const Scratch *s = &w->s;
    const REAL *place = s->place;
    int backwards = w->phase == BACKWARD_KEY;
    for (int64_t first = list->first, end = first + list->count; first < end; first += TILE_ROWS) {
        int64_t count = end - first < TILE_ROWS ? end - first : TILE_ROWS, from = 0, to = columns;
        REAL low = s->row_place[first], high = s->row_place[first + count - 1];
        int masked = 0;
        if (w->p->causal) {
            while (to > from && (backwards ? place[to - 1] < low : place[to - 1] > high))
                to--;
            while (from < to && (backwards ? place[from] < low : place[from] > high))
                from++;
            from = from / BLOCK_ROWS * BLOCK_ROWS;
            masked = from < to && (backwards ? place[from] < high : place[to - 1] > low);
        }
        if (from < to)
            N(tile)(w, first, count, from, to, bias, masked, places);
    }
}

/* What the rows of some lists see, up to `places`. */
static void N(attend)(const Work *w, const Segment *segments, const List *lists, int count, int64_t places) {
    const Scratch *s = &w->s;
    const Problem *p = w->p;
    Stream *stream = s->stream;
    int64_t low = p->span, high = -1;
    memset(stream, 0, sizeof *stream);
    for (int64_t i = 0; i < places; i++) {
        int64_t row = s->row[i];
        s->row_place[i] = (REAL)row;
        s->total[i] = s->sum[row];
        s->most[i] = w->phase == BACKWARD_QUERY && row < p->span ? N(lse_of)(w, w->start + row) : s->max[row];
        if (row < p->span)
            low = row < low ? row : low, high = row > high ? row : high;
    }
    N(pack_rows)(w, 0, places);
    if (w->phase != FORWARD)
        N(pack_rows)(w, 1, places);
    for (int i = 0; i < count; i++)
        stream->among |= lists[i].set;
    stream->segments = segments, stream->left = stream->among, stream->at = -1;
    stream->from = w->first_column, stream->to = w->last_column;
    if (p->causal && w->phase == BACKWARD_KEY)
        stream->from = stream->from > w->start + low ? stream->from : w->start + low;
    else if (p->causal)
        stream->to = w->start + high + 1;
    if (p->mask && w->phase != BACKWARD_KEY)
        stream->mask = p->mask + w->batch * p->mask_batch, stream->mask_row = p->mask_row;
    for (Columns *columns; (columns = next_columns(stream));) {
        N(open_tile)(w, columns);
        for (int i = 0; i < count; i++) {
            int times = __builtin_popcountll(columns->set & lists[i].set);
            if (times)
                N(tiles)(w, &lists[i], columns->count, times == 1 || p->once ? 0 : (REAL)log(times), places);
        }
        if (w->fused)
            N(close_tile)(w, columns);
    }
    if (w->fused)
        N(close_rows)(w, places);
    for (int64_t i = 0; w->phase == FORWARD && i < places; i++)
        s->max[s->row[i]] = s->most[i], s->sum[s->row[i]] = s->total[i];
}

/* Take the rows of the first set that is left in the cell into a list; returns the places used up. */
static int64_t N(take)(const Work *w, int64_t start, int64_t stop, int64_t first, List *list) {
    const Scratch *s = &w->s;
    *list = (List){.first = first};
    for (int64_t x = start; x < stop; x++) {
        uint64_t *set = &s->set[x - start];
        if (!list->set)
            list->set = *set;
        if (!*set || *set != list->set)
            continue;
        s->row[first + list->count++] = x - w->start;
        *set = 0;
    }
    int64_t end = first + (list->count + PANEL - 1) / PANEL * PANEL;
    for (int64_t i = first + list->count; i < end; i++)
        s->row[i] = w->p->span;
    return end;
}

/* The rows of a cell, in which no segment ends, gathered into lists by the branches that they take part in. */
static void N(cell)(const Work *w, const Segment *segments, uint64_t served, int64_t start, int64_t stop) {
    const Problem *p = w->p;
    const char *mask = p->mask && w->phase == BACKWARD_KEY ? p->mask + w->batch * p->mask_batch : NULL;
    for (int64_t x = start; x < stop; x++)
        w->s.set[x - start] = mask && mask[x * p->mask_row] ? 0 : branches_of(segments, served, x);
    List lists[LISTS];
    int count;
    do {
        int64_t places = 0;
        for (count = 0; count < LISTS; count++) {
            places = N(take)(w, start, stop, places, &lists[count]);
            if (!lists[count].count)
                break;
        }
        if (count)
            N(attend)(w, segments, lists, count, places);
    } while (count == LISTS);
}

/* All that the rows of the span see through the branches of one query head. */
static void N(walk)(const Work *w) {
    const Problem *p = w->p;
    Segment segments[MAX_BRANCHES];
    for (int64_t g = 0; g < p->groups; g++) {
        uint64_t served = serving(p, p->group[g], w->head);
        for (int64_t at = w->start; served && at < w->stop;) {
            int64_t stop = open_cell(p, served, w->head, at, w->stop, segments);
            N(cell)(w, segments, reaching(segments, served, w->first_column, w->last_column), at, stop);
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
        lse[N(place_of)(w, w->start + r)] = total == 0 ? -(REAL)INFINITY : s->max[r] + (REAL)log(total);
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

static void N(finish)(const Work *w, const Rows *to, int which, int64_t head, REAL factor) {
    for (int64_t r = 0; r < w->stop - w->start; r++) {
        REAL *sums = w->s.sums[which] + r * w->padded;
        for (int64_t d = 0; d < w->p->dim; d++)
            sums[d] *= factor;
        N(store)(row_of(to, w->batch, w->start + r, head), sums, w->p->dim, w->p->dtype);
    }
}

/* Begin with a span; all sums are 0, and are again when they have been added to what is in memory. */
static void N(begin)(Work *w, int64_t start) {
    const Problem *p = w->p;
    w->start = start;
    w->stop = start + p->span < p->seq ? start + p->span : p->seq;
    for (int64_t r = 0; r <= p->span; r++)
        w->s.max[r] = -(REAL)INFINITY, w->s.sum[r] = 0;
}

/* What a span of keys gets from the queries of the columns' range. */
static void N(keys)(Work *w, int64_t start) {
    int64_t group = w->p->heads / w->p->kv_heads;
    N(begin)(w, start);
    for (w->head = w->kv_head * group; w->head < (w->kv_head + 1) * group; w->head++) {
        w->column_head = w->head;
        N(walk)(w);
    }
}

/* A block of keys meets a block of queries. */
static void N(meet)(Work *w, int64_t block) {
    const Problem *p = w->p;
    int64_t start = block * p->block, stop = start + p->block < p->seq ? start + p->block : p->seq;
    w->first_column = (block + p->round) % p->blocks * p->block;
    w->last_column = w->first_column + p->block < p->seq ? w->first_column + p->block : p->seq;
    for (; start < stop && !(p->causal && w->last_column <= start); start += p->span)
        N(keys)(w, start);
}

/* Items count spans (or blocks) fastest, the last one first: under causality it has the most to do; then heads, then batch. */
static void N(item)(const Problem *p, int phase, int64_t index, void *memory) {
    int by_key = phase == BACKWARD_KEY, fused = by_key && p->blocks;
    int64_t parts = fused ? p->blocks : (p->seq + p->span - 1) / p->span, heads = by_key ? p->kv_heads : p->heads;
    int64_t part = parts - 1 - index % parts, head = index / parts;
    Work w = {.p = p, .phase = phase, .batch = head / heads, .head = head % heads, .fused = fused, .last_column = p->seq};
    w.kv_head = by_key ? w.head : w.head / (p->heads / p->kv_heads);
    w.padded = (p->dim + PANEL - 1) / PANEL * PANEL;
    w.row_bytes = p->dim * (p->dtype == FLOAT64 ? 8 : p->dtype == FLOAT32 ? 4 : 2);
    w.accumulators = by_key ? 2 : 1;
    N(scratch)(p, phase, &w.s, memory);
    for (int a = 0; a < w.accumulators; a++)
        memset(w.s.sums[a], 0, (size_t)((p->span + 1) * w.padded) * sizeof(REAL));
    if (fused)
        memset(w.s.turned, 0, (size_t)((TILE_COLUMNS + 1) * w.padded) * sizeof(REAL));
    Rows queries[2] = {p->q, p->dout}, keys[2] = {p->k, p->v};
    memcpy(w.row, by_key ? keys : queries, sizeof w.row);
    memcpy(w.column, by_key ? queries : keys, sizeof w.column);
    w.row_head = w.head, w.column_head = w.kv_head;
    if (fused)
        return N(meet)(&w, part);
    if (by_key) {
        N(keys)(&w, part * p->span);
        N(finish)(&w, &p->dk, 0, w.kv_head, (REAL)p->scale);
        N(finish)(&w, &p->dv, 1, w.kv_head, 1);
        return;
    }
    N(begin)(&w, part * p->span);
    if (phase == BACKWARD_QUERY)
        N(start_query)(&w);
    if (phase == FORWARD || !p->blocks)
        N(walk)(&w);
    if (phase == FORWARD)
        N(finish_forward)(&w);
    else if (!p->blocks)
        N(finish)(&w, &p->dq, 0, w.head, (REAL)p->scale);
}

#undef Scratch
#undef Work
#undef PANEL
#undef Vector
#undef Lanes
