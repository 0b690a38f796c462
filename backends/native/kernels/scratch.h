/* The state of one task, and the scratch memory of one thread that it works in. Included once for each KIND.
 *
 *     Two operands a side:          rows[0]  rows[1]     columns[0]  columns[1]     slot_sums[0]    slot_sums[1]
 *         FORWARD                   q                    k           v              out
 *         BACKWARD                  k        v           q           dout           dk              dv
 *
 * A slot is a place in the packed rows. The lines of a block are its rows, counted from its start; where heads share it
 * (`shared_heads`), those of one position lie side by side. One line more is spare, that of empty slots.
 *
 *     position    start        start + 1    start + 2
 *     line        0  1  2  3   4  5  6  7   8  9 10 11   12    of heads 0 1 2 3 that share a key/value head; 12 is spare
 */
#define Scratch N(Scratch)
#define Task N(Task)

#undef UNITS
#define UNITS(count) (((count) + UNIT - 1) / UNIT)

typedef struct {
    REAL *accumulator;         /* (lines + 1, padded_dim) */
    REAL *slot_sums[2];        /* (row vectors of the slots, padded_dim, LANES) */
    REAL *packed_rows[2];      /* (row vectors of the slots, padded_dim, LANES) */
    REAL *packed_columns[2];   /* (dim panels, TILE_COLUMNS, PANEL) */
    REAL *added_columns[2];    /* the same, as add_to_rows adds them; KIND pairs has two columns in a unit */
    Columns *columns;          /* (2,): the packed columns, or those that lie as products can read them */
    REAL *plain_rows;          /* (slots, padded_dim): rows[0] as they are; KIND pairs has two rows in a unit */
    REAL *column_sums;         /* (TILE_COLUMNS, padded_dim) */
    REAL *scores, *score_gradients; /* (TILE_COLUMNS, TILE_ROWS); for add_to_rows, KIND pairs has two columns in a unit */
    REAL *gradient_rows;       /* score_gradients for add_to_columns: KIND pairs has two rows in a unit */
    INTEGER *kept, *kept_by_row; /* (TILE_COLUMNS, TILE_ROWS) and the transpose: masks of the weights that are kept */
    REAL *slot_max, *slot_sum; /* (slots + TILE_ROWS,): running maximum, to base 2, and sum */
    REAL *slot_first, *slot_last; /* (slots + TILE_ROWS,): the first and last column_position that a slot may see */
    REAL *column_position;     /* (TILE_COLUMNS,): columns, counted from the start of the block */
    REAL *row_at[3], *row_slope; /* (slots + TILE_ROWS,): positions of rows, and the slope of their heads, for a bias; */
    INTEGER *row_table;          /* where the table of their heads begins */
    REAL *column_at[3];          /* (TILE_COLUMNS,): positions of columns */
    INTEGER *column_table;       /* (TILE_COLUMNS,): in BACKWARD where the tables of a query begin, of ROW_TABLES; else 0 */
    REAL *cap_slope;             /* (TILE_COLUMNS, TILE_ROWS): the derivative of the softcap */
    REAL *column_lse, *column_delta; /* (TILE_COLUMNS,): of the queries, in BACKWARD */
    REAL *row_max, *row_sum;   /* (lines + 1,): the same between tiles of different cells */
    int64_t *slot_line;        /* (slots,): the line of a slot */
    int64_t *position;         /* (block_rows + 1,): that of the rows of a brick in the sequence */
    Relation *relation;        /* (relations,): of the branch at hand */
    INTEGER *row_places, *column_places; /* (relations, 3, 4, slots + TILE_ROWS) and (relations, 3, TILE_COLUMNS): their numbers */
    REAL *strip_keys, *strip_values;      /* as strips/packing.h lays them out */
    INTEGER *strip_seen;                  /* (vectors of cells of a plane, GROUP_ROWS, LANES): -1 where a row sees a cell, else 0 */
    uint64_t *branch_set;      /* (block_rows,): the branches that keep a row of the cell; 0 once it is collected */
    int64_t *row_order;        /* (block_rows,): rows in the order of their intervals */
    TileIterator *tiles;
} Scratch;

typedef struct {
    const Problem *p;
    Scratch s;
    int phase, sums; /* how many slot_sums there are */
    int64_t batch, head, kv_head, start, stop; /* the block: rows start .. stop - 1, or of a brick as many as its cells */
    int64_t chunk; /* of BACKWARD: that of the block */
    Brick brick;   /* the block, where it is one */
    int64_t padded_dim, row_bytes;
    TensorView row_tensor[2], column_tensor[2]; /* what is packed as rows and as columns */
    int64_t row_head, column_head, first_column, last_column; /* only the columns first_column .. last_column - 1 */
    int64_t before, after; /* of the branches at hand: a row at x sees columns from x - before to x + after, or UNBOUNDED */
    int64_t without[2];    /* the tables of the rows and of the columns that these branches leave out, -1 = none */
    const RunTables *intervals; /* RUNS of one row each, `interval_run` that of `interval_row`: rows of row_order see their columns */
    int64_t interval_run, interval_row, interval; /* of the run so numbered; else NULL */
    int64_t segments;      /* RUNS, GRID: so many segments of columns, none in two, each seen by the lists that it names; else 0 */
    int own, relations;    /* of the branch at hand: the first `own` say which pairs are seen, the others which are not */
    int merged_once;       /* FORWARD: whether the rows at hand have no other sums to be merged with */
    int by_place;          /* whether a row sees all that its own relations show, before it or behind it */
} Task;

/* The interval of columns at hand of row `x`. */
static inline const int64_t *N(interval_of)(const Task *task, int64_t x) {
    const RunTables *t = task->intervals;
    return t->columns[t->first_columns[task->interval_run + x - task->interval_row] + task->interval];
}

/* The columns as add_to_rows reads them. */
static inline Columns N(added)(const Scratch *s, int which) {
    return UNIT == 1 ? s->columns[which] : (Columns){s->added_columns[which], PANEL};
}

static char *N(reserve)(char **at, size_t count, size_t size) {
    char *here = *at;
    *at += (count * size + 63) / 64 * 64;
    return here;
}

/* The lines of a block; the number of the spare one. */
static inline int64_t N(lines)(const Problem *p) { return p->block_rows * p->shared_heads; }

/* The row of a line. A division of each would be felt where no heads share a block. */
static inline int64_t N(row_of)(const Problem *p, int64_t line) { return p->shared_heads == 1 ? line : line / p->shared_heads; }

/* The position in the sequence of a row of the block, or of the spare one. */
static inline int64_t N(position)(const Task *task, int64_t row) {
    return has_bricks(task->p) ? task->s.position[row] : task->start + row;
}

static int64_t N(slot_count)(const Problem *p) { return round_up(N(lines)(p), N(LIST_STEP)) + MAX_ROW_LISTS * N(LIST_STEP); }

/* The bytes of a thread's scratch in a phase; lays it out in `memory` if `s` is not NULL. */
static size_t N(lay_out_scratch)(const Problem *p, int phase, Scratch *s, char *memory) {
    size_t rows = (size_t)p->block_rows, lines = (size_t)N(lines)(p), slots = (size_t)N(slot_count)(p);
    size_t padded = (size_t)round_up(p->dim, PANEL);
    size_t backward = phase == BACKWARD;
    char *at = memory;
    Scratch unused;
    s = s ? s : &unused;
#define RESERVE(count, type) (type *)(void *)N(reserve)(&at, count, sizeof(type))
    s->accumulator = RESERVE(backward ? 0 : (lines + 1) * padded, REAL);
    for (int i = 0; i < 2; i++) {
        s->slot_sums[i] = RESERVE(i == 0 || backward ? slots * padded : 0, REAL);
        s->packed_rows[i] = RESERVE(i == 0 || backward ? slots * padded : 0, REAL);
        s->packed_columns[i] = RESERVE(TILE_COLUMNS * padded, REAL);
        s->added_columns[i] = UNIT == 1 ? s->packed_columns[i] : RESERVE(i == 1 || backward ? TILE_COLUMNS * padded : 0, REAL);
    }
    s->columns = RESERVE(2, Columns);
    s->plain_rows = RESERVE(backward * slots * padded / UNIT, REAL);
    s->column_sums = RESERVE(backward * TILE_COLUMNS * padded, REAL);
    s->scores = RESERVE(TILE_COLUMNS * TILE_ROWS, REAL);
    s->score_gradients = RESERVE(backward * TILE_COLUMNS * TILE_ROWS, REAL);
    s->gradient_rows = UNIT == 1 ? s->score_gradients : RESERVE(backward * TILE_COLUMNS * TILE_ROWS, REAL);
    s->kept = RESERVE(p->dropout ? TILE_COLUMNS * TILE_ROWS : 0, INTEGER);
    s->kept_by_row = RESERVE(p->dropout && backward ? TILE_COLUMNS * TILE_ROWS : 0, INTEGER);
    s->slot_max = RESERVE(slots + TILE_ROWS, REAL), s->slot_sum = RESERVE(slots + TILE_ROWS, REAL);
    s->slot_first = RESERVE(slots + TILE_ROWS, REAL), s->slot_last = RESERVE(slots + TILE_ROWS, REAL);
    s->column_position = RESERVE(TILE_COLUMNS, REAL);
    s->column_lse = RESERVE(TILE_COLUMNS, REAL), s->column_delta = RESERVE(TILE_COLUMNS, REAL);
    size_t biased = p->bias != NO_BIAS;
    for (int d = 0; d < 3; d++)
        s->row_at[d] = RESERVE(biased * (slots + TILE_ROWS), REAL), s->column_at[d] = RESERVE(biased * TILE_COLUMNS, REAL);
    s->column_table = RESERVE(biased * TILE_COLUMNS, INTEGER);
    s->row_slope = RESERVE(biased * (slots + TILE_ROWS), REAL), s->row_table = RESERVE(biased * (slots + TILE_ROWS), INTEGER);
    s->cap_slope = RESERVE(p->softcap > 0 && backward ? TILE_COLUMNS * TILE_ROWS : 0, REAL);
    s->row_max = RESERVE(lines + 1, REAL), s->row_sum = RESERVE(lines + 1, REAL);
    s->relation = RESERVE((size_t)p->relations, Relation);
    s->row_places = RESERVE((size_t)p->relations * 12 * (slots + TILE_ROWS), INTEGER);
    s->column_places = RESERVE((size_t)p->relations * 3 * TILE_COLUMNS, INTEGER);
    s->position = RESERVE(has_bricks(p) ? rows + 1 : 0, int64_t);
    size_t cells = UNIT == 1 && has_strips(p, phase) ? (size_t)most_cells(p) : 0;
    s->strip_keys = RESERVE(cells * padded, REAL), s->strip_values = RESERVE(cells * padded, REAL);
    s->strip_seen = RESERVE(GROUP_ROWS * cells, INTEGER);
    s->slot_line = RESERVE(slots, int64_t), s->branch_set = RESERVE(rows, uint64_t), s->row_order = RESERVE(rows, int64_t), s->tiles = RESERVE(1, TileIterator);
#undef RESERVE
    return (size_t)(at - memory);
}

static void N(place_relations)(const Problem *p, Scratch *s) {
    const int64_t slots = N(slot_count)(p) + TILE_ROWS;
    for (int64_t i = 0; i < p->relations; i++)
        for (int d = 0; d < 3; d++) {
            INTEGER *numbers = s->row_places + (3 * i + d) * 4 * slots;
            s->relation[i].first[d] = numbers, s->relation[i].span[d] = numbers + slots;
            s->relation[i].low[d] = numbers + 2 * slots, s->relation[i].high[d] = numbers + 3 * slots;
            s->relation[i].place[d] = s->column_places + (3 * i + d) * TILE_COLUMNS;
        }
}

/* The tensors, head and sizes of a task; its sums are 0. */
static void N(start_task)(Task *task, void *scratch) {
    const Problem *p = task->p;
    int by_key = task->phase == BACKWARD;
    task->kv_head = by_key ? task->head : task->head / (p->heads / p->kv_heads);
    task->padded_dim = round_up(p->dim, PANEL);
    task->row_bytes = p->dim * bytes_of(p->dtype);
    task->sums = by_key ? 2 : 1;
    N(lay_out_scratch)(p, task->phase, &task->s, scratch);
    N(place_relations)(p, &task->s);
    if (by_key)
        N(clear)(task->s.column_sums, lesser(TILE_COLUMNS, round_up(p->seq, REGISTER_ROWS)) * task->padded_dim);
    TensorView queries[2] = {p->q, p->dout}, keys[2] = {p->k, p->v};
    memcpy(task->row_tensor, by_key ? keys : queries, sizeof task->row_tensor);
    memcpy(task->column_tensor, by_key ? queries : keys, sizeof task->column_tensor);
    task->row_head = task->head, task->column_head = task->kv_head;
}

/* Where the rows of a brick are in the sequence; the spare one is where the first is. */
static void N(start_brick)(Task *task, int64_t block) {
    const Problem *p = task->p;
    const int64_t *size = p->grid[0].size;
    const Brick brick = task->brick = brick_at(p, &p->bricks, block);
    int64_t row = 0;
    for (int64_t z = brick.first[0]; z < brick.first[0] + brick.sides[0]; z++)
        for (int64_t y = brick.first[1]; y < brick.first[1] + brick.sides[1]; y++)
            for (int64_t x = brick.first[2]; x < brick.first[2] + brick.sides[2]; x++)
                task->s.position[row++] = (z * size[1] + y) * size[2] + x;
    task->start = task->s.position[0], task->stop = task->start + row;
    task->s.position[p->block_rows] = task->start;
}

static void N(start_block)(Task *task, int64_t block) {
    const Problem *p = task->p;
    task->start = (task->phase == BACKWARD ? p->first_key : p->first_row) + block * p->block_rows;
    task->stop = lesser(task->start + p->block_rows, task->phase == BACKWARD ? p->end_key : p->end_row);
    if (has_bricks(p))
        N(start_brick)(task, block);
    for (int64_t r = 0; r <= N(lines)(p); r++)
        task->s.row_max[r] = -(REAL)INFINITY, task->s.row_sum[r] = 0;
}

/* What branch `b` shows to a head; an axis of one cell relates all, and is left out if there is another. */
static void N(relate)(const Problem *p, int64_t b, int64_t head, Relation *relation) {
    const int64_t rate = lesser(p->rate[b], p->seq), steps = (lesser(p->length[b], p->seq) - 1) / rate;
    Axis axes[3];
    relation->kind = (int)p->kind[b], relation->axes = 1, relation->offset = p->offset[head * p->branches + b];
    if (p->kind[b] != GRID) {
        relation->axis[0] = p->kind[b] == BAND ? axis_of(p->seq, rate, steps, 1, 0) : axis_of(1, p->rate[b], 0, p->length[b], 0);
        return;
    }
    set_axes(&p->grid[b], axes);
    relation->axes = 0;
    for (int d = 0; d < 3; d++)
        if (axes[d].size > 1 || (d == 2 && !relation->axes))
            relation->of_grid[relation->axes] = d, relation->axis[relation->axes++] = axes[d];
}

/* The relations of branch `b`: its own, if it is of GRID, and those of the branches whose pairs it leaves out. */
static void N(set_relations)(Task *task, int64_t b) {
    const Problem *p = task->p;
    task->own = p->kind[b] == GRID, task->relations = 0;
    if (task->own)
        N(relate)(p, b, task->head, &task->s.relation[task->relations++]);
    for (uint64_t left = p->shown[task->head * p->branches + b]; left; left &= left - 1)
        N(relate)(p, __builtin_ctzll(left), task->head, &task->s.relation[task->relations++]);
}
