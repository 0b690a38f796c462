/* The gradient of queries on tensor cores, over query_tiles; `mma_backward.cuh` draws its data flow:

       dquery = scale dS K

   A tile's rows are queries, its columns keys. */
#include "mma_dquery.cuh"

KERNEL(mma_dquery) {
    SHARED int item, batch, key_head;
    SHARED Tile tile;
    SHARED Keys keys;
    SHARED Columns columns;
    SHARED float biases[WINDOW];
    SHARED uint4 buffer[2 * HALF];
    int element;
    Tile found;
    start_tiles(&item);
    while (next_tile(&args, &item, &found, &element)) {
        unsigned own_query[FRAGMENTS][STEPS][4], own_dout[FRAGMENTS][STEPS][4];
        Sums dquery;
        float shift[FRAGMENTS][2], delta[FRAGMENTS][2];
        if (thread_index() == 0) {
            int end = own_position(&found, found.rows - 1) + args.ahead + 1;
            tile = found, batch = element, key_head = found.head / group_of(&args);
            find_keys(&keys, &args, found.row, found.set, found.row - args.back, end);
            find_place(&keys, &args, element, found.head);
        }
        synchronize();
        clear(dquery);
        row_terms(shift, delta, line_of(&args, batch, tile.head), &args, &tile);
        load_row_fragments(own_query, own_dout, buffer, args.query, args.dout, batch, tile.head, &args, &tile);
        locate_column(&columns, biases, &keys, &args, batch, this_thread());
        synchronize();
        copy_pair(buffer, &columns, 0, args.key, args.value, batch, key_head, args.head_dim);
#pragma unroll 1
        for (int column = 0; column < keys.total; column += SCORE_COLUMNS) {
            if (column % COLUMNS == 0) {
                int next = column + COLUMNS, after = next + COLUMNS;
                copy_async_wait(0);
                synchronize();
                if (next < keys.total)
                    copy_pair(buffer, &columns, next, args.key, args.value, batch, key_head, args.head_dim);
                if (after < keys.total && after % THREADS == 0)
                    locate_column(&columns, biases, &keys, &args, batch, after + this_thread());
            }
            int slot = column % WINDOW;
            int begin = warp_begin(&tile), end = warp_end(&tile);
            if (warp_is_idle(&tile) || none_seen(&columns, slot, begin, end, args.back, args.ahead))
                continue;
            int compare = bounded(&args) && some_cut(&columns, slot, begin, end, args.back, args.ahead);
            const uint4 *columns_at = buffer + half_of(column) + column % COLUMNS * CHUNKS;
            Scores p, ds;
            score_tile(p, own_query, STEPS, 0, columns_at);
            score_tile(ds, own_dout, STEPS, 0, columns_at + HALF / 2);
#if DROPOUT
            drop(ds, kept_weights(&columns, slot, -1, &args, &keys, &tile), args.keep_scale);
#endif
            const float *found = columns.biased[slot / 32] ? biases + slot : 0;
            query_score_gradients(ds, p, found, args.scale * LOG2E, shift, delta);
            if (compare)
                mask_beyond(ds, &columns, slot, args.back, args.ahead, &tile);
            accumulate(dquery, ds, columns_at);
        }
        copy_async_wait(0);
        synchronize();
        const float *lse = args.lse + line_of(&args, batch, tile.head);
        write_gradient(rows_of(args.dquery, batch, tile.head), dquery, args.scale, buffer, lse, 0, &args, &tile);
    }
}
