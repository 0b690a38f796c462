/* Gradients on tensor cores, for half and (from sm_80 on) bfloat16: sums in fp32, P and dS rounded to the storage type.

       P = exp2(scale log2(e) q.k + bias - lse log2(e))        dS = P (dout.v - delta)

   mma_dquery      over query_tiles    dquery = scale dS K
   mma_dkeyvalue   over key_tiles      dkey = scale dS^T Q, dvalue = P^T dout, over all query heads of the tile's key head

   The rows of a tile are the m of every product, and their fragments stay in registers: a warp has 16 or 32 of them. What they
   meet ("columns", by position) passes through two buffers of shared memory. A product q.k leaves its sums just where the next
   product wants its left operand, so P and dS never leave the registers. One barrier a buffer.

   HEAD_DIM     16   32   64   96  128
   THREADS     128  128  128  128  128
   TILE_ROWS   128  128  128   64   64
   BLOCKS        2    2    2    2    2      all capabilities from 7.5; no dynamic shared memory */
#include "dilated.cuh"

#define LOG2E 1.4426950408889634f

#define WARPS (THREADS / 32)
#define ROWS (TILE_ROWS / WARPS)
#define PARTS (ROWS / 16)
#define STEPS (HEAD_DIM / 16)
#define PIECES (HEAD_DIM / 8)

/* Columns of a buffer; those of them whose scores are in registers at a time; those that are described ahead. */
#define COLUMNS (HEAD_DIM > 64 ? 32 : 64)
#define CHUNK 16
#define RING (2 * THREADS)

/* One head of a tensor. */
typedef struct {
    Storage *data;
    long long row;
} Rows;

/* What is known of the columns, by number modulo RING: where they are (-1: nowhere, to be read as 0), and the terms of their scores.
   lowest, highest: of the positions of 32 columns. biased: a bit for each of them that has a bias. */
typedef struct {
    int position[RING], lowest[RING / 32], highest[RING / 32];
    unsigned biased[RING / 32];
    float4 terms[RING / 2];
} Columns;

DEVICE Rows rows_of(View view, int batch, int head) {
    Rows rows = {(Storage *)view.data + batch * view.batch + head * view.head, view.row};
    return rows;
}

/* Where a head's part of lse and delta begins. */
DEVICE long long line_of(const Call *call, int batch, int head) { return ((long long)batch * call->heads + head) * call->seq; }

/* Where a piece of 8 elements lies in shared memory: pieces of the same number of 8 rows are in different banks. */
DEVICE int place(int row, int piece) {
    int twist = HEAD_DIM % 64 == 0 ? row & 7 : HEAD_DIM % 32 == 0 ? row >> 1 & 3 : row >> 2 & 1;
    return row * PIECES + (piece ^ twist);
}

/* The place of 16 x 16 elements that `first` is, in this lane's row of them, and `step` times 16 elements to the right. The lanes
   load, in this order, rows 0-7 and 8-15 of the left half, then of the right half. `from` is a multiple of 16 rows. */
DEVICE int lane_place(int thread) { return place(thread % 16, thread % 32 / 16); }
DEVICE int step_right(int from, int step) {
    int within = HEAD_DIM % 64 == 0 ? 7 : HEAD_DIM % 32 == 0 ? 3 : 1;
    return (from ^ (2 * step & within)) + (2 * step & ~within);
}

/* Begins to copy a piece of the row at `position` to `to`; 0 for a position of -1 and beyond head_dim. */
DEVICE void fetch(uint4 *to, Rows from, int position, int piece, int head_dim) {
    Storage *source = from.data + most(position, 0) * from.row + piece * 8;
#if VECTOR
    int present = position >= 0 && piece * 8 < head_dim;
    copy_async_or_zero(to, present ? source : from.data, present);
#else
    unsigned words[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        unsigned low = 0, high = 0;
        if (position >= 0 && piece * 8 + 2 * i < head_dim)
            low = LOAD(source + 2 * i);
        if (position >= 0 && piece * 8 + 2 * i + 1 < head_dim)
            high = LOAD(source + 2 * i + 1);
        words[i] = low | high << 16;
    }
    *to = make_uint4(words[0], words[1], words[2], words[3]);
#endif
}

/* Where row r of the tile is; beyond the last, there. */
DEVICE int own_position(const Call *call, const Tile *tile, int r) { return tile->row + least(r, tile->rows - 1) * call->step; }

/* The row of the tile that is in half `h` of a thread's sums of part m. */
DEVICE int own_row(int thread, int m, int h) { return thread / 32 * ROWS + m * 16 + h * 8 + thread % 32 / 4; }

/* The fragments of this warp's rows of two tensors, by way of `buffer`, which is free before and after. */
DEVICE void load_own(unsigned (*a)[STEPS][4], unsigned (*b)[STEPS][4], uint4 *buffer, Rows from_a, Rows from_b, const Call *call,
                     const Tile *tile) {
    int thread = anew(thread_index());
#pragma unroll 1
    for (int i = thread; i < TILE_ROWS * PIECES; i += THREADS) {
        int row = i / PIECES, piece = i % PIECES, position = row < tile->rows ? own_position(call, tile, row) : -1;
        fetch(buffer + place(row, piece), from_a, position, piece, call->head_dim);
        fetch(buffer + TILE_ROWS * PIECES + place(row, piece), from_b, position, piece, call->head_dim);
    }
    copy_async_commit();
    copy_async_wait(0);
    synchronize();
#pragma unroll
    for (int m = 0; m < PARTS; m++)
#pragma unroll
        for (int k = 0; k < STEPS; k++) {
            int own = step_right((thread / 32 * ROWS + m * 16) * PIECES + lane_place(thread), k);
            load_matrices_4(a[m][k], buffer + own);
            load_matrices_4(b[m][k], buffer + TILE_ROWS * PIECES + own);
        }
    synchronize();
}

/* Begins to copy the columns from number `column` on of a head of two tensors. */
DEVICE void fetch_columns(uint4 *buffer, const Columns *columns, int column, View of_a, View of_b, int batch, int head, int head_dim) {
    Rows a = rows_of(of_a, batch, anew(head)), b = rows_of(of_b, batch, anew(head));
#pragma unroll 1
    for (int i = anew(thread_index()); i < COLUMNS * PIECES; i += THREADS) {
        int row = i / PIECES, piece = i % PIECES, position = columns->position[(column + row) % RING];
        fetch(buffer + place(row, piece), a, position, piece, head_dim);
        fetch(buffer + COLUMNS * PIECES + place(row, piece), b, position, piece, head_dim);
    }
}

/* What all lanes of a warp have at least. */
DEVICE int least_of_warp(int value) {
#pragma unroll
    for (int mask = 16; mask; mask /= 2)
        value = least(value, (int)shuffle_word_xor((unsigned)value, mask));
    return value;
}

/* Notes column number `index`. All threads call it, each for a column. */
DEVICE void note_column(Columns *columns, int index, int position, float bias, float shift, float delta, int causal) {
    int slot = index % RING;
    float *terms = (float *)columns->terms;
    columns->position[slot] = position;
    terms[2 * slot] = shift, terms[2 * slot + 1] = delta;
    unsigned biased = ballot(bias != 0.0f);
    if (slot % 32 == 0)
        columns->biased[slot / 32] = biased;
    if (!causal)
        return;
    int low = least_of_warp(position < 0 ? 0x7fffffff : position), high = -least_of_warp(-position);
    if (slot % 32 == 0)
        columns->lowest[slot / 32] = low, columns->highest[slot / 32] = high;
}

/* sum[part][column / 8] = own rows times columns: products over head_dim. `lane`: where this lane's first column is. */
DEVICE void score(float (*sum)[CHUNK / 8][4], unsigned (*own)[STEPS][4], const uint4 *buffer, int lane) {
#pragma unroll
    for (int m = 0; m < PARTS; m++)
#pragma unroll
        for (int n = 0; n < CHUNK / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                sum[m][n][e] = 0.0f;
#pragma unroll
    for (int k = 0; k < STEPS; k++)
#pragma unroll
        for (int n = 0; n < CHUNK / 16; n++) {
            unsigned halves[4];
            load_matrices_4(halves, buffer + step_right(lane, k) + n * 16 * PIECES);
            unsigned low[2] = {halves[0], halves[2]}, high[2] = {halves[1], halves[3]};
#pragma unroll
            for (int m = 0; m < PARTS; m++) {
                mma(sum[m][2 * n], own[m][k], low);
                mma(sum[m][2 * n + 1], own[m][k], high);
            }
        }
}

/* sum[part][element / 8] += weights times columns: products over the columns of a chunk. */
DEVICE void gather(float (*sum)[2 * STEPS][4], unsigned (*weight)[CHUNK / 16][4], const uint4 *buffer, int lane) {
#pragma unroll
    for (int n = 0; n < STEPS; n++)
#pragma unroll
        for (int k = 0; k < CHUNK / 16; k++) {
            unsigned right[4];
            load_matrices_4_transposed(right, buffer + step_right(lane, n) + k * 16 * PIECES);
#pragma unroll
            for (int m = 0; m < PARTS; m++) {
                mma(sum[m][2 * n], weight[m][k], right);
                mma(sum[m][2 * n + 1], weight[m][k], right + 2);
            }
        }
}

/* Sums of scores as the left operand of the next product. */
DEVICE void round_off(unsigned (*weight)[CHUNK / 16][4], float (*sum)[CHUNK / 8][4]) {
#pragma unroll
    for (int m = 0; m < PARTS; m++)
#pragma unroll
        for (int n = 0; n < CHUNK / 8; n++)
#pragma unroll
            for (int h = 0; h < 2; h++)
                weight[m][n / 2][n % 2 * 2 + h] = pack(sum[m][n][2 * h], sum[m][n][2 * h + 1]);
}

DEVICE void clear(float (*sum)[2 * STEPS][4]) {
#pragma unroll
    for (int m = 0; m < PARTS; m++)
#pragma unroll
        for (int n = 0; n < 2 * STEPS; n++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                sum[m][n][e] = 0.0f;
}

/* Adds the piece of a row of a gradient that is there to `sums`. */
DEVICE void add_piece(float *sums, const Storage *from, int count) {
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

DEVICE void write_piece(Storage *to, const float *sums, int count) {
#if VECTOR
    store_words(to, make_uint4(pack(sums[0], sums[1]), pack(sums[2], sums[3]), pack(sums[4], sums[5]), pack(sums[6], sums[7])));
#else
#pragma unroll
    for (int i = 0; i < 8; i++)
        if (i < count)
            STORE(to + i, to_storage(sums[i]));
#endif
}

/* Writes a gradient of the tile's rows, factor * sum, by way of `buffer`, which is free before and after; or adds it to what is
   there. 0 in rows that see nothing by `lse` (of the head) or `mask` (of the batch element), either of which may be null. */
DEVICE void deposit(Rows to, float (*sum)[2 * STEPS][4], float factor, uint4 *buffer, const float *lse, const unsigned char *mask,
                    const Call *call, const Tile *tile) {
    int thread = anew(thread_index());
    float *floats = (float *)buffer;
#pragma unroll
    for (int m = 0; m < PARTS; m++)
#pragma unroll
        for (int n = 0; n < 2 * STEPS; n++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float *pair = floats + place(own_row(thread, m, h), n) * 8 + thread % 4 * 2;
                pair[0] = factor * sum[m][n][2 * h], pair[1] = factor * sum[m][n][2 * h + 1];
            }
    synchronize();
#pragma unroll 1
    for (int i = thread; i < TILE_ROWS * PIECES; i += THREADS) {
        int row = i / PIECES, piece = i % PIECES, count = call->head_dim - piece * 8, position = own_position(call, tile, row);
        if (row >= tile->rows || count <= 0)
            continue;
        int live = (!lse || LOAD(lse + position) != NEVER) && (!mask || !LOAD(mask + position * call->mask_row));
        Storage *place_of = to.data + position * to.row + piece * 8;
        float sums[8];
#pragma unroll
        for (int e = 0; e < 8; e++)
            sums[e] = live ? floats[place(row, piece) * 8 + e] : 0.0f;
        if (!call->first)
            add_piece(sums, place_of, count);
        write_piece(place_of, sums, count);
    }
    synchronize();
}

/* Notes column number `index`, a query that the tile's keys are seen by. */
DEVICE void note_query(Columns *columns, const Keys *keys, const Call *call, int batch, int head, int index) {
    long long line = line_of(call, batch, anew(head));
    int position = -1;
    float shift = NEVER, dot = 0.0f;
    if (index < keys->total) {
        int branch, at = key_position(keys, index, &branch);
        float seen = LOAD(call->lse + line + at);
        if (seen != NEVER)
            shift = key_bias(keys, at, branch, call->once) - seen * LOG2E;
        if (shift != NEVER)
            position = at, dot = LOAD(call->delta + line + at);
    }
    note_column(columns, index, position, 0.0f, shift, dot, call->causal);
}

/* P and dS of a chunk: from scores to P, from dout.v to dS. `slot`: of the first column; `diagonal`: whether a column may be too early. */
DEVICE void differentiate_keys(float (*p)[CHUNK / 8][4], float (*ds)[CHUNK / 8][4], const Columns *columns, int slot, float scale2,
                               const int (*position)[2], int diagonal) {
    int first = slot + thread_index() % 4 * 2;
#pragma unroll
    for (int n = 0; n < CHUNK / 8; n++) {
        float4 terms = columns->terms[(first + n * 8) / 2];
#pragma unroll
        for (int m = 0; m < PARTS; m++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                float score2 = p[m][n][e] * scale2 + (e % 2 ? terms.z : terms.x);
                if (diagonal && columns->position[first + n * 8 + e % 2] < position[m][e / 2])
                    score2 = NEVER;
                p[m][n][e] = exp2_fast(score2);
                ds[m][n][e] = p[m][n][e] * (ds[m][n][e] - (e % 2 ? terms.w : terms.y));
            }
    }
}

KERNEL(mma_dkeyvalue) {
    SHARED int item;
    SHARED Keys keys;
    SHARED Columns columns;
    SHARED uint4 buffer[4 * COLUMNS * PIECES];
    int thread = thread_index(), batch, group = call.heads / call.kv_heads;
    Tile tile;
    start_tiles(&item);
    while (next_tile(&call, &item, &tile, &batch)) {
        unsigned own_key[PARTS][STEPS][4], own_value[PARTS][STEPS][4];
        float dkey[PARTS][2 * STEPS][4], dvalue[PARTS][2 * STEPS][4];
        int position[PARTS][2], warp_first = own_position(&call, &tile, thread / 32 * ROWS),
                                warp_last = own_position(&call, &tile, thread / 32 * ROWS + ROWS - 1),
                                idle = thread / 32 * ROWS >= tile.rows;
        clear(dkey), clear(dvalue);
#pragma unroll
        for (int m = 0; m < PARTS; m++)
#pragma unroll
            for (int h = 0; h < 2; h++)
                position[m][h] = own_position(&call, &tile, own_row(thread, m, h));
        load_own(own_key, own_value, buffer, rows_of(call.key, batch, tile.head), rows_of(call.value, batch, tile.head), &call, &tile);
#pragma unroll 1
        for (int head = tile.head * group; head < (tile.head + 1) * group; head++) {
            if (thread_index() == 0)
                find_keys(&keys, &call, tile.row, serving(&call, tile.set, head), call.causal ? tile.row : 0, call.seq);
            synchronize();
            int total = keys.total;
            note_query(&columns, &keys, &call, batch, head, thread_index());
            synchronize();
            fetch_columns(buffer, &columns, 0, call.query, call.dout, batch, head, call.head_dim);
            copy_async_commit();
#pragma unroll 1
            for (int column = 0; column < total; column += COLUMNS) {
                int next = column + COLUMNS, after = next + COLUMNS, here = idle ? 0 : least(COLUMNS, total - column);
                int queries = column / COLUMNS % 2 * (2 * COLUMNS * PIECES) + lane_place(thread);
                copy_async_wait(0);
                synchronize();
                if (next < total)
                    fetch_columns(buffer + next / COLUMNS % 2 * (2 * COLUMNS * PIECES), &columns, next, call.query, call.dout, batch, head, call.head_dim);
                copy_async_commit();
                if (after < total && after % THREADS == 0)
                    note_query(&columns, &keys, &call, batch, head, after + thread_index());
#pragma unroll 1
                for (int chunk = 0; chunk < here; chunk += CHUNK) {
                    int lane = anew(queries + chunk * PIECES), slot = (column + chunk) % RING;
                    if (call.causal && columns.highest[slot / 32] < warp_first)
                        continue;
                    float p[PARTS][CHUNK / 8][4], ds[PARTS][CHUNK / 8][4];
                    unsigned weight[PARTS][CHUNK / 16][4];
                    score(p, own_key, buffer, lane);
                    score(ds, own_value, buffer + COLUMNS * PIECES, lane);
                    if (call.causal && columns.lowest[slot / 32] < warp_last)
                        differentiate_keys(p, ds, &columns, slot, call.scale * LOG2E, position, 1);
                    else
                        differentiate_keys(p, ds, &columns, slot, call.scale * LOG2E, position, 0);
                    round_off(weight, p);
                    gather(dvalue, weight, buffer + COLUMNS * PIECES, lane);
                    round_off(weight, ds);
                    gather(dkey, weight, buffer, lane);
                }
            }
            copy_async_wait(0);
            synchronize();
        }
        const unsigned char *mask = call.mask ? call.mask + batch * call.mask_batch : call.mask;
        deposit(rows_of(call.dkey, batch, tile.head), dkey, call.scale, buffer, 0, mask, &call, &tile);
        deposit(rows_of(call.dvalue, batch, tile.head), dvalue, 1.0f, buffer, 0, mask, &call, &tile);
    }
}

/* Notes column number `index`, a key that the tile's queries see. */
DEVICE void note_key(Columns *columns, const Keys *keys, const Call *call, const unsigned char *mask, int index) {
    int position = -1;
    float bias = NEVER;
    if (index < keys->total) {
        int branch, at = key_position(keys, index, &branch);
        if (!mask || !LOAD(mask + at * call->mask_row))
            bias = key_bias(keys, at, branch, call->once);
        if (bias != NEVER)
            position = at;
    }
    note_column(columns, index, position, bias, bias, 0.0f, call->causal);
}

/* dS of a chunk, from scores and dout.v. `slot`: of the first column; `biased`, `diagonal`: whether a column may have a bias, or be
   too late. */
DEVICE void differentiate_queries(float (*ds)[CHUNK / 8][4], float (*p)[CHUNK / 8][4], const Columns *columns, int slot, float scale2,
                                  const float (*shift)[2], const float (*delta)[2], const int (*position)[2], int biased,
                                  int diagonal) {
    int first = slot + thread_index() % 4 * 2;
#pragma unroll
    for (int n = 0; n < CHUNK / 8; n++)
#pragma unroll
        for (int m = 0; m < PARTS; m++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                float score2 = p[m][n][e] * scale2 + shift[m][e / 2];
                if (biased)
                    score2 += ((const float *)columns->terms)[2 * (first + n * 8 + e % 2)];
                if (diagonal && columns->position[first + n * 8 + e % 2] > position[m][e / 2])
                    score2 = NEVER;
                ds[m][n][e] = exp2_fast(score2) * (ds[m][n][e] - delta[m][e / 2]);
            }
}

KERNEL(mma_dquery) {
    SHARED int item;
    SHARED Keys keys;
    SHARED Columns columns;
    SHARED uint4 buffer[4 * COLUMNS * PIECES];
    int thread = thread_index(), batch, group = call.heads / call.kv_heads;
    Tile tile;
    start_tiles(&item);
    while (next_tile(&call, &item, &tile, &batch)) {
        unsigned own_query[PARTS][STEPS][4], own_dout[PARTS][STEPS][4];
        float dquery[PARTS][2 * STEPS][4], shift[PARTS][2], delta[PARTS][2];
        int position[PARTS][2], warp_first = own_position(&call, &tile, thread / 32 * ROWS),
                                warp_last = own_position(&call, &tile, thread / 32 * ROWS + ROWS - 1),
                                idle = thread / 32 * ROWS >= tile.rows;
        long long line = line_of(&call, batch, tile.head);
        const unsigned char *mask = call.mask ? call.mask + batch * call.mask_batch : call.mask;
        if (thread_index() == 0)
            find_keys(&keys, &call, tile.row, (unsigned)tile.set, 0,
                      call.causal ? own_position(&call, &tile, tile.rows - 1) + 1 : call.seq);
        clear(dquery);
#pragma unroll
        for (int m = 0; m < PARTS; m++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                position[m][h] = own_position(&call, &tile, own_row(thread, m, h));
                float seen = LOAD(call.lse + line + position[m][h]);
                shift[m][h] = seen == NEVER ? NEVER : -seen * LOG2E;
                delta[m][h] = LOAD(call.delta + line + position[m][h]);
            }
        load_own(own_query, own_dout, buffer, rows_of(call.query, batch, tile.head), rows_of(call.dout, batch, tile.head), &call, &tile);
        int total = keys.total;
        note_key(&columns, &keys, &call, mask, thread_index());
        synchronize();
        fetch_columns(buffer, &columns, 0, call.key, call.value, batch, tile.head / group, call.head_dim);
        copy_async_commit();
#pragma unroll 1
        for (int column = 0; column < total; column += COLUMNS) {
            int next = column + COLUMNS, after = next + COLUMNS, here = idle ? 0 : least(COLUMNS, total - column);
            int keys_here = column / COLUMNS % 2 * (2 * COLUMNS * PIECES) + lane_place(thread);
            copy_async_wait(0);
            synchronize();
            if (next < total)
                fetch_columns(buffer + next / COLUMNS % 2 * (2 * COLUMNS * PIECES), &columns, next, call.key, call.value, batch, tile.head / group, call.head_dim);
            copy_async_commit();
            if (after < total && after % THREADS == 0)
                note_key(&columns, &keys, &call, mask, after + thread_index());
#pragma unroll 1
            for (int chunk = 0; chunk < here; chunk += CHUNK) {
                int lane = anew(keys_here + chunk * PIECES), slot = (column + chunk) % RING, biased = columns.biased[slot / 32] != 0;
                if (call.causal && columns.lowest[slot / 32] > warp_last)
                    continue;
                float p[PARTS][CHUNK / 8][4], ds[PARTS][CHUNK / 8][4];
                unsigned weight[PARTS][CHUNK / 16][4];
                score(p, own_query, buffer, lane);
                score(ds, own_dout, buffer + COLUMNS * PIECES, lane);
                int diagonal = call.causal && columns.highest[slot / 32] > warp_first;
                differentiate_queries(ds, p, &columns, slot, call.scale * LOG2E, shift, delta, position, biased, diagonal);
                round_off(weight, ds);
                gather(dquery, weight, buffer, lane);
            }
        }
        copy_async_wait(0);
        synchronize();
        deposit(rows_of(call.dquery, batch, tile.head), dquery, call.scale, buffer, call.lse + line, 0, &call, &tile);
    }
}
