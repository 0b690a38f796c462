/* A piece of a step: one query row against up to PIECE_ROWS stored rows, read where they lie, as in few_rows.h. Included once for
 * each KIND.
 *
 * The query heads that share a key/value head go over a tile of addresses one after the other: rows come from memory once. Those
 * that a query head does not see are no part of its tile, so that a NaN in them reaches nothing. No row is prefetched: the
 * processor foresees many keys, then many values in their order, and prefetches of one's own fill the buffers that its own need.
 */
enum { N(TOGETHER) = KEYS_TOGETHER < (int)N(LANES) ? KEYS_TOGETHER : (int)N(LANES) };

#define StoredTile N(StoredTile)
#define Piece N(Piece)

typedef struct {
    int64_t count;
    const char *key[PIECE_ROWS], *value[PIECE_ROWS];
    const REAL *times; /* how often each row counts; NULL: all of them once */
    REAL counts[PIECE_ROWS], place[3][PIECE_ROWS]; /* of a bias: the positions of the rows; along the sequence, counted from the query */
} StoredTile;

typedef struct {
    const Step *step;
    const Span *span;
    int64_t row, head, head_place, from, to; /* the query row, the key/value head, its number in the span, and the rows of the span */
    const char *key, *value;                 /* where the first row of the span is, for these */
    REAL *partial, *query, *scores;
    StoredTile *tile;
} Piece;

static inline int64_t N(stored_width)(const Problem *p) { return round_up(p->dim, PANEL); }
static inline int64_t N(query_group)(const Problem *p) { return p->heads / p->kv_heads; }

/* The partial of a query head: `stored_width` sums, then its maximum and its sum of weights. */
static inline REAL *N(partial_of)(const Step *step, int64_t piece, int64_t member) {
    const Problem *p = &step->problem;
    return N(numbers)(step->partials) + (piece * N(query_group)(p) + member) * (N(stored_width)(p) + 2);
}

static size_t N(partial_bytes)(const Step *step) {
    return (size_t)(N(query_group)(&step->problem) * (N(stored_width)(&step->problem) + 2)) * sizeof(REAL);
}

static size_t N(piece_scratch_bytes)(const Step *step) {
    size_t queries = (size_t)(N(query_group)(&step->problem) * N(stored_width)(&step->problem));
    return (queries + PIECE_ROWS) * sizeof(REAL) + sizeof(StoredTile);
}

typedef int8_t N(Bytes) __attribute__((vector_size(N(LANES))));

/* In steps of twice the width: for these the compiler has instructions. */
static inline Vector N(widen)(N(Bytes) numbers) {
    typedef int16_t Shorts __attribute__((vector_size(2 * N(LANES))));
    return __builtin_convertvector(__builtin_convertvector(__builtin_convertvector(numbers, Shorts), Lanes), Vector);
}

/* LANES numbers of a stored row from `done` on; of INT8 the integers. */
__attribute__((always_inline)) static inline Vector N(load_whole)(const char *row, int64_t done, const int dtype) {
    N(Bytes) numbers;
    if (dtype == INT8) {
        memcpy(&numbers, row + done, sizeof numbers);
        return N(widen)(numbers);
    }
    if (dtype == FLOAT64 || dtype == FLOAT32)
        return N(load_vector)(N(numbers)(row) + done);
    return N(load_half_vector)(row + 2 * done, dtype);
}

/* The numbers from `done` to the end of a row, fewer than LANES, and zeros. */
__attribute__((always_inline)) static inline Vector N(load_rest)(const char *row, int64_t done, int64_t dim, const int dtype) {
    N(Bytes) numbers = {0};
    if (dtype != INT8)
        return N(load_numbers)(row, done, dim, dtype);
    memcpy(&numbers, row + done, (size_t)(dim - done));
    return N(widen)(numbers);
}

/* What the numbers of a row are multiplied by. */
__attribute__((always_inline)) static inline REAL N(row_scale)(const char *row, int64_t dim, const int dtype) {
    float scale = 1;
    if (dtype == INT8)
        memcpy(&scale, row + dim, sizeof scale);
    return (REAL)scale;
}

/* x[i] = products of q with TOGETHER rows, lane by lane. */
__attribute__((always_inline)) static inline void N(multiply_keys)(
    const int dtype, Vector *restrict x, const char *const *key, const REAL *restrict query, int64_t dim
) {
    const int64_t whole = dim - dim % N(LANES);
    Vector sum[N(TOGETHER)];
#pragma GCC unroll 4
    for (int i = 0; i < N(TOGETHER); i++)
        sum[i] = (Vector){0};
    for (int64_t d = 0; d < whole; d += N(LANES)) {
        Vector q = N(load_vector)(query + d);
#pragma GCC unroll 4
        for (int i = 0; i < N(TOGETHER); i++)
            sum[i] += q * N(load_whole)(key[i], d, dtype);
    }
    for (int i = 0; whole < dim && i < N(TOGETHER); i++)
        sum[i] += N(load_vector)(query + whole) * N(load_rest)(key[i], whole, dim, dtype);
#pragma GCC unroll 4
    for (int i = 0; i < N(TOGETHER); i++)
        x[i] = sum[i];
}

/* scores[k] = scale * q . k of a tile, -inf up to a whole vector; returns the maximum in each lane. */
__attribute__((always_inline)) static inline Vector N(score_stored_of)(const int dtype, const Piece *piece, const REAL *restrict query) {
    const StoredTile *tile = piece->tile;
    const int64_t dim = piece->step->problem.dim;
    Vector most = N(broadcast)(-(REAL)INFINITY);
    for (int64_t k = 0; k < tile->count; k += N(LANES)) {
        Vector x[N(LANES)], scales = N(broadcast)((REAL)piece->step->problem.scale);
        REAL of_rows[N(LANES)];
#pragma GCC unroll 1
        for (int i = 0; i < N(LANES); i += N(TOGETHER))
            N(multiply_keys)(dtype, x + i, tile->key + k + i, query, dim);
        for (int i = 0; dtype == INT8 && i < N(LANES); i++)
            of_rows[i] = N(row_scale)(tile->key[k + i], dim, dtype);
        if (dtype == INT8)
            scales *= N(load_vector)(of_rows);
        Lanes beyond = N(lane_numbers)() >= (INTEGER)lesser(tile->count - k, N(LANES));
        Vector t = N(select)(beyond, N(broadcast)(-(REAL)INFINITY), N(sum_lanes)(x) * scales);
        most = N(vector_max)(t, most);
        N(store_vector)(piece->scores + k, t);
    }
    return most;
}

/* sums[d ..] += sum over the rows of a tile of weights[k] * v[k][d ..], of so many vectors. */
__attribute__((always_inline)) static inline void N(add_vectors)(
    const int dtype, const int vectors, const StoredTile *tile, REAL *restrict sums, const REAL *restrict weights, int64_t d
) {
    Vector sum[VECTORS_TOGETHER];
#pragma GCC unroll 4
    for (int i = 0; i < vectors; i++)
        sum[i] = N(load_vector)(sums + d + i * N(LANES));
    for (int64_t k = 0; k < tile->count; k++)
#pragma GCC unroll 4
        for (int i = 0; i < vectors; i++)
            sum[i] += weights[k] * N(load_whole)(tile->value[k], d + i * N(LANES), dtype);
#pragma GCC unroll 4
    for (int i = 0; i < vectors; i++)
        N(store_vector)(sums + d + i * N(LANES), sum[i]);
}

__attribute__((always_inline)) static inline int N(add_stored_of)(const int dtype, const Piece *piece, REAL *restrict sums) {
    const StoredTile *tile = piece->tile;
    const int64_t dim = piece->step->problem.dim, whole = dim - dim % N(LANES);
    int64_t d = 0;
    for (int64_t i = 0; dtype == INT8 && i < tile->count; i++)
        piece->scores[i] *= N(row_scale)(tile->value[i], dim, dtype);
    for (; d + VECTORS_TOGETHER * N(LANES) <= whole; d += VECTORS_TOGETHER * N(LANES))
        N(add_vectors)(dtype, VECTORS_TOGETHER, tile, sums, piece->scores, d);
    for (; d < whole; d += N(LANES))
        N(add_vectors)(dtype, 1, tile, sums, piece->scores, d);
    for (int64_t k = 0; d < dim && k < tile->count; k++)
        N(store_vector)(sums + d, N(load_vector)(sums + d) + piece->scores[k] * N(load_rest)(tile->value[k], d, dim, dtype));
    return 0;
}

/* The compiler sees the dtype of stored rows as a constant. */
#define FOR_STORED(function, dtype, ...)                                                                          \
    (sizeof(REAL) == 8 ? function(FLOAT64, __VA_ARGS__) : (dtype) == FLOAT32 ? function(FLOAT32, __VA_ARGS__)     \
     : (dtype) == BFLOAT16 ? function(BFLOAT16, __VA_ARGS__) : (dtype) == FLOAT16 ? function(FLOAT16, __VA_ARGS__) \
     : function(INT8, __VA_ARGS__))

/* Places of a row for a bias: as a key, or of the query. */
static void N(place_stored)(const Piece *piece, REAL *const place[3], int64_t k, int64_t position, int as_key) {
    const Problem *p = &piece->step->problem;
    const REAL *given = p->positions.data ? N(numbers)(row_address(&p->positions, piece->row / p->seq, position, 0)) : NULL;
    for (int64_t d = 0; d < 3; d++)
        place[d][k] = d >= p->position_dims ? 0 : given ? given[as_key ? p->key_position + d : d] : (REAL)(position - piece->span->query_position);
}

/* How often the rows of the piece count; NULL: once. */
static const REAL *N(count_rows)(const Piece *piece, REAL *counts) {
    const REAL *given = NULL;
    for (const Repeat *r = piece->span->repeat; r; r = r->next) {
        int64_t i = r->first < piece->from ? r->first + round_up(piece->from - r->first, r->every) : r->first;
        int64_t end = lesser(piece->to, r->first + (r->rows - 1) * r->every + 1);
        if (i >= end || !shows_head(r->first_head, r->head_step, r->heads, piece->head))
            continue;
        for (int64_t k = 0; !given && k < PIECE_ROWS; k++)
            counts[k] = 1;
        for (given = counts; i < end; i += r->every)
            counts[i - piece->from] += 1;
    }
    return given;
}

/* The rows of a piece of which all are seen, at equal distances and without a bias. */
static void N(place_all)(const Piece *piece, StoredTile *tile) {
    const StoredView *key = &piece->span->key, *value = &piece->span->value;
    tile->count = piece->to - piece->from;
    for (int64_t i = 0; i < tile->count; i++)
        tile->key[i] = piece->key + (piece->from + i) * key->row, tile->value[i] = piece->value + (piece->from + i) * value->row;
}

/* The rows of a piece that a query head sees, one by one. */
static void N(place_seen)(const Piece *piece, StoredTile *tile, const char *unseen) {
    const Span *span = piece->span;
    REAL *const place[3] = {tile->place[0], tile->place[1], tile->place[2]};
    PageRow at = first_row(span, piece->from);
    tile->count = 0;
    for (int64_t i = piece->from; i < piece->to; i++, at = next_row(span, at)) {
        if (unseen && unseen[i * span->unseen_row])
            continue;
        int64_t page = span->pages ? span->pages[at.page] * span->page : 0;
        tile->key[tile->count] = piece->key + page + at.row * span->key.row;
        tile->value[tile->count] = piece->value + page + at.row * span->value.row;
        if (piece->step->problem.bias != NO_BIAS)
            N(place_stored)(piece, place, tile->count, span->positions ? span->positions[i] : span->position + i * span->position_step, 1);
        tile->count++;
    }
}

/* The rows of a piece that a query head of the group sees, as a tile. */
static void N(fill_tile)(const Piece *piece, int64_t member) {
    const Span *span = piece->span;
    StoredTile *tile = piece->tile;
    const char *unseen = span->unseen ? span->unseen + piece->head_place * span->unseen_head + member * span->unseen_group : NULL;
    if (unseen || span->pages || piece->step->problem.bias != NO_BIAS)
        N(place_seen)(piece, tile, unseen);
    else
        N(place_all)(piece, tile);
    tile->times = N(count_rows)(piece, tile->counts);
    for (int64_t i = tile->count; tile->count && i < round_up(tile->count, N(LANES)); i++)
        tile->key[i] = tile->key[tile->count - 1], tile->value[i] = tile->value[tile->count - 1]; /* products with it are left out */
}

__attribute__((always_inline)) static inline void N(bias_stored_of)(
    const int way, const Piece *piece, int64_t head, REAL *const query[3], Vector *most
) {
    const Problem *p = &piece->step->problem;
    const REAL *weights = N(numbers)(p->bias_weights);
    for (int64_t k = 0; k < piece->tile->count; k += N(LANES)) {
        Vector t = N(load_vector)(piece->scores + k), row[3];
        for (int d = 0; d < 3; d++)
            row[d] = N(load_vector)(piece->tile->place[d] + k);
        if (way == N(LINE_TABLE) || way == N(GRID_TABLE))
            t += R(GATHER)(weights, N(entries_of)(way, p, row, query, 0, -1) + (INTEGER)(head * p->entries));
        else if (way == N(SUMMED_TABLES))
            t += N(summed_tables)(p, weights + head * p->entries, (Lanes){0}, row, query, 0, -1);
        else if (way != N(NO_BIAS))
            t -= weights[head * p->entries] * N(distance)(way, row, query, 0);
        *most = N(vector_max)(t, *most);
        N(store_vector)(piece->scores + k, t);
    }
}

/* Softcap and bias of a tile of scores; the maximum of each lane anew. Lanes beyond the tile stay -inf. */
__attribute__((noinline)) static Vector N(change_stored)(const Piece *piece, int64_t head) {
    const Problem *p = &piece->step->problem;
    const REAL cap = (REAL)p->softcap, inverse = (REAL)(1 / p->softcap);
    REAL at[3][1], *const query[3] = {at[0], at[1], at[2]};
    Vector most = N(broadcast)(-(REAL)INFINITY);
    StoredTile *tile = piece->tile;
    for (int64_t k = 0; p->softcap > 0 && k < tile->count; k += N(LANES))
        N(store_vector)(piece->scores + k, N(tanh)(N(load_vector)(piece->scores + k) * inverse) * cap);
    for (int64_t k = tile->count; k < round_up(tile->count, N(LANES)); k++) {
        piece->scores[k] = -(REAL)INFINITY;
        for (int d = 0; d < 3; d++)
            tile->place[d][k] = 0;
    }
    if (p->bias != NO_BIAS)
        N(place_stored)(piece, query, 0, piece->span->query_position, 0);
    FOR_WAY(N(bias_stored_of), N(bias_way)(p), piece, head, query, &most)
    return most;
}

/* One online softmax step of a query head of the group with the rows of the tile, as in online_softmax.h. */
static void N(attend_stored)(const Piece *piece, int64_t member) {
    const Problem *p = &piece->step->problem;
    const int64_t width = N(stored_width)(p), count = piece->tile->count;
    REAL *sums = piece->partial + member * (width + 2), *query = piece->query + member * width, sum = 0;
    const REAL *times = piece->tile->times;
    Vector maxima = FOR_STORED(N(score_stored_of), piece->step->stored, piece, query), total = {0};
    if (N(has_scores)(p))
        maxima = N(change_stored)(piece, piece->head * N(query_group)(p) + member);
    REAL max = sums[width];
    for (int i = 0; i < N(LANES); i++)
        max = maxima[i] > max ? maxima[i] : max;
    Vector base = N(broadcast)(max == -(REAL)INFINITY ? 0 : max), factor = N(exp)(sums[width] - base);
    for (int64_t k = 0; k < count; k += N(LANES)) {
        Vector weights = N(exp)(N(load_vector)(piece->scores + k) - base);
        if (times)
            weights *= N(load_vector)(times + k);
        N(store_vector)(piece->scores + k, weights);
        total += weights;
    }
    for (int i = 0; i < N(LANES); i++)
        sum += total[i];
    for (int64_t d = 0; d < width; d += N(LANES))
        N(store_vector)(sums + d, factor * N(load_vector)(sums + d));
    FOR_STORED(N(add_stored_of), piece->step->stored, piece, sums);
    sums[width] = max, sums[width + 1] = factor[0] * sums[width + 1] + sum;
}

/* The span of a piece: the last one that begins at it or before, of those that have any. */
static const Span *N(span_of_piece)(const Step *step, int64_t number) {
    int64_t low = 0, high = step->spans - 1;
    while (low < high) {
        int64_t middle = (low + high + 1) / 2;
        if (step->span[middle].first_piece <= number)
            low = middle;
        else
            high = middle - 1;
    }
    return step->span + low;
}

static void N(place_piece)(Piece *piece, int64_t number) {
    const Span *span = piece->span = N(span_of_piece)(piece->step, number);
    int64_t pieces = pieces_of(span), within = number - span->first_piece, head = within % span->heads;
    int64_t row = within / span->heads / pieces, piece_of_head = within / span->heads % pieces;
    piece->row = span->row + row, piece->head_place = head, piece->head = span->first_head + head * span->head_step;
    piece->from = piece_of_head * PIECE_ROWS, piece->to = lesser(piece->from + PIECE_ROWS, span->count);
    piece->key = span->key.data + row * span->key.sequence + head * span->key.head;
    piece->value = span->value.data + row * span->value.sequence + head * span->value.head;
}

static void N(attend_piece)(const Step *step, int64_t number, void *scratch) {
    const Problem *p = &step->problem;
    const int64_t group = N(query_group)(p), width = N(stored_width)(p);
    Piece piece = {.step = step, .partial = N(partial_of)(step, number, 0), .tile = scratch};
    piece.query = N(numbers)(piece.tile + 1), piece.scores = piece.query + group * width;
    N(place_piece)(&piece, number);
    N(clear)(piece.query, group * width);
    memset(piece.partial, 0, N(partial_bytes)(step));
    for (int64_t g = 0; g < group; g++) {
        R(load)(piece.query + g * width, row_address(&p->q, piece.row / p->seq, piece.row % p->seq, piece.head * group + g), p->dim, p->dtype);
        piece.partial[g * (width + 2) + width] = -(REAL)INFINITY;
    }
    for (int64_t g = 0; g < group; g++) {
        if (g == 0 || piece.span->unseen)
            N(fill_tile)(&piece, g);
        if (piece.tile->count)
            N(attend_stored)(&piece, g);
    }
}

/* to = to * exp(m - m') + from * exp(m_from - m'), m' = max(m, m_from), of two partials of a query head. */
static void N(merge_partial)(REAL *restrict to, const REAL *restrict from, int64_t width) {
    REAL max = to[width] > from[width] ? to[width] : from[width], ours = 0, theirs = 1;
    if (from[width + 1] == 0)
        return;
    if (to[width + 1] != 0)
        ours = (REAL)exp(to[width] - max), theirs = (REAL)exp(from[width] - max);
    else
        max = from[width];
    for (int64_t d = 0; d < width; d++)
        to[d] = ours * to[d] + theirs * from[d];
    to[width] = max, to[width + 1] = ours * to[width + 1] + theirs * from[width + 1];
}

/* out and lse of a query head, with its sink; `partial` NULL: it sees nothing. */
static void N(write_row)(const Step *step, int64_t row, int64_t head, REAL *partial) {
    const Problem *p = &step->problem;
    const int64_t width = N(stored_width)(p);
    const int64_t batch = row / p->seq, at = row % p->seq;
    REAL *lse = N(numbers)(p->lse) + (batch * p->heads + head) * p->seq + at, total = partial ? partial[width + 1] : 0;
    *lse = total == 0 ? -(REAL)INFINITY : partial[width] + (REAL)log(total);
    REAL factor = total == 0 ? 0 : 1 / total;
    if (step->sink) {
        REAL sink = N(numbers)(step->sink)[head], most = *lse > sink ? *lse : sink, before = *lse;
        if (most != -(REAL)INFINITY)
            *lse = most + (REAL)log(exp(before - most) + exp(sink - most));
        factor = total == 0 ? 0 : factor * (REAL)exp(before - *lse);
    }
    char *to = row_address(&p->out, batch, at, head);
    if (total == 0) {
        memset(to, 0, (size_t)(p->dim * bytes_of(p->dtype)));
        return;
    }
    for (int64_t d = 0; d < p->dim; d++)
        partial[d] *= factor;
    R(store)(to, partial, p->dim, p->dtype);
}

/* The partials of each row and head are added to that of its first piece, in the order of the pieces. */
static void N(merge_pieces)(const Step *step) {
    const Problem *p = &step->problem;
    const int64_t group = N(query_group)(p), width = N(stored_width)(p);
    Piece piece = {.step = step};
    memset(step->first_partial, -1, (size_t)(p->batch * p->seq * p->kv_heads) * sizeof(int64_t));
    for (int64_t i = 0; i < step->pieces; i++) {
        N(place_piece)(&piece, i);
        int64_t *first = step->first_partial + piece.row * p->kv_heads + piece.head;
        for (int64_t g = 0; *first >= 0 && g < group; g++)
            N(merge_partial)(N(partial_of)(step, *first, g), N(partial_of)(step, i, g), width);
        *first = *first < 0 ? i : *first;
    }
    for (int64_t at = 0; at < p->batch * p->seq * p->heads; at++) {
        int64_t row = at / p->heads, head = at % p->heads, first = step->first_partial[row * p->kv_heads + head / group];
        N(write_row)(step, row, head, first < 0 ? NULL : N(partial_of)(step, first, head % group));
    }
}

/* A row as INT8: integers up to 127, and their factor. A row with a number that is none becomes NaN. */
static void N(store_integers)(char *to, const REAL *row, int64_t dim) {
    float most = 0;
    for (int64_t d = 0; d < dim; d++) {
        float size = (float)fabs((double)row[d]);
        most = size <= most || isnan(most) ? most : size;
    }
    float scale = isfinite(most) ? most / 127 : NAN;
    for (int64_t d = 0; d < dim; d++) {
        float share = scale > 0 ? rintf((float)row[d] / scale) : 0;
        to[d] = (char)(int8_t)(share > 127 ? 127 : share < -127 ? -127 : share);
    }
    memcpy(to + dim, &scale, sizeof scale);
}

static void N(write_head)(const Step *step, char *to, const char *from, REAL *row) {
    const Problem *p = &step->problem;
    if (step->stored == p->dtype) {
        memcpy(to, from, (size_t)(p->dim * bytes_of(p->dtype)));
        return;
    }
    R(load)(row, from, p->dim, p->dtype);
    if (step->stored == INT8)
        N(store_integers)(to, row, p->dim);
    else
        R(store)(to, row, p->dim, step->stored);
}

static void N(write_rows)(const Step *step) {
    REAL *row = N(numbers)(step->partials); /* there is no other use for it yet */
    for (int64_t w = 0; w < step->writes; w++) {
        const Write *write = step->write + w;
        for (int64_t r = 0; r < write->rows; r++)
            for (int64_t h = 0; h < write->heads; h++) {
                int64_t head = write->first_head + h * write->head_step, seq = step->problem.seq, of = write->row + r;
                const StoredView *key = &write->key, *value = &write->value;
                const char *new_key = row_address(&step->new_key, of / seq, of % seq, head);
                const char *new_value = row_address(&step->new_value, of / seq, of % seq, head);
                N(write_head)(step, key->data + r * key->sequence + h * key->head, new_key, row);
                N(write_head)(step, value->data + r * value->sequence + h * value->head, new_value, row);
            }
    }
}

#undef FOR_STORED
#undef StoredTile
#undef Piece
