/* Gradients in fp32 on CUDA cores, of tensors in float, half or bfloat16.

       P  = count * exp(scale * (own[0] . other[0]) - lse)               dS = P * (own[1] . other[1] - delta)
       gradient of own[0] = scale * sum over others of dS * other[0]     gradient of own[1] = sum over others of P * other[1]

   fp32_dquery      OF_KEYS 0    own = query, dout    other = key, value    the second gradient is not wanted
   fp32_dkeyvalue   OF_KEYS 1    own = key, value     other = query, dout, of one query head after the other
   count = how often the query sees the key; delta = rowsum(dout * out).

       for each query head, for each 64 others:
           ACROSS slices of own[0], other[0] --> shared;    scores (registers) --> P --> `weights` (shared)
           OF_KEYS: ALONG slices of other[1] --> shared;    second gradient (registers) += P^T other[1]
           ACROSS slices of own[1], other[1] --> shared;    products (registers), P --> dS --> `weights` (shared)
           ALONG slices of other[0] --> shared;             first gradient (registers) += dS^T other[0]
       gradients --> global memory, written or, for later groups, added

   Shared memory from one `next_slice` to the next, each of which has a barrier:

                          | slice s is there                                          | slice s + 1 is there
       slices, one half   | read: products                                            | slice s + 2 is being copied
       the other half     | slice s + 1 is being copied, or passes through registers  | read: products
       weights            | after the ACROSS slices each thread writes its own; from the next barrier on all are read
       others             | located 64 ahead, in the other of two buffers, while the second pair is multiplied

   "Own" rows are those of the tile, "others" the rows that they see, 64 at a time. All matrices pass through shared memory in
   thin slices, in two buffers: one slice is computed with while the next one is on its way from global memory. A thread has sums
   of 8 rows by HEAD_DIM / 16 columns; P, then dS in its place, is the only matrix that is whole in shared memory.

   TILE_ROWS 64 and THREADS 128 for every HEAD_DIM. BLOCKS of fp32_dquery: 3, with a HEAD_DIM up to 64 on sm_90 and sm_100 4; of
   fp32_dkeyvalue: 3, from a HEAD_DIM of 96 on 2. Shared memory: 32 KB, with thicker slices 40 KB. */
#include "stored.cuh"

#if TILE_ROWS != 64 || THREADS != 128 || !defined(OF_KEYS)
#error "tiles of 64 rows, blocks of 128 threads; OF_KEYS 0 or 1"
#endif

/* Element by element, the compiler finds too few registers there for three blocks. */
#if OF_KEYS && STORAGE == 0 && !VECTOR && HEAD_DIM == 64 && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
#undef BLOCKS
#define BLOCKS 2
#endif

/* A slice is either SLICE columns of the own and the other rows (ACROSS), or SLICE other rows with all columns (ALONG): thicker
   ones where three blocks of 40 KB find room. Pitches, in float4, are such that eight rows one below the other lie in different
   banks. */
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 800 || (__CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200))
#define SLICE 16
#else
#define SLICE 8
#endif
enum { ROW = SLICE / 4 + 1, SIDE = 64 * ROW, QUADS = HEAD_DIM / 4, WEIGHTS = 17, COLUMNS = HEAD_DIM / 16 };
enum { ACROSS_QUADS = SLICE / 8, ALONG_QUADS = (SLICE * QUADS + THREADS - 1) / THREADS };
enum { PREFETCHED = ALONG_QUADS > 2 * ACROSS_QUADS ? ALONG_QUADS : 2 * ACROSS_QUADS };
enum { ACROSS, ALONG };

/* From sm_80 on, slices are copied to shared memory asynchronously; before, they pass through registers. */
#if STORAGE == 0 && VECTOR && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
#define COPIES 1
#else
#define COPIES 0
#endif

/* What a block works on: a tile, and one query head; own, other: where the head begins in the tensors, in elements. It is in
   shared memory, as registers are short; a pointer from there would not be known to point to global memory. */
typedef struct {
    long long own[2], other[2];
    Tile tile;
    int batch, query_head, last_head;
} Work;

/* The slices: where the one that is being read begins, 0 or 2 * SIDE, and what this thread loads of the next ACROSS slice: of one
   own row, and up to column `stop` of one other row. */
typedef struct {
    int slice, stop;
    const Storage *own, *other;
    Quad prefetched[PREFETCHED];
} Stream;

SHARED Work work;
SHARED Keys keys;
SHARED int item;
SHARED int positions[2][64]; /* of 64 others, and of the next 64 */
SHARED float4 weights[64 * WEIGHTS];
SHARED float4 slices[4 * SIDE];

/* A term of row number `row`, kept in the padding of the weights. BIAS is of the others; LSE and DELTA are of the queries, be
   they the others or the own rows. Of the others there are two DELTA, by buffer. */
enum { BIAS, LSE, DELTA };
DEVICE float *row_term(int row, int what) { return (float *)weights + row * (4 * WEIGHTS) + 64 + what; }

/* The views of keys and values, or of queries and gradients of out. */
DEVICE const View *view_of(const Args *args, int of_keys, int pair) {
    return of_keys ? pair ? &args->value : &args->key : pair ? &args->dout : &args->query;
}

DEVICE long long head_of(const View *view, int batch, int head) { return batch * view->batch + head * view->head; }

/* The row at `position` of a head that begins at `head`. */
DEVICE const Storage *row_in(const View *view, long long head, int position) {
    return row_at((const Storage *)view->data + head, position, view->row);
}

/* What this thread loads as number `piece`: four numbers of a row, from `column` on, where those up to column `stop` exist. They
   will lie at `target` of the next slice. A copy of nothing has the address of the row. */
DEVICE void start_load(Stream *stream, int piece, const Storage *row, int column, int stop, int target) {
#if COPIES
    copy_async_or_zero(slices + 2 * SIDE - stream->slice + target, row + (column < stop ? column : 0), column < stop);
#else
    stream->prefetched[piece] = load_four(row + column, stop - column);
#endif
}

DEVICE void finish_load(const Stream *stream, int piece, int target) {
    slices[stream->slice + target] = to_floats(stream->prefetched[piece]);
}

DEVICE int side_row(int thread) { return (thread >> 4) * 8 + (thread & 7); }
DEVICE int side_quad(int thread, int share) { return (thread >> 3 & 1) + 2 * share; }

DEVICE void load_across(Stream *stream, const Args *args, int from) {
    int thread = opaque(thread_index());
#pragma unroll
    for (int i = 0; i < ACROSS_QUADS; i++) {
        int target = side_row(thread) * ROW + side_quad(thread, i), column = from + 4 * side_quad(thread, i);
        start_load(stream, 2 * i, stream->own, column, args->head_dim, target);
        start_load(stream, 2 * i + 1, stream->other, column, stream->stop, target + SIDE);
    }
}

DEVICE void finish_across(const Stream *stream) {
    int thread = opaque(thread_index());
#pragma unroll
    for (int i = 0; i < ACROSS_QUADS; i++) {
        int target = side_row(thread) * ROW + side_quad(thread, i);
        finish_load(stream, 2 * i, target);
        finish_load(stream, 2 * i + 1, target + SIDE);
    }
}

/* The first slice of pair `pair`. Where there is no own row, the last one stands for it: its result is not written.
   Other rows that are not there are 0. */
DEVICE void start_across(Stream *stream, const Args *args, int pair, int buffer) {
    int row = side_row(opaque(thread_index())), other = positions[buffer][row];
    stream->stop = other >= 0 ? args->head_dim : 0;
    stream->own = row_in(view_of(args, OF_KEYS, pair), work.own[pair], own_position(&work.tile, row));
    stream->other = row_in(view_of(args, !OF_KEYS, pair), work.other[pair], max_of(other, 0));
    load_across(stream, args, 0);
}

DEVICE void load_along(Stream *stream, const Args *args, int pair, int from, int buffer) {
    int thread = opaque(thread_index());
#pragma unroll
    for (int i = 0; i < ALONG_QUADS; i++) {
        unsigned target = thread + i * THREADS, row = target / QUADS, column = target % QUADS * 4;
        if ((i + 1) * THREADS > SLICE * QUADS && row >= SLICE)
            return;
        int position = positions[buffer][from + row];
        const Storage *other = row_in(view_of(args, !OF_KEYS, pair), work.other[pair], max_of(position, 0));
        start_load(stream, i, other, column, position < 0 ? 0 : args->head_dim, target);
    }
}

DEVICE void finish_along(const Stream *stream) {
    int thread = opaque(thread_index());
#pragma unroll
    for (int i = 0; i < ALONG_QUADS; i++)
        if ((i + 1) * THREADS <= SLICE * QUADS || thread + i * THREADS < SLICE * QUADS)
            finish_load(stream, i, thread + i * THREADS);
}

/* Waits until the next slice is there for all threads, and all have finished with the one before. */
DEVICE void next_slice(Stream *stream, int kind) {
    stream->slice = 2 * SIDE - stream->slice;
#if COPIES
    copy_async_commit();
    copy_async_wait(0);
#else
    if (kind == ACROSS)
        finish_across(stream);
    else
        finish_along(stream);
#endif
    synchronize();
}

/* A thread's place in the 8 by 16 threads of a block. Neighbours of a warp, which is 4 by 8, alternate between row and column:
   two lanes out of four then read the same, and such loads are served together. */
DEVICE int thread_row(int thread) { return (thread >> 1 & 1) | (thread >> 3 & 1) << 1 | (thread >> 5 & 1) << 2; }
DEVICE int thread_column(int thread) {
    return (thread & 1) | (thread >> 2 & 1) << 1 | (thread >> 4 & 1) << 2 | (thread >> 6 & 1) << 3;
}

/* score[i][j] += own row (thread_row + 8 i) . other row (thread_column + 16 j), of the slice's columns. Four at a time: registers
   are short. */
DEVICE void multiply_across(const float4 *own, const float4 *other, float score[8][4]) {
#pragma unroll 1
    for (const float4 *stop = own + SLICE / 4; own < stop; own++, other++) {
        float4 b[4];
#pragma unroll
        for (int j = 0; j < 4; j++)
            b[j] = other[16 * j * ROW];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            float4 a = own[8 * i * ROW];
#pragma unroll
            for (int j = 0; j < 4; j++)
                score[i][j] += a.x * b[j].x;
#pragma unroll
            for (int j = 0; j < 4; j++)
                score[i][j] += a.y * b[j].y;
#pragma unroll
            for (int j = 0; j < 4; j++)
                score[i][j] += a.z * b[j].z;
#pragma unroll
            for (int j = 0; j < 4; j++)
                score[i][j] += a.w * b[j].w;
        }
    }
}

/* Column number e of a thread: quads of 64 columns, then one to three of what is left. */
DEVICE int column_of(int thread, int e) {
    int column = thread_column(thread), whole = e / 4 * 64, left = COLUMNS - e / 4 * 4;
    return whole + (left >= 4 ? column * 4 : column * left) + e % 4;
}

/* Which own row is number i of a thread's 8 in the sums. */
DEVICE int row_of(int thread, int i) { return i / 4 * 32 + thread_row(thread) * 4 + i % 4; }

DEVICE void load_columns(const float *row, int column, float x[COLUMNS]) {
#pragma unroll
    for (int e = 0; e + 4 <= COLUMNS; e += 4) {
        float4 quad = *(const float4 *)(row + 16 * e + 4 * column);
        x[e] = quad.x, x[e + 1] = quad.y, x[e + 2] = quad.z, x[e + 3] = quad.w;
    }
#if HEAD_DIM % 64 == 32
    float2 pair = *(const float2 *)(row + HEAD_DIM - 32 + 2 * column);
    x[COLUMNS - 2] = pair.x, x[COLUMNS - 1] = pair.y;
#elif HEAD_DIM % 64 == 48
    for (int e = 0; e < 3; e++)
        x[COLUMNS - 3 + e] = row[HEAD_DIM - 48 + 3 * column + e];
#elif HEAD_DIM % 64 == 16
    x[COLUMNS - 1] = row[HEAD_DIM - 16 + column];
#endif
}

/* What is no number stays none. */
DEVICE float not_negative(float x) { return x < 0.0f ? 0.0f : x; }

/* sum += weights^T other, of the slice's rows; negative weights are 0, if `kept`. */
DEVICE void multiply_along(const float4 *weight, int kept, const float *other, int column, float sum[8][COLUMNS]) {
#pragma unroll
    for (int k = 0; k < SLICE; k++) {
        float x[COLUMNS];
        load_columns(other + k * HEAD_DIM, column, x);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float4 w = weight[k * WEIGHTS + half * 8];
            if (kept)
                w = make_float4(not_negative(w.x), not_negative(w.y), not_negative(w.z), not_negative(w.w));
#pragma unroll
            for (int e = 0; e < COLUMNS; e++) {
                sum[half * 4][e] += w.x * x[e];
                sum[half * 4 + 1][e] += w.y * x[e];
                sum[half * 4 + 2][e] += w.z * x[e];
                sum[half * 4 + 3][e] += w.w * x[e];
            }
        }
    }
}

/* lse and delta of a query. One that sees nothing has an lse of +inf here: its weights and its gradient are 0. */
DEVICE void load_query(const Args *args, long long position, float *lse, float *delta) {
    long long query = ((long long)work.batch * args->heads + work.query_head) * args->seq + position;
    float x = LOAD(args->lse + query);
    *lse = x == NEG_INF ? INFINITY : x;
    *delta = x == NEG_INF ? 0.0f : LOAD(args->delta + query);
}

DEVICE int ignored(const Args *args, long long position) {
    return args->mask && LOAD(args->mask + work.batch * args->mask_batch + position * args->mask_row);
}

/* Where the others from number `start` on are, and the terms of their scores: a thread for each. */
DEVICE void locate_others(const Args *args, int start, int buffer) {
    int thread = opaque(thread_index()), index = start + thread, position = -1, branch;
    if (thread >= 64)
        return;
    float bias = NEG_INF, lse = INFINITY, delta = 0.0f;
    if (index < keys.total) {
        position = key_position(&keys, index, &branch);
        bias = key_bias(&keys, position, branch, args->once);
        if (OF_KEYS)
            load_query(args, position, &lse, &delta);
        if (bias == NEG_INF || (OF_KEYS ? lse == INFINITY : ignored(args, position)))
            bias = NEG_INF, position = -1;
    }
    positions[buffer][thread] = position;
    *row_term(thread, BIAS) = bias;
    if (OF_KEYS)
        *row_term(thread, LSE) = lse, *row_term(thread, DELTA + buffer) = delta;
}

/* The terms of the own rows, where these are the queries. */
DEVICE void load_own_terms(const Args *args) {
    int thread = thread_index();
    float lse = INFINITY, delta = 0.0f;
    if (thread >= 64)
        return;
    if (thread < work.tile.rows)
        load_query(args, own_position(&work.tile, thread), &lse, &delta);
    *row_term(thread, LSE) = lse, *row_term(thread, DELTA) = delta;
}

/* The 64 by 64 weights P, from the scores: 8 by 4 of them a thread. lse is subtracted before anything is rounded: both may be
   large. */
DEVICE void compute_weights(const Args *args, int buffer, float score[8][4]) {
    int thread = opaque(thread_index()), row = thread_row(thread), column = thread_column(thread), step = work.tile.step;
    unsigned lowest = work.tile.row - (OF_KEYS ? args->ahead : args->back), between = (unsigned)args->back + args->ahead;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        int other = column + 16 * j;
        unsigned distance = positions[buffer][other] - lowest - (unsigned)row * step;
        float *weight = (float *)weights + other * (4 * WEIGHTS) + row, bias = *row_term(other, BIAS);
#pragma unroll
        for (int i = 0; i < 8; i++, distance -= 8u * step) {
            float power = fmaf(score[i][j], args->scale, -*row_term(OF_KEYS ? other : row + 8 * i, LSE)) * LOG2E + bias;
            if (distance > between)
                power = NEG_INF;
            weight[8 * i] = exp2_fast(power);
        }
    }
}

#if DROPOUT
/* Makes the weights negative that dropout drops: P is read from them as it was, and 0 where only what is kept counts. */
DEVICE void mark_dropped(const Args *args, int buffer) {
    int thread = opaque(thread_index()), row = thread_row(thread), column = thread_column(thread);
#pragma unroll 1
    for (int n = 0; n < 32; n++) {
        int own = own_position(&work.tile, row + n / 4 * 8), other = positions[buffer][column + n % 4 * 16];
        float *weight = (float *)weights + (column + n % 4 * 16) * (4 * WEIGHTS) + row + n / 4 * 8;
        if (!keeps(args, &keys, OF_KEYS ? other : own, OF_KEYS ? own : other))
            *weight = -*weight;
    }
}
#endif

/* dS in place of P, from the gradients of P. */
DEVICE void compute_score_gradients(const Args *args, int buffer, float gradient[8][4]) {
    int thread = opaque(thread_index()), row = thread_row(thread), column = thread_column(thread);
#pragma unroll
    for (int j = 0; j < 4; j++) {
        int other = column + 16 * j;
        float *weight = (float *)weights + other * (4 * WEIGHTS) + row;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            float own = weight[8 * i], delta = OF_KEYS ? *row_term(other, DELTA + buffer) : *row_term(row + 8 * i, DELTA);
#if DROPOUT
            gradient[i][j] = own < 0.0f ? 0.0f : gradient[i][j] * args->keep_scale;
#endif
            weight[8 * i] = fabsf(own) * (gradient[i][j] - delta);
        }
    }
}

/* result = products of a pair whose first slice is being loaded. At the end the first slice of pair `next` is being loaded: of
   its products, or, ALONG, of its other rows. */
DEVICE void score_tile(float result[8][4], Stream *stream, const Args *args, int kind, int next, int buffer) {
    int thread = opaque(thread_index()), row = thread_row(thread), column = thread_column(thread);
#pragma unroll
    for (int i = 0; i < 8; i++)
#pragma unroll
        for (int j = 0; j < 4; j++)
            result[i][j] = 0.0f;
#pragma unroll 1
    for (int next_column = SLICE; next_column < args->head_dim + SLICE; next_column += SLICE) {
        next_slice(stream, ACROSS);
        if (next_column < args->head_dim)
            load_across(stream, args, next_column);
        else if (kind == ACROSS)
            start_across(stream, args, next, buffer);
        else
            load_along(stream, args, next, 0, buffer);
        const float4 *own = slices + stream->slice;
        multiply_across(own + row * ROW, own + SIDE + column * ROW, result);
    }
}

/* sum += weights^T other[pair], of `left` others; negative weights are 0, if `kept`. At the end the first slice of pair `next` is
   being loaded, of the others of buffer `then`, if that is not negative. */
DEVICE void accumulate(float sum[8][COLUMNS], int kept, Stream *stream, const Args *args, int pair, int buffer, int left,
                       int next, int then) {
    int thread = opaque(thread_index()), row = thread_row(thread), column = thread_column(thread), finish_load = min_of(left, 64);
#pragma unroll 1
    for (int from = 0; from < finish_load; from += SLICE) {
        next_slice(stream, ALONG);
        if (from + SLICE < finish_load)
            load_along(stream, args, pair, from + SLICE, buffer);
        else if (then >= 0)
            start_across(stream, args, next, then);
        multiply_along(weights + from * WEIGHTS + row, kept, (const float *)(slices + stream->slice), column, sum);
    }
}

/* Adds what one query head contributes to the gradients of a tile. */
DEVICE void accumulate_head(const Args *args, Stream *stream, float first[8][COLUMNS], float second[8][COLUMNS]) {
    float result[8][4];
    int buffer = 0;
    if (!keys.total)
        return;
    locate_others(args, 0, 0);
    synchronize();
    start_across(stream, args, 0, 0);
#pragma unroll 1
    for (int left = keys.total; left > 0; left -= 64, buffer ^= 1) {
        score_tile(result, stream, args, OF_KEYS ? ALONG : ACROSS, 1, buffer);
        compute_weights(args, buffer, result);
#if DROPOUT
        mark_dropped(args, buffer);
#endif
#if OF_KEYS
        accumulate(second, DROPOUT, stream, args, 1, buffer, left, 1, buffer);
#endif
        score_tile(result, stream, args, ALONG, 0, buffer);
        if (left > 64)
            locate_others(args, keys.total - left + 64, buffer ^ 1);
        compute_score_gradients(args, buffer, result);
        accumulate(first, 0, stream, args, 0, buffer, left, 0, left > 64 ? buffer ^ 1 : -1);
    }
}

/* Writes numbers to a gradient, or adds to it: the first `count` of four, or one. */
DEVICE void write_four(const Args *args, Storage *place, float4 x, int count) {
    if (!args->first) {
        float4 old = to_floats(load_four(place, count));
        x = make_float4(old.x + x.x, old.y + x.y, old.z + x.z, old.w + x.w);
    }
    store_four(place, x, count);
}

DEVICE void write_one(const Args *args, Storage *place, float x) {
    STORE(place, to_storage(args->first ? x : from_storage(LOAD(place)) + x));
}

/* Writes a gradient of the tile's own rows. */
DEVICE void write_sums(const Args *args, const View *view, float factor, float sum[8][COLUMNS]) {
    long long head = head_of(view, work.batch, work.tile.head);
    int thread = opaque(thread_index());
#pragma unroll
    for (int i = 0; i < 8; i++) {
        if (row_of(thread, i) >= work.tile.rows)
            continue;
        Storage *row = (Storage *)row_in(view, head, own_position(&work.tile, row_of(thread, i)));
#pragma unroll
        for (int e = 0; e + 4 <= COLUMNS; e += 4) {
            float4 x = make_float4(factor * sum[i][e], factor * sum[i][e + 1], factor * sum[i][e + 2], factor * sum[i][e + 3]);
            write_four(args, row + column_of(thread, e), x, args->head_dim - column_of(thread, e));
        }
#pragma unroll
        for (int e = COLUMNS / 4 * 4; e < COLUMNS; e++)
            if (column_of(thread, e) < args->head_dim)
                write_one(args, row + column_of(thread, e), factor * sum[i][e]);
    }
}

/* Keys that are ignored have no gradient. */
DEVICE void clear_masked(const Args *args, float sum[8][COLUMNS]) {
    int thread = opaque(thread_index());
#pragma unroll
    for (int i = 0; i < 8; i++) {
        int row = row_of(thread, i);
        if (row < work.tile.rows && ignored(args, own_position(&work.tile, row)))
#pragma unroll
            for (int e = 0; e < COLUMNS; e++)
                sum[i][e] = 0.0f;
    }
}

/* The next tile of the block, before its first query head; 0 when none is left. */
DEVICE int next_work(const Args *args) {
    Tile tile;
    int batch;
    if (!next_tile(args, &item, &tile, &batch))
        return 0;
    if (thread_index() == 0) {
        int heads = OF_KEYS ? args->heads / args->kv_heads : 1;
        work.tile = tile, work.batch = batch;
        work.query_head = tile.head * heads - 1, work.last_head = tile.head * heads + heads - 1;
    }
    return 1;
}

/* Sets up the next query head of the tile. */
DEVICE void next_head(const Args *args) {
    synchronize();
    if (thread_index() == 0) {
        int query_head = ++work.query_head, kv_head = query_head / (args->heads / args->kv_heads);
        int row = work.tile.row, last = own_position(&work.tile, work.tile.rows - 1);
        int back = OF_KEYS ? args->ahead : args->back, ahead = OF_KEYS ? args->back : args->ahead;
        for (int pair = 0; pair < 2; pair++) {
            work.own[pair] = head_of(view_of(args, OF_KEYS, pair), work.batch, OF_KEYS ? kv_head : query_head);
            work.other[pair] = head_of(view_of(args, !OF_KEYS, pair), work.batch, OF_KEYS ? query_head : kv_head);
        }
        find_keys(&keys, args, row, serving_branches(args, work.tile.set, query_head), row - back, last + ahead + 1);
        find_place(&keys, args, work.batch, query_head);
    }
    synchronize();
}

/* All tiles of a block. */
DEVICE void compute_tiles(const Args *args) {
    Stream stream;
    stream.slice = 0;
    start_tiles(&item);
    while (next_work(args)) {
        float first[8][COLUMNS] = {{0}}, second[8][COLUMNS] = {{0}};
        do {
            next_head(args);
            if (!OF_KEYS)
                load_own_terms(args);
            accumulate_head(args, &stream, first, second);
        } while (work.query_head < work.last_head);
        if (OF_KEYS && args->mask)
            clear_masked(args, first), clear_masked(args, second);
        write_sums(args, OF_KEYS ? &args->dkey : &args->dquery, args->scale, first);
        if (OF_KEYS)
            write_sums(args, &args->dvalue, KEEP_SCALE(args), second);
    }
}

#if OF_KEYS
KERNEL(fp32_dkeyvalue) { compute_tiles(&args); }
#else
KERNEL(fp32_dquery) { compute_tiles(&args); }
#endif
