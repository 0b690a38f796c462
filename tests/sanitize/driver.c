/* Runs the CPU kernel over the problems of a file, forward and backward, and compares with the results in the file. It is built with
 * sanitizers. Every instruction set that runs here computes with one thread and with four, in buffers of exactly the size needed; a second
 * argument of 4 leaves the one thread out.
 *
 *     run.py ---> file: header, given blocks, scores, branches, q, k, v, dout, mask, starts, bias, expected results ---> next ---> check ---> native_run
 */
#include "blocks.h"
#include "load_store.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { HEADER = 16, ARRAYS = 13, SCORES = 6, GIVEN = 5, RESULTS = 6 }; /* results: out, lse, dq, dk, dv and those of the weights of a bias */

static FILE *file;
static int least_threads = 1;

static void *bytes(int64_t count) {
    void *read = malloc((size_t)count);
    if ((count && !read) || fread(read, 1, (size_t)count, file) != (size_t)count) {
        fprintf(stderr, "the file of problems is cut off\n");
        exit(2);
    }
    return read;
}

static int64_t size_of(int dtype) { return dtype == FLOAT64 ? 8 : dtype == FLOAT32 ? 4 : 2; }

static double number(const char *at, int64_t i, int dtype) {
    double wide;
    float single;
    uint16_t half;
    memcpy(&wide, at + (dtype == FLOAT64 ? 8 * i : 0), dtype == FLOAT64 ? 8 : 0);
    memcpy(&single, at + (dtype == FLOAT32 ? 4 * i : 0), dtype == FLOAT32 ? 4 : 0);
    memcpy(&half, at + (size_of(dtype) == 2 ? 2 * i : 0), size_of(dtype) == 2 ? 2 : 0);
    if (dtype == FLOAT64)
        return wide;
    return dtype == FLOAT32 ? single : dtype == BFLOAT16 ? from_bits((uint32_t)half << 16) : half_to_float(half);
}

static TensorView view(void *data, int64_t seq, int64_t heads, int64_t dim, int dtype) {
    int64_t head = dim * size_of(dtype);
    return (TensorView){data, seq * heads * head, heads * head, head};
}

/* Whether `found` is within the dtype's errors of `expected`, NaN and infinity included. */
static int agrees(const char *what, const char *found, const double *expected, int64_t count, int dtype, int of_dtype) {
    static const double relative[] = {[FLOAT64] = 1e-9, [FLOAT32] = 2e-4, [BFLOAT16] = 6e-2, [FLOAT16] = 1e-2};
    double most = 1;
    for (int64_t i = 0; i < count; i++)
        most = isfinite(expected[i]) ? fmax(most, fabs(expected[i])) : most;
    for (int64_t i = 0; i < count; i++) {
        double x = number(found, i, dtype);
        int same = isnan(expected[i]) ? isnan(x) : isinf(expected[i]) ? x == expected[i] : fabs(x - expected[i]) <= most * relative[of_dtype];
        if (!same) {
            fprintf(stderr, "%s[%lld] = %g, not %g\n", what, (long long)i, x, expected[i]);
            return 0;
        }
    }
    return 1;
}

/* The weights of a bias, of all heads. */
static int64_t weights_of(const Problem *p) { return p->bias == NO_BIAS ? 0 : p->heads * (p->bias == ROW_TABLES ? p->head_entries : p->entries); }

/* The sum of the parts of the gradient of a bias is as expected. */
static int check_bias(const Problem *p, int64_t parts, const double *expected) {
    int64_t count = weights_of(p);
    double *sum = calloc((size_t)count, sizeof(double));
    for (int64_t i = 0; i < parts * count; i++)
        sum[i % count] += p->dbias[i];
    int right = agrees("dbias", (const char *)sum, expected, count, FLOAT64, p->dtype);
    free(sum);
    return right;
}

/* Run one problem with the code for one instruction set; the results are compared with `expected`. */
static int check(const InstructionSet *code, Problem p, int threads, double *const *expected) {
    int dtype = p.dtype, wide = dtype == FLOAT64 ? FLOAT64 : FLOAT32, right = 1;
    int64_t rows = p.starts ? p.seq : p.batch * p.seq, queries = rows * p.heads, keys = rows * p.kv_heads, lse = size_of(wide) * queries;
    char *out = malloc((size_t)(queries * p.dim * size_of(dtype))), *dq = calloc((size_t)(queries * p.dim), (size_t)size_of(wide));
    char *dk = calloc((size_t)(keys * p.dim), (size_t)size_of(wide)), *dv = calloc((size_t)(keys * p.dim), (size_t)size_of(wide));
    p.lse = malloc((size_t)lse), p.delta = malloc((size_t)lse);
    p.out = view(out, p.seq, p.heads, p.dim, dtype), p.dq = view(dq, p.seq, p.heads, p.dim, wide);
    p.dk = view(dk, p.seq, p.kv_heads, p.dim, wide), p.dv = view(dv, p.seq, p.kv_heads, p.dim, wide);
    int64_t parts = native_parts(&p);
    if (p.bias == ROW_TABLES || (p.bias != NO_BIAS && (p.one_part = threads == 1)))
        parts = 1;
    p.dbias = p.bias != NO_BIAS ? calloc((size_t)(parts * weights_of(&p)), sizeof(double)) : NULL;
    right &= native_run(code, &p, FORWARD, threads, NULL) == NATIVE_DONE;
    right &= native_run(code, &p, DELTA, threads, NULL) == NATIVE_DONE;
    right &= native_run(code, &p, BACKWARD, threads, NULL) == NATIVE_DONE;
    right &= agrees("out", out, expected[0], queries * p.dim, dtype, dtype) && agrees("lse", p.lse, expected[1], queries, wide, dtype);
    right &= agrees("dq", dq, expected[2], queries * p.dim, wide, dtype);
    right &= agrees("dk", dk, expected[3], keys * p.dim, wide, dtype) && agrees("dv", dv, expected[4], keys * p.dim, wide, dtype);
    right &= !p.dbias || check_bias(&p, parts, expected[5]);
    free(out), free(dq), free(dk), free(dv), free(p.lse), free(p.delta), free(p.dbias);
    return right;
}

/* The rows first .. first + rows - 1 of each sequence, in buffers of their size: the memory to be freed. */
static char *rows_of(TensorView *x, const Problem *p, int64_t first, int64_t rows) {
    const int64_t row = p->heads * p->dim * size_of(p->dtype);
    char *copy = malloc((size_t)(p->batch * rows * row));
    for (int64_t b = 0; b < p->batch; b++)
        memcpy(copy + b * rows * row, x->data + b * x->batch + first * x->row, (size_t)(rows * row));
    *x = view(copy, rows, p->heads, p->dim, p->dtype);
    return copy;
}

/* So many rows of each sequence alone are those of the whole: the last ones of a cache, or, with gradients, as a call's queries. */
static int check_rows(const InstructionSet *code, Problem p, int threads, int64_t first, int64_t rows, double *const *expected) {
    const int64_t row = p.heads * p.dim, keys = p.batch * p.seq * p.kv_heads * p.dim, end = first + rows, numbers = p.batch * rows * row;
    const int wide = p.dtype == FLOAT64 ? FLOAT64 : FLOAT32, cached = end == p.seq;
    char *q = rows_of(&p.q, &p, first, rows), *dout = rows_of(&p.dout, &p, first, rows), *out = malloc((size_t)(numbers * size_of(p.dtype)));
    char *sums = calloc((size_t)(numbers + 2 * keys), (size_t)size_of(wide));
    double *wanted = malloc(2 * sizeof(double) * (size_t)numbers);
    int32_t *lengths = malloc(4 * (size_t)p.batch);
    for (int64_t b = 0; b < p.batch; b++) {
        lengths[b] = (int32_t)p.seq;
        for (int i = 0; i < 2; i++) /* of out and of dq */
            memcpy(wanted + i * numbers + b * rows * row, expected[2 * i] + (b * p.seq + first) * row, sizeof(double) * (size_t)(rows * row));
    }
    p.out = view(out, rows, p.heads, p.dim, p.dtype), p.dq = view(sums, rows, p.heads, p.dim, wide);
    p.dk = view(sums + numbers * size_of(wide), p.seq, p.kv_heads, p.dim, wide), p.dv = view(p.dk.data + keys * size_of(wide), p.seq, p.kv_heads, p.dim, wide);
    p.lse = malloc((size_t)(p.batch * p.heads * rows * size_of(wide))), p.delta = malloc((size_t)(p.batch * p.heads * rows * size_of(wide)));
    p.lengths = cached ? lengths : NULL, p.rows = p.lse_head = rows, p.position = first, p.is_square = cached, p.aligns_last = cached;
    p.dbias = p.bias != NO_BIAS && !cached ? calloc((size_t)(native_parts(&p) * p.heads * p.entries), sizeof(double)) : NULL;
    int right = native_run(code, &p, FORWARD, threads, NULL) == NATIVE_DONE;
    right &= agrees("out of some rows", out, wanted, numbers, p.dtype, p.dtype);
    if (!cached) {
        right &= native_run(code, &p, DELTA, threads, NULL) == NATIVE_DONE && native_run(code, &p, BACKWARD, threads, NULL) == NATIVE_DONE;
        right &= agrees("dq of some rows", sums, wanted + numbers, numbers, wide, p.dtype);
    }
    free(q), free(dout), free(out), free(sums), free(wanted), free(lengths), free(p.lse), free(p.delta), free(p.dbias);
    return right;
}

/* The last row, which reads keys where they lie, half of all rows, and those in the middle. */
static int check_some(const InstructionSet *code, Problem p, int threads, double *const *expected) {
    int right = !p.causal || (check_rows(code, p, threads, p.seq - 1, 1, expected) & check_rows(code, p, threads, p.seq / 2, p.seq - p.seq / 2, expected));
    for (int64_t b = 0; b < p.branches; b++)
        if (p.kind[b] == GRID) /* which has as many queries as keys */
            return right;
    return right & (p.seq < 3 || check_rows(code, p, threads, p.seq / 3, p.seq / 3, expected));
}

#include "steps.h"

/* The next problem of the file, with the code for every instruction set. */
static int next(const int64_t *header, int number_of) {
    static const InstructionSet *const codes[] = {
#ifdef HAVE_AMX
        &native_amx,
#endif
#ifdef HAVE_AVX512BF16
        &native_avx512bf16,
#endif
#ifdef HAVE_AVX2
        &native_avx2,
#endif
        &native_generic,
    };
    Problem p = {.batch = header[0], .seq = header[1], .heads = header[2], .kv_heads = header[3], .dim = header[4]};
    p.most_block_rows = header[5], p.row_step = header[6], p.least_chunk_rows = header[7], p.classes = header[8], p.step = 1;
    p.dtype = (int)header[9], p.causal = (int)header[10], p.once = (int)header[11], p.branches = header[12];
    p.lse_head = p.rows = p.end_row = p.end_key = p.seq, p.keep_scale = 1, p.is_square = 1;
    int64_t *given = bytes(8 * GIVEN), *tables[4]; /* the branch, batches, heads, runs of rows and of columns */
    p.given = given[0], p.given_batches = given[1], p.given_heads = given[2];
    const int64_t lengths[] = {2 * given[1] * given[2] + 1, given[3], given[3] + 1, 2 * given[4]};
    for (int i = 0; i < 4; i++)
        tables[i] = bytes(p.given < 0 ? 0 : 8 * lengths[i]);
    p.given_runs = (RunTables){tables[0], tables[1], tables[2], (const int64_t (*)[2])(const void *)tables[3]};
    int64_t queries = p.batch * p.seq * p.heads, keys = p.batch * p.seq * p.kv_heads, size = p.dim * size_of(p.dtype);
    int64_t *scores = bytes(8 * SCORES), wide = p.dtype == FLOAT64 ? 8 : 4;
    double *scale = bytes(8 * 2);
    p.bias = (int)scores[0], p.position_dims = scores[1], p.key_position = scores[2] * scores[1], p.softcap = scale[1];
    memcpy(p.table_size, scores + 3, sizeof p.table_size);
    p.entries = table_entries(&p), set_row_tables(&p, p.batch, p.seq);
    int64_t *array[ARRAYS], *counts = bytes(8 * ARRAYS);
    for (int i = 0; i < ARRAYS; i++)
        array[i] = bytes(8 * counts[i]);
    char *q = bytes(queries * size), *k = bytes(keys * size), *v = bytes(keys * size), *dout = bytes(queries * size);
    char *mask = header[14] ? bytes(p.batch * p.seq) : NULL;
    int32_t *starts = header[13] ? bytes(4 * header[13]) : NULL;
    int64_t weights = weights_of(&p), row = p.position_dims * wide;
    char *bias = bytes(weights * wide), *positions = header[15] ? bytes(header[15] * p.seq * row) : NULL;
    const int64_t sizes[RESULTS] = {queries * p.dim, queries, queries * p.dim, keys * p.dim, keys * p.dim, weights};
    double *expected[RESULTS];
    for (int i = 0; i < RESULTS; i++)
        expected[i] = bytes(8 * sizes[i]);
    p.bias_weights = bias, p.positions = (TensorView){positions, header[15] > 1 ? p.seq * row : 0, row, 0};
    p.scale = *scale, p.kind = array[0], p.length = array[1], p.ahead = array[2], p.rate = array[3];
    p.grid = (const Grid *)(const void *)array[4];
    p.offset = array[5], p.without = array[6], p.beyond = array[7], p.shown = (const uint64_t *)array[8];
    p.runs = (RunTables){array[9], array[10], array[11], (const int64_t (*)[2])(const void *)array[12]};
    p.mask = mask, p.mask_batch = p.seq, p.mask_row = 1;
    p.q = view(q, p.seq, p.heads, p.dim, p.dtype), p.dout = view(dout, p.seq, p.heads, p.dim, p.dtype);
    p.k = view(k, p.seq, p.kv_heads, p.dim, p.dtype), p.v = view(v, p.seq, p.kv_heads, p.dim, p.dtype);
    if (starts)
        p.starts = starts, p.batch = header[13] - 1;
    else
        choose_blocks(&p);
    int right = 1, whole = starts || p.bias == ROW_TABLES, parts = !mask && !whole && p.classes == 1 && p.given < 0;
    for (size_t i = 0; i < sizeof codes / sizeof *codes; i++)
        for (int threads = least_threads; threads <= 4; threads += 3)
            if (!check(codes[i], p, threads, expected) || (parts && !check_some(codes[i], p, threads, expected)) ||
                (!whole && p.seq && !check_steps(codes[i], p, threads))) {
                fprintf(stderr, "problem %d, %s, %d threads\n", number_of, codes[i]->name, threads);
                right = 0;
            }
    for (int i = 0; i < ARRAYS; i++)
        free(array[i]);
    for (int i = 0; i < 4; i++)
        free(tables[i]);
    free(given), free(counts), free(scores), free(bias), free(positions), free(scale), free(starts), free(q), free(k), free(v), free(dout), free(mask);
    for (int i = 0; i < RESULTS; i++)
        free(expected[i]);
    return right;
}

int main(int count, char **arguments) {
    file = count > 1 ? fopen(arguments[1], "rb") : NULL;
    least_threads = count > 2 ? atoi(arguments[2]) : 1;
    if (!file) {
        fprintf(stderr, "usage: driver FILE [LEAST_THREADS]\n");
        return 2;
    }
    int64_t header[HEADER];
    int problems = 0, wrong = 0;
    for (; fread(header, sizeof header, 1, file) == 1; problems++)
        wrong += !next(header, problems);
    fclose(file);
    printf("%d problems, %d wrong\n", problems, wrong);
    return wrong || !problems;
}
