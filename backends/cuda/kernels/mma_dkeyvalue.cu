/* Gradients of keys and values on tensor cores, over key_tiles; `mma_backward.cuh` draws their data flow:

       dkey = scale dS^T Q        dvalue = P^T dout        over all query heads of the tile's key head

   A tile's rows are keys, its columns queries. Pairs of warps, as in `mma_dquery_pairs.cu`, would save little at HEAD_DIM 128:
   beside two sums registers hold half of the fragments of 32 rows, so that with the other half and the exchange of P and dS a
   product takes 0.44 loads; it takes 0.52 here. */
#include "mma_backward.cuh"

/* Locates column number `index`, a query that sees the tile's keys, with its terms: what is added to its scores, and delta. */
DEVICE void locate_query(Columns *columns, float2 *terms, const Keys *keys, const Args *args, int batch, int head, int index) {
    long long line = line_of(args, batch, opaque(head));
    int position = -1;
    float shift = NEG_INF, dot = 0.0f;
    if (index < keys->total) {
        int branch, at = key_position(keys, index, &branch);
        float seen = load_lse(args->lse + line + at);
        if (seen != NEG_INF)
            shift = key_bias(keys, at, branch, args->once) - seen * LOG2E;
        if (shift != NEG_INF)
            position = at, dot = LOAD(args->delta + line + at);
    }
    terms[index % WINDOW] = make_float2(shift, dot);
    put_column(columns, index, position, 0.0f, bounded(args));
}

/* From scores to P, from dout.v to dS, of keys (rows) and queries (columns from number `slot` of the window on). */
DEVICE void key_score_gradients(Scores p, Scores ds, const float2 *column_terms, float scale2) {
#pragma unroll
    for (int n = 0; n < 2; n++) {
        float4 terms = ((const float4 *)column_terms)[n * 4 + this_thread() % 4];
#pragma unroll
        for (int m = 0; m < FRAGMENTS; m++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                p[m][n][e] = exp2_capped(p[m][n][e] * scale2 + (e % 2 ? terms.z : terms.x));
                ds[m][n][e] = p[m][n][e] * (ds[m][n][e] - (e % 2 ? terms.w : terms.y));
            }
    }
}

#if CHANGED
/* The same, of capped scores with a bias; dS is that of scores before the softcap. */
DEVICE void changed_score_gradients(Scores p, Scores ds, const float2 *column_terms, const ScoreOf *of, const Columns *columns,
                                    int slot, const Tile *tile) {
#pragma unroll
    for (int n = 0; n < 2; n++) {
        float4 terms = ((const float4 *)column_terms)[n * 4 + this_thread() % 4];
#pragma unroll
        for (int c = 0; c < 2; c++) {
            Point query = column_point(of, columns, slot, n, c);
#pragma unroll
            for (int m = 0; m < FRAGMENTS; m++)
#pragma unroll
                for (int e = c; e < 4; e += 2) {
                    float score = capped(of, p[m][n][e]), bias = bias_of(of, query, own_point(of, tile, m, e / 2));
                    p[m][n][e] = exp2_capped((score + bias) * LOG2E + (c ? terms.z : terms.x));
                    ds[m][n][e] = p[m][n][e] * (ds[m][n][e] - (c ? terms.w : terms.y));
                    if (SOFTCAP)
                        ds[m][n][e] *= cap_slope(of, score);
                }
            keep_loads_here();
        }
    }
}
#endif

KERNEL(mma_dkeyvalue) {
    SHARED Task task;
    SHARED int heads_end;
    SHARED Columns columns;
    SHARED Reach reaches[THREADS / 32];
    SHARED float2 terms[WINDOW];
    SHARED uint4 buffer[2 * HALF], spare[(SPARE ? SPARE : 1) * FRAGMENTS * THREADS];
    first_tile(&task, &args, 1);
    while (task.tile.rows) {
        unsigned own_key[FRAGMENTS][STEPS][4], own_value[FRAGMENTS][STEPS][4];
        Sums dkey, dvalue;
        if (is_first())
            heads_end = (task.tile.head + 1) * group_of(&args);
        note_reach(reaches, &task.tile);
        clear(dkey), clear(dvalue);
        load_row_fragments(own_key, own_value, buffer, args.key, args.value, task.batch, task.tile.head, &args, &task.tile);
#pragma unroll
        for (int k = HELD; k < STEPS; k++)
#pragma unroll
            for (int m = 0; m < FRAGMENTS; m++) {
                const unsigned *kept = own_value[m][k];
                spare[spare_slot(m, k)] = make_uint4(kept[0], kept[1], kept[2], kept[3]);
            }
#pragma unroll 1
        for (int head = heads_end - group_of(&args); head < heads_end; head++) {
            locate_query(&columns, terms, &task.keys, &args, task.batch, head, this_thread());
            synchronize();
            copy_pair(buffer, &columns, 0, args.query, args.dout, task.batch, head, args.head_dim);
#pragma unroll 1
            for (int column = 0; column < task.keys.total; column += SCORE_COLUMNS) {
                if (column % COLUMNS == 0) {
                    int next = column + COLUMNS, after = next + COLUMNS;
                    copy_async_wait(0);
                    synchronize();
                    if (next < task.keys.total)
                        copy_pair(buffer, &columns, next, args.query, args.dout, task.batch, head, args.head_dim);
                    if (after < task.keys.total && after % THREADS == 0)
                        locate_query(&columns, terms, &task.keys, &args, task.batch, head, after + this_thread());
                }
                int slot = column % WINDOW;
                Reach reach = reaches[this_thread() / 32];
                if (none_seen(&columns, slot, reach, args.ahead, args.back))
                    continue;
                int compare = bounded(&args) && some_cut(&columns, slot, reach, args.ahead, args.back);
                const uint4 *columns_at = buffer + half_of(column) + column % COLUMNS * CHUNKS;
                Scores p, ds;
                /* Across this barrier the compiler moves no loads, for which there would be no registers. */
                score_tile(ds, own_value, HELD, spare, columns_at + HALF / 2);
                score_tile(p, own_key, STEPS, 0, columns_at);
                synchronize_warp();
#if DROPOUT
                unsigned kept = kept_weights(&columns, slot, 1, &args, &task.keys, &task.tile);
                drop(ds, kept, args.keep_scale);
#endif
#if CHANGED
                ScoreOf of = score_of(&args, task.batch, head);
                changed_score_gradients(p, ds, terms + slot, &of, &columns, slot, &task.tile);
#else
                key_score_gradients(p, ds, terms + slot, args.scale * LOG2E);
#endif
#if DROPOUT
                drop(p, kept, 1.0f);
#endif
                if (compare) {
                    mask_beyond(p, &columns, slot, args.ahead, args.back, &task.tile);
                    mask_beyond(ds, &columns, slot, args.ahead, args.back, &task.tile);
                }
                accumulate(dvalue, p, columns_at + HALF / 2);
                synchronize_warp();
                accumulate(dkey, ds, columns_at);
            }
            copy_async_wait(0);
            synchronize();
            if (head + 1 == heads_end)
                break;
            if (in_first_warp())
                find_keys(&task.keys, &args, &task.tile, task.batch, head + 1, args.ahead, args.back);
            synchronize();
        }
        int batch = task.batch, number = take_number(&task, &args);
        Tile tile = task.tile;
        const unsigned char *mask = args.mask ? args.mask + batch * args.mask_batch : args.mask;
        stage_gradient(buffer, dkey, args.scale);
        Found next = find_tile(&args, number);
        write_gradient(rows_of(args.dkey, batch, tile.head), buffer, 0, mask, &args, &tile);
        synchronize();
        stage_gradient(buffer, dvalue, KEEP_SCALE(&args));
        write_gradient(rows_of(args.dvalue, batch, tile.head), buffer, 0, mask, &args, &tile);
        begin_tile(&task, &args, &next, 1);
        synchronize();
    }
}
