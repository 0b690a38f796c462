/* Attention in fp32 on CUDA cores, of tensors of any STORAGE.

   HEAD_DIM     16, 32, 64     96, 128
   THREADS      64             128
   BLOCKS       4              2
   TILE_ROWS    64             64         HEAD_DIM 64 runs with THREADS 128 and BLOCKS 3 as well

   A block keeps the queries of a tile in shared memory and walks over its keys, 64 at a time, with one online softmax in base 2.
   Keys and values stream through two slots in slices: SLICE of head_dim of all 64 keys, then VALUES of the 64 values whole. While
   a slice is used, each thread holds a few numbers of the next in registers, and writes them to the other slot at the end: one
   barrier a slice, and two or three blocks fit where there are 64 to 96 KB.

   A thread has 8 rows of the tile, OWN of the 64 keys, and COLUMNS of head_dim: sums of outer products, whose factors it reads
   from shared memory as vectors of 4. Scores need numbers of 8 rows, or OWN keys, next to each other, so queries and keys are
   stored transposed. Lane i of a warp has rows by its lowest bit and those above the column's, so that neighbours read the same
   vector of keys, and every other lane that of rows. */
#include "stored.cuh"

/* Columns that are computed. */
#define WIDTH (HEAD_DIM <= 32 ? 32 : HEAD_DIM <= 64 ? 64 : 128)

enum {
    KEYS = 64,
    PART = 8,
    SWEEP = THREADS / 4,
    ACROSS = THREADS * PART / TILE_ROWS,
    OWN = KEYS / ACROSS,
    COLUMNS = WIDTH / ACROSS,
    SLICE = 16,
    PAD = 8,
    SLICE_SIZE = SLICE * KEYS + SLICE / 4 * PAD,
    VALUES = WIDTH > 64 ? 8 : 16,
    WEIGHED = 16,
    ROW_QUADS = WIDTH / 4,
    KEY_HELD = SLICE / 4 * KEYS / THREADS,
    VALUE_HELD = VALUES * ROW_QUADS / THREADS,
    HELD = KEY_HELD > VALUE_HELD ? KEY_HELD : VALUE_HELD,
    SLOT = SLICE_SIZE > VALUES * WIDTH ? SLICE_SIZE : VALUES * WIDTH,
};

#define LOG2_E 1.4426950408889634f
#define LN_2 0.6931471805599453f

/* Which of the keys shown is in `column` of a transposed slice: a thread's keys are ACROSS apart. */
DEVICE int shown_in(int column) { return (column / (4 * ACROSS) * 4 + column % 4) * ACROSS + column / 4 % ACROSS; }

/* Where row d of a transposed slice is: PAD numbers after every fourth row, so that a warp that writes 4 rows of 8 columns meets
   all banks. */
DEVICE int slice_row(int d) { return d * KEYS + d / 4 * PAD; }

/* Of a transposed slice a thread holds 4 rows from `held_row` on, of column number `held_column` and of each SWEEP further. */
DEVICE int held_row(void) { return thread_index() / 8 % 4 * 4; }
DEVICE int held_column(void) { return thread_index() / 32 * 8 + thread_index() % 8; }

/* What a block works on: its tile, and where the heads begin in the tensors, in elements. It is in shared memory, for registers are
   short; a pointer from there would no longer be known to point to global memory. */
typedef struct {
    Tile tile;
    int batch;
    long long query, key, value, out, lse;
} Work;

DEVICE long long head_of(const View *view, int batch, int head) { return batch * view->batch + head * view->head; }

DEVICE void start_work(Work *work, const Args *args, Tile tile, int batch) {
    int kv_head = tile.head / (args->heads / args->kv_heads);
    work->tile = tile, work->batch = batch;
    work->query = head_of(&args->query, batch, tile.head), work->out = head_of(&args->out, batch, tile.head);
    work->key = head_of(&args->key, batch, kv_head), work->value = head_of(&args->value, batch, kv_head);
    work->lse = ((long long)batch * args->heads + tile.head) * args->seq;
}

/* Reads SLICE of head_dim, from `from` on, of the 64 rows at `where`; a row at -1 is 0. */
DEVICE void fetch_slice(Stored *held, const View *view, long long head, const int *where, int from, int head_dim) {
    int d = from + held_row(), mine = shown_in(held_column());
    const Storage *first = (const Storage *)view->data + head + d;
#pragma unroll
    for (int piece = 0; piece < KEY_HELD; piece++) {
        int position = where[mine + shown_in(piece * SWEEP)];
        held[piece] = load_four(row_at(first, position, view->row), position < 0 ? 0 : head_dim - d);
    }
}

DEVICE void put_slice(float *slot, const Stored *held) {
    float *mine = slot + slice_row(held_row()) + held_column();
#pragma unroll
    for (int piece = 0; piece < KEY_HELD; piece++) {
        float4 x = numbers(held[piece]);
        float *place = mine + piece * SWEEP;
        place[0] = x.x, place[KEYS] = x.y, place[2 * KEYS] = x.z, place[3 * KEYS] = x.w;
    }
}

/* Reads the VALUES rows at `where`. */
DEVICE void fetch_values(Stored *held, const View *view, long long head, const int *where, int head_dim) {
    int d = thread_index() % ROW_QUADS * 4;
    const Storage *first = (const Storage *)view->data + head + d;
#pragma unroll
    for (int piece = 0; piece < VALUE_HELD; piece++) {
        int position = where[piece * (THREADS / ROW_QUADS) + thread_index() / ROW_QUADS];
        held[piece] = load_four(row_at(first, position, view->row), position < 0 ? 0 : head_dim - d);
    }
}

DEVICE void put_values(float4 *slot, const Stored *held) {
#pragma unroll
    for (int piece = 0; piece < VALUE_HELD; piece++)
        slot[piece * THREADS + thread_index()] = numbers(held[piece]);
}

/* Where keys number `first` and on of the tile are, and log2 of how often each counts: -1 and NEVER for those to leave out. */
DEVICE void show_keys(int *where, float *bias, const Keys *keys, const Args *args, int batch, int first) {
    for (int k = thread_index(); k < KEYS; k += THREADS) {
        int position = -1, branch;
        float weight = NEVER;
        if (first + k < keys->total) {
            position = key_position(keys, first + k, &branch);
            if (!args->mask || !LOAD(args->mask + batch * args->mask_batch + position * args->mask_row))
                weight = key_bias(keys, position, branch, args->once);
        }
        where[k] = weight == NEVER ? -1 : position;
        bias[k] = weight;
    }
}

DEVICE void take(float *into, const float4 *from) {
    float4 x = *from;
    into[0] = x.x, into[1] = x.y, into[2] = x.z, into[3] = x.w;
}

/* sum (PART x columns) += left right */
DEVICE void add_outer(float *sum, const float *left, const float *right, int columns) {
#pragma unroll
    for (int i = 0; i < PART; i++)
#pragma unroll
        for (int j = 0; j < columns; j++)
            sum[i * columns + j] += left[i] * right[j];
}

/* scores += queries . keys, over a slice of head_dim. */
DEVICE void add_scores(float *scores, const float *queries, const float *keys, int row, int column) {
#pragma unroll 8
    for (int d = 0; d < SLICE; d++) {
        float left[PART], right[OWN];
        const float4 *from = (const float4 *)(queries + slice_row(d) + row);
        take(left, from), take(left + 4, from + 1);
#pragma unroll
        for (int j = 0; j < OWN; j += 4)
            take(right + j, (const float4 *)(keys + slice_row(d) + j * ACROSS + 4 * column));
        add_outer(scores, left, right, OWN);
    }
}

/* sums += weights . values, over a slice of VALUES keys; `weights` as `put_weights` left them, from the first of the keys on. */
DEVICE void add_values(float *sums, const float4 *weights, const float4 *values, int column) {
#pragma unroll 8
    for (int k = 0; k < VALUES; k++) {
        float left[PART], right[COLUMNS];
        const float4 *from = weights + k / ACROSS * 64 + k % ACROSS * 2;
        take(left, from), take(left + 4, from + 32);
#pragma unroll
        for (int c = 0; c < COLUMNS; c += 4)
            take(right + c, values + k * ROW_QUADS + c / 4 * ACROSS + column);
        add_outer(sums, left, right, COLUMNS);
    }
}

/* Shows the other lanes of the warp this thread's weights of WEIGHED keys, those of its own number `from` and on. */
DEVICE void put_own_weights(float4 *weights, const float *scores, int from) {
    float4 *place = weights + thread_index() % 32;
#pragma unroll
    for (int j = 0; j < WEIGHED / ACROSS; j++) {
        const float *own = scores + from + j;
        place[j * 64] = make_float4(own[0], own[OWN], own[2 * OWN], own[3 * OWN]);
        place[j * 64 + 32] = make_float4(own[4 * OWN], own[5 * OWN], own[6 * OWN], own[7 * OWN]);
    }
}

/* The same of the keys from number `first` of the tile's on. */
DEVICE void put_weights(float4 *weights, const float *scores, int first) {
    if (first < WEIGHED) {
        put_own_weights(weights, scores, 0);
        APART(first);
    } else if (first < 2 * WEIGHED) {
        put_own_weights(weights, scores, WEIGHED / ACROSS);
        APART(second);
    } else if (first < 3 * WEIGHED) {
        put_own_weights(weights, scores, 2 * WEIGHED / ACROSS);
        APART(third);
    } else {
        put_own_weights(weights, scores, 3 * WEIGHED / ACROSS);
        APART(last);
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

/* The state of the online softmax, of a thread's rows: maximum score, the sum of the weights of its own keys, sums of values. */
typedef struct {
    float top[PART], total[PART], sums[PART * COLUMNS];
} State;

/* Turns scores into weights 2^(scale2 * score + bias - top), and the state to the new `top`. `position`: of the first row, or
   the last token where nothing is causal. */
DEVICE void weigh(float *scores, State *state, const int *where, const float *bias, float scale2, int position, int step) {
    int latest = -1;
#pragma unroll
    for (int j = 0; j < OWN; j++) {
        float extra = bias[j * ACROSS];
        latest = most(latest, where[j * ACROSS]);
#pragma unroll
        for (int i = 0; i < PART; i++)
            scores[i * OWN + j] = scores[i * OWN + j] * scale2 + extra;
    }
    if (latest > position)
#pragma unroll
        for (int j = 0; j < OWN; j++)
#pragma unroll
            for (int i = 0; i < PART; i++)
                if (where[j * ACROSS] > position + i * step)
                    scores[i * OWN + j] = NEVER;
#pragma unroll
    for (int i = 0; i < PART; i++) {
        float *own = scores + i * OWN, top = state->top[i];
#pragma unroll
        for (int j = 0; j < OWN; j++)
            top = fmaxf(top, own[j]);
        top = row_maximum(top);
        float base = top == NEVER ? 0.0f : top, rescale = exp2_fast(state->top[i] - base), total = state->total[i] * rescale;
#pragma unroll
        for (int j = 0; j < OWN; j++)
            total += own[j] = exp2_fast(own[j] - base);
        state->top[i] = top, state->total[i] = total;
#pragma unroll
        for (int c = 0; c < COLUMNS; c++)
            state->sums[i * COLUMNS + c] *= rescale;
    }
}

/* The state that earlier groups of branches left in out and lse, of the rows of the tile that exist; else that of no key. */
DEVICE void start_state(State *state, const Args *args, const Work *work, int row, int column) {
    const Storage *out = (const Storage *)args->out.data + work->out;
#pragma unroll
    for (int i = 0; i < PART; i++) {
        int position = work->tile.row + (row + i) * args->step, before = !args->first && row + i < work->tile.rows;
        float left = before ? LOAD(args->lse + work->lse + position) : NEVER;
        state->top[i] = left * LOG2_E;
        state->total[i] = column == 0 && left != NEVER ? 1.0f : 0.0f;
#pragma unroll
        for (int c = 0; c < COLUMNS; c += 4) {
            int d = c * ACROSS + 4 * column;
            float4 sums = numbers(load_four(row_at(out + d, position, args->out.row), before ? args->head_dim - d : 0));
            take(state->sums + i * COLUMNS + c, &sums);
        }
    }
}

DEVICE void finish(State *state, const Args *args, const Work *work, int row, int column) {
    Storage *out = (Storage *)args->out.data + work->out;
#pragma unroll
    for (int i = 0; i < PART; i++)
        state->total[i] = row_sum(state->total[i]);
#pragma unroll
    for (int i = 0; i < PART; i++) {
        float total = state->total[i], share = total > 0.0f ? 1.0f / total : 0.0f;
        int position = work->tile.row + (row + i) * args->step;
        if (row + i >= work->tile.rows)
            continue;
        if (column == 0)
            STORE(args->lse + work->lse + position, total > 0.0f ? (state->top[i] + log2f(total)) * LN_2 : NEVER);
#pragma unroll
        for (int c = 0; c < COLUMNS; c += 4) {
            const float *sums = state->sums + i * COLUMNS + c;
            int d = c * ACROSS + 4 * column;
            float4 x = make_float4(sums[0] * share, sums[1] * share, sums[2] * share, sums[3] * share);
            store_four((Storage *)row_at(out + d, position, args->out.row), x, args->head_dim - d);
        }
    }
}

KERNEL(fp32_forward) {
    SHARED float4 queries[WIDTH / SLICE * SLICE_SIZE / 4], ring[2][SLOT / 4], weights[WEIGHED * TILE_ROWS / 4];
    SHARED float bias[2][KEYS];
    SHARED int where[2][KEYS], item;
    SHARED Keys keys;
    SHARED Work work;
    int lane = thread_index() % 32, warp = thread_index() / 32;
    int column = lane / 2 % ACROSS, row = (warp * (32 / ACROSS) + lane / (2 * ACROSS) * 2 + lane % 2) * PART;
    float4 *own_weights = weights + warp * (WEIGHED * 2 * 32 / ACROSS);
    const float4 *row_weights = own_weights + (lane - 2 * column);
    int slices = (args.head_dim + SLICE - 1) / SLICE;
    Tile tile;
    int batch;
    start_tiles(&item);
    while (next_tile(&args, &item, &tile, &batch)) {
        if (thread_index() == 0) {
            int end = args.causal ? tile.row + (tile.rows - 1) * args.step + 1 : args.seq;
            start_work(&work, &args, tile, batch);
            find_keys(&keys, &args, tile.row, serving(&args, tile.set, tile.head), 0, end);
        }
        for (int r = thread_index(); r < TILE_ROWS; r += THREADS)
            where[1][shown_in(r)] = r < tile.rows ? tile.row + r * args.step : -1;
        synchronize();
        Stored held[HELD];
        for (int s = 0; s < slices; s++) {
            fetch_slice(held, &args.query, work.query, where[1], s * SLICE, args.head_dim);
            put_slice((float *)queries + s * SLICE_SIZE, held);
        }
        show_keys(where[0], bias[0], &keys, &args, batch, 0);
        synchronize();
        State state;
        start_state(&state, &args, &work, row, column);
        fetch_slice(held, &args.key, work.key, where[0], 0, args.head_dim);
        put_slice((float *)ring[0], held);
        synchronize();
        int slot = 0, shown = 0, busy = row - row % (32 / ACROSS * PART) < tile.rows;
        for (int first = 0; first < keys.total; first += KEYS) {
            int left = keys.total - first, value_slices = (least(left, KEYS) + VALUES - 1) / VALUES;
            if (left > KEYS)
                show_keys(where[1 - shown], bias[1 - shown], &keys, &args, work.batch, first + KEYS);
            float scores[PART * OWN] = {0};
            for (int s = 1; s <= slices; s++) {
                if (s < slices)
                    fetch_slice(held, &args.key, work.key, where[shown], s * SLICE, args.head_dim);
                else
                    fetch_values(held, &args.value, work.value, where[shown], args.head_dim);
                if (busy)
                    add_scores(scores, (float *)queries + (s - 1) * SLICE_SIZE, (float *)ring[slot], row, column);
                slot = 1 - slot;
                if (s < slices)
                    put_slice((float *)ring[slot], held);
                else
                    put_values(ring[slot], held);
                synchronize();
            }
            int position = args.causal ? work.tile.row + row * args.step : args.seq;
            weigh(scores, &state, where[shown] + column, bias[shown] + column, args.scale * LOG2_E, position, args.step);
            for (int s = 1; s <= value_slices; s++) {
                if (s < value_slices)
                    fetch_values(held, &args.value, work.value, where[shown] + s * VALUES, args.head_dim);
                else if (left > KEYS)
                    fetch_slice(held, &args.key, work.key, where[1 - shown], 0, args.head_dim);
                int of = (s - 1) * VALUES;
                if (of % WEIGHED == 0)
                    put_weights(own_weights, scores, of);
                if (busy)
                    add_values(state.sums, row_weights + of % WEIGHED * 2, ring[slot], column);
                slot = 1 - slot;
                if (s < value_slices)
                    put_values(ring[slot], held);
                else if (left > KEYS)
                    put_slice((float *)ring[slot], held);
                synchronize();
            }
            shown = 1 - shown;
        }
        finish(&state, &args, &work, row, column);
    }
}
