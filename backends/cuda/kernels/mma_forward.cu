/* Attention on tensor cores: the rows of a tile run one online softmax over all of their keys.

       score = log2(e) * scale * q.k + bias     out = sum of 2^(score - m) v / l     lse = ln(2) * (m + log2 l)

       query tile --> shared --> fragments (registers, if HELD), once a tile
       for each key tile j of KEY_TILE visible keys, with keys j in shared memory:
           start copying values j and keys j + 1 to their slots; locate keys j + 2, j + 3
           score tile (registers) = query fragments . key fragments
           online softmax step: scores --> weights (registers), the left fragments of the next product
           wait for values j;    sum (registers) += weights . value fragments
       sum / l --> shared, of a warp alone --> out;    m, l --> lse

   A warp computes 16 * FRAGMENTS of the tile's rows: scores, weights and sums stay in its registers. With SLOTS 3 there are two
   slots for keys and one for values; with SLOTS 2, one each, and keys j + 1 are copied while values j are multiplied. A lane
   holds, of each 16 rows, rows lane / 4 and 8 further, and of each 8 columns the two from lane % 4 * 2 on.

   Weights are relative to m, the largest score of an earlier key tile. Only where the sum of weights shows that scores have grown
   far beyond m, that key tile is computed again, relative to a new m: no maximum is computed otherwise. Key tiles whose keys all
   count once need no bias, those before a warp's rows need no comparison of positions, and those after its rows are left out.

   Shared memory in iteration j, with SLOTS 3, between its barrier, that after the wait for values j, and the next iteration's:

                                  | barrier: keys j are there        | barrier: values j are there   | barrier of j + 1
       keys, slot j % 2           | read: scores                     | free                          | free
       keys, slot (j + 1) % 2     | keys j + 1 are being copied ------------------------------------> | read
       values                     | values j are being copied -----> | read: sums                    | free
       located keys, ring of 4    | read: j, j + 1; written, if j is even: j + 2, j + 3              | read: j + 1, j + 2

   With SLOTS 2 keys j + 1 are copied from the second barrier on, to the slot of keys j, which nobody reads any more.

   Dynamic shared memory, in rows of HEAD_DIM elements: SLOTS * KEY_TILE, and TILE_ROWS more unless HELD.

       HEAD_DIM   capability                  TILE_ROWS   THREADS   BLOCKS   SLOTS   HELD   dynamic bytes
       16 - 64    any                         128         128       2        3       yes    384 * HEAD_DIM
       96         8.x, 12.x                   128         128       2        3       yes    36864
       96         9.0, 10.x, 11.x             128         128       2        3       no     61440
       128        8.0, 8.7                    128         128       2        2       no     65536
       128        9.0, 10.x, 11.x             128         128       2        3       no     81920
       96, 128    7.5; 128 also 8.6, 8.9, 12  128         256       1        3       yes    384 * HEAD_DIM
       any        any                         64          128       4 or 2   3       yes    384 * HEAD_DIM */
#include "dilated.cuh"

#ifndef SLOTS
#define SLOTS 3
#endif

#define KEY_TILE 64
#define KEY_TILES 4
#define WARPS (THREADS / 32)
#define FRAGMENTS (TILE_ROWS / 16 / WARPS)
#define CHUNKS (HEAD_DIM / 8)
#define ROW_LANES (CHUNKS == 12 ? 4 : CHUNKS < 8 ? CHUNKS : 8)
#define COPIED (THREADS / ROW_LANES)
#define SWAPPED (HEAD_DIM % 64 == 0 ? 8 : HEAD_DIM % 32 == 0 ? 4 : 2)
#ifndef HELD
#define HELD (FRAGMENTS * HEAD_DIM <= 192)
#endif

/* Of q.k, 16 elements each: more at once would want registers that are not there. */
#define STEPS (HELD ? HEAD_DIM / 16 : SWAPPED / 2)

#if THREADS > KEY_TILE * ROW_LANES || THREADS % 32 || TILE_ROWS % (16 * WARPS)
#error "THREADS must be full warps that share TILE_ROWS by 16 rows, and no more than copy KEY_TILE rows at a time"
#endif

#define LOWEST (-3e38f)
#define MAX_ADDED 4096.0f
#define MAX_POSITION 0x7fffffff

/* A key tile before it is copied: the position of each key, -1 if it does not count, and by 32 keys the nearest and farthest that
   count, and whether any has a bias. */
typedef struct {
    int position[KEY_TILE];
    float bias[KEY_TILE];
    int nearest[2], farthest[2], biased[2];
} KeyTile;

/* What all threads need to know of a tile of rows; registers have no room for it. `key` and `value` are of its head. */
typedef struct {
    float total[THREADS][FRAGMENTS][2];
    Tile tile;
    int batch, item;
    const Storage *key, *value;
    Keys keys;
    KeyTile key_tile[KEY_TILES];
} TileState;

/* The rows of a warp. */
typedef struct {
    float sum[FRAGMENTS][CHUNKS][4];
    float maximum[FRAGMENTS][2];
    unsigned query[HELD ? FRAGMENTS : 1][HEAD_DIM / 16][4];
} Rows;

/* Computed where they are used: what follows from them would otherwise be kept in registers all the time. */
DEVICE int thread_number(void) { return opaque(thread_index()) & (THREADS - 1); }
DEVICE int lane_number(void) { return opaque(thread_index()) & 31; }

/* Which of the tile's rows is the warp's first. */
DEVICE int first_row(void) { return thread_number() / 32 * (16 * FRAGMENTS); }

/* Where a chunk of 8 elements of a row lies: any 8 rows from a multiple of 8 on have the same chunk in different banks. */
DEVICE int swizzled(int row, int chunk) { return row * HEAD_DIM + (chunk ^ row / (8 / SWAPPED) % SWAPPED) * 8; }

/* `swizzled(row + own row, chunk + own chunk)`, given `own`, the swizzled place of own row and own chunk; row is a multiple of 8,
   own chunk 0 or 1, chunk even. In bytes, so that all but the exclusive or is a constant part of an address. */
DEVICE const void *swizzled_from(const Storage *slot, int own, int row, int chunk) {
    return (const char *)slot + (2 * own ^ chunk % SWAPPED * 16) + (row * HEAD_DIM + chunk / SWAPPED * SWAPPED * 8) * 2;
}

/* A thread's chunks of the row at `position`; zeros if that is -1, or beyond head_dim: a copy of nothing has the address of the
   head. Strides of VECTOR are below 2^32 bytes. */
DEVICE void copy_row(Storage *slot, int row, const Storage *from, long long stride, int position, int head_dim) {
    int lane = thread_number() % ROW_LANES;
#if VECTOR
    const char *source = (const char *)(from + lane * 8) + (unsigned long long)(unsigned)position * (unsigned)(stride * 2);
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk += ROW_LANES) {
        int present = position >= 0 && (chunk + lane) * 8 < head_dim;
        const void *place = present ? source + chunk * 16 : (const char *)from;
        copy_async_or_zero(slot + swizzled(row, chunk + lane), place, present);
    }
#else
    for (int chunk = lane; chunk < CHUNKS; chunk += ROW_LANES)
        for (int i = 0; i < 8; i++) {
            int present = position >= 0 && chunk * 8 + i < head_dim;
            slot[swizzled(row, chunk) + i] = present ? LOAD(from + position * stride + chunk * 8 + i) : 0;
        }
#endif
}

DEVICE void copy_queries(Storage *slot, const Args *args, const Tile *tile, int batch) {
    const Storage *from = (const Storage *)args->query.data + batch * args->query.batch + tile->head * args->query.head;
    int first = thread_number() / ROW_LANES;
#pragma unroll
    for (int i = 0; i < TILE_ROWS / COPIED; i++) {
        int row = first + i * COPIED;
        copy_row(slot, row, from, args->query.row, row < tile->rows ? own_position(tile, row) : -1, args->head_dim);
    }
    copy_async_commit();
}

/* Positions are read ahead: copies that follow each other at once are faster. */
DEVICE void copy_keys(Storage *slot, const Storage *from, long long stride, const KeyTile *key_tile, int head_dim) {
    int first = thread_number() / ROW_LANES, position[KEY_TILE / COPIED];
#pragma unroll
    for (int i = 0; i < KEY_TILE / COPIED; i++)
        position[i] = key_tile->position[first + i * COPIED];
#pragma unroll
    for (int i = 0; i < KEY_TILE / COPIED; i++)
        copy_row(slot, first + i * COPIED, from, stride, position[i], head_dim);
    copy_async_commit();
}

/* Locates the keys of two key tiles, from number `tile` on. */
DEVICE void locate_keys(TileState *shared, const Args *args, int tile) {
    for (int i = thread_index(); i < 2 * KEY_TILE; i += THREADS) {
        int index = tile * KEY_TILE + i, position = -1;
        float bias = NEG_INF;
        if (index < shared->keys.total) {
            int branch, found = key_position(&shared->keys, index, &branch);
            bias = key_bias(&shared->keys, found, branch, args->once);
            if (args->mask && LOAD(args->mask + shared->batch * args->mask_batch + found * args->mask_row))
                bias = NEG_INF;
            position = bias == NEG_INF ? -1 : found;
        }
        KeyTile *key_tile = &shared->key_tile[(tile + i / KEY_TILE) % KEY_TILES];
        key_tile->position[i % KEY_TILE] = position;
        key_tile->bias[i % KEY_TILE] = bias;
        int nearest = position < 0 ? MAX_POSITION : position, farthest = position;
        if (args->causal)
            nearest = warp_min(nearest), farthest = warp_max(farthest);
        else
            nearest = ballot(position >= 0) ? 0 : MAX_POSITION;
        int biased = ballot(bias != 0.0f) != 0, part = i % KEY_TILE / 32;
        if (i % 32 == 0)
            key_tile->nearest[part] = nearest, key_tile->farthest[part] = farthest, key_tile->biased[part] = biased;
    }
}

DEVICE void load_query_fragments(Rows *rows, const Storage *queries) {
    int lane = lane_number(), own = swizzled(first_row() + lane % 16, lane / 16);
#pragma unroll
    for (int f = 0; f < (HELD ? FRAGMENTS : 0); f++)
#pragma unroll
        for (int k = 0; k < HEAD_DIM / 16; k++)
            load_matrices_4(rows->query[f][k], swizzled_from(queries, own, f * 16, k * 2));
}

/* score[row][key] = q.k */
DEVICE void score_tile(float (*score)[KEY_TILE / 8][4], const Rows *rows, const Storage *queries, const Storage *keys) {
    int lane = lane_number();
    int own_query = swizzled(first_row() + lane % 16, lane / 16), own = swizzled(lane / 16 * 8 + lane % 8, lane / 8 % 2);
#pragma unroll
    for (int f = 0; f < FRAGMENTS; f++)
#pragma unroll
        for (int n = 0; n < KEY_TILE / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                score[f][n][i] = 0.0f;
#pragma unroll 1
    for (int from = 0; from < HEAD_DIM / 16; from += STEPS)
#pragma unroll
        for (int k = 0; k < STEPS; k++) {
            unsigned query[FRAGMENTS][4];
#pragma unroll
            for (int f = 0; f < FRAGMENTS; f++)
                if (HELD)
                    for (int i = 0; i < 4; i++)
                        query[f][i] = rows->query[HELD ? f : 0][k][i];
                else
                    load_matrices_4(query[f], swizzled_from(queries + from * 16, own_query, f * 16, k * 2));
#pragma unroll
            for (int n = 0; n < KEY_TILE / 16; n++) {
                unsigned key[4];
                load_matrices_4(key, swizzled_from(keys + from * 16, own, n * 16, k * 2));
#pragma unroll
                for (int f = 0; f < FRAGMENTS; f++) {
                    mma(score[f][n * 2], query[f], key);
                    mma(score[f][n * 2 + 1], query[f], key + 2);
                }
            }
        }
}

/* Turns products into scores, with scale and bias; with `compare`, those of keys after a row become NEG_INF. */
DEVICE void scale_and_mask(float (*score)[KEY_TILE / 8][4], const Args *args, const Tile *tile, const KeyTile *key_tile,
                           float scale, int compare) {
    int lane = lane_number();
#pragma unroll
    for (int n = 0; n < KEY_TILE / 8; n++) {
        int column = n * 8 + lane % 4 * 2;
        float bias[2] = {key_tile->bias[column], key_tile->bias[column + 1]};
#pragma unroll
        for (int f = 0; f < FRAGMENTS; f++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                score[f][n][i] = score[f][n][i] * scale + bias[i % 2];
    }
    if (!compare)
        return;
    unsigned step = tile->step, row = tile->row + (first_row() + lane / 4) * step; /* of no row of the tile, it may wrap */
#pragma unroll
    for (int n = 0; n < KEY_TILE / 8; n++) {
        int column = n * 8 + lane % 4 * 2;
        int position[2] = {key_tile->position[column], key_tile->position[column + 1]};
#pragma unroll
        for (int f = 0; f < FRAGMENTS; f++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (position[i % 2] > (int)(row + (f * 16 + i / 2 * 8) * step))
                    score[f][n][i] = NEG_INF;
    }
}

/* The rest of an online softmax step: raises the maxima to the scores, and rescales total and sum. */
DEVICE void raise_maxima(Rows *rows, float (*total)[2], float (*score)[KEY_TILE / 8][4]) {
#pragma unroll
    for (int f = 0; f < FRAGMENTS; f++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float top = NEG_INF;
#pragma unroll
            for (int n = 0; n < KEY_TILE / 8; n++)
                top = fmaxf(top, fmaxf(score[f][n][h * 2], score[f][n][h * 2 + 1]));
            top = fmaxf(top, shuffle_xor(top, 1));
            top = fmaxf(rows->maximum[f][h], fmaxf(top, shuffle_xor(top, 2)));
            float keep = exp2_fast(rows->maximum[f][h] - top);
            rows->maximum[f][h] = top;
            total[f][h] *= keep;
#pragma unroll
            for (int n = 0; n < CHUNKS; n++)
                rows->sum[f][n][h * 2] *= keep, rows->sum[f][n][h * 2 + 1] *= keep;
        }
}

/* weight = 2^(factor * score - m), as left fragments of products with the values, and their sums by row. Returns whether any of
   the sums is too large, which none is after `raise_maxima`. */
DEVICE int compute_weights(unsigned (*weight)[KEY_TILE / 16][4], float (*added)[2], const Rows *rows,
                           float (*score)[KEY_TILE / 8][4], float factor) {
    int large = 0;
#pragma unroll
    for (int f = 0; f < FRAGMENTS; f++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            added[f][h] = 0.0f;
#pragma unroll
            for (int n = 0; n < KEY_TILE / 8; n++) {
                float low = exp2_fast(score[f][n][h * 2] * factor - rows->maximum[f][h]);
                float high = exp2_fast(score[f][n][h * 2 + 1] * factor - rows->maximum[f][h]);
                added[f][h] += low + high;
                weight[f][n / 2][n % 2 * 2 + h] = pack(low, high);
            }
            large |= added[f][h] > MAX_ADDED;
        }
    return ballot(large) != 0;
}

#if DROPOUT
/* Makes the weights 0 that dropout drops, after they have been added up. One after the other: each takes many registers. */
DEVICE void drop_weights(unsigned (*weight)[KEY_TILE / 16][4], const TileState *shared, const Args *args,
                         const KeyTile *key_tile) {
    int lane = lane_number();
#pragma unroll
    for (int f = 0; f < FRAGMENTS; f++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int row = own_position(&shared->tile, first_row() + f * 16 + h * 8 + lane / 4);
            unsigned kept = 0;
#pragma unroll 1
            for (int i = 0; i < KEY_TILE / 4; i++)
                kept |= keeps(args, &shared->keys, row, key_tile->position[i / 2 * 8 + lane % 4 * 2 + i % 2]) << i;
#pragma unroll
            for (int n = 0; n < KEY_TILE / 8; n++)
                weight[f][n / 2][n % 2 * 2 + h] &= (kept >> 2 * n & 1 ? 0xffffu : 0u) | (kept >> 2 * n & 2 ? 0xffff0000u : 0u);
        }
}
#endif

/* sum[row] += weight[row][key] * value[key] */
DEVICE void accumulate(Rows *rows, unsigned (*weight)[KEY_TILE / 16][4], const Storage *values) {
    int lane = lane_number(), own = swizzled(lane % 16, lane / 16);
#pragma unroll
    for (int k = 0; k < KEY_TILE / 16; k++)
#pragma unroll
        for (int n = 0; n < CHUNKS / 2; n++) {
            unsigned value[4];
            load_matrices_4_transposed(value, swizzled_from(values, own, k * 16, n * 2));
#pragma unroll
            for (int f = 0; f < FRAGMENTS; f++) {
                mma(rows->sum[f][n * 2], weight[f][k], value);
                mma(rows->sum[f][n * 2 + 1], weight[f][k], value + 2);
            }
        }
}

/* Element `column` and the next of a row of `out`; zero beyond head_dim. */
DEVICE void load_pair(float *pair, const Storage *row, int column, int head_dim) {
#if VECTOR
    unsigned word = column < head_dim ? LOAD((const unsigned *)(row + column)) : 0;
    pair[0] = low_of(word), pair[1] = high_of(word);
#else
    pair[0] = column < head_dim ? from_storage(LOAD(row + column)) : 0.0f;
    pair[1] = column + 1 < head_dim ? from_storage(LOAD(row + column + 1)) : 0.0f;
#endif
}

DEVICE Storage *out_of(const Args *args, const Tile *tile, int batch) {
    return (Storage *)args->out.data + batch * args->out.batch + tile->head * args->out.head;
}

DEVICE float *lse_of(const Args *args, const Tile *tile, int batch) {
    return args->lse + ((long long)batch * args->heads + tile->head) * args->seq;
}

/* The state before any key: empty, or what earlier launches have left, whose sum is `out`, relative to lse. */
DEVICE void start_rows(Rows *rows, float (*total)[2], const Args *args, const Tile *tile, int batch) {
    int lane = lane_number();
#pragma unroll
    for (int f = 0; f < FRAGMENTS; f++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            rows->maximum[f][h] = LOWEST, total[f][h] = 0.0f;
#pragma unroll
            for (int n = 0; n < CHUNKS; n++)
                rows->sum[f][n][h * 2] = rows->sum[f][n][h * 2 + 1] = 0.0f;
        }
    if (args->first)
        return;
#pragma unroll
    for (int f = 0; f < FRAGMENTS; f++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int row = first_row() + f * 16 + h * 8 + lane / 4, position = own_position(tile, row);
            float before = row < tile->rows ? LOAD(lse_of(args, tile, batch) + position) : NEG_INF;
            if (before == NEG_INF)
                continue;
            rows->maximum[f][h] = before * LOG2E, total[f][h] = lane % 4 == 0 ? 1.0f : 0.0f;
            const Storage *out = out_of(args, tile, batch) + position * args->out.row;
#pragma unroll
            for (int n = 0; n < CHUNKS; n++)
                load_pair(&rows->sum[f][n][h * 2], out, n * 8 + lane % 4 * 2, args->head_dim);
#if DROPOUT
#pragma unroll
            for (int n = 0; n < CHUNKS; n++)
                rows->sum[f][n][h * 2] /= KEEP_SCALE(args), rows->sum[f][n][h * 2 + 1] /= KEEP_SCALE(args);
#endif
        }
}

/* Writes out and lse, through shared memory that only this warp uses. */
DEVICE void write_rows(Rows *rows, float (*totals)[2], const Args *args, const Tile *tile, int batch, Storage *stage) {
    int lane = lane_number();
    Storage *out = out_of(args, tile, batch);
    float *lse = lse_of(args, tile, batch);
#pragma unroll
    for (int f = 0; f < FRAGMENTS; f++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float total = totals[f][h];
            total += shuffle_xor(total, 1);
            total += shuffle_xor(total, 2);
            float part = total > 0.0f ? KEEP_SCALE(args) / total : total;
            int row = first_row() + f * 16 + h * 8 + lane / 4;
            if (lane % 4 == 0 && row < tile->rows)
                STORE(lse + own_position(tile, row),
                      total > 0.0f ? LN2 * (rows->maximum[f][h] + log2f(total)) : NEG_INF + total);
#pragma unroll
            for (int n = 0; n < CHUNKS; n++) {
                unsigned *to = (unsigned *)(stage + swizzled(row, n)) + lane % 4;
                *to = pack(rows->sum[f][n][h * 2] * part, rows->sum[f][n][h * 2 + 1] * part);
            }
        }
    synchronize_warp();
    for (int i = lane / ROW_LANES; i < 16 * FRAGMENTS; i += 32 / ROW_LANES) {
        int row = first_row() + i;
        if (row >= tile->rows)
            break;
        Storage *to = out + own_position(tile, row) * args->out.row;
        for (int chunk = lane % ROW_LANES; chunk < CHUNKS; chunk += ROW_LANES) {
            const Storage *from = stage + swizzled(row, chunk);
#if VECTOR
            if (chunk * 8 < args->head_dim)
                store_words(to + chunk * 8, *(const uint4 *)from);
#else
            for (int e = 0; e < 8 && chunk * 8 + e < args->head_dim; e++)
                STORE(to + chunk * 8 + e, from[e]);
#endif
        }
    }
}

/* What one thread prepares of a tile, for all. */
DEVICE void begin_tile(TileState *shared, const Args *args, const Tile *tile, int batch) {
    int kv_head = tile->head / (opaque(args->heads) / args->kv_heads), last = own_position(tile, tile->rows - 1);
    shared->tile = *tile, shared->batch = batch;
    shared->key = (const Storage *)args->key.data + batch * args->key.batch + kv_head * args->key.head;
    shared->value = (const Storage *)args->value.data + batch * args->value.batch + kv_head * args->value.head;
    find_keys(&shared->keys, args, tile->row, tile->set, 0, args->causal ? last + 1 : args->seq);
    find_place(&shared->keys, args, batch, tile->head);
}

/* Whether any row of the warp sees any of the keys. */
DEVICE int warp_sees_any(const TileState *shared, const Args *args, const KeyTile *key_tile) {
    int first = first_row(), last = min_of(first + 16 * FRAGMENTS, shared->tile.rows) - 1;
    int nearest = min_of(key_tile->nearest[0], key_tile->nearest[1]);
    return last >= first && nearest <= (args->causal ? shared->tile.row + last * shared->tile.step : MAX_POSITION - 1);
}

/* Weights of the keys for the warp's rows. `raise`: whether the maxima are known to be too low for them. Maxima are raised to
   rounded scores: a product within a fused operation may exceed its rounded value, by far where it is huge, each time again. */
DEVICE void attend(unsigned (*weight)[KEY_TILE / 16][4], Rows *rows, TileState *shared, const Args *args, const KeyTile *key_tile,
                   const Storage *queries, const Storage *keys, int raise) {
    float (*total)[2] = shared->total[thread_number()], added[FRAGMENTS][2], scale = args->scale * LOG2E;
    int farthest = max_of(key_tile->farthest[0], key_tile->farthest[1]);
    int compare = args->causal && farthest > shared->tile.row + first_row() * shared->tile.step;
    int plain = !compare && !key_tile->biased[0] && !key_tile->biased[1] && scale >= 0.0f;
    do {
        float score[FRAGMENTS][KEY_TILE / 8][4];
        score_tile(score, rows, queries, keys);
        if (raise || !plain)
            scale_and_mask(score, args, &shared->tile, key_tile, scale, compare);
        if (raise)
            raise_maxima(rows, total, score);
        raise = compute_weights(weight, added, rows, score, raise || !plain ? 1.0f : scale);
    } while (raise);
#pragma unroll
    for (int f = 0; f < FRAGMENTS; f++)
        total[f][0] += added[f][0], total[f][1] += added[f][1];
#if DROPOUT
    drop_weights(weight, shared, args, key_tile);
#endif
}

DEVICE void compute_tile(const Args *args, const Tile *tile, int batch, TileState *shared, Storage *slots) {
    Storage *queries = slots + (HELD ? SLOTS - 2 : SLOTS) * KEY_TILE * HEAD_DIM;
    Storage *values = slots + (SLOTS - 1) * KEY_TILE * HEAD_DIM;
    copy_queries(queries, args, tile, batch);
    if (thread_index() == 0)
        begin_tile(shared, args, tile, batch);
    synchronize();
    locate_keys(shared, args, 0);
    synchronize();
    copy_keys(slots, shared->key, args->key.row, &shared->key_tile[0], args->head_dim);

    Rows rows;
    start_rows(&rows, shared->total[thread_number()], args, &shared->tile, shared->batch);
    copy_async_wait(1);
    synchronize();
    load_query_fragments(&rows, queries);

    for (int j = 0; j * KEY_TILE < shared->keys.total; j++) {
        const KeyTile *key_tile = &shared->key_tile[j % KEY_TILES], *next = &shared->key_tile[(j + 1) % KEY_TILES];
        Storage *keys = slots + (SLOTS > 2 ? j % 2 * KEY_TILE * HEAD_DIM : 0);
        Storage *next_keys = slots + (SLOTS > 2 ? (j + 1) % 2 * KEY_TILE * HEAD_DIM : 0);
        int more = (j + 1) * KEY_TILE < shared->keys.total;
        copy_async_wait(0);
        synchronize();
        copy_keys(values, shared->value, args->value.row, key_tile, args->head_dim);
        if (SLOTS > 2 && more)
            copy_keys(next_keys, shared->key, args->key.row, next, args->head_dim);
        if (j % 2 == 0 && more)
            locate_keys(shared, args, j + 2);
        int seen = warp_sees_any(shared, args, key_tile);
        unsigned weight[FRAGMENTS][KEY_TILE / 16][4];
        if (seen)
            attend(weight, &rows, shared, args, key_tile, queries, keys, j == 0 && args->first);
        if (SLOTS > 2 && more)
            copy_async_wait(1);
        else
            copy_async_wait(0);
        synchronize();
        if (SLOTS == 2 && more)
            copy_keys(next_keys, shared->key, args->key.row, next, args->head_dim);
        if (seen)
            accumulate(&rows, weight, values);
    }
    copy_async_wait(0);
    synchronize();
    write_rows(&rows, shared->total[thread_number()], args, &shared->tile, shared->batch, slots);
}

KERNEL(mma_forward) {
    SHARED TileState shared;
    DYNAMIC_SHARED(bytes);
    Tile tile;
    int batch;
    start_tiles(&shared.item);
    while (next_tile(&args, &shared.item, &tile, &batch))
        compute_tile(&args, &tile, batch, &shared, (Storage *)bytes);
}
