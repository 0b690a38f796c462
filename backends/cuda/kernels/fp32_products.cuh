/* Products of own and other rows, and sums of other rows, in fp32: from thin slices in shared memory to registers.

       score_tile   ACROSS slices of both --> 64 by 64 products, 8 by 4 of them a thread
       accumulate   weights, ALONG slices of the others --> sums of the own rows, 8 by HEAD_DIM / 16 of them a thread

   One slice is computed with while the next one is on its way. */
#ifndef DILKIT_FP32_PRODUCTS
#define DILKIT_FP32_PRODUCTS

#include "fp32_slices.cuh"

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

#endif
