/* Attention on Hopper's tensor cores: a warpgroup that copies, and two that multiply. Scores, out and lse as in `mma_forward.cu`.

       producer (threads 0 to 127)                                consumers (two warpgroups of 64 rows of the tile each)

       counter --> find_tile, find_keys --> Task
       Work (shared), query tile --copies--> panels ----------->  query_there
       for each key tile j of 128 keys:
           locate 128 keys, of four key tiles at once --> KeyNotes (shared)
           keys j   --copies--> panels, slot j % 2 ------------>  key_there:    scores j (registers) = queries . keys j
           values j --copies--> panels, slot j % 2 ------------>  value_there:  sums (registers) += weights j - 1 . values j - 1
           wait for the copy two before this one, or for
           all before a slot that is not free yet;
           show it to the products, arrive
                                            key_free  <--------   scores j are there:  online softmax, while sums are computed
                                            value_free  <------   sums are there:      rescaled; weights j (registers)
                                            query_free  <------   the last scores are there
       next tile of the block, from the counter                   sum / l --> shared, of a warp alone --> out;    m, l --> lse

   Dynamic shared memory: panels of 128 rows for queries, two slots of keys, two of values, and results: 12 * 128 * HEAD_DIM bytes,
   and 1024 for them to begin at a multiple of that.

   Written and read anew                by the producer, once                              by the consumers, until
       Work, two slots                  query_free of the tile before is there             query_free of their tile
       KeyNotes, four slots             key_free of j - 2 is there: j - 3 was weighed      the weights of j

   Keys of a run come class by class modulo the largest rate, so that those of a key tile usually count equally often: then
   log2 of that is one constant of the tile. With bounds they come in order, for whole key tiles to be beyond them.

   Without bounds, where both warpgroups have the same key tiles, they take turns: while the products of one are computed, which it
   starts in its turn, the other weighs its scores. With TURNS 0 they do not.

   Registers of 384 threads: 168 each; 56 for the producer and 224 for the consumers, which have 64 scores, HEAD_DIM / 2 sums and
   32 registers of weights. */
#include "hopper.cuh"
#include "scores.cuh"
#include "stored.cuh"

#if THREADS != 384 || TILE_ROWS != 128 || (HEAD_DIM != 64 && HEAD_DIM != 128) || !VECTOR || CHANGED || DROPOUT || PACKED
#error "for calls without bias, softcap, dropout and packed sequences, with head_dim 64 or 128"
#endif

#define GROUP 128
#define GROUP_ROWS 64
#define KEYS 128
#define CONSUMER_WARPS 8
#define PRODUCER_REGISTERS 56
#define CONSUMER_REGISTERS 224
#define PRODUCER_BARRIER 1
#define TURN_BARRIER 2

/* Chunks of 16 bytes: of a row, of a panel, and of all panels of 128 rows. */
#define CHUNKS (HEAD_DIM / 8)
#define PANEL_CHUNKS (KEYS * 8)
#define SLOT (KEYS * CHUNKS)

/* Rows that a warp copies at once. */
#define COPIED (32 / CHUNKS)

#ifndef TURNS
#define TURNS 1
#endif

#define SLOTS 2
#define NOTES 4
#define AHEAD 4
#define LOWEST (-3e38f)

/* Numbers of barriers. Those of keys and of values are one a slot. */
enum {
    QUERY_THERE,
    QUERY_FREE,
    KEY_THERE,
    KEY_FREE = KEY_THERE + SLOTS,
    VALUE_THERE = KEY_FREE + SLOTS,
    VALUE_FREE = VALUE_THERE + SLOTS,
    BARRIERS = VALUE_FREE + SLOTS
};
#define NONE (-1)

/* Panels in dynamic shared memory, in units of SLOT. */
enum { QUERIES, KEY_SLOTS, VALUE_SLOTS = KEY_SLOTS + SLOTS, STAGE = VALUE_SLOTS + SLOTS };

/* The keys of a key tile: positions (-1: none, which is read as 0 and has the bias NEG_INF), and log2 of how often each counts. Of
   32 keys the bias, or NaN where they differ, and, with bounds, the lowest and the highest position. */
typedef struct {
    int position[KEYS];
    float bias[KEYS], common[KEYS / 32];
    int lowest[KEYS / 32], highest[KEYS / 32];
} KeyNotes;

/* This thread's keys of the next key tiles. */
typedef struct {
    int position[AHEAD];
    float bias[AHEAD];
} Located;

/* A tile for the consumers; without rows: there is none any more. */
typedef struct {
    Tile tile;
    int batch, key_tiles;
} Work;

typedef struct {
    Barrier barriers[BARRIERS];
    KeyNotes notes[NOTES];
    Work work[2];
    float total[2 * GROUP][2];
    Task task;
} BlockState;

/* One head of a tensor. */
typedef struct {
    Storage *data;
    long long row;
} HeadRows;

DEVICE HeadRows rows_of(View view, int batch, int head) {
    HeadRows rows = {(Storage *)view.data + batch * view.batch + head * view.head, view.row};
    return rows;
}

/* Where a chunk of a row lies among panels. */
DEVICE int chunk_at(int row, int chunk) { return chunk / 8 * PANEL_CHUNKS + row * 8 + ((chunk ^ row) & 7); }

/* Producer */

/* Ends a copy, and notes that `barrier` waits for it; arrives for the copy two before. */
DEVICE void hand_over(BlockState *shared, int *copying, int barrier) {
    copy_async_commit();
    copy_async_wait(2);
    if (copying[0] != NONE) {
        show_to_products();
        barrier_arrive(&shared->barriers[copying[0]]);
    }
    copying[0] = copying[1], copying[1] = barrier;
}

/* Waits for all copies, and arrives for them. */
DEVICE void hand_over_rest(BlockState *shared, int *copying) {
    copy_async_wait(0);
    show_to_products();
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if (copying[i] != NONE)
            barrier_arrive(&shared->barriers[copying[i]]);
        copying[i] = NONE;
    }
}

/* Waits until the consumers have freed a slot. If they have not yet, they first get all that is being copied: it may be what they
   wait for. */
DEVICE void wait_until_free(BlockState *shared, int *copying, int barrier, int parity) {
    if (!ballot(!barrier_ended(&shared->barriers[barrier], parity)))
        return;
    hand_over_rest(shared, copying);
    barrier_wait(&shared->barriers[barrier], parity);
}

/* Starts copying 128 rows: each lane of a warp brings the position of one of its 32 rows; -1: zeros. Lanes have the same chunk of
   each of their rows, and every 8 rows the same place in them. */
DEVICE void copy_rows(uint4 *slot, HeadRows from, int position, int head_dim) {
    int thread = thread_index(), chunk = thread % CHUNKS, first = thread % 32 / CHUNKS, within = chunk * 8 < head_dim;
    const Storage *start = from.data + (within ? chunk * 8 : 0);
    uint4 *to[8 / COPIED];
#pragma unroll
    for (int i = 0; i < 8 / COPIED; i++)
        to[i] = slot + chunk_at(thread / 32 * 32 + first + i * COPIED, chunk);
#pragma unroll 8
    for (int i = 0; i < 32; i += COPIED) {
        int at = (int)shuffle_word(position, first + i);
        copy_async_or_zero(to[i % 8 / COPIED] + i / 8 * 64, row_at(start, max_of(at, 0), from.row), at >= 0 && within);
    }
}

/* The place in a run of `count` of what is number `index` if its classes modulo `classes` come one after the other. */
DEVICE int class_by_class(int index, int count, int classes) {
    int each = divided(count, classes), longer = count - each * classes, before = longer * (each + 1);
    if (index >= before && each) {
        int whole = divided(index - before, each);
        return longer + whole + classes * (index - before - whole * each);
    }
    int whole = divided(index, each + 1);
    return whole + classes * (index - whole * (each + 1));
}

/* The largest rate of the tile's segments; 1 for a tile with bounds, whose keys stay in order. */
DEVICE int period_of(const Keys *keys, const Args *args) {
    int period = 1;
    if (!bounded(args))
        for (int i = 0; i < keys->segment_count; i++)
            period = max_of(period, keys->segments[i].rate);
    return period;
}

/* Where key number `index` of the tile is, -1 beyond the last; *branch: which branch shows it. */
DEVICE int listed_key(const Keys *keys, int index, int period, int *branch) {
    int r = 0;
    *branch = 0;
    if (index >= keys->total)
        return -1;
#pragma unroll 1
    while (index >= keys->runs[r].count)
        index -= keys->runs[r++].count;
    Run run = keys->runs[r];
    int classes = divided(period, run.step);
    *branch = run.branch;
    return run.first + (classes > 1 ? class_by_class(index, run.count, classes) : index) * run.step;
}

/* `locate_key` of dilated.cuh, for this thread's keys of the next key tiles at once: they wait for the same words. */
DEVICE void locate_ahead(Located *found, const Keys *keys, const Args *args, int batch, int first, int period) {
    int branch[AHEAD], count[AHEAD], before[AHEAD];
#pragma unroll
    for (int a = 0; a < AHEAD; a++)
        found->position[a] = listed_key(keys, first + a * KEYS, period, &branch[a]), count[a] = before[a] = 0;
#pragma unroll 1
    for (int i = 0; i < keys->segment_count && keys->segment_count > 1; i++) {
        Segment segment = keys->segments[i];
#pragma unroll
        for (int a = 0; a < AHEAD; a++) {
            int position = found->position[a], within = (unsigned)(position - segment.low) < (unsigned)segment.length;
            int shows = within && congruent(position, keys->row, segment.rate);
            count[a] += shows, before[a] |= shows && segment.branch < branch[a];
        }
    }
#pragma unroll
    for (int a = 0; a < AHEAD; a++) {
        int position = found->position[a];
        found->bias[a] = args->once || count[a] < 2 ? 0.0f : log2f((float)count[a]);
        if (position < 0 || before[a] || (args->mask && LOAD(args->mask + batch * args->mask_batch + position * args->mask_row)))
            found->position[a] = -1, found->bias[a] = NEG_INF;
    }
}

/* Notes a key tile, each thread a key. */
DEVICE void note_keys(KeyNotes *notes, int position, float bias, int bounds) {
    int thread = thread_index(), differ = ballot(bias != shuffle(bias, 0)) != 0;
    notes->position[thread] = position, notes->bias[thread] = bias;
    if (thread % 32 == 0)
        notes->common[thread / 32] = differ ? NEG_INF - NEG_INF : bias;
    if (!bounds)
        return;
    int lowest = warp_min(position < 0 ? MAX_POSITION : position), highest = warp_max(position);
    if (thread % 32 == 0)
        notes->lowest[thread / 32] = lowest, notes->highest[thread / 32] = highest;
}

/* Brings one tile, whose task is in shared memory, to the consumers. *filled: key tiles so far. */
DEVICE void bring_tile(const Args *args, BlockState *shared, uint4 *panels, int turn, int *filled) {
    int thread = thread_index(), copying[2] = {NONE, NONE}, batch = shared->task.batch;
    Tile tile = shared->task.tile;
    int key_tiles = tile.rows ? (shared->task.keys.total + KEYS - 1) / KEYS : 0;
    barrier_wait(&shared->barriers[QUERY_FREE], ~turn & 1);
    if (is_first()) {
        Work work = {tile, batch, key_tiles};
        shared->work[turn % 2] = work;
    }
    HeadRows from = rows_of(args->query, batch, tile.head);
    copy_rows(panels + QUERIES * SLOT, from, thread < tile.rows ? own_position(&tile, thread) : -1, args->head_dim);
    hand_over(shared, copying, QUERY_THERE);

    int head = tile.head / group_of(args), period = key_tiles ? period_of(&shared->task.keys, args) : 1;
    HeadRows keys = rows_of(args->key, batch, head), values = rows_of(args->value, batch, head);
    Located found;
#pragma unroll 1
    for (int j = 0; j < key_tiles; j++) {
        int fill = *filled + j, slot = fill % SLOTS, parity = ~(fill / SLOTS) & 1;
        if (j % AHEAD == 0)
            locate_ahead(&found, &shared->task.keys, args, batch, j * KEYS + thread, period);
        int position = found.position[0];
        float bias = found.bias[0];
#pragma unroll
        for (int a = 0; a + 1 < AHEAD; a++)
            found.position[a] = found.position[a + 1], found.bias[a] = found.bias[a + 1];
        wait_until_free(shared, copying, KEY_FREE + slot, parity);
        note_keys(&shared->notes[fill % NOTES], position, bias, bounded(args));
        copy_rows(panels + (KEY_SLOTS + slot) * SLOT, keys, position, args->head_dim);
        hand_over(shared, copying, KEY_THERE + slot);
        wait_until_free(shared, copying, VALUE_FREE + slot, parity);
        copy_rows(panels + (VALUE_SLOTS + slot) * SLOT, values, position, args->head_dim);
        hand_over(shared, copying, VALUE_THERE + slot);
    }
    *filled += key_tiles;
    hand_over_rest(shared, copying);
}

/* Brings tile after tile, and last one without rows. */
DEVICE void produce(const Args *args, BlockState *shared, uint4 *panels) {
    int filled = 0;
#pragma unroll 1
    for (int turn = 0;; turn++) {
        int rows = shared->task.tile.rows;
        bring_tile(args, shared, panels, turn, &filled);
        if (!rows)
            break;
        int number = take_number(&shared->task, args);
        synchronize_threads(PRODUCER_BARRIER, GROUP);
        Found next = find_tile(args, number);
        begin_tile(&shared->task, args, &next, 0);
        synchronize_threads(PRODUCER_BARRIER, GROUP);
    }
}

/* Consumers */

/* What a thread of a consumer holds of its rows g and g + 8 of its warp's 16: `sum` and `score` as `hopper.cuh` says. */
typedef struct {
    float sum[HEAD_DIM / 2], score[KEYS / 2], maximum[2], keep[2];
    unsigned weight[KEYS / 16][4];
} Rows;

/* A consumer's tile: the first of its rows that is its warpgroup's, and the number of its first key tile among all of the block. */
typedef struct {
    Tile tile;
    int batch, key_tiles, first_row;
    unsigned first_fill;
} Job;

/* The number of a thread among the consumers; its row in half `h` of its sums; what is the same in all lanes. */
DEVICE int consumer(void) { return opaque(thread_index()) - GROUP; }
DEVICE int row_of(int thread, int h) { return thread / 32 * 16 + thread % 32 / 4 + 8 * h; }
DEVICE int same(int x) { return (int)shuffle_word(x, 0); }

DEVICE void wait_for(BlockState *shared, int barrier, unsigned fill) {
    barrier_wait(&shared->barriers[barrier + fill % SLOTS], fill / SLOTS & 1);
}

/* Gives a barrier the arrival of this warp. */
DEVICE void release(BlockState *shared, int barrier) {
    synchronize_warp();
    if (lane_index() == 0)
        barrier_arrive(&shared->barriers[barrier]);
}

/* Gives back the keys of key tile number `fill`, and the queries, if it is the last one before `end`. */
DEVICE void release_keys(BlockState *shared, unsigned fill, unsigned end) {
    release(shared, KEY_FREE + fill % SLOTS);
    if (fill + 1 == end)
        release(shared, QUERY_FREE);
}

/* Whether any row of the warpgroup sees any key of a key tile; *cut: whether some row does not see all. */
DEVICE int group_sees(const KeyNotes *notes, const Args *args, const Job *job, int *cut) {
    const Tile *tile = &job->tile;
    *cut = 0;
    if (!bounded(args))
        return job->first_row < tile->rows;
    int lowest = MAX_POSITION, highest = -1;
    for (int i = 0; i < KEYS / 32; i++)
        lowest = min_of(lowest, notes->lowest[i]), highest = max_of(highest, notes->highest[i]);
    int first = own_position(tile, job->first_row), last = own_position(tile, job->first_row + GROUP_ROWS - 1);
    *cut = highest > first + args->ahead || lowest < last - args->back;
    return job->first_row < tile->rows && lowest <= last + args->ahead && highest >= first - args->back;
}

/* Whether both warpgroups see all key tiles of a tile, one after the other; the turn of this one; the end of its turn. */
DEVICE int take_turns(const Args *args, const Job *job) { return TURNS && !bounded(args) && job->tile.rows > GROUP_ROWS; }
DEVICE void begin_turn(int first_row) { synchronize_threads(TURN_BARRIER + first_row / GROUP_ROWS, 2 * GROUP); }
DEVICE void end_turn(int first_row) { arrive_threads(TURN_BARRIER + 1 - first_row / GROUP_ROWS, 2 * GROUP); }

/* score = q.k of a key tile: started. */
DEVICE void start_scores(Rows *rows, const uint4 *queries, const uint4 *keys) {
    Factor left = along_rows(queries), right = along_rows(keys);
    KEEP_IN_ORDER(rows->score, KEYS / 2);
    products_begin();
#pragma unroll
    for (int k = 0; k < HEAD_DIM / 16; k++) {
        int at = k / 4 * PANEL_CHUNKS * 16 + k % 4 * 32;
        multiply_panels_128(rows->score, further(left, at), further(right, at), k > 0);
    }
    products_commit();
}

/* sum += weight * value of a key tile: started. */
DEVICE void start_sums(Rows *rows, const uint4 *values) {
    Factor right = across_rows(values, KEYS);
    KEEP_IN_ORDER(rows->sum, HEAD_DIM / 2);
    products_begin();
#pragma unroll
    for (int k = 0; k < KEYS / 16; k++)
#if HEAD_DIM == 64
        multiply_weights_64(rows->sum, rows->weight[k], further(right, k * 16 * PANEL_ROW));
#else
        multiply_weights_128(rows->sum, rows->weight[k], further(right, k * 16 * PANEL_ROW));
#endif
    products_commit();
}

/* Turns products into scores to the base 2, with each key's bias; those of keys beyond the bounds of a row become NEG_INF. */
DEVICE void scale_and_mask(Rows *rows, const Args *args, const KeyNotes *notes, const Tile *tile, float scale, int compare) {
    int thread = consumer();
    unsigned between = (unsigned)args->back + args->ahead;
    unsigned lowest = tile->row + row_of(thread, 0) * tile->step - args->back; /* of no row, it may wrap */
#pragma unroll
    for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            int column = n * 8 + thread % 4 * 2 + e;
            float bias = notes->bias[column];
            int position = compare ? notes->position[column] : 0;
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float *score = &rows->score[n * 4 + h * 2 + e];
                *score = *score * scale + bias;
                if (compare && position - (lowest + h * 8 * tile->step) > between)
                    *score = NEG_INF;
            }
        }
}

/* The largest score of row h. */
DEVICE float top_of(const Rows *rows, int h) {
    float top = NEG_INF;
#pragma unroll
    for (int n = 0; n < KEYS / 8; n++)
        top = fmaxf(top, fmaxf(rows->score[n * 4 + h * 2], rows->score[n * 4 + h * 2 + 1]));
    top = fmaxf(top, shuffle_xor(top, 1));
    return fmaxf(top, shuffle_xor(top, 2));
}

/* An online softmax step: scores become weights, 2^(factor * score + bias - m), relative to the new maximum m; sums are then to be
   multiplied by `keep`. Keys that all count equally often, and that no bound cuts, are neither scaled nor compared one by one,
   unless m is so huge that its rounding would show. `total` is in shared memory: its store, which needs all weights, keeps the
   compiler from computing them after the wait for sums that are under way. */
DEVICE void weigh(Rows *rows, float *total, const Args *args, const KeyNotes *notes, const Tile *tile, int compare) {
    float scale = args->scale * LOG2E, bias = notes->common[0], factor = scale, top[2];
    int huge = 0, plain = !compare && scale >= 0.0f && bias == notes->common[1] && bias == notes->common[2]
                          && bias == notes->common[3];
    if (plain)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            top[h] = fmaxf(rows->maximum[h], top_of(rows, h) * scale + bias);
            huge |= fabsf(top[h]) > HUGE_SCORE;
        }
    if (!plain || ballot(huge)) {
        scale_and_mask(rows, args, notes, tile, scale, compare);
        factor = 1.0f, bias = 0.0f;
        for (int h = 0; h < 2; h++)
            top[h] = fmaxf(rows->maximum[h], top_of(rows, h));
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float added = 0.0f, offset = bias - top[h];
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float *score = &rows->score[n * 4 + h * 2 + e];
                *score = exp2_fast(*score * factor + offset);
                added += *score;
            }
        rows->keep[h] = exp2_fast(rows->maximum[h] - top[h]);
        rows->maximum[h] = top[h], total[h] = total[h] * rows->keep[h] + added;
    }
}

/* Makes room for the next scores: weights as left sides of products, and sums relative to the new maximum. */
DEVICE void keep_weights(Rows *rows) {
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; i++)
        rows->sum[i] *= rows->keep[i / 2 % 2];
#pragma unroll
    for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
        for (int h = 0; h < 2; h++)
            rows->weight[n / 2][n % 2 * 2 + h] = pack(rows->score[n * 4 + h * 2], rows->score[n * 4 + h * 2 + 1]);
}

DEVICE float *lse_of(const Args *args, const Tile *tile, int batch) { return args->lse + line_of(args, batch, tile->head); }

/* The state before any key: empty, or what earlier launches have left, whose sum is `out`, relative to lse. */
DEVICE void start_rows(Rows *rows, float *total, const Args *args, const Job *job) {
    int thread = consumer();
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; i++)
        rows->sum[i] = 0.0f;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        rows->maximum[h] = LOWEST, total[h] = 0.0f;
        int row = row_of(thread, h), position = own_position(&job->tile, row);
        float before = !args->first && row < job->tile.rows ? LOAD(lse_of(args, &job->tile, job->batch) + position) : NEG_INF;
        if (before == NEG_INF)
            continue;
        rows->maximum[h] = before * LOG2E, total[h] = thread % 4 == 0 ? 1.0f : 0.0f;
        const Storage *out = rows_of(args->out, job->batch, job->tile.head).data + position * args->out.row;
#pragma unroll
        for (int n = 0; n < CHUNKS; n++) {
            int column = n * 8 + thread % 4 * 2;
            unsigned word = column < args->head_dim ? LOAD((const unsigned *)(out + column)) : 0;
            rows->sum[n * 4 + h * 2] = low_of(word), rows->sum[n * 4 + h * 2 + 1] = high_of(word);
        }
    }
}

/* Runs the rows of the warpgroup over all key tiles: scores of a key tile and sums of the one before are computed at once. */
DEVICE void attend(Rows *rows, const Args *args, BlockState *shared, const uint4 *panels, const Job *job) {
    const uint4 *queries = panels + QUERIES * SLOT + job->first_row * 8;
    const uint4 *keys = panels + KEY_SLOTS * SLOT, *values = panels + VALUE_SLOTS * SLOT;
    float *total = shared->total[consumer()];
    unsigned fill = job->first_fill, end = fill + job->key_tiles;
    int turns = take_turns(args, job);
#pragma unroll 1
    while (fill < end) {
        wait_for(shared, KEY_THERE, fill);
        int cut;
        if (!group_sees(&shared->notes[fill % NOTES], args, job, &cut)) {
            release_keys(shared, fill, end);
            wait_for(shared, VALUE_THERE, fill);
            release(shared, VALUE_FREE + fill % SLOTS);
            fill++;
            continue;
        }
        start_scores(rows, queries, keys + fill % SLOTS * SLOT);
        products_wait(0);
        KEEP_IN_ORDER(rows->score, KEYS / 2);
        release_keys(shared, fill, end);
        weigh(rows, total, args, &shared->notes[fill % NOTES], &job->tile, cut);
        keep_weights(rows);
#pragma unroll 1
        for (fill++; fill < end; fill++) {
            wait_for(shared, KEY_THERE, fill);
            if (!group_sees(&shared->notes[fill % NOTES], args, job, &cut))
                break;
            wait_for(shared, VALUE_THERE, fill - 1);
            if (turns)
                begin_turn(job->first_row);
            start_scores(rows, queries, keys + fill % SLOTS * SLOT);
            start_sums(rows, values + (fill - 1) % SLOTS * SLOT);
            if (turns)
                end_turn(job->first_row);
            products_wait(1);
            KEEP_IN_ORDER(rows->score, KEYS / 2);
            release_keys(shared, fill, end);
            weigh(rows, total, args, &shared->notes[fill % NOTES], &job->tile, cut);
            products_wait(0);
            KEEP_IN_ORDER(rows->sum, HEAD_DIM / 2);
            release(shared, VALUE_FREE + (fill - 1) % SLOTS);
            keep_weights(rows);
        }
        wait_for(shared, VALUE_THERE, fill - 1);
        start_sums(rows, values + (fill - 1) % SLOTS * SLOT);
        products_wait(0);
        KEEP_IN_ORDER(rows->sum, HEAD_DIM / 2);
        release(shared, VALUE_FREE + (fill - 1) % SLOTS);
    }
}

/* Writes lse, and, to shared memory that only this warp uses, out. */
DEVICE void stage_rows(uint4 *stage, const Rows *rows, const float *totals, const Args *args, const Job *job) {
    int thread = consumer();
    float *lse = lse_of(args, &job->tile, job->batch);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float total = totals[h];
        total += shuffle_xor(total, 1);
        total += shuffle_xor(total, 2);
        float part = total > 0.0f ? 1.0f / total : total;
        int row = row_of(thread, h);
        if (thread % 4 == 0 && row < job->tile.rows)
            STORE(lse + own_position(&job->tile, row), total > 0.0f ? LN2 * (rows->maximum[h] + log2f(total)) : NEG_INF + total);
#pragma unroll
        for (int n = 0; n < CHUNKS; n++) {
            unsigned *to = (unsigned *)(stage + chunk_at(row, n)) + thread % 4;
            *to = pack(rows->sum[n * 4 + h * 2] * part, rows->sum[n * 4 + h * 2 + 1] * part);
        }
    }
    synchronize_warp();
}

/* Writes out, the 16 rows of a warp. */
DEVICE void write_rows(const uint4 *stage, const Args *args, const Job *job) {
    int thread = consumer(), lane = thread % 32, chunk = lane % CHUNKS;
    HeadRows out = rows_of(args->out, job->batch, job->tile.head);
    for (int i = lane / CHUNKS; i < 16; i += 32 / CHUNKS) {
        int row = thread / 32 * 16 + i;
        if (row < job->tile.rows && chunk * 8 < args->head_dim)
            store_words(out.data + own_position(&job->tile, row) * out.row + chunk * 8, stage[chunk_at(row, chunk)]);
    }
    synchronize_warp();
}

/* Computes tile after tile, until there is none. */
DEVICE void consume(const Args *args, BlockState *shared, uint4 *panels) {
    unsigned filled = 0;
    int first_row = same(consumer() / GROUP) * GROUP_ROWS;
    if (TURNS && first_row) /* the first turn is that of the other warpgroup */
        end_turn(first_row);
#pragma unroll 1
    for (int turn = 0;; turn++) {
        barrier_wait(&shared->barriers[QUERY_THERE], turn & 1);
        Work work = shared->work[turn % 2];
        if (!work.tile.rows)
            break;
        Job job = {work.tile, work.batch, same(work.key_tiles), first_row, filled};
        Rows rows;
        start_rows(&rows, shared->total[consumer()], args, &job);
        attend(&rows, args, shared, panels, &job);
        if (!job.key_tiles)
            release(shared, QUERY_FREE);
        stage_rows(panels + STAGE * SLOT, &rows, shared->total[consumer()], args, &job);
        write_rows(panels + STAGE * SLOT, args, &job);
        filled += job.key_tiles;
    }
}

DEVICE void init_barriers(BlockState *shared) {
    for (int i = 0; i < BARRIERS; i++) {
        int is_free = i == QUERY_FREE || (i >= KEY_FREE && i < VALUE_THERE) || i >= VALUE_FREE;
        barrier_init(&shared->barriers[i], is_free ? CONSUMER_WARPS : GROUP);
    }
}

KERNEL(hopper_forward) {
    SHARED BlockState shared;
    DYNAMIC_SHARED(bytes);
    uint4 *panels = (uint4 *)(bytes + (0u - shared_address(bytes)) % 1024);
    if (is_first())
        init_barriers(&shared);
    first_tile(&shared.task, &args, 0);
    if (thread_index() < GROUP) {
        give_registers(PRODUCER_REGISTERS);
        produce(&args, &shared, panels);
    } else {
        take_registers(CONSUMER_REGISTERS);
        consume(&args, &shared, panels);
    }
}
