/* The gradients of keys and values in fp32: own = key, value; other = query, dout, of one query head after the other.

       for each query head, for each 64 others:
           ACROSS slices of own[0], other[0] --> shared;    scores (registers) --> P --> `weights` (shared)
           ALONG slices of other[1] --> shared;             second gradient (registers) += P^T other[1]
           ACROSS slices of own[1], other[1] --> shared;    products (registers), P --> dS --> `weights` (shared)
           ALONG slices of other[0] --> shared;             first gradient (registers) += dS^T other[0]
       if SOFTCAP, scores are computed once more after the last products: registers have no room for its derivative
       gradients --> global memory, written or, for later groups, added;    the first warp then finds the next tile

   BLOCKS: 3, from a HEAD_DIM of 96 on 2. */
enum { OF_KEYS = 1 };
#include "fp32_backward.cuh"

/* Element by element, the compiler finds too few registers there for three blocks. */
#if STORAGE == 0 && !VECTOR && HEAD_DIM == 64 && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
#undef BLOCKS
#define BLOCKS 2
#endif

/* Where the queries from number `start` on are, and the terms of their scores: a thread for each. */
DEVICE void locate_others(const Args *args, int start, int buffer) {
    int thread = opaque(thread_index()), index = start + thread, position = -1, branch;
    if (thread >= 64)
        return;
    float bias = NEG_INF, lse = INFINITY, delta = 0.0f;
    if (index < task.keys.total) {
        position = key_position(&task.keys, index, &branch);
        bias = key_bias(&task.keys, position, branch, args->once);
        load_query(args, position, &lse, &delta);
        if (bias == NEG_INF || lse == INFINITY)
            bias = NEG_INF, position = -1;
    }
    positions[buffer][thread] = position;
    *row_term(thread, BIAS) = bias;
    *row_term(thread, LSE) = lse, *row_term(thread, DELTA + buffer) = delta;
}

/* Adds what one query head contributes to the gradients of a tile. */
DEVICE void accumulate_head(const Args *args, Stream *stream, float first[8][COLUMNS], float second[8][COLUMNS]) {
    float result[8][4];
    int buffer = 0;
    if (!task.keys.total)
        return;
    locate_others(args, 0, 0);
    synchronize();
    start_across(stream, args, 0, 0);
#pragma unroll 1
    for (int left = task.keys.total; left > 0; left -= 64, buffer ^= 1) {
        score_tile(result, stream, args, ALONG, 1, buffer);
#if CHANGED
        change_scores(args, buffer, result);
#endif
        compute_weights(args, buffer, result);
#if DROPOUT
        mark_dropped(args, buffer);
#endif
        accumulate(second, DROPOUT, stream, args, 1, buffer, left, 1, buffer);
#if SOFTCAP
        score_tile(result, stream, args, ACROSS, 0, buffer);
        keep_weight_gradients(args, buffer, result);
        score_tile(result, stream, args, ALONG, 0, buffer);
        compute_changed_gradients(args, buffer, result);
        synchronize();
        if (left > 64)
            locate_others(args, task.keys.total - left + 64, buffer ^ 1);
#else
        score_tile(result, stream, args, ALONG, 0, buffer);
        if (left > 64)
            locate_others(args, task.keys.total - left + 64, buffer ^ 1);
        compute_score_gradients(args, buffer, result);
#endif
        accumulate(first, 0, stream, args, 0, buffer, left, 0, left > 64 ? buffer ^ 1 : -1);
    }
}

/* Keys that are ignored have no gradient. */
DEVICE void clear_masked(const Args *args, float sum[8][COLUMNS]) {
    int thread = opaque(thread_index());
#pragma unroll
    for (int i = 0; i < 8; i++) {
        int row = row_of(thread, i);
        if (row < task.tile.rows && ignored(args, own_position(&task.tile, row)))
#pragma unroll
            for (int e = 0; e < COLUMNS; e++)
                sum[i][e] = 0.0f;
    }
}

/* All tiles of a block. */
DEVICE void compute_tiles(const Args *args) {
    Stream stream;
    stream.slice = 0;
    first_tile(&task, args, OF_KEYS);
    while (task.tile.rows) {
        float first[8][COLUMNS] = {{0}}, second[8][COLUMNS] = {{0}};
        start_heads(args);
        do {
            next_head(args);
            accumulate_head(args, &stream, first, second);
        } while (work.query_head < work.last_head);
        if (args->mask)
            clear_masked(args, first), clear_masked(args, second);
        int batch = task.batch, number = take_number(&task, args);
        Tile tile = task.tile;
        synchronize();
        write_sums(args, &args->dkey, args->scale, first, &tile, batch);
        write_sums(args, &args->dvalue, KEEP_SCALE(args), second, &tile, batch);
        Found next = find_tile(args, number);
        begin_tile(&task, args, &next, OF_KEYS);
        synchronize();
    }
}

KERNEL(fp32_dkeyvalue) { compute_tiles(&args); }
