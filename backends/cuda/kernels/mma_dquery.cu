/* The gradient of queries on tensor cores, over query_tiles; `mma_backward.cuh` draws its data flow:

       dquery = scale dS K

   A tile's rows are queries, its columns keys. */
#include "mma_dquery.cuh"

KERNEL(mma_dquery) {
    SHARED Task task;
    SHARED int key_head;
    SHARED Columns columns;
    SHARED Reach reaches[THREADS / 32];
    SHARED float biases[WINDOW];
    SHARED uint4 buffer[2 * HALF];
    first_tile(&task, &args, 0);
    while (task.tile.rows) {
        unsigned own_query[FRAGMENTS][STEPS][4], own_dout[FRAGMENTS][STEPS][4];
        Sums dquery;
        float shift[FRAGMENTS][2], delta[FRAGMENTS][2];
        if (is_first())
            key_head = task.tile.head / group_of(&args);
        note_reach(reaches, &task.tile);
        clear(dquery);
        row_terms(shift, delta, line_of(&args, task.batch, task.tile.head), &args, &task.tile);
        load_row_fragments(own_query, own_dout, buffer, args.query, args.dout, task.batch, task.tile.head, &args, &task.tile);
        locate_column(&columns, biases, &task.keys, &args, task.batch, this_thread());
        synchronize();
        copy_pair(buffer, &columns, 0, args.key, args.value, task.batch, key_head, args.head_dim);
#pragma unroll 1
        for (int column = 0; column < task.keys.total; column += SCORE_COLUMNS) {
            if (column % COLUMNS == 0) {
                int next = column + COLUMNS, after = next + COLUMNS;
                copy_async_wait(0);
                synchronize();
                if (next < task.keys.total)
                    copy_pair(buffer, &columns, next, args.key, args.value, task.batch, key_head, args.head_dim);
                if (after < task.keys.total && after % THREADS == 0)
                    locate_column(&columns, biases, &task.keys, &args, task.batch, after + this_thread());
            }
            int slot = column % WINDOW;
            Reach reach = reaches[this_thread() / 32];
            if (none_seen(&columns, slot, reach, args.back, args.ahead))
                continue;
            int compare = bounded(&args) && some_cut(&columns, slot, reach, args.back, args.ahead);
            const uint4 *columns_at = buffer + half_of(column) + column % COLUMNS * CHUNKS;
            Scores p, ds;
            score_tile(p, own_query, STEPS, 0, columns_at);
            score_tile(ds, own_dout, STEPS, 0, columns_at + HALF / 2);
#if DROPOUT
            drop(ds, kept_weights(&columns, slot, -1, &args, &task.keys, &task.tile), args.keep_scale);
#endif
            const float *found = columns.biased[slot / 32] ? biases + slot : 0;
#if CHANGED
            ScoreOf of = score_of(&args, task.batch, task.tile.head);
            changed_score_gradients(ds, p, found, &of, shift, delta, &columns, slot, &task.tile);
#else
            query_score_gradients(ds, p, found, args.scale * LOG2E, shift, delta);
#endif
            if (compare)
                mask_beyond(ds, &columns, slot, args.back, args.ahead, &task.tile);
#if CHANGED
            finish_score_gradients(ds, p, &args, &of, &columns, slot, &task.tile);
#endif
            accumulate(dquery, ds, columns_at);
        }
        int batch = task.batch, number = take_number(&task, &args);
        Tile tile = task.tile;
        copy_async_wait(0);
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
