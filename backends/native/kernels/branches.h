/* The branches of one query head, kind by kind: which rows of the block go with which columns. Included once for each KIND.
 *
 *     SEGMENTS   attend_segments       cell by cell, rows of a list by the set of branches that keep them
 *     BAND       attend_beyond         rows by their remainder, which see columns from a first to a last position
 *     RUNS       attend_runs           each run of rows with its runs of columns; single rows, each with its own, together
 *     GRID       attend_neighborhood   patch by patch of the grid, each with the cells around it (neighborhood.h)
 */

/* A row of the block goes into a list, once for each head that shares the block. */
static void N(add_row)(const Task *task, RowList *list, int64_t row) {
    const int64_t heads = task->p->shared_heads;
    for (int64_t head = 0; head < heads; head++)
        task->s.slot_line[list->first + list->count++] = row * heads + head;
}

/* Fill a list with the spare line, up to as many rows as products take together; return the next free slot. */
static int64_t N(end_list)(const Task *task, const RowList *list) {
    int64_t end = list->first + round_up(list->count, task->phase == BACKWARD ? N(LIST_STEP) : N(LANES));
    for (int64_t i = list->first + list->count; i < end; i++)
        task->s.slot_line[i] = N(lines)(task->p);
    return end;
}

/* Collect the rows of the first set that is left in the cell in the slots from `first` on; return the next free slot. */
static int64_t N(collect_rows)(const Task *task, int64_t start, int64_t stop, int64_t first, RowList *list) {
    *list = (RowList){.first = first};
    for (int64_t x = start; x < stop; x++) {
        uint64_t *set = &task->s.branch_set[x - start];
        if (!list->set)
            list->set = *set;
        if (!*set || *set != list->set)
            continue;
        N(add_row)(task, list, (task->intervals ? task->s.row_order[x - start] : x) - task->start);
        *set = 0;
    }
    return N(end_list)(task, list);
}

/* The rows start .. stop - 1, whose sets of branches are in branch_set. */
static void N(attend_rows)(const Task *task, const Segment *segments, int64_t start, int64_t stop) {
    RowList lists[MAX_ROW_LISTS];
    int count;
    do {
        int64_t slots = 0;
        for (count = 0; count < MAX_ROW_LISTS; count++) {
            slots = N(collect_rows)(task, start, stop, slots, &lists[count]);
            if (!lists[count].count)
                break;
        }
        if (count)
            N(attend_row_lists)(task, segments, lists, count, slots);
    } while (count == MAX_ROW_LISTS);
}

/* Whether row x takes no part: the mask hides it, a key, or it is left out. */
static int N(hidden)(const Task *task, int64_t x) {
    const Problem *p = task->p;
    int masked = p->mask && task->phase == BACKWARD && p->mask[task->batch * p->mask_batch + x * p->mask_row];
    return masked || in_table(&p->runs, task->without[0], x);
}

#include "neighborhood.h"

/* The branches of a group of SEGMENTS, cell by cell: no segment ends within one. */
static void N(attend_segments)(const Task *task, uint64_t served) {
    Segment segments[MAX_BRANCHES];
    for (int64_t at = task->start; at < task->stop;) {
        int64_t stop = segments_around(task->p, served, task->head, at, task->stop, segments);
        uint64_t overlapping = branches_overlapping(segments, served, task->first_column, task->last_column);
        for (int64_t x = at; x < stop; x++)
            task->s.branch_set[x - at] = N(hidden)(task, x) ? 0 : branches_keeping(segments, overlapping, x);
        N(attend_rows)(task, segments, at, stop);
        at = stop;
    }
}

static int N(reaches)(const Task *task, int64_t x) {
    return x + task->after >= task->first_column && x - task->before < task->last_column;
}

/* A branch of BAND: rows by their remainder modulo the rate, MAX_BRANCHES of these at a time; bit i of a set is a remainder. */
static void N(attend_band)(const Task *task, int64_t rate) {
    Segment segments[MAX_BRANCHES];
    int64_t rows = task->stop - task->start;
    for (int64_t done = 0; done < lesser(rate, rows); done += MAX_BRANCHES) {
        int64_t count = lesser(lesser(rate, rows) - done, MAX_BRANCHES);
        for (int64_t i = 0; i < count; i++)
            segments[i] = (Segment){(task->start + done + i) % rate, task->p->seq, rate, 0, {0}};
        for (int64_t x = 0; x < rows; x++) {
            int64_t i = x % rate - done, row = task->start + x;
            int seen = i >= 0 && i < count && N(reaches)(task, row) && !N(hidden)(task, row);
            task->s.branch_set[x] = seen ? (uint64_t)1 << i : 0;
        }
        N(attend_rows)(task, segments, task->start, task->stop);
    }
}

static void N(attend_run)(Task *task, const Segment *runs, int64_t count, int64_t start, int64_t stop) {
    for (int64_t x = start; count && x < stop; x++)
        task->s.branch_set[x - start] = !N(hidden)(task, x);
    task->segments = count;
    if (count)
        N(attend_rows)(task, runs, start, stop);
    task->segments = 0;
}

/* Sort rows by where their intervals begin: Shell's sort, which leaves those in order as they are. */
static void N(order_rows)(const Task *task, int64_t *order, int64_t count) {
    for (int64_t gap = count / 2; gap > 0; gap = gap == 2 ? 1 : gap * 5 / 11)
        for (int64_t i = gap; i < count; i++) {
            int64_t x = order[i], at = i;
            for (; at >= gap && N(interval_of)(task, order[at - gap])[0] > N(interval_of)(task, x)[0]; at -= gap)
                order[at] = order[at - gap];
            order[at] = x;
        }
}

/* The first rows of row_order, each of which sees an interval: all columns of these at once, of which each row sees its own. */
static void N(attend_interval)(Task *task, int64_t count) {
    const int64_t *order = task->s.row_order;
    Segment segments[MAX_BRANCHES];
    N(order_rows)(task, task->s.row_order, count);
    for (int64_t i = 0; i < count; i++) {
        const int64_t *columns = N(interval_of)(task, order[i]), stop = lesser(columns[1], task->p->seq);
        task->s.branch_set[i] = !N(hidden)(task, order[i]);
        if (!task->segments || (columns[0] > segments[task->segments - 1].stop && task->segments < MAX_BRANCHES))
            segments[task->segments++] = (Segment){columns[0], stop, 1, 1, {0}};
        else
            segments[task->segments - 1].stop = greater(segments[task->segments - 1].stop, stop);
    }
    if (count)
        N(attend_rows)(task, segments, task->start, task->start + count);
    task->segments = 0;
}

/* Consecutive rows from `at` on that see few runs of columns each, from `run` on: the first one of all rows, the second, ... */
static void N(attend_intervals)(Task *task, const RunTables *t, int64_t run, int64_t at, int64_t rows) {
    int64_t most = 0;
    for (int64_t i = run; i < run + rows; i++)
        most = greater(most, t->first_columns[i + 1] - t->first_columns[i]);
    task->intervals = t, task->interval_run = run, task->interval_row = at;
    for (task->interval = 0; task->interval < most; task->interval++) {
        int64_t count = 0;
        for (int64_t x = at, i = run; x < at + rows; x++, i++) {
            if (task->interval >= t->first_columns[i + 1] - t->first_columns[i])
                continue;
            const int64_t *columns = N(interval_of)(task, x);
            if (columns[0] < task->last_column && columns[1] > task->first_column)
                task->s.row_order[count++] = x;
        }
        N(attend_interval)(task, count);
    }
    task->intervals = NULL;
}

/* A branch of RUNS: each run of rows with the runs of columns that it sees, MAX_BRANCHES of these at a time. */
static void N(attend_runs)(Task *task, const RunTables *t, int64_t table) {
    enum { EXACT_POSITIONS = 1 << 24 }; /* of rows and columns, as fp32 numbers */
    Segment segments[MAX_BRANCHES];
    int64_t at = task->start;
    for (int64_t run = run_of_row(t, table, at); at < task->stop && run < t->table[table + 1]; run++) {
        int64_t stop = greater(lesser(t->rows_end[run], task->stop), at), rows = 0;
        if (t->rows_end[run] == at + 1 && task->p->seq <= EXACT_POSITIONS)
            rows = single_rows(t, run, lesser(t->table[table + 1], run + task->stop - at));
        if (rows > 1) {
            N(attend_intervals)(task, t, run, at, rows);
            at += rows, run += rows - 1;
            continue;
        }
        for (int64_t first = t->first_columns[run], end = t->first_columns[run + 1]; first < end; first += MAX_BRANCHES) {
            int64_t count = 0;
            for (int64_t i = first; i < lesser(end, first + MAX_BRANCHES); i++)
                if (t->columns[i][0] < task->last_column && t->columns[i][1] > task->first_column)
                    segments[count++] = (Segment){t->columns[i][0], lesser(t->columns[i][1], task->p->seq), 1, 1, {0}};
            N(attend_run)(task, segments, count, at, stop);
        }
        at = stop;
    }
}

/* How far a row sees: a query as far as the branch says, under causality nothing ahead; a key the other way round. */
static void N(set_reach)(Task *task, int64_t b) {
    const Problem *p = task->p;
    int64_t back = UNBOUNDED, ahead = UNBOUNDED;
    if (p->kind[b] == BAND && p->length[b] < p->seq)
        back = p->length[b] - 1;
    if (p->kind[b] == BAND && p->ahead[b] < p->seq - 1)
        ahead = p->ahead[b];
    if (p->causal)
        ahead = 0;
    int by_key = task->phase == BACKWARD;
    task->before = by_key ? ahead : back, task->after = by_key ? back : ahead;
    task->by_place = task->own && !p->causal;
}

/* The part of a BAND that is at least `beyond` away: what is before a row, then what is behind it. */
static void N(attend_beyond)(Task *task, int64_t rate, int64_t beyond) {
    int64_t before = task->before, after = task->after;
    if (!beyond)
        return N(attend_band)(task, rate);
    task->after = -beyond;
    if (before)
        N(attend_band)(task, rate);
    task->before = -beyond, task->after = after;
    if (after)
        N(attend_band)(task, rate);
}

/* The number of the tables that a call gives for a head. */
static inline int64_t N(given_table)(const Problem *p, int64_t batch, int64_t head) {
    return (p->given_batches > 1 ? batch * p->given_heads : 0) + head * p->given_heads / p->heads;
}

/* The block of rows through all branches of one query head. */
static void N(attend_block)(Task *task) {
    const Problem *p = task->p;
    for (int64_t g = 0; g < p->groups; g++) {
        uint64_t served = branches_serving(p, p->branch_group[g], task->head);
        if (!served)
            continue;
        int b = __builtin_ctzll(served);
        int64_t at = task->head * p->branches + b, table = p->without[at];
        int by_key = task->phase == BACKWARD;
        task->without[0] = table < 0 ? -1 : 2 * table + by_key, task->without[1] = table < 0 ? -1 : 2 * table + !by_key;
        N(set_relations)(task, b);
        N(set_reach)(task, b);
        task->merged_once = task->phase == FORWARD && p->groups == 1 && p->kind[b] != RUNS && !p->beyond[at];
        if (p->kind[b] == SEGMENTS)
            N(attend_segments)(task, served);
        else if (p->kind[b] == BAND)
            N(attend_beyond)(task, p->rate[b], p->beyond[at]);
        else if (p->kind[b] == RUNS && b == p->given)
            N(attend_runs)(task, &p->given_runs, 2 * N(given_table)(p, task->batch, task->head) + by_key);
        else if (p->kind[b] == RUNS)
            N(attend_runs)(task, &p->runs, 2 * p->offset[at] + by_key);
        else
            N(attend_neighborhood)(task, &p->grid[b]);
    }
}
