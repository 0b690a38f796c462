/* One task: a block of rows against all columns that it sees. Included once for each KIND, with all that it needs.
 *
 *     run_task                      one task of a phase: start_task, then blocks of rows, then results.h
 *       attend_chunks                 BACKWARD: every key block of a chunk, against the queries of another chunk
 *       attend_block                  for each group of branches that share scores, as branches.h says
 *         attend_segments, ...          for each cell: rows of the block between two ends of segments
 *           collect_rows                  rows by set of branches      -> row lists, slot_line
 *           attend_row_lists              up to MAX_ROW_LISTS at once; pack_rows                -> packed_rows
 *             next_tile, pack_tile          for each tile of columns                            -> packed_columns
 *               attend_row_list               for each row list, tile of rows by tile of rows; columns by which rows may see them
 *                 attend_tile                   tile.h                                        -> scores, slot_sums
 *             merge_slots                   the sums of the list's rows                   -> accumulator or out, or dk and dv
 */
#include "vector.h"

/* The columns of a tile, as products read them: packed, (dim panels, TILE_COLUMNS, PANEL), or rows of a tensor where they lie. */
#define Columns N(Columns)
typedef struct {
    REAL *at;
    int64_t column; /* numbers from one column to the next: PANEL, or head_dim, which is more where they are read in place */
} Columns;

#if UNIT == 2
#include "bf16_pairs.h"
#endif
#ifdef BF16_TILES
#include "amx_tiles.h"
#else
#include "matmul.h"
#endif
#include "online_softmax.h"
#include "relation.h"
#include "scratch.h"
#include "results.h"
#include "scores.h"
#include "packing.h"
#include "dropout.h"
#include "tile.h"
#include "few_rows.h"

static void N(attend_vectors)(
    const Task *task, int64_t first, int64_t end, int low, int high, int64_t from, int64_t to, REAL bias
) {
    const Scratch *s = &task->s;
    int64_t start = first + low * N(LANES), stop = first + high * N(LANES) < end ? first + high * N(LANES) : end;
    if (from == to)
        return;
    REAL begin = s->slot_first[stop - 1], last = s->slot_last[start]; /* what all rows see */
    for (int64_t i = start; task->intervals && i < stop; i++) {
        begin = s->slot_first[i] > begin ? s->slot_first[i] : begin;
        last = s->slot_last[i] < last ? s->slot_last[i] : last;
    }
    int unseen = !task->by_place && (s->column_position[to - 1] > last || s->column_position[from] < begin);
    N(attend_tile)(task, start, stop - start, high - low, from, to, bias, unseen);
}

/* A tile of rows with the packed tile of columns. Under causality a query sees the columns up to its own place, and a key is seen
 * from there on: columns between the places of two row vectors go with fewer vectors, unless they are few.
 */
static void N(attend_queries)(const Task *task, int64_t first, int64_t end, int vectors, int64_t columns, REAL bias) {
    const REAL *column = task->s.column_position, *row = task->s.slot_last;
    int64_t from = 0, to = 0;
    for (int v = 0, low = 0; v < vectors; v++) {
        int64_t next = first + (v + 1) * N(LANES), last = (next < end ? next : end) - 1;
        if (column[columns - 1] <= row[last])
            to = columns;
        while (to < columns && column[to] <= row[last])
            to++;
        int64_t edge = round_up(to, REGISTER_ROWS);
        if (edge > from && edge - from < FEW_COLUMNS && v < vectors - 1)
            continue;
        N(attend_vectors)(task, first, end, low, vectors, from, edge, bias);
        from = edge, low = v + 1;
    }
}

static void N(attend_keys)(const Task *task, int64_t first, int64_t end, int vectors, int64_t columns, REAL bias) {
    const REAL *column = task->s.column_position, *row = task->s.slot_first;
    int64_t from = columns, to = round_up(columns, REGISTER_ROWS);
    for (int v = vectors - 1, high = vectors; v >= 0; v--) {
        if (column[0] >= row[first + v * N(LANES)])
            from = 0;
        while (from > 0 && column[from - 1] >= row[first + v * N(LANES)])
            from--;
        int64_t edge = from == columns ? to : from / REGISTER_ROWS * REGISTER_ROWS;
        if (edge < to && to - edge < FEW_COLUMNS && v > 0)
            continue;
        N(attend_vectors)(task, first, end, 0, high, edge, to, bias);
        to = edge, high = v;
    }
}

/* A tile of rows with those of the packed columns that some of them see, before or behind them. */
static void N(attend_between)(const Task *task, int64_t first, int64_t end, int vectors, int64_t columns, REAL bias) {
    const REAL *column = task->s.column_position, *firsts = task->s.slot_first, *lasts = task->s.slot_last;
    int64_t next = first + vectors * N(LANES), stop = next < end ? next : end, from = 0, to = columns;
    REAL least = firsts[first], most = lasts[stop - 1];
    for (int64_t i = first; task->intervals && i < stop; i++) {
        least = firsts[i] < least ? firsts[i] : least;
        most = lasts[i] > most ? lasts[i] : most;
    }
    while (from < columns && column[from] < least)
        from++;
    while (to > from && column[to - 1] > most)
        to--;
    if (from < to)
        N(attend_vectors)(task, first, end, 0, vectors, from / REGISTER_ROWS * REGISTER_ROWS, round_up(to, REGISTER_ROWS), bias);
}

static void N(attend_row_list)(const Task *task, const RowList *list, int64_t columns, REAL bias) {
    int vectors;
    for (int64_t first = list->first, end = first + list->count; first < end; first += vectors * N(LANES)) {
        vectors = N(block_vectors)((end - first + N(LANES) - 1) / N(LANES));
        if (task->intervals || (task->phase == BACKWARD ? task->after : task->before) != UNBOUNDED)
            N(attend_between)(task, first, end, vectors, columns, bias);
        else if (task->phase == BACKWARD)
            N(attend_keys)(task, first, end, vectors, columns, bias);
        else
            N(attend_queries)(task, first, end, vectors, columns, bias);
    }
}

/* Set the state of the first `slots` slots; return their lowest and highest row through `low` and `high`. */
static void N(start_slots)(const Task *task, int64_t slots, int64_t *low, int64_t *high) {
    const Scratch *s = &task->s;
    const Problem *p = task->p;
    *low = p->block_rows, *high = -1;
    for (int64_t i = 0; i < slots; i++) {
        int64_t line = s->slot_line[i], row = N(row_of)(p, line);
        s->slot_first[i] = task->before == UNBOUNDED ? -REAL_MAX : (REAL)(row - task->before);
        s->slot_last[i] = task->after == UNBOUNDED ? REAL_MAX : (REAL)(row + task->after);
        if (task->intervals && row < p->block_rows) {
            const int64_t *interval = N(interval_of)(task, task->start + row);
            REAL first = (REAL)(interval[0] - task->start), last = (REAL)(interval[1] - 1 - task->start);
            s->slot_first[i] = first > s->slot_first[i] ? first : s->slot_first[i];
            s->slot_last[i] = last < s->slot_last[i] ? last : s->slot_last[i];
        }
        s->slot_sum[i] = 0, s->slot_max[i] = -(REAL)INFINITY;
        if (row < p->block_rows)
            *low = row < *low ? row : *low, *high = row > *high ? row : *high;
        if (p->bias != NO_BIAS)
            N(place_row)(task, i, row < p->block_rows ? N(position)(task, row) : task->start, task->head + line % p->shared_heads);
        for (int n = task->own; n < task->relations; n++) /* collect_patch has its own */
            N(relate_row)(&s->relation[n], task->phase == BACKWARD, i, row < p->block_rows ? N(position)(task, row) : -1);
    }
    for (int n = 0; n < task->own; n++)
        N(find_seen_by_all)(&s->relation[n], slots);
}

static void N(load_slots)(const Task *task, int64_t slots) {
    N(pack_rows)(task, 0, slots);
    if (task->phase == BACKWARD)
        N(pack_rows)(task, 1, slots);
    for (int a = 0; a < task->sums; a++)
        N(clear)(task->s.slot_sums[a], slots * task->padded_dim);
}

static void N(attend_row_lists)(const Task *task, const Segment *segments, const RowList *lists, int count, int64_t slots) {
    const Scratch *s = &task->s;
    const Problem *p = task->p;
    int64_t low, high, from = task->first_column, to = task->last_column;
    uint64_t among = 0;
    int few = N(are_few)(task, lists, count);
    N(start_slots)(task, slots, &low, &high);
    few ? N(load_few)(task, slots) : N(load_slots)(task, slots);
    for (int i = 0; i < count; i++)
        among |= lists[i].set;
    if (task->before != UNBOUNDED)
        from = greater(from, task->start + low - task->before);
    if (task->after != UNBOUNDED)
        to = lesser(to, task->start + high + task->after + 1);
    start_tiles(s->tiles, segments, task->segments ? 0 : among, task->segments, from, to);
    if (p->mask && task->phase != BACKWARD)
        s->tiles->mask = p->mask + task->batch * p->mask_batch, s->tiles->mask_row = p->mask_row;
    s->tiles->runs = &p->runs, s->tiles->without = task->without[1];
    for (ColumnTile *tile; (tile = next_tile(s->tiles));) {
        few ? N(place_columns)(task, tile) : N(pack_tile)(task, tile);
        for (int which = 0; few && which < 2; which++)
            N(prefetch_columns)(task, which);
        for (int i = 0; i < count; i++) {
            int times = __builtin_popcountll(tile->set & lists[i].set);
            REAL bias = times <= 1 || p->once ? 0 : (REAL)log(times);
            RowList list = lists[i];
            while (task->by_place && times && i + 1 < count && (tile->set & lists[i + 1].set))
                i++, list.count = lists[i].first + lists[i].count - list.first;
            if (times && few)
                N(attend_few)(task, &list, tile, bias);
            else if (times)
                N(attend_row_list)(task, &list, tile->count, bias);
        }
        if (task->phase == BACKWARD)
            N(add_columns_to_dq)(task, tile);
    }
    for (int64_t slot = 0; few && slot < slots; slot++)
        N(merge_slot)(task, 0, slot, s->slot_sums[0] + slot * task->padded_dim);
    if (!few)
        N(merge_slots)(task, slots);
}

#include "branches.h"

/* A block of keys through all query heads that share them. */
static void N(attend_key_block)(Task *task) {
    int64_t group = task->p->heads / task->p->kv_heads;
    for (task->head = task->kv_head * group; task->head < (task->kv_head + 1) * group; task->head++) {
        task->column_head = task->head;
        N(attend_block)(task);
    }
}

/* All key blocks of a chunk, against the queries of the chunk that it goes with. */
static void N(attend_chunks)(Task *task, int64_t chunk) {
    const Problem *p = task->p;
    int64_t block = chunk * p->chunk_blocks, end = lesser(block + p->chunk_blocks, p->blocks);
    task->chunk = chunk;
    task->first_column = p->first_row + (chunk + p->shift) % p->chunks * p->chunk_rows;
    task->last_column = lesser(task->first_column + p->chunk_rows, p->end_row);
    for (; block < end && task->first_column < task->last_column; block++) {
        N(start_block)(task, block);
        if (p->causal && task->last_column <= task->start)
            break;
        N(attend_key_block)(task);
    }
}

/* Tasks count blocks (or chunks) fastest, then heads, then batch. Under causality the last blocks of all heads, which have the
 * most to do, come first; otherwise the first blocks do, which hold the global tokens of most patterns. */
static void N(run_task)(const Problem *p, int phase, int64_t index, void *scratch) {
    int by_key = phase == BACKWARD;
    int64_t shared = by_key ? 1 : p->shared_heads, heads = (by_key ? p->kv_heads : p->heads) / shared;
    int64_t parts = by_key ? p->chunks : p->blocks;
    int64_t part = by_key ? chunk_of_task(p, index) : index % parts, head = index / parts;
    if (p->causal && !by_key)
        part = parts - 1 - index / (heads * p->batch), head = index % (heads * p->batch);
    Task task = {.p = p, .phase = phase, .batch = head / heads, .head = head % heads * shared};
    task.first_column = p->first_key, task.last_column = p->end_key;
    N(start_task)(&task, scratch);
    if (by_key)
        return N(attend_chunks)(&task, part);
    N(start_block)(&task, part);
    if (phase == DELTA)
        return N(compute_delta)(&task);
    N(attend_block)(&task);
    N(write_output)(&task);
}

#if UNIT == 1
#include "stored_rows.h"
#endif

#undef FOR_WAY
#undef Relation
#undef Places
#undef PlaceLanes
#undef Columns
#undef Scratch
#undef Task
#undef Words
#undef Masks
#undef Vector
#undef Lanes
