/* Attention on tensor cores: the rows of a tile run one online softmax over all of their keys.

       score = log2(e) * scale * q.k + bias     out = sum of 2^(score - m) v / l     lse = ln(2) * (m + log2 l)

       query tile --> shared --> fragments (registers, if HELD), once a tile
       for each key tile j of COLUMNS visible keys, with keys j in shared memory:
           start copying values j and keys j + 1 to their slots; locate keys from j + 2 on
           score tile (registers) = query fragments . key fragments;    if CHANGED, capped, with a bias (`scores.cuh`)
           online softmax step: scores --> weights (registers), the left fragments of the next product
           wait for values j;    sum (registers) += weights . value fragments
       sum / l --> shared, of a warp alone --> out;    m, l --> lse;    meanwhile the first warp finds the next tile

   A warp computes 16 * FRAGMENTS of the tile's rows; `mma.cuh` draws how: scores, weights and sums stay in its registers. With
   SLOTS 3 there are two slots for keys and one for values; with SLOTS 2, one each, and keys j + 1 are copied while values j are
   multiplied.

   Weights are relative to m, the largest score of an earlier key tile. Only where the sum of weights shows that scores have grown
   far beyond m, that key tile is computed again, relative to a new m: no maximum is computed otherwise. Key tiles whose keys all
   count once need no bias, those before a warp's rows need no comparison of positions, and those after its rows are left out.
   Scores of a tile that needs neither are not rounded before m is subtracted, unless m is huge: they would differ from m by its rounding.

   Shared memory in iteration j, with SLOTS 3, between its barrier, that after the wait for values j, and the next iteration's:

                                  | barrier: keys j are there        | barrier: values j are there   | barrier of j + 1
       keys, slot j % 2           | read: scores                     | free                          | free
       keys, slot (j + 1) % 2     | keys j + 1 are being copied ------------------------------------> | read
       values                     | values j are being copied -----> | read: sums                    | free
       window of located keys     | read: j, j + 1; written, THREADS at a time: from j + 2 on         | read: j + 1, j + 2

   With SLOTS 2 keys j + 1 are copied from the second barrier on, to the slot of keys j, which nobody reads any more.

   Dynamic shared memory, in rows of HEAD_DIM elements: SLOTS * COLUMNS, and TILE_ROWS more unless HELD.

       HEAD_DIM   capability                  TILE_ROWS   THREADS   BLOCKS   SLOTS   HELD   dynamic bytes
       16 - 64    any                         128         128       2        3       yes    384 * HEAD_DIM
       96         8.x, 12.x                   128         128       2        3       yes    36864
       96         9.0, 10.x, 11.x             128         128       2        3       no     61440
       128        8.0, 8.7                    128         128       2        2       no     65536
       128        9.0, 10.x, 11.x             128         128       2        3       no     81920
       96, 128    7.5; 128 also 8.6, 8.9, 12  128         256       1        3       yes    384 * HEAD_DIM
       any        any                         64          128       4 or 2   3       yes    384 * HEAD_DIM */
#include "scores.cuh"

/* Fewer where a bias takes registers. */
#define COLUMNS (GATHERS ? 32 : 64)
#define SCORE_COLUMNS COLUMNS
#include "mma.cuh"

#ifndef SLOTS
#define SLOTS 3
#endif
#ifndef HELD
#define HELD (FRAGMENTS * HEAD_DIM <= 192)
#endif

/* Of q.k, 16 elements each: more at once would want registers that are not there. */
#define STEPS_AT_ONCE (HELD ? STEPS : SWAPPED / 2)

/* Copied keys or values. */
#define SLOT (COLUMNS * CHUNKS)

#define LOWEST (-3e38f)
#define MAX_ADDED 4096.0f

/* Whether registers have room for the sums of weights. */
#define TOTALS_HELD (HEAD_DIM <= 64 && !CHANGED)

/* What all threads need to know of a tile of rows; registers have no room for it. `key` and `value` are of its head. */
typedef struct {
    float total[TOTALS_HELD ? 1 : THREADS][FRAGMENTS][2];
    Task task;
    Storage *key, *value;
    Columns columns;
    float bias[WINDOW];
} TileState;

/* The rows of a warp. */
typedef struct {
    Sums sum;
    float maximum[FRAGMENTS][2], total[TOTALS_HELD ? FRAGMENTS : 1][2];
    unsigned query[HELD ? FRAGMENTS : 1][STEPS][4];
} Rows;

typedef unsigned Weights[SCORE_COLUMNS / 16][FRAGMENTS][4];

/* The sums of weights of this thread's rows. */
DEVICE float (*totals_of(Rows *rows, TileState *shared))[2] { return TOTALS_HELD ? rows->total : shared->total[this_thread()]; }

/* Starts copying the keys, or the values, from number `column` on. */
DEVICE void copy_keys(uint4 *slot, Storage *from, long long stride, const TileState *shared, int column, int head_dim) {
    HeadRows rows = {from, stride};
    copy_columns(slot, rows, &shared->columns, column, head_dim);
}

/* Locates THREADS keys, from number `from` on. */
DEVICE void locate_keys(TileState *shared, const Args *args, int from) {
    float bias;
    int index = from + this_thread(), position = locate_key(&shared->task.keys, args, shared->task.batch, index, &bias);
    shared->bias[index % WINDOW] = bias;
    put_column(&shared->columns, index, position, bias, bounded(args));
}

/* score[row][key] = q.k */
DEVICE void score_tile(Scores score, const Rows *rows, const uint4 *queries, const uint4 *keys) {
    unsigned thread = this_thread();
    int own_query = row_fragment(thread), own = column_fragment(thread);
    clear_scores(score);
    queries += first_row(thread) * CHUNKS;
#pragma unroll 1
    for (int from = 0; from < STEPS; from += STEPS_AT_ONCE)
#pragma unroll
        for (int k = 0; k < STEPS_AT_ONCE; k++) {
            unsigned query[FRAGMENTS][4];
#pragma unroll
            for (int f = 0; f < FRAGMENTS; f++)
                if (HELD)
                    for (int i = 0; i < 4; i++)
                        query[f][i] = rows->query[HELD ? f : 0][k][i];
                else
                    load_matrices_4(query[f], fragment_at(queries + 2 * from, own_query, f * 16, k));
            multiply_across(score, query, keys + 2 * from, own, k);
        }
}

#if CHANGED
/* Turns products into scores to the base 2, without what comes of how often keys count. */
DEVICE void change_scores(Scores score, const Args *args, const TileState *shared, int slot) {
    const Tile *tile = &shared->task.tile;
    ScoreOf of = score_of(args, shared->task.batch, tile->head);
#pragma unroll
    for (int n = 0; n < SCORE_COLUMNS / 8; n++) {
        Point keys[2] = {column_point(&of, &shared->columns, slot, n, 0), column_point(&of, &shared->columns, slot, n, 1)};
#pragma unroll
        for (int f = 0; f < FRAGMENTS; f++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float bias = bias_of(&of, own_point(&of, tile, f, i / 2), keys[i % 2]);
                score[f][n][i] = (capped(&of, score[f][n][i]) + bias) * LOG2E;
            }
        keep_loads_here();
    }
}
#endif

/* Turns products into scores, with scale and bias, of the keys from number `slot` of the window on; with `compare`, those of keys
   beyond the bounds of a row become NEG_INF. */
DEVICE void scale_and_mask(Scores score, const Args *args, const TileState *shared, int slot, float scale, int compare) {
    unsigned thread = this_thread();
#pragma unroll
    for (int n = 0; n < SCORE_COLUMNS / 8; n++) {
        int column = slot + n * 8 + thread % 4 * 2;
        float bias[2] = {shared->bias[column], shared->bias[column + 1]};
#pragma unroll
        for (int f = 0; f < FRAGMENTS; f++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                score[f][n][i] = score[f][n][i] * scale + bias[i % 2];
    }
    if (!compare)
        return;
    unsigned step = shared->task.tile.step, between = (unsigned)args->back + args->ahead;
    unsigned lowest = shared->task.tile.row + own_row(thread, 0, 0) * step - args->back; /* of no row, it may wrap */
#pragma unroll
    for (int n = 0; n < SCORE_COLUMNS / 8; n++) {
        int column = slot + n * 8 + thread % 4 * 2;
        int position[2] = {shared->columns.position[column], shared->columns.position[column + 1]};
#pragma unroll
        for (int f = 0; f < FRAGMENTS; f++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (position[i % 2] - (lowest + (f * 16 + i / 2 * 8) * step) > between)
                    score[f][n][i] = NEG_INF;
    }
}

/* The rest of an online softmax step: raises the maxima to the scores, and rescales total and sum. */
DEVICE void raise_maxima(Rows *rows, float (*total)[2], Scores score) {
#pragma unroll
    for (int f = 0; f < FRAGMENTS; f++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float top = NEG_INF;
#pragma unroll
            for (int n = 0; n < SCORE_COLUMNS / 8; n++)
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
DEVICE int compute_weights(Weights weight, float (*added)[2], const Rows *rows,
                           Scores score, float factor) {
    int large = 0;
#pragma unroll
    for (int f = 0; f < FRAGMENTS; f++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            added[f][h] = 0.0f;
#pragma unroll
            for (int n = 0; n < SCORE_COLUMNS / 8; n++) {
                float low = exp2_fast(score[f][n][h * 2] * factor - rows->maximum[f][h]);
                float high = exp2_fast(score[f][n][h * 2 + 1] * factor - rows->maximum[f][h]);
                added[f][h] += low + high;
                weight[n / 2][f][n % 2 * 2 + h] = pack(low, high);
            }
            large |= added[f][h] > MAX_ADDED;
        }
    return ballot(large) != 0;
}

#if DROPOUT
/* Makes the weights 0 that dropout drops, after they have been added up. One after the other: each takes many registers. */
DEVICE void drop_weights(Weights weight, const TileState *shared, const Args *args, int slot) {
    unsigned thread = this_thread();
    const int *positions = shared->columns.position + slot + thread % 4 * 2;
#pragma unroll
    for (int f = 0; f < FRAGMENTS; f++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int row = own_position(&shared->task.tile, own_row(thread, f, h));
            unsigned kept = 0;
#pragma unroll 1
            for (int i = 0; i < SCORE_COLUMNS / 4; i++)
                kept |= keeps(args, &shared->task.keys, row, positions[i / 2 * 8 + i % 2]) << i;
#pragma unroll
            for (int n = 0; n < SCORE_COLUMNS / 8; n++)
                weight[n / 2][f][n % 2 * 2 + h] &= (kept >> 2 * n & 1 ? 0xffffu : 0u) | (kept >> 2 * n & 2 ? 0xffff0000u : 0u);
        }
}
#endif

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

DEVICE float *lse_of(const Args *args, const Tile *tile, int batch) { return args->lse + line_of(args, batch, tile->head); }

/* The state before any key: empty, or what earlier launches have left, whose sum is `out`, relative to lse. */
DEVICE void start_rows(Rows *rows, float (*total)[2], const Args *args, const Tile *tile, int batch) {
    unsigned thread = this_thread();
    clear(rows->sum);
#pragma unroll
    for (int f = 0; f < FRAGMENTS; f++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            rows->maximum[f][h] = LOWEST, total[f][h] = 0.0f;
            int row = own_row(thread, f, h), position = own_position(tile, row);
            float before = !args->first && row < tile->rows ? LOAD(lse_of(args, tile, batch) + position) : NEG_INF;
            if (before == NEG_INF)
                continue;
            rows->maximum[f][h] = before * LOG2E, total[f][h] = thread % 4 == 0 ? 1.0f : 0.0f;
            const Storage *out = rows_of(args->out, batch, tile->head).data + position * args->out.row;
#pragma unroll
            for (int n = 0; n < CHUNKS; n++) {
                float *pair = &rows->sum[f][n][h * 2];
                load_pair(pair, out, n * 8 + thread % 4 * 2, args->head_dim);
#if DROPOUT
                pair[0] /= KEEP_SCALE(args), pair[1] /= KEEP_SCALE(args);
#endif
            }
        }
}

/* Writes lse, and, to shared memory that only this warp uses, out. */
DEVICE void stage_rows(uint4 *stage, Rows *rows, float (*totals)[2], const Args *args, const Tile *tile, int batch) {
    unsigned thread = this_thread(), lane = thread % 32;
    float *lse = lse_of(args, tile, batch);
#pragma unroll
    for (int f = 0; f < FRAGMENTS; f++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float total = totals[f][h];
            total += shuffle_xor(total, 1);
            total += shuffle_xor(total, 2);
            float part = total > 0.0f ? KEEP_SCALE(args) / total : total;
            int row = own_row(thread, f, h);
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
}

/* Writes out. */
DEVICE void write_rows(const uint4 *stage, const Args *args, const Tile *tile, int batch) {
    unsigned thread = this_thread(), lane = thread % 32;
    HeadRows out = rows_of(args->out, batch, tile->head);
    for (int i = lane / ROW_LANES; i < ROWS; i += 32 / ROW_LANES) {
        int row = first_row(thread) + i;
        if (row >= tile->rows)
            break;
        Storage *to = out.data + own_position(tile, row) * out.row;
        for (int chunk = lane % ROW_LANES; chunk < CHUNKS; chunk += ROW_LANES) {
            const uint4 *from = stage + swizzled(row, chunk);
#if VECTOR
            if (chunk * 8 < args->head_dim)
                store_words(to + chunk * 8, *from);
#else
            for (int e = 0; e < 8 && chunk * 8 + e < args->head_dim; e++)
                STORE(to + chunk * 8 + e, ((const Storage *)from)[e]);
#endif
        }
    }
}

/* Notes where the key head of the tile begins. */
DEVICE void find_heads(TileState *shared, const Args *args) {
    int batch = shared->task.batch, head = shared->task.tile.head / group_of(args);
    shared->key = rows_of(args->key, batch, head).data, shared->value = rows_of(args->value, batch, head).data;
}

/* Whether any row of the warp sees any of the keys from number `slot` of the window on. */
DEVICE int warp_sees_any(const TileState *shared, const Args *args, int slot) {
    return !none_seen(&shared->columns, slot, reach_of(&shared->task.tile), args->back, args->ahead);
}

/* Whether any maximum of the warp's rows is huge, or that of a row which has seen no key. */
DEVICE int any_huge(const Rows *rows) {
    int huge = 0;
#pragma unroll
    for (int f = 0; f < FRAGMENTS; f++)
#pragma unroll
        for (int h = 0; h < 2; h++)
            huge |= fabsf(rows->maximum[f][h]) > HUGE_SCORE;
    return ballot(huge) != 0;
}

/* Weights of the keys for the warp's rows. `raise`: whether the maxima are known to be too low for them. Maxima are raised to
   rounded scores: a product within a fused operation may exceed its rounded value, by far where it is huge, each time again. */
DEVICE void attend(Weights weight, Rows *rows, TileState *shared, const Args *args, int slot, const uint4 *queries,
                   const uint4 *keys, int raise) {
    const Columns *columns = &shared->columns;
    float (*total)[2] = totals_of(rows, shared), added[FRAGMENTS][2], scale = CHANGED ? 1.0f : args->scale * LOG2E;
    int compare = bounded(args) && some_cut(columns, slot, reach_of(&shared->task.tile), args->back, args->ahead);
    int plain = !CHANGED && !compare && !columns->biased[slot / 32] && !columns->biased[slot / 32 + 1] && scale >= 0.0f
                && !any_huge(rows);
    do {
        Scores score;
        score_tile(score, rows, queries, keys);
#if CHANGED
        change_scores(score, args, shared, slot);
#endif
        if (raise || !plain)
            scale_and_mask(score, args, shared, slot, scale, compare);
        if (raise)
            raise_maxima(rows, total, score);
        raise = compute_weights(weight, added, rows, score, raise || !plain ? 1.0f : scale);
    } while (raise);
#pragma unroll
    for (int f = 0; f < FRAGMENTS; f++)
        total[f][0] += added[f][0], total[f][1] += added[f][1];
#if DROPOUT
    drop_weights(weight, shared, args, slot);
#endif
}

/* sum[row] += weight[row][key] * value[key] */
DEVICE void accumulate(Rows *rows, Weights weight, const uint4 *values) {
    int own = row_fragment(this_thread());
#pragma unroll
    for (int k = 0; k < SCORE_COLUMNS / 16; k++)
        multiply_along(rows->sum, weight[k], values + k * 16 * CHUNKS, own);
}

/* Computes the block's tile, and finds the next one. */
DEVICE void compute_tile(const Args *args, TileState *shared, uint4 *slots) {
    uint4 *queries = slots + (HELD ? SLOTS - 2 : SLOTS) * SLOT, *values = slots + (SLOTS - 1) * SLOT;
    Tile tile = shared->task.tile;
    copy_tile(queries, rows_of(args->query, shared->task.batch, tile.head), &tile, args->head_dim);
    if (is_first())
        find_heads(shared, args);
    locate_keys(shared, args, 0);
    synchronize();
    copy_keys(slots, shared->key, args->key.row, shared, 0, args->head_dim);

    Rows rows;
    start_rows(&rows, totals_of(&rows, shared), args, &shared->task.tile, shared->task.batch);
    copy_async_wait(1);
    synchronize();
    if (HELD)
        load_fragments(rows.query, queries);

    for (int column = 0; column < shared->task.keys.total; column += COLUMNS) {
        int next = column + COLUMNS, after = next + COLUMNS, more = next < shared->task.keys.total;
        const uint4 *keys = slots + (SLOTS > 2 ? column / COLUMNS % 2 * SLOT : 0);
        uint4 *next_keys = slots + (SLOTS > 2 ? next / COLUMNS % 2 * SLOT : 0);
        copy_async_wait(0);
        synchronize();
        copy_keys(values, shared->value, args->value.row, shared, column, args->head_dim);
        if (SLOTS > 2 && more)
            copy_keys(next_keys, shared->key, args->key.row, shared, next, args->head_dim);
        if (after < shared->task.keys.total && after % THREADS == 0)
            locate_keys(shared, args, after);
        int seen = warp_sees_any(shared, args, column % WINDOW);
        Weights weight;
        if (seen)
            attend(weight, &rows, shared, args, column % WINDOW, queries, keys, column == 0 && args->first);
        if (SLOTS > 2 && more)
            copy_async_wait(1);
        else
            copy_async_wait(0);
        synchronize();
        if (SLOTS == 2 && more)
            copy_keys(next_keys, shared->key, args->key.row, shared, next, args->head_dim);
        if (seen)
            accumulate(&rows, weight, values);
    }
    int batch = shared->task.batch, number = take_number(&shared->task, args);
    tile = shared->task.tile;
    copy_async_wait(0);
    synchronize();
    stage_rows(slots, &rows, totals_of(&rows, shared), args, &tile, batch);
    Found next = find_tile(args, number);
    write_rows(slots, args, &tile, batch);
    begin_tile(&shared->task, args, &next, 0);
    synchronize();
}

KERNEL(mma_forward) {
    SHARED TileState shared;
    DYNAMIC_SHARED(bytes);
    first_tile(&shared.task, &args, 0);
    while (shared.task.tile.rows)
        compute_tile(&args, &shared, (uint4 *)bytes);
}
