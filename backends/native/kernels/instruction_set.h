/* The CPU kernel compiled for one instruction set; each of generic.c, avx2.c, avx512.c, avx512bf16.c and amx.c includes this
 * file.
 *
 *     KIND float    fp32, fp16, bf16: computed in float
 *     KIND double   fp64: computed in double
 *     KIND pairs    bf16, by products of bf16 pairs
 *
 * Each KIND includes attention_block.h, and with it all other headers, once. The including file defines VECTOR_BYTES, and the
 * register block of a matrix product: REGISTER_ROWS, a divisor of 16, x (ROW_VECTORS vectors). BF16_PAIRS: KIND pairs alone.
 * BF16_TILES: by AMX.
 */
#include "native.h"
#include "repeats.h"
#include "visibility.h"
#include "patches.h"
#include "strips/strip.h"
#include "load_store.h"

#include <float.h>
#include <math.h>

#define JOIN_(a, b) a##_##b
#define JOIN(a, b) JOIN_(a, b)
#define N(name) JOIN(name, KIND) /* of this kind */
#define R(name) JOIN(name, REAL) /* of this type of numbers */

#define TILE_ROWS (ROW_VECTORS * N(LANES))
enum { PANEL = 16 };       /* numbers of a packed column that lie side by side */
enum { FEW_COLUMNS = 40 }; /* fewer go with row vectors that do not see them: a step of their own takes longer */
enum { FEW_ROWS = 3 };     /* lists of so many read columns where they lie: with more, to pack them takes no longer */
enum { COLUMNS_TOGETHER = 8 }; /* values of so many are summed up at once */
enum { DELTA_PARTS = 16 };     /* sums of a row of dout * out */
enum { IS_WRITTEN = -1 };      /* the sum of a row whose results are in out and lse */

#define LOG_float(x) logf(x)
#define LOG_double(x) log(x)

#define LOG2_E ((REAL)1.442695040888963407)
#define LN_2 0.69314718055994530942L

/* Scores whose rounding changes a weight by up to 1/32 or more; an lse whose rounding does so by 1/512. */
#define EPSILON ((REAL)(sizeof(REAL) == 4 ? FLT_EPSILON : DBL_EPSILON))
#define HUGE_SCORE (1 / (16 * EPSILON))
#define LARGE_LSE (1 / (1024 * EPSILON))

/* Vector extensions have no maximum. */
#if defined(__AVX512F__) && VECTOR_BYTES == 64
#include <immintrin.h>
#define VECTOR_MAX_float(a, b) _mm512_max_ps(a, b)
#define VECTOR_MAX_double(a, b) _mm512_max_pd(a, b)
#elif defined(__AVX__) && VECTOR_BYTES == 32
#include <immintrin.h>
#define VECTOR_MAX_float(a, b) _mm256_max_ps(a, b)
#define VECTOR_MAX_double(a, b) _mm256_max_pd(a, b)
#else
#define VECTOR_MAX_float(a, b) N(select)((Lanes)(a > b), a, b)
#define VECTOR_MAX_double(a, b) N(select)((Lanes)(a > b), a, b)
#endif

/* Nor a square root, nor lanes that are read from anywhere. */
#if defined(__AVX512F__) && VECTOR_BYTES == 64
#define VECTOR_SQRT_float(x) (Vector) _mm512_sqrt_ps((__m512)(x))
#define VECTOR_SQRT_double(x) (Vector) _mm512_sqrt_pd((__m512d)(x))
#define GATHER_float(from, at) (Vector) _mm512_i32gather_ps((__m512i)(at), from, 4)
#define GATHER_double(from, at) (Vector) _mm512_i64gather_pd((__m512i)(at), from, 8)
#elif defined(__AVX2__) && VECTOR_BYTES == 32
#define VECTOR_SQRT_float(x) (Vector) _mm256_sqrt_ps((__m256)(x))
#define VECTOR_SQRT_double(x) (Vector) _mm256_sqrt_pd((__m256d)(x))
#define GATHER_float(from, at) (Vector) _mm256_i32gather_ps(from, (__m256i)(at), 4)
#define GATHER_double(from, at) (Vector) _mm256_i64gather_pd(from, (__m256i)(at), 8)
#else
#define OF_LANES(number)                        \
    ({                                          \
        Vector lanes = {0};                     \
        for (int l = 0; l < N(LANES); l++)      \
            lanes[l] = number;                  \
        lanes;                                  \
    })
#define VECTOR_SQRT_float(x) OF_LANES(sqrtf((x)[l]))
#define VECTOR_SQRT_double(x) OF_LANES(sqrt((x)[l]))
#define GATHER_float(from, at) OF_LANES((from)[(at)[l]])
#define GATHER_double(from, at) OF_LANES((from)[(at)[l]])
#endif

/* The product of the low halves of vectors of 64-bit words. */
#if defined(__AVX512F__) && VECTOR_BYTES == 64
#define MULTIPLY_LOW(a, b) (Words) _mm512_mul_epu32((__m512i)(a), (__m512i)(b))
#elif defined(__AVX2__) && VECTOR_BYTES == 32
#define MULTIPLY_LOW(a, b) (Words) _mm256_mul_epu32((__m256i)(a), (__m256i)(b))
#else
#define MULTIPLY_LOW(a, b) (((a) & 0xffffffffu) * ((b) & 0xffffffffu))
#endif

/* The lanes of a and b, one after the other, that `which` names: of GCC; clang has it with constants only. */
#ifdef __clang__
#define SHUFFLE(a, b, which)                                                                       \
    ({                                                                                             \
        Vector shuffled;                                                                           \
        for (int l = 0; l < N(LANES); l++)                                                         \
            shuffled[l] = which[l] < N(LANES) ? (a)[which[l]] : (b)[which[l] - N(LANES)];          \
        shuffled;                                                                                  \
    })
#else
#define SHUFFLE(a, b, which) __builtin_shuffle(a, b, which)
#endif

#define REAL float
#define REAL_MAX FLT_MAX
#define INTEGER int32_t
#define UNSIGNED uint32_t
#ifdef BF16_PAIRS

#define KIND pairs
#define UNIT 2
#include "attention_block.h"
#include "speed.h"

static int by_pairs(const Problem *problem, int phase) { return problem->dtype == BFLOAT16 && phase != DELTA; }

static size_t scratch_bytes(const Problem *problem, int phase) {
    return by_pairs(problem, phase) ? lay_out_scratch_pairs(problem, phase, NULL, NULL) : native_avx512.scratch_bytes(problem, phase);
}

static void run_task_of_dtype(const Problem *problem, int phase, int64_t index, void *scratch) {
    if (by_pairs(problem, phase))
        run_task_pairs(problem, phase, index, scratch);
    else
        native_avx512.run_task(problem, phase, index, scratch);
}

static void exp2_many(const float *x, float *y, int64_t count) { native_avx512.exp2(x, y, count); }
static int64_t multiply_add(int64_t rounds, float *result) { return native_avx512.multiply_add(rounds, result); }
static const StepCode *step_code(int dtype) { return native_avx512.step(dtype); }

#else

#define KIND float
#define UNIT 1
#include "attention_block.h"
#include "speed.h"
#undef KIND
#undef REAL
#undef REAL_MAX
#undef INTEGER
#undef UNSIGNED

#define REAL double
#define REAL_MAX DBL_MAX
#define INTEGER int64_t
#define UNSIGNED uint64_t
#define KIND double
#include "attention_block.h"

static size_t scratch_bytes(const Problem *problem, int phase) {
    return problem->dtype == FLOAT64 ? lay_out_scratch_double(problem, phase, NULL, NULL)
                                     : lay_out_scratch_float(problem, phase, NULL, NULL);
}

static void run_task_of_dtype(const Problem *problem, int phase, int64_t index, void *scratch) {
    if (problem->dtype == FLOAT64)
        run_task_double(problem, phase, index, scratch);
    else
        run_task_float(problem, phase, index, scratch);
}

static const StepCode *step_code(int dtype) {
    static const StepCode of_float = {
        piece_scratch_bytes_float, partial_bytes_float, write_rows_float, attend_piece_float, merge_pieces_float
    };
    static const StepCode of_double = {
        piece_scratch_bytes_double, partial_bytes_double, write_rows_double, attend_piece_double, merge_pieces_double
    };
    return dtype == FLOAT64 ? &of_double : &of_float;
}

static void exp2_many(const float *x, float *y, int64_t count) {
    for (int64_t i = 0; i < count; i += LANES_float)
        store_vector_float(y + i, exp2_float(load_vector_float(x + i)));
}

/* Fused multiply-adds in `rounds` rounds of all registers, from nothing but registers; returns the FLOPs. */
static int64_t multiply_add(int64_t rounds, float *result) {
    Vector_float sum[12], term = *result - (Vector_float){0}, factor = term;
    for (int i = 0; i < 12; i++)
        sum[i] = term + (float)i;
    for (int64_t round = 0; round < rounds; round++)
#pragma GCC unroll 12
        for (int i = 0; i < 12; i++)
            sum[i] = sum[i] * factor + term;
    for (int i = 1; i < 12; i++)
        sum[0] += sum[i];
    *result = sum[0][0];
    return rounds * 12 * LANES_float * 2;
}

#endif
