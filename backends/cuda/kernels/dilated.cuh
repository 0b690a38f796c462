/* What all kernels share: their argument, the tiles of a launch, and which keys the rows of a tile see.

       counter (global) --> take_number, find_tile --> Tile: rows of one head, `step` apart              loop over tiles
                                                              |
       Branch table (global) --> find_keys, by one warp --> Keys (shared): runs of positions            once a tile
                                                              |
              locate_key: key_position, key_bias --> position and log2(multiplicity) of a key   each key
       places (Args) -------------> find_place, by one thread --> Place (shared)                         once a tile, if DROPOUT
       seed (Args), Place --------> keeps --> whether a weight is kept                                   each weight, if DROPOUT

   The kernels are written in the part of CUDA that is also C, so that a C compiler can build them for the CPU: no templates, no
   references. `intrinsics.cuh` holds what differs between the two. Sizes and dtypes are macros that the compiler is given.

   A tile is up to TILE_ROWS rows of one head, `step` apart, in one segment of each branch of its set. Its keys are those rows of
   the segments that are congruent to its own row modulo the branch's rate. They are listed as runs: branch after branch,
   shortest segment first, without the stretch that an earlier branch of a dividing rate has covered. A key that is listed a
   second time all the same gets the weight 0 there. The same holds with queries and keys exchanged, for the gradients of keys.

   A tile of a relation (`dilkit.backends.tiles.relations`) has rows of one part, whose columns are given as runs: its `set` is 1 + the
   number of the part, 0 for none. Query i sees the keys from i - back to i + ahead: what no row of a tile sees is not listed, and
   only what a bound cuts is compared.

   A block finds its next tile while it writes the results of one, when sums are on their way out of the registers:

                                    | barrier: nobody needs the keys                     | barrier: the next tile is there
       number of the next tile      | on its way, taken just before                      |
       first warp                   | find_tile; writes results; begin_tile: find_keys   | the next tile
       other warps                  | write results, of a tile that they have noted      | the next tile
       Task (shared)                | written: by the first warp, at the end             | read

   It is taken no earlier: a block that held a tile in reserve would keep others from it at the end of a launch. */
#ifndef DILKIT_DILATED
#define DILKIT_DILATED

#include "intrinsics.cuh"

/* Whether sequences of different lengths are packed one after the other. */
#ifndef PACKED
#define PACKED 0
#endif

/* Whether weights are dropped. */
#ifndef DROPOUT
#define DROPOUT 0
#endif

#define MAX_BRANCHES 32
#define NEG_INF (-INFINITY)
#define LOG2E 1.4426950408889634f
#define LN2 0.6931471805599453f

/* Scores whose rounding changes a weight by up to 1/32 or more; an lse whose rounding does so by 1/512. */
#define EPSILON 1.1920929e-7f
#define HUGE_SCORE (1 / (16 * EPSILON))
#define LARGE_LSE (1 / (1024 * EPSILON))
#define MAX_POSITION 0x7fffffff

typedef struct {
    int row, set, step;
    unsigned short head, rows;
} Tile;

/* A part of a relation has the rate -n: its columns are n of the runs that follow the branches, from number `segment` on. */
typedef struct {
    int segment, rate, head_start, head_stop;
} Branch;

/* The positions low, low + step, ... below `high`, counted from the start of a sequence; of_row: those of them that are a multiple of
   `step` from a tile's rows. */
typedef struct {
    int low, step, high, of_row;
} ColumnRun;

/* A tensor (batch, seq, heads, head_dim): strides in elements, the last one 1. */
typedef struct {
    void *data;
    long long batch, row, head;
} View;

/* Of a step of decoding: its tables and what `step.cuh` says of them. A piece of its work leaves a partial in `partials`. */
typedef struct {
    const long long *spans, *writes, *pages, *memory;
    float *partials;
    const float *sink;
    long long page_count;
    int span_count, write_count, stored_count, positions_count, unseen_count, tokens, splits;
} StepTables;

/* The one argument of every kernel. lse and delta are (batch, heads, seq), contiguous; mask is (batch, seq), nonzero = ignored,
   or null. places is (batch, 5), where dropout finds each element of the batch in the whole (dilkit/op/dropout.py), or null: then
   they follow first_batch and first_head. Later groups of branches merge with what is in out and lse, or add to what is in
   dquery, dkey and dvalue: their `first` is 0. `scores.cuh` says what bias_weights (heads, entries), positions and bias_parts are;
   positions of elements of the batch are positions_batch numbers apart, 0 if they share them. branch_count of a relation is minus the
   number of its parts.

   PACKED: `seq` is all rows, `batch` how many sequences they are; sequence s begins at row starts[s], and its tiles are numbered
   from tile_ends[s - 1] (0 for the first) up to tile_ends[s]. `tiles` are those of one long sequence by ascending row: a
   shorter one has as many of them as begin before its end, and they end with it. */
typedef struct {
    View query, key, value, out, dout, dquery, dkey, dvalue;
    float *lse, *delta;
    const unsigned char *mask;
    long long mask_batch, mask_row;
    const Tile *tiles;
    const Branch *branches;
    int *counter;
    const int *starts, *tile_ends;
    const long long *places;
    int tile_count, branch_count, batch, seq, heads, kv_heads, head_dim;
    int back, ahead, once, first;
    float scale, keep_scale;
    int first_batch, first_head;
    unsigned seed_low, seed_high, threshold;
    const float *bias_weights, *positions;
    float *bias_parts;
    long long positions_batch;
    int entries, size_0, size_1, size_2;
    float softcap;
    StepTables step;
} Args;

/* `count` positions from `first` on, `step` apart, that the rows of a tile see through branch number `branch`. */
typedef struct {
    int first, step, count, branch;
} Run;

/* The segment of branch number `branch` that a tile is in: `length` rows from `low` on. */
typedef struct {
    int low, length, rate, branch;
} Segment;

/* Where dropout finds the weights of a head in the whole: that of rows i and j of the call is there that of rows query + step i
   and key + step j, of sequence `number` and head `head`. */
typedef struct {
    long long query, key, step;
    unsigned number, head;
} Place;

/* The keys of a tile with `row`: `total` of them in runs, of the branches of `segment_count` segments. PACKED: of sequence number
   `sequence`, which begins at row `begin`. */
typedef struct {
    int row, total, segment_count;
#if PACKED
    int begin, sequence;
#endif
#if DROPOUT
    Place place;
#endif
    Run runs[2 * MAX_BRANCHES];
    Segment segments[MAX_BRANCHES];
} Keys;

/* Tile number `item` of the whole batch, which is of element `batch`. Without rows: none is left. */
typedef struct {
    Tile tile;
    int item, batch;
} Found;

/* What a block works on, in its shared memory: a tile that was found, and its keys. */
typedef struct {
    Tile tile;
    int item, batch;
    Keys keys;
} Task;

/* The factor of weights that are kept. */
#if DROPOUT
#define KEEP_SCALE(args) ((args)->keep_scale)
#else
#define KEEP_SCALE(args) 1.0f
#endif

DEVICE int min_of(int a, int b) { return a < b ? a : b; }
DEVICE int max_of(int a, int b) { return a < b ? b : a; }

/* a mod b, of b > 0: 0 to b - 1. Most are powers of two, and a division takes long. */
DEVICE int modulo(int a, int b) {
    if (!(b & (b - 1)))
        return a & (b - 1);
    int left = a % b;
    return left < 0 ? left + b : left;
}

/* a / b, of a that is not negative and b > 0. */
DEVICE int divided(int a, int b) { return b & (b - 1) ? a / b : a >> bit_count(b - 1); }

/* Whether `position` is congruent to `row` modulo `rate`. Most rates are powers of two, and a division takes long. */
DEVICE int congruent(int position, int row, int rate) {
    int apart = position - row;
    return rate & (rate - 1) ? (unsigned)(apart < 0 ? -apart : apart) % (unsigned)rate == 0 : !(apart & (rate - 1));
}

/* The index of the first of `count` ascending numbers that is above `number`; `count` if none is. */
DEVICE int first_above(const int *numbers, int count, int number) {
    int low = 0, high = count;
#pragma unroll 1
    while (low < high) {
        int middle = (low + high) / 2;
        if (LOAD(numbers + middle) > number)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

/* Tile number `item` of all sequences of a packed call, at its place among all rows, if there are as many. */
DEVICE void packed_tile(const Args *args, int item, Tile *tile) {
    int sequence = first_above(args->tile_ends, args->batch, item);
    if (sequence == args->batch)
        return;
    int begin = LOAD(args->starts + sequence), length = LOAD(args->starts + sequence + 1) - begin;
    *tile = LOAD(args->tiles + (sequence ? item - LOAD(args->tile_ends + sequence - 1) : item));
    tile->rows = min_of(tile->rows, (length - 1 - tile->row) / tile->step + 1);
    tile->row += begin;
}

/* The number of this thread in its warp; whether it is the first of the block, or in the first warp. Opaque, so that nothing that
   follows from it stays in registers. */
DEVICE int lane_index(void) { return (unsigned)opaque(thread_index()) % 32; }
DEVICE int is_first(void) { return opaque(thread_index()) == 0; }
DEVICE int in_first_warp(void) { return opaque(thread_index()) < 32; }

/* Query heads of a key head. */
DEVICE int group_of(const Args *args) { return args->heads / opaque(args->kv_heads); }

/* The position of row r of the tile; beyond the last row, that of the last: the product would not fit. */
DEVICE int own_position(const Tile *tile, int r) { return tile->row + min_of(r, tile->rows - 1) * tile->step; }

/* Where a head's part of lse and delta begins. */
DEVICE long long line_of(const Args *args, int batch, int head) { return ((long long)batch * args->heads + head) * args->seq; }

/* An lse as gradients take it. A large one is less by what rounding made of it and of the scores: the key that a row sees almost
   alone then has a weight of 1, not of 2 to a rounding error. NEG_INF stays. */
DEVICE float load_lse(const float *place) {
    float lse = LOAD(place), size = fabsf(lse);
    return size > LARGE_LSE ? lse - 3 * EPSILON * size : lse;
}

/* How many tiles there are, over the batch or all packed sequences. */
DEVICE int item_count(const Args *args) {
    return PACKED ? LOAD(args->tile_ends + args->batch - 1) : args->tile_count * args->batch;
}

/* The number of the block's next tile, for thread 0: with a counter, blocks compute whichever tile is next; without, every n-th. */
DEVICE int take_number(const Task *task, const Args *args) {
    if (!is_first())
        return 0;
    return args->counter ? atomic_add(args->counter, 1) : task->item + block_count();
}

/* The counter is 0 before a launch and after it: every block takes one number too many, and the one that has taken the very last
   of them sets the counter back, which no block looks at any more. */
DEVICE void give_back(const Args *args, int number) {
    if (args->counter && number == item_count(args) + block_count() - 1)
        STORE(args->counter, 0);
}

/* The tile whose number thread 0 has taken, for the first warp. All threads call it. */
DEVICE Found find_tile(const Args *args, int number) {
    Found found = {{0, 0, 1, 0, 0}, 0, 0};
    if (!in_first_warp())
        return found;
    found.item = shuffle_word(number, 0);
#if PACKED
    packed_tile(args, found.item, &found.tile);
#else
    int place = found.item / args->batch;
    found.batch = found.item - place * args->batch;
    if (place < args->tile_count)
        found.tile = LOAD(args->tiles + place);
#endif
    return found;
}

/* Whether any row of the launch has a bound. */
DEVICE int bounded(const Args *args) { return min_of(args->back, args->ahead) < args->seq; }

/* Notes where dropout finds the weights of a head. */
DEVICE void find_place(Keys *keys, const Args *args, int batch, int head) {
#if DROPOUT
    Place place = {0, 0, 1, (unsigned)(args->first_batch + batch), (unsigned)(args->first_head + head)};
    int begin = 0;
#if PACKED
    place.number += keys->sequence, begin = keys->begin;
#endif
    if (args->places) {
        const long long *line = args->places + 5 * (long long)batch;
        place.number = (unsigned)LOAD(line), place.head = (unsigned)LOAD(line + 1) + head;
        place.query = LOAD(line + 2), place.key = LOAD(line + 3), place.step = LOAD(line + 4);
    }
    place.query -= begin * place.step, place.key -= begin * place.step;
    keys->place = place;
#endif
}

/* The rows that `branch` shows from `low` on and below `high`, those that are a multiple of `step` from `row`: a run, of count 0 if
   there are none. */
DEVICE Run run_between(int row, int step, int branch, int low, int high) {
    Run run = {0, step, 0, branch};
    if (low >= high)
        return run;
    int first = low + modulo(row - low, step);
    if (first < high)
        run.first = first, run.count = divided(high - first - 1, step) + 1;
    return run;
}

/* Puts two runs of each lane, one after the other, after those of the lanes before, without those that are empty. */
DEVICE void put_runs(Keys *keys, const Run *own) {
    int lane = lane_index(), total = warp_sum(own[0].count + own[1].count);
    unsigned first = ballot(own[0].count > 0), second = ballot(own[1].count > 0), before = (1u << lane) - 1;
    int place = bit_count(first & before) + bit_count(second & before);
    if (own[0].count > 0)
        keys->runs[place++] = own[0];
    if (own[1].count > 0)
        keys->runs[place] = own[1];
    if (lane == 0)
        keys->total = total;
}

/* Two runs of each lane: of the columns of a part of a relation, the one that is in `serving`, if any. */
DEVICE void find_columns(Run *own, const Args *args, unsigned serving, Branch mine, int row, int begin, int lowest, int highest) {
    int part = bit_count((serving & -serving) - 1) % 32, count = serving ? -(int)shuffle_word(mine.rate, part) : 0;
    const ColumnRun *runs = (const ColumnRun *)(args->branches - args->branch_count) + (int)shuffle_word(mine.segment, part);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int number = 2 * lane_index() + i;
        ColumnRun run = {0, 1, 0, 0};
        if (number < count)
            run = LOAD(runs + number);
        int low = begin + run.low, high = min_of(begin + run.high, highest);
        own[i] = run_between(run.of_row ? row : low, run.step, 0, max_of(low, lowest), high);
    }
}

/* Two runs of each lane of `serving`: of its segment `mine`, before and after the stretch that an earlier branch of a dividing rate
   has covered, the last of them. All segments are noted on the way. */
DEVICE void find_stretches(Run *own, Keys *keys, unsigned serving, Segment mine, int row, int lowest, int highest) {
    int lane = lane_index(), serves = serving >> lane & 1, place = bit_count(serving & ((1u << lane) - 1));
    int high = serves ? mine.low + mine.length : mine.low, covered_from = high, covered_to = high;
    if (serves)
        keys->segments[place] = mine;
    synchronize_warp();
#pragma unroll 1
    for (int i = serves ? place - 1 : -1; i >= 0; i--) {
        Segment other = keys->segments[i];
        if (modulo(mine.rate, other.rate))
            continue;
        covered_from = max_of(mine.low, other.low), covered_to = min_of(high, other.low + other.length);
        break;
    }
    own[0] = run_between(row, mine.rate, mine.branch, max_of(mine.low, lowest), min_of(covered_from, highest));
    own[1] = run_between(row, mine.rate, mine.branch, max_of(covered_to, lowest), min_of(high, highest));
}

/* The branch of each lane; of a relation the part, one of the 32 among which that of the tile is. *set: the tile's, a bit a lane. */
DEVICE Branch branch_of_lane(const Args *args, const Tile *tile, unsigned *set) {
    int parts = -args->branch_count, own = parts > 0 ? max_of(tile->set - 1, 0) : 0, number = (own & ~31) + lane_index();
    Branch branch = {1, 1, 0, 0};
    if (number < max_of(parts, -parts))
        branch = LOAD(args->branches + number);
    *set = parts > 0 ? (unsigned)(tile->set > 0) << (own & 31) : tile->set;
    return branch;
}

/* Finds the keys that the rows of a tile see through the branches that serve query head `head`, from row - back to row + ahead.
   The lanes of one warp call it, each for a branch; `keys` is in shared memory. */
DEVICE void find_keys(Keys *keys, const Args *args, const Tile *tile, int batch, int head, int back, int ahead) {
    int lane = lane_index(), row = tile->row, begin = 0, end = args->seq;
#if PACKED
    int next = first_above(args->starts, args->batch + 1, row);
    begin = LOAD(args->starts + next - 1), end = LOAD(args->starts + next);
    if (lane == 0)
        keys->begin = begin, keys->sequence = next - 1;
#endif
    int lowest = max_of(row - back, begin), highest = min_of(own_position(tile, tile->rows - 1) + ahead + 1, end);
    unsigned set;
    Branch branch = branch_of_lane(args, tile, &set);
    unsigned serving = set & ballot(branch.head_start <= head && head < branch.head_stop);
    int of_relation = args->branch_count < 0;
    Run own[2];
    if (of_relation) {
        find_columns(own, args, serving, branch, row, begin, lowest, highest);
    } else {
        int low = row - modulo(row - begin, branch.segment), high = min_of(low + branch.segment, end);
        Segment mine = {low, high - low, branch.rate, lane};
        find_stretches(own, keys, serving, mine, row, lowest, highest);
    }
    put_runs(keys, own);
    if (lane == 0) {
        keys->row = row, keys->segment_count = of_relation ? 0 : bit_count(serving);
        find_place(keys, args, batch, head);
    }
}

/* Makes what `find_tile` has found the task of the block, with its keys, or, of a tile `of_keys`, the queries of its first query
   head. All threads call it when none reads `task` any more; the first warp does it, and the next barrier shows it to all. */
DEVICE void begin_tile(Task *task, const Args *args, const Found *found, int of_keys) {
    if (!in_first_warp())
        return;
    if (is_first()) {
        give_back(args, found->item);
        task->tile = found->tile, task->item = found->item, task->batch = found->batch;
    }
    int head = found->tile.head * (of_keys ? group_of(args) : 1);
    int back = of_keys ? args->ahead : args->back, ahead = of_keys ? args->back : args->ahead;
    if (found->tile.rows)
        find_keys(&task->keys, args, &found->tile, found->batch, head, back, ahead);
}

/* The first task of a block. All threads call it. */
DEVICE void first_tile(Task *task, const Args *args, int of_keys) {
    if (is_first())
        task->item = block_index() - block_count();
    Found found = find_tile(args, take_number(task, args));
    begin_tile(task, args, &found, of_keys);
    synchronize();
}

/* Where key number `index` of the tile is; *branch: which branch shows it. `index` is below keys->total. */
DEVICE int key_position(const Keys *keys, int index, int *branch) {
    int r = 0;
#pragma unroll 1
    while (index >= keys->runs[r].count)
        index -= keys->runs[r++].count;
    *branch = keys->runs[r].branch;
    return keys->runs[r].first + index * keys->runs[r].step;
}

/* log2 of how many branches show the tile's rows the key at `position`, 0 if each key counts once; NEG_INF if a branch before
   `branch` shows it, for then it is listed before. */
DEVICE float key_bias(const Keys *keys, int position, int branch, int once) {
    if (keys->segment_count < 2)
        return 0.0f;
    int count = 0, before = 0;
#pragma unroll 1
    for (int i = 0; i < keys->segment_count; i++) {
        Segment segment = keys->segments[i];
        int shows = (unsigned)(position - segment.low) < (unsigned)segment.length && congruent(position, keys->row, segment.rate);
        count += shows;
        before |= shows && segment.branch < branch;
    }
    return before ? NEG_INF : once ? 0.0f : log2f((float)count);
}

/* Where key number `index` of the tile is, of an element of the batch, and *bias, what its score needs: -1 and NEG_INF beyond the
   last key, for a key that is ignored, and for one that is listed before. */
DEVICE int locate_key(const Keys *keys, const Args *args, int batch, int index, float *bias) {
    *bias = NEG_INF;
    if (index >= keys->total)
        return -1;
    int branch, position = key_position(keys, index, &branch);
    if (!args->mask || !LOAD(args->mask + batch * args->mask_batch + position * args->mask_row))
        *bias = key_bias(keys, position, branch, args->once);
    return *bias == NEG_INF ? -1 : position;
}

#if DROPOUT

/* Whether dropout keeps the weight of row `query` with row `key`, for the rows of the tile of `keys`: Philox 4x32 of seven
   rounds, whose four words are those of four neighbouring keys. */
DEVICE unsigned keeps(const Args *args, const Keys *keys, int query, int key) {
    unsigned long long i = keys->place.query + keys->place.step * query, j = keys->place.key + keys->place.step * key;
    unsigned x0 = (unsigned)(j >> 2), x1 = (unsigned)i, x2 = keys->place.number;
    unsigned x3 = keys->place.head | (unsigned)(i >> 32) << 16 | (unsigned)(j >> 34) << 24;
    unsigned key0 = args->seed_low, key1 = args->seed_high;
#pragma unroll
    for (int round = 0; round < 7; round++) {
        unsigned long long product0 = 0xD2511F53ull * x0, product1 = 0xCD9E8D57ull * x2;
        x0 = (unsigned)(product1 >> 32) ^ x1 ^ key0, x1 = (unsigned)product1;
        x2 = (unsigned)(product0 >> 32) ^ x3 ^ key1, x3 = (unsigned)product0;
        key0 += 0x9E3779B9u, key1 += 0xBB67AE85u;
    }
    unsigned word = j & 2 ? (j & 1 ? x3 : x2) : (j & 1 ? x1 : x0);
    return word >= args->threshold;
}

#endif

#endif
