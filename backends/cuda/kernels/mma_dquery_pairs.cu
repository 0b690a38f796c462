/* The gradient of queries on tensor cores, over query_tiles, for HEAD_DIM 128: two warps, a pair, have the same 32 rows.

       dquery = scale dS K        dS = P (dout.v - delta), as in `mma_backward.cuh`

       rows of the tile, of query and dout --> `buffer` (shared) --> row fragments (registers) of both warps, once a tile
       for each COLUMNS keys, a step, with keys and values in `buffer`:
           start copying those of the next step; locate keys after them
           dquery (registers: 32 rows, half of HEAD_DIM) += dS of the last step . its keys, transposed
               dS of half the keys is this warp's own; that of the others comes from `exchange`, where the other warp left it
           scores and dout.v (registers: 32 rows, half of the keys) --> dS, rounded --> kept in registers, and to `exchange`
       dquery --> `buffer` --> global memory, written or, for later groups, added

   `mma_dquery` loads a fragment for every two products at this HEAD_DIM, since registers hold 16 rows of a warp. A load takes
   shared memory four cycles, and two products take GPUs of 8.0, 8.7 and 9.0 four or fewer: loads are what limits there. A warp of
   a pair has 32 rows: 24 loads for 96 products, and 2 reads and 2 writes of the exchange that take as long. GPUs of 10.x and 11.x
   have this kernel too, with shared memory for two blocks as these; 8.6, 8.9 and 12.x have not, and multiply at half the rate or
   less.

   Both warps of a pair leave out the same steps, those whose keys none of their rows sees. dS is used a step late, so that the
   barrier of the step is the exchange's too.

   Shared memory from the barrier of step j to the next:

                                | barrier: keys, values of j and dS of j - 1 are there     | barrier of j + 1
       keys, slot (j - 1) % 3   | read: dquery                                             | free
       keys, slot j % 3         | read: scores                                             | read: dquery
       keys, slot (j + 1) % 3   | keys j + 1 are being copied ---------------------------> | read: scores
       values, slot j % 2       | read: dout.v                                             | free
       values, slot (j + 1) % 2 | values j + 1 are being copied -------------------------> | read: dout.v
       exchange, slot j % 2     | written: dS of j                                         | read
       exchange, other slot     | read: dS of j - 1                                        | free
       window of columns        | read: of j and j + 1; written: those after               | ...

   THREADS 128, TILE_ROWS 64, BLOCKS 2. Dynamic shared memory, 48 KB: five slots of COLUMNS rows, and the exchange. */
#define SHARING 2
#include "mma_dquery.cuh"

#if SUM_CHUNKS % SWAPPED
#error "the chunks of a warp's sums change places among each other"
#endif

/* Keys, or values, of a step. */
#define SLOT (COLUMNS * CHUNKS)

/* dS of a warp's rows and its half of the keys, as the left fragments of a product. */
typedef unsigned Rounded[FRAGMENTS][4];

/* Where the keys and the values of the step from number `column` on pass through `buffer`, and this thread's dS the exchange. */
DEVICE int key_slot(int column) { return column / COLUMNS % 3 * SLOT; }
DEVICE int value_slot(int column) { return (3 + column / COLUMNS % 2) * SLOT; }
DEVICE int exchange_slot(int column) { return column / COLUMNS % 2 * FRAGMENTS * THREADS; }

/* Starts copying the keys and values from number `column` on. */
DEVICE void copy_step(uint4 *buffer, const Columns *columns, int column, int batch, int head, const Args *args) {
    copy_columns(buffer + key_slot(column), rows_of(args->key, batch, opaque(head)), columns, column, args->head_dim);
    copy_columns(buffer + value_slot(column), rows_of(args->value, batch, opaque(head)), columns, column, args->head_dim);
}

/* Notes the terms of the scores of the tile's rows, as `row_terms` has them; what they are for a thread's rows. */
DEVICE void note_terms(float2 *terms, long long line, const Args *args, const Tile *tile) {
    int row = thread_index();
    if (row >= TILE_ROWS)
        return;
    int position = own_position(tile, row);
    float seen = load_lse(args->lse + line + position);
    terms[row] = make_float2(seen == NEG_INF ? NEG_INF : -seen * LOG2E, LOAD(args->delta + line + position));
}

DEVICE void own_terms(float (*shift)[2], float (*delta)[2], const float2 *terms) {
#pragma unroll
    for (int m = 0; m < FRAGMENTS; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float2 both = terms[own_row(this_thread(), m, h)];
            shift[m][h] = both.x, delta[m][h] = both.y;
        }
}

/* Rounds dS, to be kept and, at `slot`, for the other warp. */
DEVICE void round_and_share(Rounded rounded, Scores ds, uint4 *slot) {
#pragma unroll
    for (int m = 0; m < FRAGMENTS; m++) {
#pragma unroll
        for (int i = 0; i < 4; i++)
            rounded[m][i] = pack(ds[m][i / 2][i % 2 * 2], ds[m][i / 2][i % 2 * 2 + 1]);
        slot[m * THREADS + this_thread()] = make_uint4(rounded[m][0], rounded[m][1], rounded[m][2], rounded[m][3]);
    }
}

/* sum += dS of a half of a step's keys times these. */
DEVICE void accumulate_half(Sums sum, Rounded ds, const uint4 *keys_at, int half) {
    unsigned thread = this_thread();
    multiply_along(sum, ds, keys_at + half * SCORE_COLUMNS * CHUNKS + first_chunk(thread), row_fragment(thread));
}

/* sum += dS of both warps of the pair, this one's `own` and the other's from `slot`, times the keys of their step. */
DEVICE void accumulate_step(Sums sum, Rounded own, const uint4 *slot, const uint4 *keys_at) {
    int half = share(this_thread());
    accumulate_half(sum, own, keys_at, half);
    Rounded other;
#pragma unroll
    for (int m = 0; m < FRAGMENTS; m++) {
        uint4 words = slot[m * THREADS + (this_thread() ^ 32)];
        other[m][0] = words.x, other[m][1] = words.y, other[m][2] = words.z, other[m][3] = words.w;
    }
    accumulate_half(sum, other, keys_at, !half);
}

KERNEL(mma_dquery_pairs) {
    SHARED Task task;
    SHARED int key_head;
    SHARED Columns columns;
    SHARED float biases[WINDOW];
    SHARED float2 terms[TILE_ROWS];
    DYNAMIC_SHARED(bytes);
    uint4 *buffer = (uint4 *)bytes, *exchange = buffer + 5 * SLOT;
    first_tile(&task, &args, 0);
    while (task.tile.rows) {
        unsigned own_query[FRAGMENTS][STEPS][4], own_dout[FRAGMENTS][STEPS][4];
        Rounded rounded;
        Sums dquery;
        int pending = 0; /* whether the last step has left dS */
        if (is_first())
            key_head = task.tile.head / group_of(&args);
        clear(dquery);
        locate_column(&columns, biases, &task.keys, &args, task.batch, this_thread());
        note_terms(terms, line_of(&args, task.batch, task.tile.head), &args, &task.tile);
        load_row_fragments(own_query, own_dout, buffer, args.query, args.dout, task.batch, task.tile.head, &args, &task.tile);
        synchronize();
        copy_step(buffer, &columns, 0, task.batch, key_head, &args);
#pragma unroll 1
        for (int column = 0;; column += COLUMNS) {
            int next = column + COLUMNS, after = next + COLUMNS;
            copy_async_wait(0);
            synchronize();
            if (next < task.keys.total)
                copy_step(buffer, &columns, next, task.batch, key_head, &args);
            if (after < task.keys.total && after % THREADS == 0)
                locate_column(&columns, biases, &task.keys, &args, task.batch, after + this_thread());
            if (pending)
                accumulate_step(dquery, rounded, exchange + exchange_slot(next), buffer + key_slot(after));
            pending = 0;
            if (column >= task.keys.total)
                break;
            int slot = column % WINDOW;
            if (none_seen(&columns, slot, reach_of(&task.tile), args.back, args.ahead))
                continue;
            int first = share(this_thread()) * SCORE_COLUMNS;
            Scores p, ds;
#if DROPOUT
            unsigned kept = kept_weights(&columns, slot + first, -1, &args, &task.keys, &task.tile);
#endif
            score_tile(p, own_query, STEPS, 0, buffer + key_slot(column) + first * CHUNKS);
            score_tile(ds, own_dout, STEPS, 0, buffer + value_slot(column) + first * CHUNKS);
            /* Across this barrier the compiler moves no loads, for which there would be no registers. */
            synchronize_warp();
#if DROPOUT
            drop(ds, kept, args.keep_scale);
#endif
            float shift[FRAGMENTS][2], delta[FRAGMENTS][2];
            own_terms(shift, delta, terms);
            const float *found = columns.biased[slot / 32] ? biases + slot + first : 0;
#if CHANGED
            ScoreOf of = score_of(&args, task.batch, task.tile.head);
            changed_score_gradients(ds, p, found, &of, shift, delta, &columns, slot + first, &task.tile);
#else
            query_score_gradients(ds, p, found, args.scale * LOG2E, shift, delta);
#endif
            if (bounded(&args) && some_cut(&columns, slot, reach_of(&task.tile), args.back, args.ahead))
                mask_beyond(ds, &columns, slot + first, args.back, args.ahead, &task.tile);
#if CHANGED
            finish_score_gradients(ds, p, &args, &of, &columns, slot + first, &task.tile);
#endif
            round_and_share(rounded, ds, exchange + exchange_slot(column));
            pending = 1;
        }
        int batch = task.batch, number = take_number(&task, &args);
        Tile tile = task.tile;
        synchronize();
#if LEARNED
        give_learned(&args, tile.head);
#endif
        stage_gradient(buffer, dquery, args.scale);
        Found next = find_tile(&args, number);
        const float *lse = args.lse + line_of(&args, batch, tile.head);
        write_gradient(rows_of(args.dquery, batch, tile.head), buffer, lse, 0, &args, &tile);
        begin_tile(&task, &args, &next, 0);
        synchronize();
    }
}
