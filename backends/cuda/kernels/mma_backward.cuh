/* Gradients on tensor cores, for half and (from sm_80 on) bfloat16: sums in fp32, P and dS rounded to the storage type.

       P = exp2(min(scale log2(e) q.k + bias - lse log2(e), 0))        dS = P (dout.v - delta)

   Rounding takes exponents of large scores far above 0. A large lse is less by its rounding (`load_lse`).

   mma_dquery      over query_tiles    dquery = scale dS K
   mma_dkeyvalue   over key_tiles      dkey = scale dS^T Q, dvalue = P^T dout, over all query heads of the tile's key head
   mma_dquery_pairs computes what mma_dquery does where a HEAD_DIM of 128 asks for more loads than a GPU has time for; its file
   draws how. The others:

       rows of the tile, of two tensors --> `buffer` (shared) --> row fragments (registers), once a tile
       for each COLUMNS of the positions that they see ("columns"), with these in one half of `buffer`:
           start copying the next COLUMNS, of two tensors, to the other half; locate those after them
           for each SCORE_COLUMNS of them:
               score tiles (registers) = row fragments . column fragments, of both tensors --> P, dS (registers)
               gradients (registers) += P, dS . column fragments, transposed
       gradients --> `buffer` (shared) --> global memory, written or, for later groups, added;    meanwhile the first warp finds
           the next tile

   Shared memory while half h of `buffer` is computed with, from one barrier to the next:

                          | barrier: half h is there, nobody reads the other          | barrier: the other half is there
       buffer, half h     | read: SCORE_COLUMNS after SCORE_COLUMNS                   | free
       the other half     | the next COLUMNS are being copied ----------------------> | read
       window of columns  | read: of half h and of the next; written: those after     | ...

   A warp has 16 or 32 rows of the tile, whose first and last position it notes; `mma.cuh` draws how it multiplies them. There is one
   barrier for each half of the buffer.

   HEAD_DIM     16   32   64   96  128      low tiles    16   32   64      on sm_75    64  128
   THREADS     128  128  128  128  128                 128  128  128                 128   64
   TILE_ROWS   128  128  128   64   64                  64   64   64                  64   32
   BLOCKS        4    3    2    2    2                   4    4    3                   3    3
   mma_dquery has 3 blocks for HEAD_DIM 96 from sm_80 on.
   No dynamic shared memory, 8 to 45 KB of static: as many blocks as registers allow find room on a multiprocessor.
   With 32 rows a warp, shared memory is read half as often as with 16, but registers hold no more than 16 beyond HEAD_DIM 64
   unless two warps share the work on them. */
#ifndef DILKIT_MMA_BACKWARD
#define DILKIT_MMA_BACKWARD

#define COLUMNS (TILE_ROWS / 2)
#define SCORE_COLUMNS 16
#include "mma.cuh"

/* Half of the buffer holds COLUMNS of two tensors; the whole of it the tile's rows of them, or one gradient of these in fp32. */
#define HALF (2 * COLUMNS * CHUNKS)

/* Fragments of own values, side by side, that mma_dkeyvalue has no registers for: they are in `spare`, in shared memory. */
#ifndef SPARE
#define SPARE (FRAGMENTS * STEPS > 7)
#endif
#define HELD (STEPS - SPARE)

/* Loads the fragments of this warp's rows of a head of two tensors, through `buffer`, which is free before, and after the next
   barrier. */
DEVICE void load_row_fragments(unsigned (*a)[STEPS][4], unsigned (*b)[STEPS][4], uint4 *buffer, View of_a, View of_b, int batch,
                               int head, const Args *args, const Tile *tile) {
    copy_tile(buffer, rows_of(of_a, batch, head), tile, args->head_dim);
    copy_tile(buffer + HALF, rows_of(of_b, batch, head), tile, args->head_dim);
    copy_async_wait(0);
    synchronize();
    load_fragments(a, buffer), load_fragments(b, buffer + HALF);
}

/* Where the half of the buffer begins that the columns from number `column` on pass through. */
DEVICE int half_of(int column) { return column / COLUMNS % 2 * HALF; }

/* Starts copying the columns from number `column` on, of a head of two tensors. */
DEVICE void copy_pair(uint4 *buffer, const Columns *columns, int column, View of_a, View of_b, int batch, int head,
                      int head_dim) {
    uint4 *half = buffer + half_of(column);
    copy_columns(half, rows_of(of_a, batch, opaque(head)), columns, column, head_dim);
    copy_columns(half + HALF / 2, rows_of(of_b, batch, opaque(head)), columns, column, head_dim);
}

/* Where a thread keeps what it has no registers for: fragment k >= HELD of its rows m. */
DEVICE int spare_slot(int m, int k) { return ((k - HELD) * FRAGMENTS + m) * THREADS + this_thread(); }

/* score = own rows times the columns at `columns_at`. Fragments from number `held` on are in `spare`. */
DEVICE void score_tile(Scores score, unsigned (*own)[STEPS][4], int held, const uint4 *spare, const uint4 *columns_at) {
    int first = column_fragment(this_thread());
    clear_scores(score);
#pragma unroll
    for (int k = 0; k < STEPS; k++) {
        unsigned left[FRAGMENTS][4];
#pragma unroll
        for (int m = 0; m < FRAGMENTS; m++) {
            uint4 kept = k < held ? make_uint4(own[m][k][0], own[m][k][1], own[m][k][2], own[m][k][3]) : spare[spare_slot(m, k)];
            left[m][0] = kept.x, left[m][1] = kept.y, left[m][2] = kept.z, left[m][3] = kept.w;
        }
        multiply_across(score, left, columns_at, first, k);
    }
}

/* sum += weights, rounded, times the columns at `columns_at`. */
DEVICE void accumulate(Sums sum, Scores weight, const uint4 *columns_at) {
    unsigned left[FRAGMENTS][4];
#pragma unroll
    for (int m = 0; m < FRAGMENTS; m++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            left[m][i] = pack(weight[m][i / 2][i % 2 * 2], weight[m][i / 2][i % 2 * 2 + 1]);
    multiply_along(sum, left, columns_at, row_fragment(this_thread()));
}

/* Adds the chunk of a gradient that is in memory to `sums`. */
DEVICE void add_chunk(float *sums, const Storage *from, int count) {
#if VECTOR
    uint4 words = load_words(from);
    unsigned four[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 4; i++)
        sums[2 * i] += low_of(four[i]), sums[2 * i + 1] += high_of(four[i]);
#else
#pragma unroll
    for (int i = 0; i < 8; i++)
        if (i < count)
            sums[i] += from_storage(LOAD(from + i));
#endif
}

DEVICE void write_chunk(Storage *to, const float *sums, int count) {
#if VECTOR
    store_words(to, make_uint4(pack(sums[0], sums[1]), pack(sums[2], sums[3]), pack(sums[4], sums[5]), pack(sums[6], sums[7])));
#else
#pragma unroll
    for (int i = 0; i < 8; i++)
        if (i < count)
            STORE(to + i, to_storage(sums[i]));
#endif
}

/* Leaves a gradient of the tile's rows, factor * sum, in `buffer`, which is free before. */
DEVICE void stage_gradient(uint4 *buffer, Sums sum, float factor) {
    unsigned thread = this_thread();
    float *floats = (float *)buffer;
#pragma unroll
    for (int m = 0; m < FRAGMENTS; m++)
#pragma unroll
        for (int n = 0; n < SUM_CHUNKS; n++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float *pair = floats + swizzled(own_row(thread, m, h), first_chunk(thread) + n) * 8 + thread % 4 * 2;
                pair[0] = factor * sum[m][n][2 * h], pair[1] = factor * sum[m][n][2 * h + 1];
            }
    synchronize();
}

/* Writes a gradient of the tile's rows from `buffer`, or adds it to what is there. 0 in rows that see nothing by `lse` (of the
   head) or `mask` (of the batch element), either of which may be null. */
DEVICE void write_gradient(HeadRows to, const uint4 *buffer, const float *lse, const unsigned char *mask, const Args *args,
                           const Tile *tile) {
    unsigned thread = this_thread();
#pragma unroll 1
    for (unsigned i = thread; i < TILE_ROWS * CHUNKS; i += THREADS) {
        int row = i / CHUNKS, chunk = i % CHUNKS, count = args->head_dim - chunk * 8, position = own_position(tile, row);
        if (row >= tile->rows || count <= 0)
            continue;
        int live = (!lse || LOAD(lse + position) != NEG_INF) && (!mask || !LOAD(mask + position * args->mask_row));
        Storage *there = to.data + position * to.row + chunk * 8;
        const float4 *from = (const float4 *)buffer + swizzled(row, chunk) * 2;
        int second = thread / 4 % 2; /* of eight lanes, four read the second half first: all banks at once */
        float4 one = from[second], other = from[!second], low = second ? other : one, high = second ? one : other;
        float sums[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int e = 0; e < 8; e++)
            sums[e] = live ? sums[e] : 0.0f;
        if (!args->first)
            add_chunk(sums, there, count);
        write_chunk(there, sums, count);
    }
}

/* 0 in `weight` where a column is not from row - back to row + ahead. */
DEVICE void mask_beyond(Scores weight, const Columns *columns, int slot, int back, int ahead, const Tile *tile) {
    unsigned thread = this_thread(), between = (unsigned)back + ahead;
#pragma unroll
    for (int m = 0; m < FRAGMENTS; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            unsigned lowest = own_position(tile, own_row(thread, m, h)) - back;
#pragma unroll
            for (int n = 0; n < 2; n++)
#pragma unroll
                for (int e = 0; e < 2; e++)
                    if (columns->position[slot + n * 8 + thread % 4 * 2 + e] - lowest > between)
                        weight[m][n][2 * h + e] = 0.0f;
        }
}

#if CHANGED
/* From gradients of scores to those of scores before the softcap, given `score` after it. */
DEVICE void uncap(Scores ds, Scores score, const ScoreOf *of) {
#pragma unroll
    for (int m = 0; m < FRAGMENTS; m++)
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                ds[m][n][e] *= cap_slope(of, score[m][n][e]);
}
#endif

#if DROPOUT
/* Of the weights of rows and columns, a bit for each that dropout keeps, numbered as `drop` does: keys are rows (sign 1) or
   columns (sign -1). One after the other: each takes many registers. */
DEVICE unsigned kept_weights(const Columns *columns, int slot, int sign, const Args *args, const Keys *keys, const Tile *tile) {
    unsigned thread = this_thread(), kept = 0;
#pragma unroll 1
    for (int i = 0; i < 8 * FRAGMENTS; i++) {
        int own = own_position(tile, own_row(thread, i / 8, i / 2 % 2));
        int other = columns->position[slot + i / 4 % 2 * 8 + thread % 4 * 2 + i % 2];
        kept |= keeps(args, keys, sign > 0 ? other : own, sign > 0 ? own : other) << i;
    }
    return kept;
}

/* Those that are kept times `factor`, 0 in place of the others. */
DEVICE void drop(Scores x, unsigned kept, float factor) {
#pragma unroll
    for (int m = 0; m < FRAGMENTS; m++)
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                x[m][n][e] = kept >> ((m * 2 + n) * 4 + e) & 1 ? x[m][n][e] * factor : 0.0f;
}
#endif

#endif
