/* One task: a block of rows against all columns that it sees. Included once for each KIND, with all that it needs.
 *
 *     run_task                      one task of a phase: start_task, then blocks of rows, then results.h
 *       attend_chunks                 BACKWARD: every key block of a chunk, against the queries of another chunk
 *       attend_block                  for each group of branches that share scores, as branches.h says
 *         attend_segments, ...          for each cell: rows of the block between two ends of segments
 *           collect_rows                  rows by set of branches      -> row lists, slot_line
 *           attend_row_lists              up to MAX_ROW_LISTS at once; pack_rows                -> packed_rows
 *             next_tile, pack_tile          for each tile of columns                            -> packed_columns
 *               attend_row_list               for each row list, tile of rows by tile of rows
 *                 attend_between, attend_queries, attend_keys   columns by which row vectors may see them
 *                   attend_tile                   q k^T, scores.h, softmax step, dropout, accumulate  -> scores, slot_sums
 *             merge_slots                   the sums of the list's rows                             -> accumulator, or dk and dv
 *
 *     FORWARD   packed_rows[0] . packed_columns[0] -> scores -> online_softmax_step -> slot_sums[0] += P . added_columns[1]
 *     BACKWARD  packed_rows[0] . packed_columns[0] -> scores                                           (rows and columns: scratch.h)
 *               packed_rows[1] . packed_columns[1] -> score_gradients -> softmax_backward_step: scores = P, score_gradients = dS
 *               slot_sums[0] += dS . added_columns[0]        slot_sums[1] += P . added_columns[1]
 *               column_sums += dS^T (gradient_rows) . plain_rows
 */
#include "vector.h"
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
#include "few_rows.h"

/* The scores of the rows in `vectors` vectors of slots from `first` on, `count` of them in use, with the columns from .. to - 1, and
 * their maxima. Returns whether some are masked by relations. */
static int N(score_pairs)(
    const Task *task, int64_t first, int64_t count, int vectors, int64_t from, int64_t to, REAL bias, REAL *max
) {
    const Scratch *s = &task->s;
    const Problem *p = task->p;
    const int64_t units = UNITS(p->dim), rows = first * round_up(units, PANEL);
    const int scored = N(has_scores)(p);
    int masked = 0;
    N(compute_scores)(vectors, s->scores, max, s->packed_columns[0], s->packed_rows[0] + rows, from, to, units, (REAL)p->scale, scored ? 0 : bias);
    if (scored)
        N(score_tile)(task, first, count, vectors, from, to, bias, max);
    for (int i = 0; i < task->own; i++)
        masked |= N(mask_relation)(&s->relation[i], s->scores, first, count, from, to, s->tiles->returned->count);
    for (int i = task->own; i < task->relations; i++)
        masked |= N(mask_shown)(&s->relation[i], s->scores, first, count, from, to, s->tiles->returned->count);
    return masked;
}

/* Scores to probabilities, which add values to the sums of their rows. */
static void N(add_values)(const Task *task, int64_t first, int vectors, int64_t from, int64_t to, int masked, REAL *max) {
    const Scratch *s = &task->s;
    const int64_t apart = task->padded_dim * N(LANES), count = vectors * N(LANES);
    REAL rescale[TILE_ROWS], *sums = s->slot_sums[0] + first * task->padded_dim;
    if (masked)
        N(mask_scores)(s->scores, max, s->slot_first + first, s->slot_last + first, s->column_position, from, to, count);
    N(online_softmax_step)(s->scores, max, s->slot_max + first, s->slot_sum + first, rescale, from, to, count);
    if (task->p->dropout)
        N(drop_weights)(UNIT, s->scores, s->kept, from, to, count);
    N(add_to_rows)(vectors, sums, apart, rescale, s->scores, s->added_columns[1], from, to, task->p->dim);
}

/* Scores to P, and dS, of the columns from .. to - 1, as they are added. */
static void N(compute_gradients)(
    const Task *task, int64_t first, int64_t count, int vectors, int64_t from, int64_t to, int masked
) {
    const Scratch *s = &task->s;
    const Problem *p = task->p;
    const int64_t units = UNITS(p->dim), lanes = vectors * N(LANES);
    REAL *rows = s->packed_rows[1] + first * round_up(units, PANEL);
    N(compute_products)(vectors, s->score_gradients, s->packed_columns[1], rows, from, to, units);
    if (p->dropout)
        N(drop_weights)(1, s->score_gradients, s->kept, from, to, lanes);
    N(softmax_backward_step)(
        s->scores, s->score_gradients, s->column_lse, s->column_delta, s->slot_first + first, s->slot_last + first, s->column_position,
        masked, from, to, lanes, (REAL)p->keep_scale
    );
    if (p->dbias)
        N(sum_bias_gradient)(task, first, count, from, to);
    if (p->softcap > 0)
        N(uncap_gradients)(task, vectors, from, to);
    if (p->dropout)
        N(drop_weights)(1, s->scores, s->kept, from, to, lanes);
#if UNIT == 2
    pair_lanes(s->gradient_rows, s->score_gradients, from, to, count);
    pair_lines(s->score_gradients, from, to, lanes), pair_lines(s->scores, from, to, lanes);
#endif
}

/* dS and P add to the sums of dk and dv, those of the rows, and of dq, those of the columns. */
static void N(add_gradients)(const Task *task, int64_t first, int64_t count, int vectors, int64_t from, int64_t to) {
    const Scratch *s = &task->s;
    const int64_t apart = task->padded_dim * N(LANES), sums = first * task->padded_dim, dim = task->p->dim;
    REAL ones[TILE_ROWS];
    for (int r = 0; r < TILE_ROWS; r++)
        ones[r] = 1;
    N(add_to_rows)(vectors, s->slot_sums[0] + sums, apart, ones, s->score_gradients, s->added_columns[0], from, to, dim);
    N(add_to_rows)(vectors, s->slot_sums[1] + sums, apart, ones, s->scores, s->added_columns[1], from, to, dim);
    N(add_to_columns)(s->column_sums, s->gradient_rows, s->plain_rows + sums / UNIT, task->padded_dim, from, to, count, dim);
}

/* A tile of scores, and all that is computed with them: gradients in steps of columns that stay in the nearest cache. If `masked`, some
 * rows do not see some columns, by their positions. */
static void N(attend_tile)(
    const Task *task, int64_t first, int64_t count, int vectors, int64_t from, int64_t to, REAL bias, int masked
) {
    const int64_t step = task->phase == FORWARD ? to - from : N(STEP_COLUMNS);
    REAL max[TILE_ROWS];
    for (int64_t k = from; k < to; k += step) {
        const int64_t end = lesser(k + step, to);
        for (int r = 0; r < TILE_ROWS; r++)
            max[r] = -(REAL)INFINITY;
        int unseen = masked | N(score_pairs)(task, first, count, vectors, k, end, bias, max);
        if (task->p->dropout)
            N(mask_tile)(task, first, vectors, k, end);
        if (task->phase == FORWARD)
            N(add_values)(task, first, vectors, k, end, unseen, max);
        else
            N(compute_gradients)(task, first, count, vectors, k, end, unseen);
    }
    if (task->phase == BACKWARD)
        N(add_gradients)(task, first, count, vectors, from, to);
}

/* The row vectors `low` .. `high` - 1 of a tile of rows with the columns from .. to - 1. */
static void N(attend_vectors)(
    const Task *task, int64_t first, int64_t end, int low, int high, int64_t from, int64_t to, REAL bias
) {
    const Scratch *s = &task->s;
    int64_t start = first + low * N(LANES), stop = first + high * N(LANES) < end ? first + high * N(LANES) : end;
    if (from == to)
        return;
    int unseen = s->column_position[to - 1] > s->slot_last[start] || s->column_position[from] < s->slot_first[stop - 1];
    N(attend_tile)(task, start, stop - start, high - low, from, to, bias, unseen);
}

/* A tile of rows with the packed tile of columns. Under causality a query sees the columns up to its own place, and a key is seen
 * from there on, so that the columns between the places of two row vectors go with fewer vectors, unless they are few.
 *
 *     queries as rows   vector 0  ######|                  keys as rows   vector 0  |####|####|######
 *                       vector 1  ######|####|                            vector 1       |####|######
 *                       vector 2  ######|####|####|                       vector 2            |######     columns -->
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

/* A tile of rows, of which each sees some columns before or behind it, with those of the packed tile of columns that some of them see. */
static void N(attend_between)(const Task *task, int64_t first, int64_t end, int vectors, int64_t columns, REAL bias) {
    const REAL *column = task->s.column_position;
    int64_t next = first + vectors * N(LANES), last = (next < end ? next : end) - 1, from = 0, to = columns;
    while (from < columns && column[from] < task->s.slot_first[first])
        from++;
    while (to > from && column[to - 1] > task->s.slot_last[last])
        to--;
    if (from < to)
        N(attend_vectors)(task, first, end, 0, vectors, from / REGISTER_ROWS * REGISTER_ROWS, round_up(to, REGISTER_ROWS), bias);
}

/* All rows of a list with the packed tile of columns. */
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
            const int64_t *interval = task->intervals[task->start + row - task->interval_row];
            REAL first = (REAL)(interval[0] - task->start), last = (REAL)(interval[1] - 1 - task->start);
            s->slot_first[i] = first > s->slot_first[i] ? first : s->slot_first[i];
            s->slot_last[i] = last < s->slot_last[i] ? last : s->slot_last[i];
        }
        s->slot_sum[i] = 0, s->slot_max[i] = -(REAL)INFINITY;
        if (row < p->block_rows)
            *low = row < *low ? row : *low, *high = row > *high ? row : *high;
        if (p->bias != NO_BIAS)
            N(place_row)(task, i, row < p->block_rows ? task->start + row : task->start, task->head + line % p->shared_heads);
        for (int n = 0; n < task->relations; n++)
            N(relate_row)(&s->relation[n], task->phase == BACKWARD, i, row < p->block_rows ? task->start + row : task->start);
    }
}

/* Pack the rows of the slots, and begin their sums. */
static void N(load_slots)(const Task *task, int64_t slots) {
    N(pack_rows)(task, 0, slots);
    if (task->phase == BACKWARD)
        N(pack_rows)(task, 1, slots);
    for (int a = 0; a < task->sums; a++)
        memset(task->s.slot_sums[a], 0, (size_t)(slots * task->padded_dim) * sizeof(REAL));
}

/* The rows of some lists, in the first `slots` slots, with all columns that they see. */
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
    start_tiles(s->tiles, segments, task->runs ? task->runs : among, task->runs != 0, from, to);
    if (p->mask && task->phase != BACKWARD)
        s->tiles->mask = p->mask + task->batch * p->mask_batch, s->tiles->mask_row = p->mask_row;
    s->tiles->runs = &p->runs, s->tiles->without = task->without[1];
    for (ColumnTile *tile; (tile = next_tile(s->tiles));) {
        few ? N(find_columns)(task, tile) : N(pack_tile)(task, tile);
        for (int i = 0; i < count; i++) {
            int times = __builtin_popcountll(tile->set & lists[i].set);
            REAL bias = times <= 1 || p->once ? 0 : (REAL)log(times);
            if (times && few)
                N(attend_few)(task, &lists[i], tile, bias);
            else if (times)
                N(attend_row_list)(task, &lists[i], tile->count, bias);
        }
        if (task->phase == BACKWARD)
            N(add_columns_to_dq)(task, tile);
    }
    few ? N(merge_few)(task, slots) : N(merge_slots)(task, slots);
}

#include "branches.h"

/* A block of keys through all query heads that share them. */
static void N(attend_key_block)(Task *task, int64_t start) {
    int64_t group = task->p->heads / task->p->kv_heads;
    N(start_block)(task, start);
    for (task->head = task->kv_head * group; task->head < (task->kv_head + 1) * group; task->head++) {
        task->column_head = task->head;
        N(attend_block)(task);
    }
}

/* All key blocks of a chunk, against the queries of the chunk that this round pairs it with. */
static void N(attend_chunks)(Task *task, int64_t chunk) {
    const Problem *p = task->p;
    int64_t start = chunk * p->chunk_rows, stop = start + p->chunk_rows < p->seq ? start + p->chunk_rows : p->seq;
    task->first_column = (chunk + p->round) % p->chunks * p->chunk_rows;
    task->last_column = task->first_column + p->chunk_rows < p->seq ? task->first_column + p->chunk_rows : p->seq;
    for (; start < stop && !(p->causal && task->last_column <= start); start += p->block_rows)
        N(attend_key_block)(task, start);
}

/* Tasks count blocks (or chunks) fastest, the last one first: under causality it has the most to do; then heads, then batch. */
static void N(run_task)(const Problem *p, int phase, int64_t index, void *scratch) {
    int by_key = phase == BACKWARD;
    int64_t shared = by_key ? 1 : p->shared_heads, heads = (by_key ? p->kv_heads : p->heads) / shared;
    int64_t parts = by_key ? p->chunks : (p->seq - p->first_row + p->block_rows - 1) / p->block_rows;
    int64_t part = parts - 1 - index % parts, head = index / parts;
    Task task = {.p = p, .phase = phase, .batch = head / heads, .head = head % heads * shared, .last_column = p->seq};
    N(start_task)(&task, scratch);
    if (by_key)
        return N(attend_chunks)(&task, part);
    N(start_block)(&task, p->first_row + part * p->block_rows);
    if (phase == DELTA)
        return N(compute_delta)(&task);
    N(attend_block)(&task);
    N(write_output)(&task);
}

#undef Relation
#undef Scratch
#undef Task
#undef Words
#undef Masks
#undef Vector
#undef Lanes
