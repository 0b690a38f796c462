/* Gradients on tensor cores, for half and (from sm_80 on) bfloat16: sums in fp32, P and dS rounded to the storage type.

       P = exp2(scale log2(e) q.k + bias - lse log2(e))        dS = P (dout.v - delta)

   mma_dquery      over query_tiles    dquery = scale dS K
   mma_dkeyvalue   over key_tiles      dkey = scale dS^T Q, dvalue = P^T dout, over all query heads of the tile's key head

       rows of the tile, of two tensors --> `buffer` (shared) --> row fragments (registers), once a tile
       for each COLUMNS of the positions that they see ("columns"), with these in one half of `buffer`:
           start copying the next COLUMNS, of two tensors, to the other half; locate those after them
           for each SCORE_COLUMNS of them:
               score tiles (registers) = row fragments . column fragments, of both tensors --> P, dS (registers)
               gradients (registers) += P, dS . column fragments, transposed
       gradients --> `buffer` (shared) --> global memory, written or, for later groups, added

   Shared memory while half h of `buffer` is computed with, from one barrier to the next:

                          | barrier: half h is there, nobody reads the other          | barrier: the other half is there
       buffer, half h     | read: SCORE_COLUMNS after SCORE_COLUMNS                   | free
       the other half     | the next COLUMNS are being copied ----------------------> | read
       window of columns  | read: of half h and of the next; written: those after     | ...

   A warp has 16 or 32 rows of the tile; `mma.cuh` draws how it multiplies them. There is one barrier for each half of the buffer.

   HEAD_DIM     16   32   64   96  128      low tiles    16   32   64      on sm_75    64  128
   THREADS     128  128  128  128  128                 128  128  128                 128   64
   TILE_ROWS   128  128  128   64   64                  64   64   64                  64   32
   BLOCKS        4    3    2    2    2                   4    4    3                   3    3
   mma_dquery has 3 blocks for HEAD_DIM 96 from sm_80 on.
   No dynamic shared memory, 8 to 45 KB of static: as many blocks as registers allow find room on a multiprocessor.
   With 32 rows a warp, shared memory is read half as often as with 16, but registers hold no more than 16 beyond HEAD_DIM 64. */
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

/* Query heads of a key head. */
DEVICE int group_of(const Args *args) { return args->heads / opaque(args->kv_heads); }

/* Loads the fragments of this warp's rows of a head of two tensors, through `buffer`, which is free before and after. */
DEVICE void load_row_fragments(unsigned (*a)[STEPS][4], unsigned (*b)[STEPS][4], uint4 *buffer, View of_a, View of_b, int batch,
                               int head, const Args *args, const Tile *tile) {
    copy_tile(buffer, rows_of(of_a, batch, head), tile, args->head_dim);
    copy_tile(buffer + HALF, rows_of(of_b, batch, head), tile, args->head_dim);
    copy_async_wait(0);
    synchronize();
    load_fragments(a, buffer), load_fragments(b, buffer + HALF);
    synchronize();
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

/* Writes a gradient of the tile's rows, factor * sum, through `buffer`, which is free before and after; or adds it to what is
   there. 0 in rows that see nothing by `lse` (of the head) or `mask` (of the batch element), either of which may be null. */
DEVICE void write_gradient(HeadRows to, Sums sum, float factor, uint4 *buffer, const float *lse, const unsigned char *mask,
                           const Args *args, const Tile *tile) {
    unsigned thread = this_thread();
    float *floats = (float *)buffer;
#pragma unroll
    for (int m = 0; m < FRAGMENTS; m++)
#pragma unroll
        for (int n = 0; n < CHUNKS; n++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float *pair = floats + swizzled(own_row(thread, m, h), n) * 8 + thread % 4 * 2;
                pair[0] = factor * sum[m][n][2 * h], pair[1] = factor * sum[m][n][2 * h + 1];
            }
    synchronize();
#pragma unroll 1
    for (unsigned i = thread; i < TILE_ROWS * CHUNKS; i += THREADS) {
        int row = i / CHUNKS, chunk = i % CHUNKS, count = args->head_dim - chunk * 8, position = own_position(tile, row);
        if (row >= tile->rows || count <= 0)
            continue;
        int live = (!lse || LOAD(lse + position) != NEG_INF) && (!mask || !LOAD(mask + position * args->mask_row));
        Storage *there = to.data + position * to.row + chunk * 8;
        const float4 *from = (const float4 *)floats + swizzled(row, chunk) * 2;
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
    synchronize();
}

/* Locates column number `index`, a query that sees the tile's keys, with its terms: what is added to its scores, and delta. */
DEVICE void locate_query(Columns *columns, float2 *terms, const Keys *keys, const Args *args, int batch, int head, int index) {
    long long line = line_of(args, batch, opaque(head));
    int position = -1;
    float shift = NEG_INF, dot = 0.0f;
    if (index < keys->total) {
        int branch, at = key_position(keys, index, &branch);
        float seen = LOAD(args->lse + line + at);
        if (seen != NEG_INF)
            shift = key_bias(keys, at, branch, args->once) - seen * LOG2E;
        if (shift != NEG_INF)
            position = at, dot = LOAD(args->delta + line + at);
    }
    terms[index % WINDOW] = make_float2(shift, dot);
    put_column(columns, index, position, 0.0f, bounded(args));
}

/* From scores to P, from dout.v to dS, of keys (rows) and queries (columns from number `slot` of the window on). */
DEVICE void key_score_gradients(Scores p, Scores ds, const float2 *column_terms, float scale2) {
#pragma unroll
    for (int n = 0; n < 2; n++) {
        float4 terms = ((const float4 *)column_terms)[n * 4 + this_thread() % 4];
#pragma unroll
        for (int m = 0; m < FRAGMENTS; m++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                p[m][n][e] = exp2_fast(p[m][n][e] * scale2 + (e % 2 ? terms.z : terms.x));
                ds[m][n][e] = p[m][n][e] * (ds[m][n][e] - (e % 2 ? terms.w : terms.y));
            }
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

/* Whether the tile ends before this warp's rows; the first and the last of them, by position. */
DEVICE int warp_is_idle(const Tile *tile) { return first_row(this_thread()) >= tile->rows; }
DEVICE int warp_begin(const Tile *tile) { return own_position(tile, first_row(this_thread())); }
DEVICE int warp_end(const Tile *tile) { return own_position(tile, first_row(this_thread()) + ROWS - 1); }

KERNEL(mma_dkeyvalue) {
    SHARED int item, batch, heads_end;
    SHARED Tile tile;
    SHARED Keys keys;
    SHARED Columns columns;
    SHARED float2 terms[WINDOW];
    SHARED uint4 buffer[2 * HALF], spare[(SPARE ? SPARE : 1) * FRAGMENTS * THREADS];
    int element;
    Tile found;
    start_tiles(&item);
    while (next_tile(&args, &item, &found, &element)) {
        unsigned own_key[FRAGMENTS][STEPS][4], own_value[FRAGMENTS][STEPS][4];
        Sums dkey, dvalue;
        if (thread_index() == 0)
            tile = found, batch = element, heads_end = (found.head + 1) * group_of(&args);
        synchronize();
        clear(dkey), clear(dvalue);
        load_row_fragments(own_key, own_value, buffer, args.key, args.value, batch, tile.head, &args, &tile);
#pragma unroll
        for (int k = HELD; k < STEPS; k++)
#pragma unroll
            for (int m = 0; m < FRAGMENTS; m++) {
                const unsigned *kept = own_value[m][k];
                spare[spare_slot(m, k)] = make_uint4(kept[0], kept[1], kept[2], kept[3]);
            }
#pragma unroll 1
        for (int head = heads_end - group_of(&args); head < heads_end; head++) {
            if (thread_index() == 0) {
                int end = own_position(&tile, tile.rows - 1) + args.back + 1;
                find_keys(&keys, &args, tile.row, serving_branches(&args, tile.set, head), tile.row - args.ahead, end);
                find_place(&keys, &args, batch, head);
            }
            synchronize();
            locate_query(&columns, terms, &keys, &args, batch, head, this_thread());
            synchronize();
            copy_pair(buffer, &columns, 0, args.query, args.dout, batch, head, args.head_dim);
#pragma unroll 1
            for (int column = 0; column < keys.total; column += SCORE_COLUMNS) {
                if (column % COLUMNS == 0) {
                    int next = column + COLUMNS, after = next + COLUMNS;
                    copy_async_wait(0);
                    synchronize();
                    if (next < keys.total)
                        copy_pair(buffer, &columns, next, args.query, args.dout, batch, head, args.head_dim);
                    if (after < keys.total && after % THREADS == 0)
                        locate_query(&columns, terms, &keys, &args, batch, head, after + this_thread());
                }
                int slot = column % WINDOW;
                int begin = warp_begin(&tile), end = warp_end(&tile);
                if (warp_is_idle(&tile) || none_seen(&columns, slot, begin, end, args.ahead, args.back))
                    continue;
                int compare = bounded(&args) && some_cut(&columns, slot, begin, end, args.ahead, args.back);
                const uint4 *columns_at = buffer + half_of(column) + column % COLUMNS * CHUNKS;
                Scores p, ds;
                /* Across this barrier the compiler moves no loads, for which there would be no registers. */
                score_tile(ds, own_value, HELD, spare, columns_at + HALF / 2);
                score_tile(p, own_key, STEPS, 0, columns_at);
                synchronize_warp();
#if DROPOUT
                unsigned kept = kept_weights(&columns, slot, 1, &args, &keys, &tile);
                drop(ds, kept, args.keep_scale);
#endif
                key_score_gradients(p, ds, terms + slot, args.scale * LOG2E);
#if DROPOUT
                drop(p, kept, 1.0f);
#endif
                if (compare) {
                    mask_beyond(p, &columns, slot, args.ahead, args.back, &tile);
                    mask_beyond(ds, &columns, slot, args.ahead, args.back, &tile);
                }
                accumulate(dvalue, p, columns_at + HALF / 2);
                synchronize_warp();
                accumulate(dkey, ds, columns_at);
            }
            copy_async_wait(0);
            synchronize();
        }
        const unsigned char *mask = args.mask ? args.mask + batch * args.mask_batch : args.mask;
        write_gradient(rows_of(args.dkey, batch, tile.head), dkey, args.scale, buffer, 0, mask, &args, &tile);
        write_gradient(rows_of(args.dvalue, batch, tile.head), dvalue, KEEP_SCALE(&args), buffer, 0, mask, &args, &tile);
    }
}

/* Locates column number `index`, a key that the tile's queries see, with its bias. */
DEVICE void locate_column(Columns *columns, float *biases, const Keys *keys, const Args *args, int batch, int index) {
    float bias;
    int position = locate_key(keys, args, batch, index, &bias);
    biases[index % WINDOW] = bias;
    put_column(columns, index, position, bias, bounded(args));
}

/* The terms of the scores of the tile's queries, by fragment and half of the sums: -lse log2(e), and delta. */
DEVICE void row_terms(float (*shift)[2], float (*delta)[2], long long line, const Args *args, const Tile *tile) {
#pragma unroll
    for (int m = 0; m < FRAGMENTS; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int position = own_position(tile, own_row(thread_index(), m, h));
            float seen = LOAD(args->lse + line + position);
            shift[m][h] = seen == NEG_INF ? NEG_INF : -seen * LOG2E;
            delta[m][h] = LOAD(args->delta + line + position);
        }
}

/* From scores and dout.v to dS, of queries (rows) and keys (columns) with `biases`, or none if that is null. */
DEVICE void query_score_gradients(Scores ds, Scores p, const float *biases, float scale2, float (*shift)[2], float (*delta)[2]) {
#pragma unroll
    for (int n = 0; n < 2; n++) {
        float2 bias = make_float2(0.0f, 0.0f);
        if (biases)
            bias = ((const float2 *)biases)[n * 4 + this_thread() % 4];
#pragma unroll
        for (int m = 0; m < FRAGMENTS; m++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                float score2 = p[m][n][e] * scale2 + shift[m][e / 2];
                if (biases)
                    score2 += e % 2 ? bias.y : bias.x;
                ds[m][n][e] = exp2_fast(score2) * (ds[m][n][e] - delta[m][e / 2]);
            }
    }
}

KERNEL(mma_dquery) {
    SHARED int item, batch, key_head;
    SHARED Tile tile;
    SHARED Keys keys;
    SHARED Columns columns;
    SHARED float biases[WINDOW];
    SHARED uint4 buffer[2 * HALF];
    int element;
    Tile found;
    start_tiles(&item);
    while (next_tile(&args, &item, &found, &element)) {
        unsigned own_query[FRAGMENTS][STEPS][4], own_dout[FRAGMENTS][STEPS][4];
        Sums dquery;
        float shift[FRAGMENTS][2], delta[FRAGMENTS][2];
        if (thread_index() == 0) {
            int end = own_position(&found, found.rows - 1) + args.ahead + 1;
            tile = found, batch = element, key_head = found.head / group_of(&args);
            find_keys(&keys, &args, found.row, found.set, found.row - args.back, end);
            find_place(&keys, &args, element, found.head);
        }
        synchronize();
        clear(dquery);
        row_terms(shift, delta, line_of(&args, batch, tile.head), &args, &tile);
        load_row_fragments(own_query, own_dout, buffer, args.query, args.dout, batch, tile.head, &args, &tile);
        locate_column(&columns, biases, &keys, &args, batch, this_thread());
        synchronize();
        copy_pair(buffer, &columns, 0, args.key, args.value, batch, key_head, args.head_dim);
#pragma unroll 1
        for (int column = 0; column < keys.total; column += SCORE_COLUMNS) {
            if (column % COLUMNS == 0) {
                int next = column + COLUMNS, after = next + COLUMNS;
                copy_async_wait(0);
                synchronize();
                if (next < keys.total)
                    copy_pair(buffer, &columns, next, args.key, args.value, batch, key_head, args.head_dim);
                if (after < keys.total && after % THREADS == 0)
                    locate_column(&columns, biases, &keys, &args, batch, after + this_thread());
            }
            int slot = column % WINDOW;
            int begin = warp_begin(&tile), end = warp_end(&tile);
            if (warp_is_idle(&tile) || none_seen(&columns, slot, begin, end, args.back, args.ahead))
                continue;
            int compare = bounded(&args) && some_cut(&columns, slot, begin, end, args.back, args.ahead);
            const uint4 *columns_at = buffer + half_of(column) + column % COLUMNS * CHUNKS;
            Scores p, ds;
            score_tile(p, own_query, STEPS, 0, columns_at);
            score_tile(ds, own_dout, STEPS, 0, columns_at + HALF / 2);
#if DROPOUT
            drop(ds, kept_weights(&columns, slot, -1, &args, &keys, &tile), args.keep_scale);
#endif
            const float *found = columns.biased[slot / 32] ? biases + slot : 0;
            query_score_gradients(ds, p, found, args.scale * LOG2E, shift, delta);
            if (compare)
                mask_beyond(ds, &columns, slot, args.back, args.ahead, &tile);
            accumulate(dquery, ds, columns_at);
        }
        copy_async_wait(0);
        synchronize();
        const float *lse = args.lse + line_of(&args, batch, tile.head);
        write_gradient(rows_of(args.dquery, batch, tile.head), dquery, args.scale, buffer, lse, 0, &args, &tile);
    }
}
