/* Gradients in fp32 on CUDA cores, of tensors in float, half or bfloat16.

       P  = count * exp(scale * (own[0] . other[0]) - lse)               dS = P * (own[1] . other[1] - delta)
       gradient of own[0] = scale * sum over others of dS * other[0]     gradient of own[1] = sum over others of P * other[1]

   fp32_dquery      own = query, dout    other = key, value    the second gradient is not wanted
   fp32_dkeyvalue   own = key, value     other = query, dout, of one query head after the other
   count = how often the query sees the key; delta = rowsum(dout * out).

   A tile's own rows meet its others 64 at a time. All matrices go through shared memory in thin slices, two buffers in turn: a
   slice is computed with while the next one is on its way from global memory. The sums stay in registers, of a thread 8 rows
   by HEAD_DIM / 16 columns; P, then dS in its place, is the only matrix that is whole in shared memory.

   TILE_ROWS 64 and THREADS 128 for every HEAD_DIM; BLOCKS 3, for a HEAD_DIM of 96 and 128: 2. Shared memory: 32 KB. */
#include "dilated.cuh"

#if TILE_ROWS != 64 || THREADS != 128
#error "tiles of 64 rows, blocks of 128 threads"
#endif

#define LOG2E 1.4426950408889634f

/* A slice is either 8 columns of the own and the other rows, or 8 other rows with all columns. Pitches, in float4, are such that
   eight rows one below the other lie in different banks. */
enum { SLICE = 8, ROW = SLICE / 4 + 1, SIDE = 64 * ROW, QUADS = HEAD_DIM / 4, WEIGHTS = 17 };
enum { COLUMNS = HEAD_DIM / 16, AHEAD = HEAD_DIM > 64 ? 2 : 1, LOADS = AHEAD > 2 ? AHEAD : 2 };
enum { ACROSS, ALONG };

SHARED Keys keys;
SHARED int item;
/* Of 64 others, and of the next 64. lses and deltas are those of the queries: the others, or, in [0], the own rows. */
SHARED int positions[2][64];
SHARED float biases[64], lses[64], deltas[2][64];
SHARED float4 weights[64 * WEIGHTS];
SHARED float4 slices[2][2 * SIDE];

#if STORAGE == 0
typedef float4 Quad;
#else
typedef uint2 Quad;
#endif

/* The rows of one head: number p is at data + p * row. */
typedef struct {
    const Storage *data;
    long long row;
} Rows;

/* What a block works on: its tile, and the head whose rows it meets. */
typedef struct {
    Rows own[2], other[2];
    int first, rows, batch, query_head;
} Work;

DEVICE Rows rows_of(const View *view, int batch, int head) {
    Rows rows = {(const Storage *)view->data + batch * view->batch + head * view->head, view->row};
    return rows;
}

#if STORAGE == 0
DEVICE float4 widen(Quad quad) { return quad; }
DEVICE Quad make_quad(Storage a, Storage b, Storage c, Storage d) { return make_float4(a, b, c, d); }
#else
DEVICE float4 widen(Quad quad) { return make_float4(low_of(quad.x), high_of(quad.x), low_of(quad.y), high_of(quad.y)); }
DEVICE Quad make_quad(Storage a, Storage b, Storage c, Storage d) {
    return make_uint2(a | (unsigned)b << 16, c | (unsigned)d << 16);
}
#endif

/* Four elements of a row, 0 beyond the true head_dim and for a row that is not there. */
DEVICE Quad load_quad(const Rows *rows, int position, int column, int head_dim) {
    Quad quad = make_quad(0, 0, 0, 0);
    if (position < 0 || column >= head_dim)
        return quad;
    const Storage *place = rows->data + position * rows->row + column;
#if VECTOR
    return LOAD((const Quad *)place);
#else
    Storage element[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
        element[i] = column + i < head_dim ? LOAD(place + i) : (Storage)0;
    return make_quad(element[0], element[1], element[2], element[3]);
#endif
}

/* Adds to, or writes, `count` elements of a gradient's row. */
DEVICE void write(Storage *place, const float *sum, int count, int column, const Call *call) {
#pragma unroll
    for (int i = 0; i < count; i++)
        if (column + i < call->head_dim)
            STORE(place + column + i, to_storage(call->first ? sum[i] : sum[i] + from_storage(LOAD(place + column + i))));
}

/* What a thread loads of a slice: a quad of an own row and of another (ACROSS), or one or two quads of other rows (ALONG). */
DEVICE int side_row(int thread) { return (thread >> 4) * 8 + (thread & 7); }
DEVICE int side_quad(int thread) { return thread >> 3 & 1; }

DEVICE void fetch(Quad *ahead, const Call *call, const Work *work, int kind, int pair, int slice, int buffer) {
    int thread = thread_index();
    if (kind == ACROSS) {
        int row = side_row(thread), column = slice * SLICE + side_quad(thread) * 4;
        int position = row < work->rows ? work->first + row * call->step : -1;
        ahead[0] = load_quad(&work->own[pair], position, column, call->head_dim);
        ahead[1] = load_quad(&work->other[pair], positions[buffer][row], column, call->head_dim);
        return;
    }
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
        int row = (thread + i * THREADS) / QUADS, column = (thread + i * THREADS) % QUADS * 4;
        if (row < SLICE)
            ahead[i] = load_quad(&work->other[pair], positions[buffer][slice * SLICE + row], column, call->head_dim);
    }
}

DEVICE void put(const Quad *ahead, float4 *slice, int kind) {
    int thread = thread_index();
    if (kind == ACROSS) {
        float4 *place = slice + side_row(thread) * ROW + side_quad(thread);
        place[0] = widen(ahead[0]);
        place[SIDE] = widen(ahead[1]);
        return;
    }
#pragma unroll
    for (int i = 0; i < AHEAD; i++)
        if (thread + i * THREADS < SLICE * QUADS)
            slice[thread + i * THREADS] = widen(ahead[i]);
}

/* A thread's place in the 8 by 16 threads of a block. Neighbours of a warp, which is 4 by 8, alternate between row and column:
   two lanes out of four then read the same, and such loads are served together. */
DEVICE int thread_row(int thread) { return (thread >> 1 & 1) | (thread >> 3 & 1) << 1 | (thread >> 5 & 1) << 2; }
DEVICE int thread_column(int thread) {
    return (thread & 1) | (thread >> 2 & 1) << 1 | (thread >> 4 & 1) << 2 | (thread >> 6 & 1) << 3;
}

/* score[i][j] += own row (thread_row + 8 i) . other row (thread_column + 16 j), of 8 columns. */
DEVICE void multiply_across(const float4 *own, const float4 *other, float score[8][4]) {
#pragma unroll
    for (int k = 0; k < SLICE / 4; k++) {
        float4 b[4];
#pragma unroll
        for (int j = 0; j < 4; j++)
            b[j] = other[16 * j * ROW + k];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            float4 a = own[8 * i * ROW + k];
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

/* Column number e of a thread: quads of 64 columns, then a pair or a single one of what is left. */
DEVICE int column_of(int e) {
    int column = thread_column(thread_index()), whole = e / 4 * 64, left = COLUMNS - e / 4 * 4;
    return whole + (left >= 4 ? column * 4 : column * left) + e % 4;
}

DEVICE void load_columns(const float *row, float x[COLUMNS]) {
    int column = thread_column(thread_index());
#pragma unroll
    for (int e = 0; e + 4 <= COLUMNS; e += 4) {
        float4 quad = *(const float4 *)(row + 16 * e + 4 * column);
        x[e] = quad.x, x[e + 1] = quad.y, x[e + 2] = quad.z, x[e + 3] = quad.w;
    }
#if HEAD_DIM % 64 == 32
    float2 pair = *(const float2 *)(row + HEAD_DIM - 32 + 2 * column);
    x[COLUMNS - 2] = pair.x, x[COLUMNS - 1] = pair.y;
#elif HEAD_DIM % 64 == 16
    x[COLUMNS - 1] = row[HEAD_DIM - 16 + column];
#endif
}

/* Own row number i of a thread, of its 8 in the sums. */
DEVICE int row_of(int i) { return i / 4 * 32 + thread_row(thread_index()) * 4 + i % 4; }

/* sum += weights^T other, of 8 other rows. */
DEVICE void multiply_along(const float4 *weight, const float *other, float sum[8][COLUMNS]) {
#pragma unroll
    for (int k = 0; k < SLICE; k++) {
        float x[COLUMNS];
        load_columns(other + k * HEAD_DIM, x);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float4 w = weight[k * WEIGHTS + half * 8];
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

/* lse and delta of a query. One that sees nothing has an lse of +inf here: its weights are 0, its gradient is nothing. */
DEVICE void load_query(const Call *call, const Work *work, long long position, float *lse, float *delta) {
    long long query = ((long long)work->batch * call->heads + work->query_head) * call->seq + position;
    float x = LOAD(call->lse + query);
    *lse = x == NEVER ? INFINITY : x;
    *delta = x == NEVER ? 0.0f : LOAD(call->delta + query);
}

DEVICE int ignored(const Call *call, const Work *work, long long position) {
    return call->mask && LOAD(call->mask + work->batch * call->mask_batch + position * call->mask_row);
}

/* Where the others from number `start` on are, and what their scores need, a thread each. */
DEVICE void prepare(const Call *call, const Work *work, int of_keys, int start, int buffer) {
    int thread = thread_index(), index = start + thread, position = -1, branch;
    if (thread >= 64)
        return;
    float bias = NEVER, lse = INFINITY, delta = 0.0f;
    if (index < keys.total) {
        position = key_position(&keys, index, &branch);
        bias = key_bias(&keys, position, branch, call->once);
        if (of_keys)
            load_query(call, work, position, &lse, &delta);
        if (bias == NEVER || (of_keys ? lse == INFINITY : ignored(call, work, position)))
            bias = NEVER, position = -1;
    }
    positions[buffer][thread] = position;
    biases[thread] = bias;
    if (of_keys)
        lses[thread] = lse, deltas[buffer][thread] = delta;
}

/* The same of the own rows, where they are the queries. */
DEVICE void prepare_own(const Call *call, const Work *work) {
    int thread = thread_index();
    float lse = INFINITY, delta = 0.0f;
    if (thread >= 64)
        return;
    if (thread < work->rows)
        load_query(call, work, work->first + thread * (long long)call->step, &lse, &delta);
    lses[thread] = lse, deltas[0][thread] = delta;
}

/* The 64 by 64 weights P, from the scores; a thread its own 8 by 4. */
DEVICE void weigh(const Call *call, const Work *work, int of_keys, int buffer, float score[8][4]) {
    int row = thread_row(thread_index()), column = thread_column(thread_index());
#pragma unroll
    for (int j = 0; j < 4; j++) {
        int other = column + 16 * j, position = positions[buffer][other];
        float *weight = (float *)weights + other * (4 * WEIGHTS) + row, bias = biases[other];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            int own = work->first + (row + 8 * i) * call->step;
            float power = (score[i][j] * call->scale - lses[of_keys ? other : row + 8 * i]) * LOG2E + bias;
            if (call->causal && (of_keys ? position < own : own < position))
                power = NEVER;
            weight[8 * i] = exp2_fast(power);
        }
    }
}

/* dS in the place of P, from the gradients of P. */
DEVICE void weigh_gradients(int of_keys, int buffer, float gradient[8][4]) {
    int row = thread_row(thread_index()), column = thread_column(thread_index());
#pragma unroll
    for (int j = 0; j < 4; j++) {
        int other = column + 16 * j;
        float *weight = (float *)weights + other * (4 * WEIGHTS) + row;
#pragma unroll
        for (int i = 0; i < 8; i++)
            weight[8 * i] *= gradient[i][j] - (of_keys ? deltas[buffer][other] : deltas[0][row + 8 * i]);
    }
}

/* Scores of pair `pair`: slice after slice, and fetches what comes then. */
DEVICE void score(float result[8][4], Quad *ahead, int *turn, const Call *call, const Work *work, int pair, int buffer, int kind,
                  int next) {
    int row = thread_row(thread_index()), column = thread_column(thread_index());
    int count = (call->head_dim + SLICE - 1) / SLICE;
#pragma unroll
    for (int i = 0; i < 8; i++)
#pragma unroll
        for (int j = 0; j < 4; j++)
            result[i][j] = 0.0f;
#pragma unroll 1
    for (int slice = 0; slice < count; slice++, *turn ^= 1) {
        put(ahead, slices[*turn], ACROSS);
        synchronize();
        if (slice + 1 < count)
            fetch(ahead, call, work, ACROSS, pair, slice + 1, buffer);
        else
            fetch(ahead, call, work, kind, next, 0, buffer);
        multiply_across(slices[*turn] + row * ROW, slices[*turn] + SIDE + column * ROW, result);
    }
}

/* sum += weights^T other[pair], of which there are `left`; fetches the first columns of pair `next` in buffer `then`, or nothing
   if that is negative. */
DEVICE void gather(float sum[8][COLUMNS], Quad *ahead, int *turn, const Call *call, const Work *work, int pair, int buffer, int left,
                   int next, int then) {
    int row = thread_row(thread_index());
    int count = least((left + SLICE - 1) / SLICE, 64 / SLICE);
#pragma unroll 1
    for (int slice = 0; slice < count; slice++, *turn ^= 1) {
        put(ahead, slices[*turn], ALONG);
        synchronize();
        if (slice + 1 < count)
            fetch(ahead, call, work, ALONG, pair, slice + 1, buffer);
        else if (then >= 0)
            fetch(ahead, call, work, ACROSS, next, 0, then);
        multiply_along(weights + slice * SLICE * WEIGHTS + row, (const float *)slices[*turn], sum);
    }
}

/* The gradients of a tile from one query head. */
DEVICE void meet(const Call *call, const Work *work, int of_keys, int *turn, float first[8][COLUMNS], float second[8][COLUMNS]) {
    float result[8][4];
    Quad ahead[LOADS];
    int buffer = 0;
    prepare(call, work, of_keys, 0, 0);
    synchronize();
    fetch(ahead, call, work, ACROSS, 0, 0, 0);
#pragma unroll 1
    for (int start = 0; start < keys.total; start += 64, buffer ^= 1) {
        int left = keys.total - start;
        score(result, ahead, turn, call, work, 0, buffer, of_keys ? ALONG : ACROSS, 1);
        weigh(call, work, of_keys, buffer, result);
        if (of_keys)
            gather(second, ahead, turn, call, work, 1, buffer, left, 1, buffer);
        score(result, ahead, turn, call, work, 1, buffer, ALONG, 0);
        if (left > 64)
            prepare(call, work, of_keys, start + 64, buffer ^ 1);
        weigh_gradients(of_keys, buffer, result);
        gather(first, ahead, turn, call, work, 0, buffer, left, 0, left > 64 ? buffer ^ 1 : -1);
    }
}

/* Writes a gradient of the tile's own rows. */
DEVICE void write_sums(const Call *call, const Work *work, const View *view, int head, float factor, float sum[8][COLUMNS]) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
        if (row_of(i) >= work->rows)
            continue;
        long long position = work->first + row_of(i) * (long long)call->step;
        Storage *row = (Storage *)view->data + work->batch * view->batch + position * view->row + head * view->head;
#pragma unroll
        for (int e = 0; e < COLUMNS; e++) {
            float value = factor * sum[i][e];
            write(row, &value, 1, column_of(e), call);
        }
    }
}

/* Keys that are ignored have no gradient. */
DEVICE void forget_masked(const Call *call, const Work *work, float sum[8][COLUMNS]) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
        long long position = work->first + row_of(i) * (long long)call->step;
        if (row_of(i) < work->rows && ignored(call, work, position))
#pragma unroll
            for (int e = 0; e < COLUMNS; e++)
                sum[i][e] = 0.0f;
    }
}

/* All tiles of a block. */
DEVICE void gradients(const Call *call, int of_keys) {
    Tile tile;
    int batch, turn = 0, per_head = call->heads / call->kv_heads;
    start_tiles(&item);
    while (next_tile(call, &item, &tile, &batch)) {
        float first[8][COLUMNS] = {{0}}, second[8][COLUMNS] = {{0}};
        int last = tile.row + (tile.rows - 1) * call->step;
        int kv_head = of_keys ? tile.head : tile.head / per_head;
        Work work;
        work.first = tile.row, work.rows = tile.rows, work.batch = batch;
        int from = of_keys ? tile.head * per_head : tile.head, heads = of_keys ? per_head : 1;
#pragma unroll 1
        for (work.query_head = from; work.query_head < from + heads; work.query_head++) {
            Rows query = rows_of(&call->query, batch, work.query_head), dout = rows_of(&call->dout, batch, work.query_head);
            Rows key = rows_of(&call->key, batch, kv_head), value = rows_of(&call->value, batch, kv_head);
            work.own[0] = of_keys ? key : query, work.own[1] = of_keys ? value : dout;
            work.other[0] = of_keys ? query : key, work.other[1] = of_keys ? dout : value;
            synchronize();
            if (thread_index() == 0)
                find_keys(&keys, call, tile.row, serving(call, tile.set, work.query_head), of_keys && call->causal ? tile.row : 0,
                          !of_keys && call->causal ? last + 1 : call->seq);
            if (!of_keys)
                prepare_own(call, &work);
            synchronize();
            meet(call, &work, of_keys, &turn, first, second);
        }
        if (of_keys && call->mask)
            forget_masked(call, &work, first), forget_masked(call, &work, second);
        write_sums(call, &work, of_keys ? &call->dkey : &call->dquery, tile.head, call->scale, first);
        if (of_keys)
            write_sums(call, &work, &call->dvalue, tile.head, 1.0f, second);
    }
}

#ifndef WITHOUT_DQUERY
KERNEL(fp32_dquery) { gradients(&call, 0); }
#endif
#ifndef WITHOUT_DKEYVALUE
KERNEL(fp32_dkeyvalue) { gradients(&call, 1); }
#endif
