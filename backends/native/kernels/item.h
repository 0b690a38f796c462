/* One item of work: the rows of a span, list by list; for each list the columns it sees, tile by tile. Included once a kind. */

/* A tile of scores: the rows at places first .. first + count - 1 with the columns from .. to - 1. */
static void N(tile)(const Work *w, int64_t first, int64_t count, int64_t from, int64_t to, REAL bias, int masked, int64_t places) {
    const Scratch *s = &w->s;
    const Problem *p = w->p;
    const REAL scale = (REAL)p->scale, *place = s->row_place + first;
    int64_t panels = (count + PANEL - 1) / PANEL, units = UNITS(p->dim), offset = first * units;
    REAL *sums[2][TILE_ROWS], factor[TILE_ROWS > TILE_COLUMNS ? TILE_ROWS : TILE_COLUMNS];
    for (int a = 0; a < w->accumulators; a++)
        for (int64_t r = 0; r < TILE_ROWS; r++)
            sums[a][r] = s->sums[a] + (r < count ? s->row[first + r] : p->span) * w->padded;
    N(multiply)(s->scores, s->columns[0], s->rows[0] + offset, from, to, panels, units);
    if (w->phase == FORWARD) {
        N(soften)(s->scores, s->most + first, s->total + first, factor, place, s->place, scale, bias, masked, from, to,
                  panels * PANEL);
        N(accumulate)(sums[0], factor, s->scores, s->columns[1], from, to, count, p->dim);
        return;
    }
    for (size_t r = 0; r < sizeof factor / sizeof *factor; r++)
        factor[r] = 1;
    N(multiply)(s->gradients, s->columns[1], s->rows[1] + offset, from, to, panels, units);
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
    int64_t low = p->span, high = -1, from = w->first_column, to = w->last_column;
    uint64_t among = 0;
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
        among |= lists[i].set;
    if (p->causal && w->phase == BACKWARD_KEY)
        from = from > w->start + low ? from : w->start + low;
    else if (p->causal)
        to = w->start + high + 1;
    open_stream(s->stream, segments, among, from, to);
    if (p->mask && w->phase != BACKWARD_KEY)
        s->stream->mask = p->mask + w->batch * p->mask_batch, s->stream->mask_row = p->mask_row;
    for (Columns *columns; (columns = next_columns(s->stream));) {
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
        R(store)(row_of(&w->p->out, w->batch, w->start + r, w->head), sums, w->p->dim, w->p->dtype);
        lse[N(place_of)(w, w->start + r)] = total == 0 ? -(REAL)INFINITY : s->max[r] + (REAL)log(total);
    }
}

/* delta = dout . out of the span's rows, kept for the gradients of the keys as well. */
static void N(start_query)(const Work *w) {
    const Problem *p = w->p;
    REAL *delta = (REAL *)(void *)p->delta, *dout = w->s.columns[0], *out = w->s.columns[1];
    for (int64_t r = 0; r < w->stop - w->start; r++) {
        double sum = 0;
        R(load)(dout, row_of(&p->dout, w->batch, w->start + r, w->head), p->dim, p->dtype);
        R(load)(out, row_of(&p->out, w->batch, w->start + r, w->head), p->dim, p->dtype);
        for (int64_t d = 0; d < p->dim; d++)
            sum += (double)dout[d] * (double)out[d];
        delta[N(place_of)(w, w->start + r)] = w->s.sum[r] = (REAL)sum;
    }
}

/* Write a span's sums as they are, times a factor. */
static void N(finish)(const Work *w, const Rows *to, int which, int64_t head, REAL factor) {
    for (int64_t r = 0; r < w->stop - w->start; r++) {
        REAL *sums = w->s.sums[which] + r * w->padded;
        for (int64_t d = 0; d < w->p->dim; d++)
            sums[d] *= factor;
        R(store)(row_of(to, w->batch, w->start + r, head), sums, w->p->dim, w->p->dtype);
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
    w.row_bytes = p->dim * N(number_bytes)(p);
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
#undef Vector
#undef Lanes
