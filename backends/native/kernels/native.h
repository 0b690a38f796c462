/* What the parts of the CPU kernel share: a problem as plain numbers, and how a kernel is called.
 *
 * An item of work is a span of consecutive rows of one head of one batch element. Items write to separate rows and are computed
 * the same way whoever takes them, so results do not depend on the number of threads.
 */
#ifndef DILKIT_NATIVE_H
#define DILKIT_NATIVE_H

#include <stddef.h>
#include <stdint.h>

enum { MAX_BRANCHES = 64 };
enum { FLOAT64, FLOAT32, BFLOAT16, FLOAT16 };
enum { FORWARD, BACKWARD_QUERY, BACKWARD_KEY };

/* A tensor (batch, seq, heads, dim) with a contiguous last dimension; strides in bytes. */
typedef struct {
    char *data;
    int64_t batch, row, head;
} Rows;

typedef struct {
    int64_t batch, seq, heads, kv_heads, dim, span;
    int dtype, causal, once;
    double scale;
    int64_t branches, groups;
    const int64_t *length, *rate; /* (branches,), at most seq */
    const int64_t *offset;        /* (heads, branches), -1 where a branch does not serve a head */
    const uint64_t *group;        /* (groups,): sets of branches that share their keys' scores */
    int64_t blocks, block, round; /* of the gradients, see below; blocks 0: in two passes */
    const char *mask;             /* (batch, seq), nonzero = key ignored; NULL = none */
    int64_t mask_batch, mask_row; /* strides in bytes */
    Rows q, k, v, out, dout, dq, dk, dv;
    char *lse, *delta; /* (batch, heads, seq) contiguous, double for FLOAT64, else float */
} Problem;

/* The code of one instruction set. */
typedef struct {
    const char *name;
    int (*runs_here)(void);
    size_t (*scratch)(const Problem *problem, int phase);
    void (*item)(const Problem *problem, int phase, int64_t index, void *scratch);
    void (*exp)(const float *x, float *y, int64_t count); /* for tests of its accuracy; count in multiples of 16 */
    int64_t (*multiply_add)(int64_t rounds, float *result); /* for the machine's speed: returns the FLOPs done */
} Kernel;

extern const Kernel native_generic;
#ifdef HAVE_AVX2
extern const Kernel native_avx2;
#endif
#ifdef HAVE_AVX512
extern const Kernel native_avx512;
#endif
#ifdef HAVE_AVX512BF16
extern const Kernel native_avx512bf16;
#endif

/* Items of work of a phase.
 *
 * The gradients take five products of matrices in one pass, in which an item sums up rows of dk and dv and rows of dq. So that
 * no two items write the same rows, the sequence is cut into blocks, and in round t the keys of block s meet the queries of
 * block (s + t) mod blocks: a phase a round, each adding to dq, dk and dv. BACKWARD_QUERY goes before and computes delta.
 * Half types have no such sums: there, in two passes of seven products, BACKWARD_QUERY computes dq and BACKWARD_KEY dk and dv.
 */
static inline int64_t native_items(const Problem *problem, int phase) {
    int64_t heads = phase == BACKWARD_KEY ? problem->kv_heads : problem->heads;
    if (phase == BACKWARD_KEY && problem->blocks)
        return problem->batch * heads * problem->blocks;
    return problem->batch * heads * ((problem->seq + problem->span - 1) / problem->span);
}

enum { NATIVE_DONE, NATIVE_INTERRUPTED, NATIVE_NO_MEMORY };

/* Compute a phase with up to `threads` threads; `interrupted`, called now and then on the caller's, may end it (NULL: never). */
int native_run(const Kernel *kernel, const Problem *problem, int phase, int threads, int (*interrupted)(void));

#endif
