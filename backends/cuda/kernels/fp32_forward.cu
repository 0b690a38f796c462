/* Attention in fp32 on CUDA cores, of tensors of any STORAGE.

       query tile --> `queries` (shared, transposed), once a tile
       for each key tile of KEY_TILE visible keys:
           for each slice of SLICE columns of head_dim:
               key slice --> slot (shared, transposed);    scores (registers) += queries . keys
           if CHANGED, scores --> capped, with a bias (`scores.cuh`)
           online softmax step: scores --> weights (registers); accumulator and total are rescaled
           for each slice of VALUES keys:
               value slice --> slot (shared);    weights --> shared, of a warp;    accumulator (registers) += weights . values
       accumulator / total --> out;    maximum, total --> lse;    the first warp then finds the next tile

   There are two slots. While one is read, each thread prefetches a few numbers of the next slice into registers, and writes them
   to the other slot at the end: one barrier a slice, and two or three blocks fit where there are 64 to 96 KB. Between barriers:

                          | barrier: slice s is in slot 0                             | barrier: slice s + 1 is in slot 1
       slot 0             | read: products                                            | written at the end: slice s + 2
       slot 1             | written at the end: slice s + 1, from registers           | read: products
       located keys       | of this key tile read; of the next one written, once a key tile, to the other of two buffers
       weights            | of a warp alone: written and read between barriers of the warp

       HEAD_DIM     16, 32, 48, 64     96, 128
       THREADS      64                 128
       BLOCKS       4                  2
       TILE_ROWS    64                 64         HEAD_DIM 64 runs with THREADS 128 and BLOCKS 3 as well

   A thread computes THREAD_ROWS rows of the tile, THREAD_KEYS of the keys, and THREAD_COLUMNS of head_dim: sums of outer
   products, whose factors it reads from shared memory as vectors of 4. Scores need numbers of THREAD_ROWS rows, or THREAD_KEYS
   keys, next to each other, so queries and keys are stored transposed. The lowest bit of a lane's number and those above its
   column's choose its rows, so that neighbours read the same vector of keys, and every other lane the same vector of rows. */
#include "scores.cuh"
#include "stored.cuh"

enum {
    KEY_TILE = 64,
    THREAD_ROWS = 8,
    SWEEP = THREADS / 4,
    ACROSS = THREADS * THREAD_ROWS / TILE_ROWS,
    THREAD_KEYS = KEY_TILE / ACROSS,
    THREAD_COLUMNS = HEAD_DIM / ACROSS,
    QUAD_COLUMNS = THREAD_COLUMNS / 4 * 4,
    SLICE = 16,
    PAD = 8,
    SLICE_SIZE = SLICE * KEY_TILE + (SLICE / 4 - 1) * PAD,
    VALUES = HEAD_DIM > 96 ? 8 : 16,
    SHARED_KEYS = 16,
    ROW_QUADS = HEAD_DIM / 4,
    KEY_QUADS = SLICE / 4 * KEY_TILE / THREADS,
    VALUE_QUADS = VALUES * ROW_QUADS / THREADS,
    PREFETCHED = KEY_QUADS > VALUE_QUADS ? KEY_QUADS : VALUE_QUADS,
    SLOT = SLICE_SIZE > VALUES * HEAD_DIM ? SLICE_SIZE : VALUES * HEAD_DIM,
};

/* Which key of the key tile is in `column` of a transposed slice: a thread's keys are ACROSS apart. */
DEVICE int key_in_column(int column) { return (column / (4 * ACROSS) * 4 + column % 4) * ACROSS + column / 4 % ACROSS; }

/* A thread's columns of head_dim are quads, ACROSS quads apart, and, where these do not fill HEAD_DIM, a pair after all of them: the
   place of a number of that. */
DEVICE int pair_column(int number, int column) { return QUAD_COLUMNS * ACROSS + 2 * column + number - QUAD_COLUMNS; }

/* Where row d of a transposed slice is: PAD numbers between every fourth row and the next, so that a warp that writes 4 rows of 8
   columns uses all banks. */
DEVICE int slice_row(int d) { return d * KEY_TILE + d / 4 * PAD; }

/* Of a transposed slice a thread prefetches 4 rows from `slice_thread_row` on, of column `slice_thread_column` and of each SWEEP
   further. */
DEVICE int slice_thread_row(void) { return thread_index() / 8 % 4 * 4; }
DEVICE int slice_thread_column(void) { return thread_index() / 32 * 8 + thread_index() % 8; }

/* Where the heads of a tile begin in the tensors, in elements. It is in shared memory, for registers are short; a pointer from
   there would no longer be known to point to global memory. */
typedef struct {
    long long query, key, value, out, lse;
} Heads;

DEVICE long long head_of(const View *view, int batch, int head) { return batch * view->batch + head * view->head; }

DEVICE Heads heads_of(const Args *args, const Task *task) {
    int batch = task->batch, head = task->tile.head, kv_head = head / group_of(args);
    Heads heads = {head_of(&args->query, batch, head), head_of(&args->key, batch, kv_head), head_of(&args->value, batch, kv_head),
                   head_of(&args->out, batch, head), line_of(args, batch, head)};
    return heads;
}

/* Prefetches SLICE columns of head_dim, from `from` on, of the rows at `positions`; a row at -1 is 0. */
DEVICE void fetch_slice(Quad *prefetched, const View *view, long long head, const int *positions, int from, int head_dim) {
    int d = from + slice_thread_row(), mine = key_in_column(slice_thread_column());
    const Storage *first = (const Storage *)view->data + head + d;
#pragma unroll
    for (int piece = 0; piece < KEY_QUADS; piece++) {
        int position = positions[mine + key_in_column(piece * SWEEP)];
        prefetched[piece] = load_four(row_at(first, position, view->row), position < 0 ? 0 : head_dim - d);
    }
}

DEVICE void store_slice(float *slot, const Quad *prefetched) {
    float *mine = slot + slice_row(slice_thread_row()) + slice_thread_column();
#pragma unroll
    for (int piece = 0; piece < KEY_QUADS; piece++) {
        float4 x = to_floats(prefetched[piece]);
        float *place = mine + piece * SWEEP;
        place[0] = x.x, place[KEY_TILE] = x.y, place[2 * KEY_TILE] = x.z, place[3 * KEY_TILE] = x.w;
    }
}

/* Prefetches the VALUES rows at `positions`. */
DEVICE void fetch_values(Quad *prefetched, const View *view, long long head, const int *positions, int head_dim) {
    const Storage *first = (const Storage *)view->data + head;
#pragma unroll
    for (int piece = 0; piece < VALUE_QUADS; piece++) {
        unsigned quad = piece * THREADS + thread_index();
        int position = positions[quad / ROW_QUADS], d = quad % ROW_QUADS * 4;
        prefetched[piece] = load_four(row_at(first + d, position, view->row), position < 0 ? 0 : head_dim - d);
    }
}

DEVICE void store_values(float4 *slot, const Quad *prefetched) {
#pragma unroll
    for (int piece = 0; piece < VALUE_QUADS; piece++)
        slot[piece * THREADS + thread_index()] = to_floats(prefetched[piece]);
}

/* Where the keys from number `first` on are, and log2 of how often each counts: -1 and NEG_INF for those to leave out. */
DEVICE void locate_keys(int *positions, float *bias, const Keys *keys, const Args *args, int batch, int first) {
    for (int k = thread_index(); k < KEY_TILE; k += THREADS)
        positions[k] = locate_key(keys, args, batch, first + k, bias + k);
}

DEVICE void load_vector(float *into, const float4 *from) {
    float4 x = *from;
    into[0] = x.x, into[1] = x.y, into[2] = x.z, into[3] = x.w;
}

/* sum (THREAD_ROWS x columns) += left right */
DEVICE void add_outer(float *sum, const float *left, const float *right, int columns) {
#pragma unroll
    for (int i = 0; i < THREAD_ROWS; i++)
#pragma unroll
        for (int j = 0; j < columns; j++)
            sum[i * columns + j] += left[i] * right[j];
}

/* scores += queries . keys, over a slice of head_dim. */
DEVICE void add_score_tile(float *scores, const float *queries, const float *keys, int row, int column) {
#pragma unroll 8
    for (int d = 0; d < SLICE; d++) {
        float left[THREAD_ROWS], right[THREAD_KEYS];
        const float4 *from = (const float4 *)(queries + slice_row(d) + row);
        load_vector(left, from), load_vector(left + 4, from + 1);
#pragma unroll
        for (int j = 0; j < THREAD_KEYS; j += 4)
            load_vector(right + j, (const float4 *)(keys + slice_row(d) + j * ACROSS + 4 * column));
        add_outer(scores, left, right, THREAD_KEYS);
    }
}

/* accumulator += weights . values, over a slice of VALUES keys; `weights` are those that `share_weights` has left, from the first
   of the keys on. */
DEVICE void accumulate(float *accumulator, const float4 *weights, const float4 *values, int column) {
#pragma unroll 8
    for (int k = 0; k < VALUES; k++) {
        float left[THREAD_ROWS], right[THREAD_COLUMNS];
        const float4 *from = weights + k / ACROSS * 64 + k % ACROSS * 2;
        load_vector(left, from), load_vector(left + 4, from + 32);
#pragma unroll
        for (int c = 0; c < QUAD_COLUMNS; c += 4)
            load_vector(right + c, values + k * ROW_QUADS + c / 4 * ACROSS + column);
        for (int c = QUAD_COLUMNS; c < THREAD_COLUMNS; c += 2) {
            float2 pair = ((const float2 *)(values + k * ROW_QUADS))[c / 2 * ACROSS + column];
            right[c] = pair.x, right[c + 1] = pair.y;
        }
        add_outer(accumulator, left, right, THREAD_COLUMNS);
    }
}

/* Writes this thread's weights of SHARED_KEYS keys, from its own number `from` on, where the other lanes of the warp read them.
   */
DEVICE void share_thread_weights(float4 *weights, const float *scores, int from) {
    float4 *place = weights + thread_index() % 32;
#pragma unroll
    for (int j = 0; j < SHARED_KEYS / ACROSS; j++) {
        const float *own = scores + from + j;
        place[j * 64] = make_float4(own[0], own[THREAD_KEYS], own[2 * THREAD_KEYS], own[3 * THREAD_KEYS]);
        place[j * 64 + 32] = make_float4(own[4 * THREAD_KEYS], own[5 * THREAD_KEYS], own[6 * THREAD_KEYS], own[7 * THREAD_KEYS]);
    }
}

/* The same of the keys from number `first` of the key tile on. */
DEVICE void share_weights(float4 *weights, const float *scores, int first) {
    if (first < SHARED_KEYS) {
        share_thread_weights(weights, scores, 0);
        KEEP_APART(first);
    } else if (first < 2 * SHARED_KEYS) {
        share_thread_weights(weights, scores, SHARED_KEYS / ACROSS);
        KEEP_APART(second);
    } else if (first < 3 * SHARED_KEYS) {
        share_thread_weights(weights, scores, 2 * SHARED_KEYS / ACROSS);
        KEEP_APART(third);
    } else {
        share_thread_weights(weights, scores, 3 * SHARED_KEYS / ACROSS);
        KEEP_APART(last);
    }
    synchronize_warp();
}

DEVICE float row_maximum(float x) {
#pragma unroll
    for (int lanes = 2; lanes < 2 * ACROSS; lanes *= 2)
        x = fmaxf(x, shuffle_xor(x, lanes));
    return x;
}

DEVICE float row_sum(float x) {
#pragma unroll
    for (int lanes = 2; lanes < 2 * ACROSS; lanes *= 2)
        x += shuffle_xor(x, lanes);
    return x;
}

/* The state of the online softmax, of a thread's rows: maximum score, total weight of its own keys, weighted sums of values. */
typedef struct {
    float maximum[THREAD_ROWS], total[THREAD_ROWS], accumulator[THREAD_ROWS * THREAD_COLUMNS];
} Softmax;

#if CHANGED
/* Turns products into scores to the base 2, without what comes of how often keys count. */
DEVICE void change_scores(float *scores, const int *positions, const Args *args, const Task *task, int row) {
    ScoreOf of = score_of(args, task->batch, task->tile.head);
#pragma unroll
    for (int j = 0; j < THREAD_KEYS; j++) {
        Point key = point_of(&of, positions[j * ACROSS]);
#pragma unroll
        for (int i = 0; i < THREAD_ROWS; i++) {
            float *score = scores + i * THREAD_KEYS + j;
            *score = capped(&of, *score);
            keep_loads_here();
            *score = (*score + bias_of(&of, point_of(&of, own_position(&task->tile, row + i)), key)) * LOG2E;
        }
        keep_loads_here();
    }
}
#endif

/* Turns scores into weights 2^(scale2 * score + bias - maximum), and makes the state relative to the new maximum. `row`: the first
   of the thread's; of no row of the tile, positions may wrap. */
DEVICE void online_softmax_step(float *scores, Softmax *softmax, const int *positions, const float *bias, const Args *args,
                                const Tile *tile, int row) {
    int earliest = MAX_POSITION, latest = -1;
    float scale2 = CHANGED ? 1.0f : args->scale * LOG2E;
#pragma unroll
    for (int j = 0; j < THREAD_KEYS; j++) {
        float extra = bias[j * ACROSS];
        latest = max_of(latest, positions[j * ACROSS]);
        earliest = min_of(earliest, positions[j * ACROSS] & MAX_POSITION);
#pragma unroll
        for (int i = 0; i < THREAD_ROWS; i++)
            scores[i * THREAD_KEYS + j] = scores[i * THREAD_KEYS + j] * scale2 + extra;
    }
    int begin = own_position(tile, row), end = own_position(tile, row + THREAD_ROWS - 1);
    unsigned lowest = begin - args->back, step = tile->step;
    if (latest > begin + args->ahead || earliest < end - args->back)
#pragma unroll
        for (int j = 0; j < THREAD_KEYS; j++)
#pragma unroll
            for (int i = 0; i < THREAD_ROWS; i++)
                if (positions[j * ACROSS] - (lowest + i * step) > (unsigned)args->back + args->ahead)
                    scores[i * THREAD_KEYS + j] = NEG_INF;
#pragma unroll
    for (int i = 0; i < THREAD_ROWS; i++) {
        float *own = scores + i * THREAD_KEYS, maximum = softmax->maximum[i];
#pragma unroll
        for (int j = 0; j < THREAD_KEYS; j++)
            maximum = fmaxf(maximum, own[j]);
        maximum = row_maximum(maximum);
        float base = maximum == NEG_INF ? 0.0f : maximum, rescale = exp2_fast(softmax->maximum[i] - base);
        float total = softmax->total[i] * rescale;
#pragma unroll
        for (int j = 0; j < THREAD_KEYS; j++)
            total += own[j] = exp2_fast(own[j] - base);
        softmax->maximum[i] = maximum, softmax->total[i] = total;
#pragma unroll
        for (int c = 0; c < THREAD_COLUMNS; c++)
            softmax->accumulator[i * THREAD_COLUMNS + c] *= rescale;
    }
}

/* The state that earlier groups of branches left in out and lse, of the rows of the tile that exist; else that of no key. */
DEVICE void start_softmax(Softmax *softmax, const Args *args, const Tile *tile, const Heads *heads, int row, int column) {
    const Storage *out = (const Storage *)args->out.data + heads->out;
#pragma unroll
    for (int i = 0; i < THREAD_ROWS; i++) {
        int position = own_position(tile, row + i), before = !args->first && row + i < tile->rows;
        float left = before ? LOAD(args->lse + heads->lse + position) : NEG_INF;
        softmax->maximum[i] = left * LOG2E;
        softmax->total[i] = column == 0 && left != NEG_INF ? 1.0f : 0.0f;
#pragma unroll
        for (int c = 0; c < QUAD_COLUMNS; c += 4) {
            int d = c * ACROSS + 4 * column;
            float4 accumulator = to_floats(load_four(row_at(out + d, position, args->out.row), before ? args->head_dim - d : 0));
            load_vector(softmax->accumulator + i * THREAD_COLUMNS + c, &accumulator);
        }
#pragma unroll
        for (int c = QUAD_COLUMNS; c < THREAD_COLUMNS; c++) {
            int d = pair_column(c, column), there = before && d < args->head_dim;
            float x = there ? from_storage(LOAD(row_at(out + d, position, args->out.row))) : 0.0f;
            softmax->accumulator[i * THREAD_COLUMNS + c] = x;
        }
#if DROPOUT
#pragma unroll
        for (int c = 0; c < THREAD_COLUMNS; c++)
            softmax->accumulator[i * THREAD_COLUMNS + c] /= KEEP_SCALE(args);
#endif
    }
}

#if DROPOUT
/* Makes the weights 0 that dropout drops, after they have been added up. */
DEVICE void drop_weights(float *weights, const Args *args, const Keys *keys, const Tile *tile, const int *positions,
                         int row) {
    unsigned long long kept = 0;
#pragma unroll 1
    for (int n = 0; n < THREAD_ROWS * THREAD_KEYS; n++) {
        int query = own_position(tile, row + n / THREAD_KEYS), key = positions[n % THREAD_KEYS * ACROSS];
        kept |= (unsigned long long)keeps(args, keys, query, key) << n;
    }
#pragma unroll
    for (int n = 0; n < THREAD_ROWS * THREAD_KEYS; n++)
        weights[n] = kept >> n & 1 ? weights[n] : 0.0f;
}
#endif

DEVICE void write_rows(Softmax *softmax, const Args *args, const Tile *tile, long long to, long long lse, int row, int column) {
    Storage *out = (Storage *)args->out.data + to;
#pragma unroll
    for (int i = 0; i < THREAD_ROWS; i++)
        softmax->total[i] = row_sum(softmax->total[i]);
#pragma unroll
    for (int i = 0; i < THREAD_ROWS; i++) {
        float total = softmax->total[i], share = total > 0.0f ? KEEP_SCALE(args) / total : 0.0f;
        if (row + i >= tile->rows)
            continue;
        int position = own_position(tile, row + i);
        if (column == 0)
            STORE(args->lse + lse + position, total > 0.0f ? (softmax->maximum[i] + log2f(total)) * LN2 : NEG_INF);
#pragma unroll
        for (int c = 0; c < QUAD_COLUMNS; c += 4) {
            const float *sums = softmax->accumulator + i * THREAD_COLUMNS + c;
            int d = c * ACROSS + 4 * column;
            float4 x = make_float4(sums[0] * share, sums[1] * share, sums[2] * share, sums[3] * share);
            store_four((Storage *)row_at(out + d, position, args->out.row), x, args->head_dim - d);
        }
#pragma unroll
        for (int c = QUAD_COLUMNS; c < THREAD_COLUMNS; c++) {
            int d = pair_column(c, column);
            if (d < args->head_dim)
                STORE((Storage *)row_at(out + d, position, args->out.row),
                      to_storage(softmax->accumulator[i * THREAD_COLUMNS + c] * share));
        }
    }
}

KERNEL(fp32_forward) {
    SHARED float4 queries[HEAD_DIM / SLICE * SLICE_SIZE / 4], slots[2][SLOT / 4], weights[SHARED_KEYS * TILE_ROWS / 4];
    SHARED float bias[2][KEY_TILE];
    SHARED int positions[2][KEY_TILE];
    SHARED Task task;
    SHARED Heads heads;
    int lane = thread_index() % 32, warp = thread_index() / 32;
    int column = lane / 2 % ACROSS, row = (warp * (32 / ACROSS) + lane / (2 * ACROSS) * 2 + lane % 2) * THREAD_ROWS;
    float4 *own_weights = weights + warp * (SHARED_KEYS * 2 * 32 / ACROSS);
    const float4 *row_weights = own_weights + (lane - 2 * column);
    int slices = (args.head_dim + SLICE - 1) / SLICE;
    first_tile(&task, &args, 0);
    while (task.tile.rows) {
        if (thread_index() == 0)
            heads = heads_of(&args, &task);
        for (int r = thread_index(); r < TILE_ROWS; r += THREADS)
            positions[1][key_in_column(r)] = r < task.tile.rows ? own_position(&task.tile, r) : -1;
        synchronize();
        Quad prefetched[PREFETCHED];
        for (int s = 0; s < slices; s++) {
            fetch_slice(prefetched, &args.query, heads.query, positions[1], s * SLICE, args.head_dim);
            store_slice((float *)queries + s * SLICE_SIZE, prefetched);
        }
        locate_keys(positions[0], bias[0], &task.keys, &args, task.batch, 0);
        synchronize();
        Softmax softmax;
        start_softmax(&softmax, &args, &task.tile, &heads, row, column);
        fetch_slice(prefetched, &args.key, heads.key, positions[0], 0, args.head_dim);
        store_slice((float *)slots[0], prefetched);
        synchronize();
        int slot = 0, buffer = 0, has_rows = row - row % (32 / ACROSS * THREAD_ROWS) < task.tile.rows;
        for (int first = 0; first < task.keys.total; first += KEY_TILE) {
            int left = task.keys.total - first, value_slices = (min_of(left, KEY_TILE) + VALUES - 1) / VALUES;
            if (left > KEY_TILE)
                locate_keys(positions[1 - buffer], bias[1 - buffer], &task.keys, &args, task.batch, first + KEY_TILE);
            float scores[THREAD_ROWS * THREAD_KEYS] = {0};
            for (int s = 1; s <= slices; s++) {
                if (s < slices)
                    fetch_slice(prefetched, &args.key, heads.key, positions[buffer], s * SLICE, args.head_dim);
                else
                    fetch_values(prefetched, &args.value, heads.value, positions[buffer], args.head_dim);
                if (has_rows)
                    add_score_tile(scores, (float *)queries + (s - 1) * SLICE_SIZE, (float *)slots[slot], row, column);
                slot = 1 - slot;
                if (s < slices)
                    store_slice((float *)slots[slot], prefetched);
                else
                    store_values(slots[slot], prefetched);
                synchronize();
            }
#if CHANGED
            change_scores(scores, positions[buffer] + column, &args, &task, row);
#endif
            online_softmax_step(scores, &softmax, positions[buffer] + column, bias[buffer] + column, &args, &task.tile, row);
#if DROPOUT
            drop_weights(scores, &args, &task.keys, &task.tile, positions[buffer] + column, row);
#endif
            for (int s = 1; s <= value_slices; s++) {
                if (s < value_slices)
                    fetch_values(prefetched, &args.value, heads.value, positions[buffer] + s * VALUES, args.head_dim);
                else if (left > KEY_TILE)
                    fetch_slice(prefetched, &args.key, heads.key, positions[1 - buffer], 0, args.head_dim);
                int of = (s - 1) * VALUES;
                if (of % SHARED_KEYS == 0)
                    share_weights(own_weights, scores, of);
                if (has_rows)
                    accumulate(softmax.accumulator, row_weights + of % SHARED_KEYS * 2, slots[slot], column);
                slot = 1 - slot;
                if (s < value_slices)
                    store_values(slots[slot], prefetched);
                else if (left > KEY_TILE)
                    store_slice((float *)slots[slot], prefetched);
                synchronize();
            }
            buffer = 1 - buffer;
        }
        long long out = heads.out, lse = heads.lse;
        int number = take_number(&task, &args);
        Tile tile = task.tile;
        synchronize();
        write_rows(&softmax, &args, &tile, out, lse, row, column);
        Found next = find_tile(&args, number);
        begin_tile(&task, &args, &next, 0);
        synchronize();
    }
}
