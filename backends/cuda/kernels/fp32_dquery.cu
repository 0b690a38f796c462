/* The gradient of queries in fp32: own = query, dout; other = key, value.

       for each 64 others:
           ACROSS slices of own[0], other[0] --> shared;    scores (registers) --> P --> `weights` (shared)
           ACROSS slices of own[1], other[1] --> shared;    products (registers), P --> dS --> `weights` (shared)
           ALONG slices of other[0] --> shared;             gradient (registers) += dS^T other[0]
       if CHANGED, products of the second pair come first, and wait in `weights` for the scores: dS needs both
       gradient --> global memory, written or, for later groups, added;    the first warp then finds the next tile

   BLOCKS: 3, with a HEAD_DIM up to 64 on sm_90 and sm_100 4. */
enum { OF_KEYS = 0 };
#include "fp32_backward.cuh"

/* Where the keys from number `start` on are, and the terms of their scores: a thread for each. */
DEVICE void locate_others(const Args *args, int start, int buffer) {
    int thread = opaque(thread_index()), index = start + thread, position = -1, branch;
    if (thread >= 64)
        return;
    float bias = NEG_INF;
    if (index < task.keys.total) {
        position = key_position(&task.keys, index, &branch);
        bias = key_bias(&task.keys, position, branch, args->once);
        if (bias == NEG_INF || ignored(args, position))
            bias = NEG_INF, position = -1;
    }
    positions[buffer][thread] = position;
    *row_term(thread, BIAS) = bias;
}

/* The terms of the own rows. */
DEVICE void load_own_terms(const Args *args) {
    int thread = thread_index();
    float lse = INFINITY, delta = 0.0f;
    if (thread >= 64)
        return;
    if (thread < task.tile.rows)
        load_query(args, own_position(&task.tile, thread), &lse, &delta);
    *row_term(thread, LSE) = lse, *row_term(thread, DELTA) = delta;
}

/* Adds what the keys of a tile contribute to its gradient. */
DEVICE void accumulate_head(const Args *args, Stream *stream, float sum[8][COLUMNS]) {
    float result[8][4];
    int buffer = 0;
    if (!task.keys.total)
        return;
    locate_others(args, 0, 0);
    synchronize();
    start_across(stream, args, CHANGED, 0);
#pragma unroll 1
    for (int left = task.keys.total; left > 0; left -= 64, buffer ^= 1) {
#if CHANGED
        score_tile(result, stream, args, ACROSS, 0, buffer);
        keep_weight_gradients(args, buffer, result);
        score_tile(result, stream, args, ALONG, 0, buffer);
        compute_changed_gradients(args, buffer, result);
        synchronize();
        if (left > 64)
            locate_others(args, task.keys.total - left + 64, buffer ^ 1);
#else
        score_tile(result, stream, args, ACROSS, 1, buffer);
        compute_weights(args, buffer, result);
#if DROPOUT
        mark_dropped(args, buffer);
#endif
        score_tile(result, stream, args, ALONG, 0, buffer);
        if (left > 64)
            locate_others(args, task.keys.total - left + 64, buffer ^ 1);
        compute_score_gradients(args, buffer, result);
#endif
        accumulate(sum, 0, stream, args, 0, buffer, left, CHANGED, left > 64 ? buffer ^ 1 : -1);
    }
}

/* All tiles of a block. */
DEVICE void compute_tiles(const Args *args) {
    Stream stream;
    stream.slice = 0;
    first_tile(&task, args, OF_KEYS);
    while (task.tile.rows) {
        float sum[8][COLUMNS] = {{0}};
        start_heads(args);
        /* Once: a tile of queries is of one head. Written without a loop, it takes more code and, on sm_61, two registers more. */
        do {
            next_head(args);
            load_own_terms(args);
            accumulate_head(args, &stream, sum);
        } while (work.query_head < work.last_head);
        int batch = task.batch, number = take_number(&task, args);
        Tile tile = task.tile;
        synchronize();
#if LEARNED
        give_learned(args, tile.head);
#endif
        write_sums(args, &args->dquery, args->scale, sum, &tile, batch);
        Found next = find_tile(args, number);
        begin_tile(&task, args, &next, OF_KEYS);
        synchronize();
    }
}

KERNEL(fp32_dquery) { compute_tiles(&args); }
