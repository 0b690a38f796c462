/* Gradients in fp32 on CUDA cores, of tensors in float, half or bfloat16: what both kernels share.

       P  = min(count * exp(scale * (own[0] . other[0]) - lse), 1)       dS = P * (own[1] . other[1] - delta)
       gradient of own[0] = scale * sum over others of dS * other[0]     gradient of own[1] = sum over others of P * other[1]

   fp32_dquery.cu      OF_KEYS 0    own = query, dout    other = key, value    the second gradient is not wanted
   fp32_dkeyvalue.cu   OF_KEYS 1    own = key, value     other = query, dout, of one query head after the other
   count = how often the query sees the key; delta = rowsum(dout * out). Rounding takes exponents of large scores far above 0; a large
   lse is less by its rounding (`load_lse`).

   P, then dS in its place, is the only matrix that is whole in shared memory. TILE_ROWS 64 and THREADS 128 for every HEAD_DIM.
   Shared memory: 32 KB, with thicker slices 40 KB. */
#ifndef DILKIT_FP32_BACKWARD
#define DILKIT_FP32_BACKWARD

#include "scores.cuh"
#include "fp32_products.cuh"

/* A term of row number `row`, kept in the padding of the weights. BIAS is of the others; LSE and DELTA are of the queries, be
   they the others or the own rows. Of the others there are two DELTA, by buffer. */
enum { BIAS, LSE, DELTA };
DEVICE float *row_term(int row, int what) { return (float *)weights + row * (4 * WEIGHTS) + 64 + what; }

/* lse and delta of a query. One that sees nothing has an lse of +inf here: its weights and its gradient are 0. */
DEVICE void load_query(const Args *args, long long position, float *lse, float *delta) {
    long long query = ((long long)task.batch * args->heads + work.query_head) * args->seq + position;
    float x = load_lse(args->lse + query);
    *lse = x == NEG_INF ? INFINITY : x;
    *delta = x == NEG_INF ? 0.0f : LOAD(args->delta + query);
}

DEVICE int ignored(const Args *args, long long position) {
    return args->mask && LOAD(args->mask + task.batch * args->mask_batch + position * args->mask_row);
}

/* The 64 by 64 weights P, from the products, or, if CHANGED, the scores: 8 by 4 of them a thread. lse is subtracted before anything is rounded: both may be
   large. */
DEVICE void compute_weights(const Args *args, int buffer, float score[8][4]) {
    int thread = opaque(thread_index()), row = thread_row(thread), column = thread_column(thread), step = task.tile.step;
    unsigned lowest = task.tile.row - (OF_KEYS ? args->ahead : args->back), between = (unsigned)args->back + args->ahead;
    float scale = CHANGED ? 1.0f : args->scale;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        int other = column + 16 * j;
        unsigned distance = positions[buffer][other] - lowest - (unsigned)row * step;
        float *weight = (float *)weights + other * (4 * WEIGHTS) + row, bias = *row_term(other, BIAS);
#pragma unroll
        for (int i = 0; i < 8; i++, distance -= 8u * step) {
            float power = fmaf(score[i][j], scale, -*row_term(OF_KEYS ? other : row + 8 * i, LSE)) * LOG2E + bias;
            if (distance > between)
                power = NEG_INF;
            weight[8 * i] = exp2_capped(power);
        }
    }
}

#if DROPOUT
/* Makes the weights negative that dropout drops: P is read from them as it was, and 0 where only what is kept counts. */
DEVICE void mark_dropped(const Args *args, int buffer) {
    int thread = opaque(thread_index()), row = thread_row(thread), column = thread_column(thread);
#pragma unroll 1
    for (int n = 0; n < 32; n++) {
        int own = own_position(&task.tile, row + n / 4 * 8), other = positions[buffer][column + n % 4 * 16];
        float *weight = (float *)weights + (column + n % 4 * 16) * (4 * WEIGHTS) + row + n / 4 * 8;
        if (!keeps(args, &task.keys, OF_KEYS ? other : own, OF_KEYS ? own : other))
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

#if CHANGED

/* The bias of an own row and another. */
DEVICE float bias_between(const ScoreOf *of, Point own, Point other) {
    return OF_KEYS ? bias_of(of, other, own) : bias_of(of, own, other);
}

/* Turns products into scores. */
DEVICE void change_scores(const Args *args, int buffer, float score[8][4]) {
    ScoreOf of = score_of(args, task.batch, work.query_head);
    int thread = opaque(thread_index()), row = thread_row(thread), column = thread_column(thread);
#pragma unroll
    for (int j = 0; j < 4; j++) {
        Point other = point_of(&of, positions[buffer][column + 16 * j]);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            Point own = point_of(&of, own_position(&task.tile, row + 8 * i));
            score[i][j] = capped(&of, score[i][j]) + bias_between(&of, own, other);
        }
        keep_loads_here();
    }
}

/* Leaves the gradients of P where P would be, 0 of weights that dropout drops. */
DEVICE void keep_weight_gradients(const Args *args, int buffer, float gradient[8][4]) {
    int thread = opaque(thread_index()), row = thread_row(thread), column = thread_column(thread);
    float *first = (float *)weights + column * (4 * WEIGHTS) + row;
#pragma unroll
    for (int j = 0; j < 4; j++)
#pragma unroll
        for (int i = 0; i < 8; i++)
            first[16 * j * (4 * WEIGHTS) + 8 * i] = gradient[i][j] * KEEP_SCALE(args);
#if DROPOUT
#pragma unroll 1
    for (int n = 0; n < 32; n++) {
        int own = own_position(&task.tile, row + n / 4 * 8), other = positions[buffer][column + n % 4 * 16];
        if (!keeps(args, &task.keys, OF_KEYS ? other : own, OF_KEYS ? own : other))
            first[n % 4 * 16 * (4 * WEIGHTS) + n / 4 * 8] = 0.0f;
    }
#endif
}

/* dS in place of the gradients of P, from the products of queries and keys: of scores as they are before the softcap. What LEARNED
   wants is of scores as they are after it. */
DEVICE void compute_changed_gradients(const Args *args, int buffer, float product[8][4]) {
    ScoreOf of = score_of(args, task.batch, work.query_head);
    int thread = opaque(thread_index()), row = thread_row(thread), column = thread_column(thread), step = task.tile.step;
    unsigned lowest = task.tile.row - (OF_KEYS ? args->ahead : args->back), between = (unsigned)args->back + args->ahead;
    float learned = 0.0f;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        int place = column + 16 * j, position = positions[buffer][place];
        unsigned distance = position - lowest - (unsigned)row * step;
        Point other = point_of(&of, position);
        float *gradient = (float *)weights + place * (4 * WEIGHTS) + row, bias = *row_term(place, BIAS);
#pragma unroll
        for (int i = 0; i < 8; i++, distance -= 8u * step) {
            Point own = point_of(&of, own_position(&task.tile, row + 8 * i));
            float score = capped(&of, product[i][j]), delta = *row_term(OF_KEYS ? place : row + 8 * i, OF_KEYS ? DELTA + buffer : DELTA);
            float seen = *row_term(OF_KEYS ? place : row + 8 * i, LSE);
            float power = (score + bias_between(&of, own, other) - seen) * LOG2E + bias;
            float ds = distance > between ? 0.0f : exp2_capped(power) * (gradient[8 * i] - delta);
#if LEARNED
            learned += learn_pair(args, &of, own, other, ds);
#endif
            gradient[8 * i] = SOFTCAP ? ds * cap_slope(&of, score) : ds;
        }
        keep_loads_here();
    }
#if LEARNED
    learn_sum(args, learned);
#endif
}

#endif

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

/* Writes a gradient of the own rows of a tile. */
DEVICE void write_sums(const Args *args, const View *view, float factor, float sum[8][COLUMNS], const Tile *tile, int batch) {
    long long head = head_of(view, batch, tile->head);
    int thread = opaque(thread_index());
#pragma unroll
    for (int i = 0; i < 8; i++) {
        if (row_of(thread, i) >= tile->rows)
            continue;
        Storage *row = (Storage *)row_in(view, head, own_position(tile, row_of(thread, i)));
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

/* Sets up the tile before its first query head. */
DEVICE void start_heads(const Args *args) {
    int heads = OF_KEYS ? group_of(args) : 1;
    if (thread_index() == 0)
        work.query_head = task.tile.head * heads - 1, work.last_head = task.tile.head * heads + heads - 1;
}

/* Sets up the next query head of the tile; the keys of the first one are known. */
DEVICE void next_head(const Args *args) {
    synchronize();
    if (in_first_warp()) {
        int query_head = work.query_head + 1, kv_head = query_head / group_of(args);
        if (OF_KEYS && query_head > task.tile.head * group_of(args))
            find_keys(&task.keys, args, &task.tile, task.batch, query_head, args->ahead, args->back);
        synchronize_warp();
        if (thread_index() == 0)
            work.query_head = query_head;
        for (int pair = thread_index(); pair < 2; pair += 32) {
            work.own[pair] = head_of(view_of(args, OF_KEYS, pair), task.batch, OF_KEYS ? kv_head : query_head);
            work.other[pair] = head_of(view_of(args, !OF_KEYS, pair), task.batch, OF_KEYS ? query_head : kv_head);
        }
    }
    synchronize();
}

#endif
