/* A step of decoding in one launch: new rows are stored, then each query row attends to the stored rows that spans show it.

       items, in order       one of them                           waits for     leaves
       writes                the new row of one key/value head     nothing       stored rows
       pieces                1 / splits of what a row sees of a    all writes    partials[piece]: sum of weights * values, their
                             head, for GROUP query heads                         largest score, the sum of weights
       merges                a row, for GROUP query heads          all pieces    out, lse

       stored rows --load_stored--> Four --+--> scores (registers) --> weights --+--> sums (registers) --> warps (shuffles)
       query (shared) --> float4 ----------+       values --> Four --------------+    --> block (shared) --> partials (global)

   LANES threads share a stored row, and load BATCH of their rows before they use them. A stored row is loaded once for GROUP query
   heads. The rows of all spans of a row and a head are numbered in tiles of TILE, and piece s has the tiles s, s + splits, ..., so that
   the work of a launch does not depend on what tables say. Partials are merged in their order: equal inputs give equal bits.

   Items are taken by the counter in their order, and each waits for earlier ones alone, which are taken by blocks that run: none waits
   for a block that has not begun. The second number of the counter is how many are done. */
#include "step.cuh"

enum {
    LANES = HEAD_DIM >= 128 ? 16 : HEAD_DIM >= 64 ? 8 : HEAD_DIM >= 32 ? 4 : 2,
    QUADS = HEAD_DIM / 4 / LANES,
    STREAMS = THREADS / LANES,
    BATCH = GROUP * QUADS > 16 ? 1 : GROUP > 4 ? 2 : 4,
    TILE = STREAMS * BATCH,
    PARTIAL = HEAD_DIM + 2,
};

/* Of the query heads of a piece, over the stored rows that this thread has seen a share of. Scores are times log2(e). */
typedef struct {
    float sum[GROUP][QUADS * 4], most[GROUP], total[GROUP];
} Sums;

/* What a piece or a merge is of: query heads from `first` on, `count` of them. */
typedef struct {
    int row, kv_head, first, count, split;
} Piece;

DEVICE int shares_of(const Args *args) { return (group_of(args) + GROUP - 1) / GROUP; }

/* The bits of those of THREADS lines from `first` on that are of a row and a head. All threads call it. */
DEVICE void find_lines(const long long *table, int first, int count, int columns, int row, int head, unsigned *bits) {
    int line = first + thread_index();
    unsigned own = ballot(line < count && place_in(table + (long long)line * columns, row, head) >= 0);
    synchronize();
    if (thread_index() % 32 == 0)
        bits[thread_index() / 32] = own;
    synchronize();
}

/* Writes */

/* Four numbers of a lane as they are stored, of the row of a head; all lanes of a warp call it. */
DEVICE void store_row(const Args *args, const Storage *from, Element *to) {
    int lane = lane_index(), dim = args->head_dim;
#if STORED == 3
    float number[HEAD_DIM / 32 + 1], most = 0.0f;
    int finite = 1;
#pragma unroll
    for (int i = 0; i * 32 < HEAD_DIM; i++) {
        number[i] = i * 32 + lane < dim ? from_storage(LOAD(from + i * 32 + lane)) : 0.0f;
        most = fmaxf(most, fabsf(number[i])), finite = finite && fabsf(number[i]) < INFINITY;
    }
#pragma unroll
    for (int mask = 16; mask; mask /= 2)
        most = fmaxf(most, shuffle_xor(most, mask));
    union {
        float number;
        unsigned bits;
    } scale = {most / 127};
    finite = ballot(finite) == 0xffffffffu;
    if (!finite)
        scale.bits = 0x7fc00000u; /* NaN */
#pragma unroll
    for (int i = 0; i * 32 < HEAD_DIM; i++)
        if (i * 32 + lane < dim)
            STORE(to + i * 32 + lane,
                  (Element)(finite && most > 0 ? fminf(fmaxf(rintf(number[i] / scale.number), -127.0f), 127.0f) : 0.0f));
    if (lane < SCALE_BYTES)
        STORE(to + dim + lane, (Element)(scale.bits >> 8 * lane));
#else
    for (int d = lane; d < dim; d += 32) {
        Storage x = LOAD(from + d);
#if STORED == STORAGE
        STORE(to + d, x);
#else
        STORE(to + d, float_to_bfloat(from_storage(x)));
#endif
    }
#endif
}

/* The new row of a key/value head goes where the writes say: the key by the first warp, the value by the second. */
DEVICE void write_row(const Args *args, int row, int head, unsigned *bits) {
    int side = thread_index() / 32;
    const View *view = side ? &args->value : &args->key;
    const Storage *from = (const Storage *)view->data + row / args->seq * view->batch + row % args->seq * view->row;
    for (int first = 0; first < args->step.write_count; first += THREADS) {
        find_lines(args->step.writes, first, args->step.write_count, WRITE_COLUMNS, row, head, bits);
        for (int at = 0; side < SIDES && at < THREADS; at++) {
            const long long *line = args->step.writes + (long long)(first + at) * WRITE_COLUMNS;
            long long limit;
            if (!(bits[at / 32] >> at % 32 & 1))
                continue;
            const long long *own = line + (side ? TO_VALUE : TO_KEY);
            long long to = side_of(args, own, row - column(line, ROW), place_in(line, row, head), &limit);
            if (to >= 0)
                store_row(args, from + head * view->head, stored_at(args, own, to));
        }
    }
}

/* Pieces */

DEVICE Piece piece_of(const Args *args, int number, int splits) {
    int share = number / splits % shares_of(args), pair = number / splits / shares_of(args);
    int kv_head = pair % args->kv_heads, member = share * GROUP, group = group_of(args);
    Piece piece = {pair / args->kv_heads, kv_head, kv_head * group + member, min_of(GROUP, group - member), number % splits};
    return piece;
}

DEVICE void load_query(const Args *args, const Piece *piece, float (*query)[HEAD_DIM]) {
    const View *view = &args->query;
    const Storage *row = (const Storage *)view->data + piece->row / args->seq * view->batch + piece->row % args->seq * view->row;
    for (int at = thread_index(); at < GROUP * HEAD_DIM; at += THREADS) {
        int g = at / HEAD_DIM, d = at % HEAD_DIM;
        query[g][d] = g < piece->count && d < args->head_dim ? from_storage(LOAD(row + (piece->first + g) * view->head + d)) : 0.0f;
    }
}

/* A product of a query and a key as a score times log2(e), with what a softcap and a bias make of it. Whether it is seen is decided
   before the largest is subtracted from it, so that no compiler fuses the two: a huge score would exceed the largest. */
DEVICE float score_from(const Args *args, const Piece *piece, const Seen *seen, int g, long long position, float product) {
#if CHANGED
    ScoreOf of = score_of(args, piece->row / args->seq, piece->first + min_of(g, piece->count - 1));
    float score = capped(&of, product);
#if PLACED
    score += bias_of(&of, point_of(&of, (int)seen->query_position), point_of(&of, (int)position));
#elif BIASED
    Point query = {{0}}, key = {{(float)(position - seen->query_position)}};
    score += bias_of(&of, query, key);
#endif
    return score * LOG2E;
#else
    return product * (args->scale * LOG2E);
#endif
}

/* Whether a query head sees a stored row. */
DEVICE int sees(const Piece *piece, const Args *args, const Seen *seen, int g, long long number) {
    int member = piece->first % group_of(args) + g;
    return !seen->unseen || !LOAD(seen->unseen + member * seen->unseen_group + number * seen->unseen_row);
}

/* Weights of BATCH scores in their place; what was summed by a smaller largest score becomes less. */
DEVICE void weigh(Sums *s, int g, float *scores) {
    float most = s->most[g];
#pragma unroll
    for (int b = 0; b < BATCH; b++)
        most = fmaxf(most, scores[b]);
    float base = most == NEG_INF ? 0.0f : most, factor = exp2_fast(s->most[g] - base), total = 0.0f;
#pragma unroll
    for (int b = 0; b < BATCH; b++)
        scores[b] = exp2_fast(scores[b] - base), total += scores[b];
    s->most[g] = most, s->total[g] = s->total[g] * factor + total;
#pragma unroll
    for (int d = 0; d < QUADS * 4; d++)
        s->sum[g][d] *= factor;
}

/* BATCH stored rows of each stream, from number `first` of a span on. Values of weight 0 add nothing, be they NaN. */
DEVICE void attend_tile(const Args *args, const Piece *piece, const Seen *seen, long long first, float (*query)[HEAD_DIM], Sums *s,
                        const int whole) {
    int lane = thread_index() % LANES, stream = thread_index() / LANES, dim = args->head_dim;
    Four keys[BATCH][QUADS], values[BATCH][QUADS];
    float scores[GROUP][BATCH] = {{0}}, key_scale[BATCH], value_scale[BATCH];
    long long numbers = seen->count;
    int present = 0;
#pragma unroll
    for (int b = 0; b < BATCH; b++) {
        long long number = first + b * STREAMS + stream, key = number < numbers ? place_of(seen, number, 0) : -1;
        const Element *key_row = seen->rows[0] + (key < 0 ? 0 : key);
        const Element *value_row = seen->rows[1] + (key < 0 ? 0 : place_of(seen, number, 1));
        int count = key < 0 ? 0 : dim;
        present |= (key >= 0) << b;
#pragma unroll
        for (int q = 0; q < QUADS; q++) {
            keys[b][q] = load_stored(key_row, (q * LANES + lane) * 4, count, whole);
            values[b][q] = load_stored(value_row, (q * LANES + lane) * 4, count, whole);
        }
        key_scale[b] = count ? scale_after(key_row, count, whole) : 1.0f;
        value_scale[b] = count ? scale_after(value_row, count, whole) : 1.0f;
    }
#pragma unroll
    for (int q = 0; q < QUADS; q++) {
        float4 key[BATCH];
#pragma unroll
        for (int b = 0; b < BATCH; b++)
            key[b] = stored_to_floats(keys[b][q]);
#pragma unroll
        for (int g = 0; g < GROUP; g++) {
            float4 x = *(const float4 *)&query[g][(q * LANES + lane) * 4];
#pragma unroll
            for (int b = 0; b < BATCH; b++)
                scores[g][b] += x.x * key[b].x + x.y * key[b].y + x.z * key[b].z + x.w * key[b].w;
        }
    }
#pragma unroll
    for (int b = 0; b < BATCH; b++) {
        long long number = first + b * STREAMS + stream, position = BIASED && present >> b & 1 ? position_of(seen, number) : 0;
        int here = (present >> b & 1) && !(PLACED && (position < 0 || position >= args->step.tokens));
#pragma unroll
        for (int g = 0; g < GROUP; g++) {
#pragma unroll
            for (int mask = 1; mask < LANES; mask *= 2)
                scores[g][b] += shuffle_xor(scores[g][b], mask);
            float score = score_from(args, piece, seen, g, here ? position : 0, scores[g][b] * key_scale[b]);
            scores[g][b] = here && g < piece->count && sees(piece, args, seen, g, number) ? score : NEG_INF;
        }
    }
#pragma unroll
    for (int g = 0; g < GROUP; g++)
        weigh(s, g, scores[g]);
#pragma unroll
    for (int b = 0; b < BATCH; b++)
#pragma unroll
        for (int q = 0; q < QUADS; q++) {
            float4 value = stored_to_floats(values[b][q]);
#pragma unroll
            for (int g = 0; g < GROUP; g++) {
                float weight = scores[g][b] * value_scale[b];
                if (scores[g][b] != 0.0f) {
                    s->sum[g][q * 4] += weight * value.x, s->sum[g][q * 4 + 1] += weight * value.y;
                    s->sum[g][q * 4 + 2] += weight * value.z, s->sum[g][q * 4 + 3] += weight * value.w;
                }
            }
        }
}

/* The tiles of a span that are the piece's. *tiles: those of the spans before; that grows by its own. All threads call it. */
DEVICE void attend_span(const Args *args, const Piece *piece, const Seen *seen, int *tiles, float (*query)[HEAD_DIM], Sums *s) {
    int splits = args->step.splits, before = *tiles, whole = seen->whole[0] && seen->whole[1];
    if (!seen->rows[0] || !seen->rows[1])
        return;
    long long first = (long long)modulo(piece->split - before, splits) * TILE;
    for (; first < seen->count; first += (long long)splits * TILE)
        if (whole)
            attend_tile(args, piece, seen, first, query, s, 1);
        else
            attend_tile(args, piece, seen, first, query, s, 0);
    *tiles = (int)((before + (seen->count + TILE - 1) / TILE) % splits);
}

/* The sums of all streams of a warp, in each of them. */
DEVICE void join_streams(Sums *s) {
#pragma unroll
    for (int mask = LANES; mask < 32; mask *= 2)
#pragma unroll
        for (int g = 0; g < GROUP; g++) {
            float other = shuffle_xor(s->most[g], mask), most = fmaxf(s->most[g], other), base = most == NEG_INF ? 0.0f : most;
            float ours = exp2_fast(s->most[g] - base), theirs = exp2_fast(other - base);
            s->most[g] = most, s->total[g] = ours * s->total[g] + theirs * shuffle_xor(s->total[g], mask);
#pragma unroll
            for (int d = 0; d < QUADS * 4; d++)
                s->sum[g][d] = ours * s->sum[g][d] + theirs * shuffle_xor(s->sum[g][d], mask);
        }
}

/* Each warp's sums as a partial in shared memory. */
DEVICE void give_warp(const Sums *s, float (*parts)[GROUP][PARTIAL]) {
    int lane = lane_index(), warp = thread_index() / 32;
    if (lane >= LANES)
        return;
#pragma unroll
    for (int g = 0; g < GROUP; g++) {
#pragma unroll
        for (int q = 0; q < QUADS; q++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                parts[warp][g][(q * LANES + lane) * 4 + e] = s->sum[g][q * 4 + e];
        if (lane == 0)
            parts[warp][g][HEAD_DIM] = s->most[g], parts[warp][g][HEAD_DIM + 1] = s->total[g];
    }
}

/* The partial of a block. */
DEVICE void give_block(const Args *args, int number, float (*parts)[GROUP][PARTIAL]) {
    for (int at = thread_index(); at < GROUP * PARTIAL; at += THREADS) {
        int g = at / PARTIAL, d = at % PARTIAL;
        float most = NEG_INF, sum = 0.0f;
#pragma unroll
        for (int w = 0; w < BLOCK_WARPS; w++)
            most = fmaxf(most, parts[w][g][HEAD_DIM]);
        float base = most == NEG_INF ? 0.0f : most;
#pragma unroll
        for (int w = 0; w < BLOCK_WARPS; w++)
            sum += parts[w][g][d] * exp2_fast(parts[w][g][HEAD_DIM] - base);
        STORE(args->step.partials + ((long long)number * GROUP + g) * PARTIAL + d, d == HEAD_DIM ? most : sum);
    }
}

DEVICE void attend_piece(const Args *args, int number, unsigned *bits, Seen *seen, float (*query)[HEAD_DIM],
                         float (*parts)[GROUP][PARTIAL]) {
    Piece piece = piece_of(args, number, args->step.splits);
    Sums s;
    int tiles = 0;
#pragma unroll
    for (int g = 0; g < GROUP; g++) {
        s.most[g] = NEG_INF, s.total[g] = 0.0f;
#pragma unroll
        for (int d = 0; d < QUADS * 4; d++)
            s.sum[g][d] = 0.0f;
    }
    load_query(args, &piece, query);
    for (int first = 0; first < args->step.span_count; first += THREADS) {
        find_lines(args->step.spans, first, args->step.span_count, SPAN_COLUMNS, piece.row, piece.kv_head, bits);
#pragma unroll 1
        for (int at = 0; at < THREADS; at++) {
            if (!(bits[at / 32] >> at % 32 & 1))
                continue;
            find_seen(args, args->step.spans + (long long)(first + at) * SPAN_COLUMNS, piece.row, piece.kv_head, seen);
            attend_span(args, &piece, seen, &tiles, query, &s);
        }
    }
    join_streams(&s);
    give_warp(&s, parts);
    synchronize();
    give_block(args, number, parts);
}

/* Merges */

/* out and lse of GROUP query heads of a row, with their sinks. */
DEVICE void merge_pieces(const Args *args, int number) {
    Piece piece = piece_of(args, number, 1);
    const View *view = &args->out;
    int batch = piece.row / args->seq, at_row = piece.row % args->seq, splits = args->step.splits;
    for (int at = thread_index(); at < piece.count * HEAD_DIM; at += THREADS) {
        int g = at / HEAD_DIM, d = at % HEAD_DIM, head = piece.first + g;
        const float *partial = args->step.partials + ((long long)number * splits * GROUP + g) * PARTIAL;
        float sink = args->step.sink ? LOAD(args->step.sink + head) * LOG2E : NEG_INF, most = sink, sum = 0.0f, total = 0.0f;
        for (int i = 0; i < splits; i++)
            most = fmaxf(most, LOAD(partial + (long long)i * GROUP * PARTIAL + HEAD_DIM));
        float base = most == NEG_INF ? 0.0f : most;
        for (int i = 0; i < splits; i++) {
            const float *own = partial + (long long)i * GROUP * PARTIAL;
            float factor = exp2_fast(LOAD(own + HEAD_DIM) - base);
            sum += LOAD(own + d) * factor, total += LOAD(own + HEAD_DIM + 1) * factor;
        }
        total += exp2_fast(sink - base);
        if (d < args->head_dim)
            STORE((Storage *)view->data + batch * view->batch + at_row * view->row + head * view->head + d,
                  to_storage(total == 0.0f ? 0.0f : sum / total));
        if (d == 0)
            STORE(args->lse + ((long long)batch * args->heads + head) * args->seq + at_row,
                  total == 0.0f ? NEG_INF : base * LN2 + logf(total));
    }
}

/* Waits until `count` items are done, and what they have left is there. All threads call it. */
DEVICE void wait_for(int *done, int count) {
    if (is_first()) {
        while (atomic_add(done, 0) < count)
            ;
        fence();
    }
    synchronize();
}

KERNEL(attend_stored) {
    SHARED int number;
    SHARED unsigned bits[BLOCK_WARPS];
    SHARED Seen seen;
    SHARED float query[GROUP][HEAD_DIM];
    SHARED float parts[BLOCK_WARPS][GROUP][PARTIAL];
    int pairs = args.batch * args.seq * args.kv_heads, writes = args.step.write_count ? pairs : 0;
    int merges = pairs * shares_of(&args), pieces = merges * args.step.splits, item;
    while (1) {
        if (is_first())
            number = atomic_add(args.counter, 1);
        synchronize();
        item = number;
        if (item >= writes + pieces + merges)
            break;
        if (item < writes) {
            write_row(&args, item / args.kv_heads, item % args.kv_heads, bits);
        } else if (item < writes + pieces) {
            wait_for(args.counter + 1, writes);
            attend_piece(&args, item - writes, bits, &seen, query, parts);
        } else {
            wait_for(args.counter + 1, writes + pieces);
            merge_pieces(&args, item - writes - pieces);
        }
        fence();
        synchronize();
        if (is_first())
            atomic_add(args.counter + 1, 1);
    }
    if (is_first() && item == writes + pieces + merges + block_count() - 1) {
        STORE(args.counter, 0);
        STORE(args.counter + 1, 0);
    }
}
