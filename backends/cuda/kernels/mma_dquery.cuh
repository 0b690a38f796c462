/* What the kernels of the gradient of queries share: a tile's rows are queries, its columns keys. */
#ifndef DILKIT_MMA_DQUERY
#define DILKIT_MMA_DQUERY

#include "mma_backward.cuh"

/* Locates column number `index`, a key that the tile's queries see, with its bias. */
DEVICE void locate_column(Columns *columns, float *biases, const Keys *keys, const Args *args, int batch, int index) {
    float bias;
    int position = locate_key(keys, args, batch, index, &bias);
    biases[index % WINDOW] = bias;
    put_column(columns, index, position, bias, SHARING > 1 || bounded(args));
}

/* The terms of the scores of the tile's queries, by fragment and half of the sums: -lse log2(e), and delta. */
DEVICE void row_terms(float (*shift)[2], float (*delta)[2], long long line, const Args *args, const Tile *tile) {
#pragma unroll
    for (int m = 0; m < FRAGMENTS; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int position = own_position(tile, own_row(thread_index(), m, h));
            float seen = load_lse(args->lse + line + position);
            shift[m][h] = seen == NEG_INF ? NEG_INF : -seen * LOG2E;
            delta[m][h] = LOAD(args->delta + line + position);
        }
}

/* From scores and dout.v to dS, of queries (rows) and keys (columns) with `biases`, or none if that is null. */
DEVICE void query_score_gradients(Scores ds, Scores p, const float *biases, float scale2, float (*shift)[2], float (*delta)[2]) {
#pragma unroll
    for (int n = 0; n < 2; n++) {
        float2 bias = make_float2(0.0f, 0.0f);
        if (biases)
            bias = ((const float2 *)biases)[n * 4 + this_thread() % 4];
#pragma unroll
        for (int m = 0; m < FRAGMENTS; m++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                float score2 = p[m][n][e] * scale2 + shift[m][e / 2];
                if (biases)
                    score2 += e % 2 ? bias.y : bias.x;
                ds[m][n][e] = exp2_capped(score2) * (ds[m][n][e] - delta[m][e / 2]);
            }
    }
}

#if CHANGED

/* The same, of capped scores with a bias: from products and dout.v to capped scores and dS. */
DEVICE void changed_score_gradients(Scores ds, Scores p, const float *biases, const ScoreOf *of, float (*shift)[2],
                                    float (*delta)[2], const Columns *columns, int slot, const Tile *tile) {
#pragma unroll
    for (int n = 0; n < 2; n++) {
        float2 bias = make_float2(0.0f, 0.0f);
        if (biases)
            bias = ((const float2 *)biases)[n * 4 + this_thread() % 4];
        Point keys[2] = {column_point(of, columns, slot, n, 0), column_point(of, columns, slot, n, 1)};
#pragma unroll
        for (int m = 0; m < FRAGMENTS; m++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                p[m][n][e] = capped(of, p[m][n][e]);
                float score = p[m][n][e] + bias_of(of, own_point(of, tile, m, e / 2), keys[e % 2]);
                float score2 = score * LOG2E + shift[m][e / 2] + (e % 2 ? bias.y : bias.x);
                ds[m][n][e] = exp2_capped(score2) * (ds[m][n][e] - delta[m][e / 2]);
            }
        keep_loads_here();
    }
}

#if LEARNED
/* Adds what dS says of the weights of the bias. */
DEVICE void learn_scores(Scores ds, const Args *args, const ScoreOf *of, const Columns *columns, int slot, const Tile *tile) {
    float learned = 0.0f;
#pragma unroll
    for (int n = 0; n < 2; n++) {
        Point keys[2] = {column_point(of, columns, slot, n, 0), column_point(of, columns, slot, n, 1)};
#pragma unroll
        for (int m = 0; m < FRAGMENTS; m++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                if (own_row(this_thread(), m, e / 2) < tile->rows)
                    learned += learn_pair(args, of, own_point(of, tile, m, e / 2), keys[e % 2], ds[m][n][e]);
        keep_loads_here();
    }
    learn_sum(args, learned);
}
#endif

/* From dS of scores to dS of products times the scale. Bounds have been compared. */
DEVICE void finish_score_gradients(Scores ds, Scores p, const Args *args, const ScoreOf *of, const Columns *columns, int slot,
                                   const Tile *tile) {
#if LEARNED
    learn_scores(ds, args, of, columns, slot, tile);
#endif
#if SOFTCAP
    uncap(ds, p, of);
#endif
}

#endif

#endif
