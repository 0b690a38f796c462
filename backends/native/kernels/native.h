/* The interface of the CPU kernel: a problem as plain numbers, the code for one instruction set, and the call that runs a phase.
 * native_run of work_queue.c hands out the tasks of a phase to threads, each of which reads q, k, v (dout, out, lse, delta).
 *
 *     FORWARD     a task = one query block of one head              writes out, lse
 *     DELTA       a task = one query block of one head              writes delta
 *     BACKWARD    a task = a chunk of keys with one of queries      adds to dk, dv and dq; in rounds (rounds.h)
 *
 * A block is up to `block_rows` consecutive rows, or a brick of a grid (bricks.h); where rows are few, of the last rows against a
 * cache, that of all query heads of a key/value head. Tasks of several sequences come one sequence after another (sequences.h).
 * Tasks of a phase write to separate rows, so results do not depend on the number of threads.
 */
#ifndef DILKIT_NATIVE_H
#define DILKIT_NATIVE_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { MAX_BRANCHES = 64 };
enum { FLOAT64, FLOAT32, BFLOAT16, FLOAT16 };
enum { FORWARD, DELTA, BACKWARD };

/* How a branch says which query sees which key.
 *
 *     SEGMENTS  both are kept, and are in one segment              `length` of a segment, `rate`, and the offset of each head
 *     BAND      -ahead <= i - j < length, (i - j) mod rate == 0    a sliding window, strided attention
 *     RUNS      a run of consecutive queries sees runs of keys     global tokens, blocks: `tables`
 *     GRID      a cell of a grid sees those around it              neighborhoods: `grid`
 */
enum { SEGMENTS, BAND, RUNS, GRID };
#define UNBOUNDED ((int64_t)1 << 62) /* a `length` that no sequence reaches */

static inline int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t greater(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t parts_of(int64_t count, int64_t part) { return (count + part - 1) / part; }
static inline int64_t round_up(int64_t count, int64_t to) { return (count + to - 1) / to * to; }

/* The first of the ascending numbers low .. high that is above x; high, if none before it is. */
static inline int64_t first_above(const int64_t *numbers, int64_t low, int64_t high, int64_t x) {
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if (numbers[middle] > x)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

/* What a bias is a function of: distances of positions, in a metric, or differences, by which a table has an entry for each: one
 * table, the sum of one for each dimension, or such a sum with tables for each query. */
enum { NO_BIAS, EUCLIDEAN, L1, MAXIMUM, TABLE, AXIS_TABLES, ROW_TABLES };

/* A tensor (batch, seq, heads, dim) with a contiguous last dimension; strides in bytes. */
typedef struct {
    char *data;
    int64_t batch, row, head;
} TensorView;

/* Where an element of the batch lies in the whole, for dropout: its sequence, first head, first query and key, and row step. */
typedef struct {
    int64_t batch, head, query, key, step;
} Place;

/* Which runs of consecutive rows see which runs of columns. Table 2 t has queries as rows, table 2 t + 1 keys. Its runs of rows,
 * table[i] .. table[i + 1] - 1, are ascending and complete. Run r of rows ends before rows_end[r] and sees the runs of columns
 * first_columns[r] .. first_columns[r + 1] - 1. */
typedef struct {
    const int64_t *table, *rows_end, *first_columns;
    const int64_t (*columns)[2]; /* start, stop */
} RunTables;

/* A row-major grid, of as many cells as the sequence has tokens; dimensions that it has not are the first ones, of size 1. */
typedef struct {
    int64_t size[3], kernel[3], step[3];
    int64_t shared[3]; /* cells of a residue class that share a kernel, at most as many as it has */
    int64_t causal[3]; /* whether a cell sees no later one on the axis */
    int64_t cut;       /* whether edges cut neighborhoods off, which else move back from them */
} Grid;

/* Bricks of a grid as blocks: their sides, and how many there are along each; 0: blocks are consecutive rows. */
typedef struct {
    int64_t sides[3], across[3];
} Bricks;

typedef struct {
    int64_t batch, seq, heads, kv_heads, dim; /* seq: positions, in which queries and keys lie */
    int64_t first_row, end_row, first_key, end_key; /* of a sequence: the positions of its queries, and of its keys */
    int is_square;                                  /* whether query i is key i, of all */
    int dtype, causal, once;
    double scale;
    int64_t branches;
    /* These up to `runs` are the arrays of a `BranchArrays`, in its order. */
    const int64_t *kind, *length, *ahead, *rate; /* (branches,), at most UNBOUNDED */
    const Grid *grid; /* (branches,), of GRID */
    const int64_t *offset; /* (heads, branches), for RUNS the number of a table; -1 where a branch does not serve a head */
    /* (heads, branches), so that a pair counts once: the number of a table whose rows of any run are left out, or -1; the distance
     * from which on a BAND begins; and the set of branches whose pairs are left out one by one, no RUNS (none for SEGMENTS) */
    const int64_t *without, *beyond;
    const uint64_t *shown;
    RunTables runs, given_runs; /* given_runs: of the branch `given`, whose tables each call has: a pair for each batch and head of a */
    int64_t given, given_batches, given_heads; /* layout, each perhaps 1; `given` is -1 where there is no such branch */
    int64_t most_block_rows, row_step, least_chunk_rows;
    const int32_t *starts;  /* packed: (batch + 1,), the rows where sequences begin, and the end; else NULL */
    const int32_t *lengths; /* cached: the length of each sequence, of which the last `rows` are computed; else NULL */
    int64_t rows; /* queries of each element of the batch */
    /* Where query i is not key i: where the keys of packed sequences begin, and the position of the first query, of each sequence
     * or of all; or else, if `aligns_last`, that which makes the last query the last key. */
    int64_t position;
    const int32_t *key_starts, *positions_of;
    int aligns_last;
    int64_t block_rows, key_rows, groups; /* these twelve are chosen by blocks.h; key_rows: of a block in BACKWARD */
    int64_t blocks, key_blocks;           /* how many, of a sequence */
    Bricks bricks, key_bricks;
    int64_t relations; /* how many of them a branch needs, at most; see relation.h */
    int64_t chunks, chunk_blocks, chunk_rows; /* of BACKWARD: blocks of keys of a chunk, and rows of one of queries */
    int64_t shared_heads; /* query heads of a task: 1, or in FORWARD of a cached call those of a key/value head */
    uint64_t branch_group[MAX_BRANCHES]; /* (groups,): sets of branches that share their keys' scores */
    int64_t classes;       /* sequences that each is cut into, of every so-many-th row, which see nothing of each other */
    int64_t step, residue; /* row x of such a sequence is row x * step + residue of the tensors; else 1 and 0 */
    int64_t shift; /* of a task of BACKWARD, see native_tasks */
    int dropout; /* whether weights are dropped, those of words below the threshold: dropout.h */
    uint64_t seed;
    uint32_t threshold;
    double keep_scale; /* the factor of weights that are kept; 1 where none are dropped */
    int64_t first_batch, first_head, first_query; /* the numbers of the first sequence, head and query of the tensors */
    const Place *places; /* (batch,): in place of both, where each element of the batch lies; else NULL */
    double softcap; /* scores are at most so large; 0: not capped */
    int bias;
    int64_t position_dims, table_size[3], entries; /* numbers of a position; sizes of a table, or 1; weights of a head, or row of it */
    const char *bias_weights; /* (heads, entries) contiguous, double for FLOAT64, else float; ROW_TABLES: (heads, batch, rows, entries) */
    int64_t head_entries, batch_entries, row_entries; /* ROW_TABLES: weights of a head, of a sequence in it, from a row to the next; else 0 */
    TensorView positions;     /* (batch, seq, columns) of such numbers; without `data`, of a row its number */
    int64_t key_position;     /* the column where the position as a key begins: 0, or position_dims after that as a query */
    double *dbias;            /* (parts, heads, entries), to which each task adds in a part of its own, from `first_part` on; or NULL. */
                              /* ROW_TABLES: as `bias_weights`, for tasks side by side have other rows of queries */
    int64_t first_part;
    int one_part; /* all tasks add to one part: one after the other */
    const char *mask; /* (batch, seq), nonzero = key ignored; NULL = none */
    int64_t mask_batch, mask_row; /* strides in bytes */
    TensorView q, k, v, out, dout, dq, dk, dv; /* the last three are summed up in: double for FLOAT64, else float */
    char *lse, *delta; /* (batch, heads, lse_head) contiguous, double for FLOAT64, else float */
    int64_t lse_head;  /* numbers of a head */
} Problem;

static inline int is_summed(const Problem *p) { return p->bias == AXIS_TABLES || p->bias == ROW_TABLES; }

/* The weights of a head of a table of these sizes, or of a query of it. */
static inline int64_t table_entries(const Problem *p) {
    int64_t product = p->table_size[0] * p->table_size[1] * p->table_size[2], sum = 0;
    for (int64_t d = 0; d < p->position_dims; d++)
        sum += p->table_size[d];
    return is_summed(p) ? sum : product;
}

/* Let each of `rows` queries of `batch` sequences have weights of its own, where it has. */
static inline void set_row_tables(Problem *p, int64_t batch, int64_t rows) {
    p->row_entries = p->bias == ROW_TABLES ? p->entries : 0;
    p->batch_entries = rows * p->row_entries, p->head_entries = batch * p->batch_entries;
}

/* Where the rows of a head lie in the whole. */
static inline Place place_of(const Problem *problem, int64_t batch, int64_t head) {
    Place place = {problem->first_batch + batch, problem->first_head, 0, 0, 1};
    if (problem->places)
        place = problem->places[batch];
    place.head += head, place.query += problem->first_query + problem->residue * place.step;
    place.key += problem->residue * place.step - problem->first_key;
    place.step *= problem->step;
    return place;
}

/* The code compiled for one instruction set. */
typedef struct InstructionSet {
    const char *name;
    int (*runs_here)(void);
    size_t (*scratch_bytes)(const Problem *problem, int phase); /* of one thread */
    void (*run_task)(const Problem *problem, int phase, int64_t index, void *scratch);
    void (*exp2)(const float *x, float *y, int64_t count);  /* for tests of its accuracy; count in multiples of 16 */
    int64_t (*multiply_add)(int64_t rounds, float *result); /* for the machine's speed: returns the FLOPs done */
    int64_t (*score_tiles)(int64_t rounds);                 /* the same of its products in a tile */
    const struct StepCode *(*step)(int dtype);              /* of decoding, for the dtype of a query: step.h */
    const struct InstructionSet *instead; /* of one for bf16 alone: the code that computes everything else; else NULL */
} InstructionSet;

extern const InstructionSet native_generic;
/* Those that the compiler knows: HAVE_AVX2, ... */
extern const InstructionSet native_avx2, native_avx512, native_avx512bf16, native_amx;

/* The number of tasks of a phase, of BACKWARD in a round: there the keys of chunk c go with the queries of chunk (c + shift) mod
 * chunks, so that no two tasks add to the same rows of dk, dv or dq. */
static inline int64_t native_tasks(const Problem *problem, int phase) {
    if (phase == BACKWARD)
        return problem->batch * problem->kv_heads * problem->chunks;
    int64_t heads = problem->heads / problem->shared_heads;
    return problem->batch * heads * problem->blocks;
}

/* The chunk of keys of a task of BACKWARD: tasks count chunks fastest, the last one first, then heads, then batch. */
static inline int64_t chunk_of_task(const Problem *problem, int64_t index) { return problem->chunks - 1 - index % problem->chunks; }

enum { NATIVE_DONE, NATIVE_INTERRUPTED, NATIVE_NO_MEMORY };

/* The parts of `dbias`, as many as tasks of a key/value head run in BACKWARD. */
int64_t native_parts(const Problem *problem);

/* Compute a phase with up to `threads` threads; `interrupted`, called now and then on the caller's, may end it (NULL: never). */
int native_run(const InstructionSet *code, const Problem *problem, int phase, int threads, int (*interrupted)(void));

/* Whether a score is scale * q . k and perhaps a log of a count, in the order of the products: one of -inf makes a score of
 * -inf. */
static inline int is_scaled_alone(const Problem *p) { return !(p->softcap > 0) && p->bias == NO_BIAS && (float)p->scale > 0; }

#endif
