/* Scores that know positions: what a softcap and a bias make of the product of a query and a key.

       score = softcap(scale q.k) + bias        softcap(s) = cap tanh(s / cap), if SOFTCAP
       bias  = -slope[head] * distance          BIASED 1: of two points, by METRIC 0 (Euclidean), 1 (sum), 2 (largest difference)
       bias  = table[head, entry]               BIASED 2: the difference of two points, clipped to the table in each dimension

   A point has DIMS numbers. It is read from `positions` if PLACED, else it is the number of a row. All of these are macros: what a call
   does not have is not compiled.

   LEARNED, in the kernels of the gradient of queries: the gradient of slopes and tables, without atomics, so that equal inputs give
   equal bits. `bias_parts` is (blocks, entries, THREADS + heads):

       dS of a pair (registers) --learn--> [block, entry, thread], of this thread alone
       at the end of a tile --give_learned--> their sum over threads is added to [block, entry, THREADS + head]; they are 0 again

   A launch without a counter gives each block the same tiles each time; the sum over blocks is the caller's. */
#ifndef DILKIT_SCORES
#define DILKIT_SCORES

#include "dilated.cuh"

#ifndef SOFTCAP
#define SOFTCAP 0
#endif

#ifndef BIASED
#define BIASED 0
#endif

#ifndef PLACED
#define PLACED 0
#endif

#ifndef DIMS
#define DIMS 1
#endif

#ifndef METRIC
#define METRIC 0
#endif

#ifndef LEARNED
#define LEARNED 0
#endif

/* Whether a score is more than a product times the scale. */
#define CHANGED (SOFTCAP || BIASED)

/* Whether a bias is read from memory for each pair. */
#define GATHERS (PLACED || BIASED == 2)

#if CHANGED

/* Differences of rows' numbers are exact as ints alone. FROM_QUERY: points are such differences. */
#ifndef FROM_QUERY
#define FROM_QUERY 0
#endif

#if PLACED || FROM_QUERY
typedef float Coordinate;
#else
typedef int Coordinate;
#endif

typedef struct {
    Coordinate at[DIMS];
} Point;

/* What the scores of one head are made with: `weights` are its slope or its table, `positions` those of its element of the batch. */
typedef struct {
    const float *weights, *positions;
    float scale, cap, inverse_cap, slope;
    int size[3];
} ScoreOf;

DEVICE ScoreOf score_of(const Args *args, int batch, int head) {
    ScoreOf of = {0, 0, args->scale, args->softcap, 1.0f / args->softcap, 0.0f, {args->size_0, args->size_1, args->size_2}};
#if SOFTCAP
    of.scale = args->scale * of.inverse_cap;
#endif
#if BIASED
    of.weights = args->bias_weights + (long long)head * args->entries;
#endif
#if BIASED == 1
    of.slope = LOAD(of.weights);
#endif
#if PLACED
    of.positions = args->positions + batch * args->positions_batch;
#endif
    return of;
}

/* The point of a row; of no row, -1, that of any. */
DEVICE Point point_of(const ScoreOf *of, int row) {
    Point point = {{0}};
#if PLACED
#pragma unroll
    for (int d = 0; d < DIMS; d++)
        point.at[d] = LOAD(of->positions + (long long)opaque(max_of(row, 0)) * DIMS + d);
#else
    point.at[0] = row;
#endif
    return point;
}

/* No load moves across it: those of more pairs at once would want registers that are not there. All threads of a warp call it. */
DEVICE void keep_loads_here(void) {
    if (GATHERS)
        synchronize_warp();
}

DEVICE float distance_of(Point query, Point key) {
    float sum = 0.0f;
#pragma unroll
    for (int d = 0; d < DIMS; d++) {
        float apart = fabsf((float)(query.at[d] - key.at[d]));
        if (DIMS == 1 || METRIC == 1)
            sum += apart;
        else
            sum = METRIC == 2 ? fmaxf(sum, apart) : sum + apart * apart;
    }
    return DIMS == 1 || METRIC ? sum : sqrtf(sum);
}

DEVICE int entry_of(const ScoreOf *of, Point query, Point key) {
    int entry = 0;
#pragma unroll
    for (int d = 0; d < DIMS; d++) {
        int most = of->size[d] / 2;
        float apart = (float)(query.at[d] - key.at[d]);
        entry = entry * of->size[d] + most + (int)fminf(fmaxf(apart, (float)-most), (float)most);
    }
    return entry;
}

/* A product of a query and a key, scaled, and capped if there is a cap. */
DEVICE float capped(const ScoreOf *of, float product) {
    return SOFTCAP ? of->cap * tanhf(product * of->scale) : product * of->scale;
}

/* The derivative of `capped` by the scaled product, given its value. */
DEVICE float cap_slope(const ScoreOf *of, float score) {
    float share = score * of->inverse_cap;
    return 1.0f - share * share;
}

DEVICE float bias_of(const ScoreOf *of, Point query, Point key) {
#if BIASED == 1
    return -of->slope * distance_of(query, key);
#elif BIASED == 2
    float bias = LOAD(of->weights + opaque(entry_of(of, query, key)));
    keep_loads_here();
    return bias;
#else
    return 0.0f;
#endif
}

#endif

#if LEARNED

DEVICE float *learned_at(const Args *args, int entry) {
    return args->bias_parts + ((long long)block_index() * args->entries + entry) * (THREADS + args->heads);
}

/* Adds to this thread's sum for an entry. */
DEVICE void learn(const Args *args, int entry, float gradient) {
    float *sum = learned_at(args, entry) + opaque(thread_index());
    STORE(sum, LOAD(sum) + gradient);
}

/* Adds dS of a pair to the sum of its entry of a table; of a distance, returns its gradient, which `learn_sum` adds. */
DEVICE float learn_pair(const Args *args, const ScoreOf *of, Point query, Point key, float ds) {
#if BIASED == 2
    if (ds != 0.0f)
        learn(args, entry_of(of, query, key), ds);
    return 0.0f;
#else
    return -ds * distance_of(query, key);
#endif
}

DEVICE void learn_sum(const Args *args, float gradient) {
#if BIASED == 1
    learn(args, 0, gradient);
#endif
}

/* Adds the sums of all threads to that of a head. All threads call it, when none adds to its own. */
DEVICE void give_learned(const Args *args, int head) {
    int lane = lane_index();
#pragma unroll 1
    for (int entry = thread_index() / 32; entry < args->entries; entry += THREADS / 32) {
        float *sums = learned_at(args, entry), total = 0.0f;
        for (int thread = lane; thread < THREADS; thread += 32) {
            total += LOAD(sums + thread);
            STORE(sums + thread, 0.0f);
        }
        for (int mask = 16; mask; mask /= 2)
            total += shuffle_xor(total, mask);
        if (lane == 0)
            STORE(sums + THREADS + head, LOAD(sums + THREADS + head) + total);
    }
}

#endif

#endif
