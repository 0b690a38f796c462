/* The kernel for one instruction set: in float, for fp32 and the half types, in double, and where there are dot products of
 * pairs of bf16, in those, for the forward pass of bf16.
 *
 * The including file defines VECTOR_BYTES, and the register block BLOCK_ROWS x (BLOCK_VECTORS vectors); TILE_ROWS is a multiple
 * of both sides of the block in every type. PAIRS says that there are such dot products.
 */
#include "native.h"
#include "keys.h"
#include "rows.h"

#include <math.h>

#define JOIN_(a, b) a##_##b
#define JOIN(a, b) JOIN_(a, b)
#define N(name) JOIN(name, KIND) /* of this kind of the kernel */
#define R(name) JOIN(name, REAL) /* of this type of numbers */

#define LOG2_E ((REAL)1.442695040888963407)
#define LN_2 0.69314718055994530942L

/* Vector extensions have no maximum. */
#if defined(__AVX512F__) && VECTOR_BYTES == 64
#include <immintrin.h>
#define LARGER_float(a, b) _mm512_max_ps(a, b)
#define LARGER_double(a, b) _mm512_max_pd(a, b)
#elif defined(__AVX__) && VECTOR_BYTES == 32
#include <immintrin.h>
#define LARGER_float(a, b) _mm256_max_ps(a, b)
#define LARGER_double(a, b) _mm256_max_pd(a, b)
#else
#define LARGER_float(a, b) N(choose)((Lanes)(a > b), a, b)
#define LARGER_double(a, b) N(choose)((Lanes)(a > b), a, b)
#endif

#define KIND float
#define REAL float
#define INTEGER int32_t
#define UNIT 1
#include "vector.h"
#include "tile.h"
#include "work.h"
#include "item.h"
#undef KIND

#ifdef PAIRS
#undef UNIT
#define KIND pairs
#define UNIT 2
#include "vector.h"
#include "pairs.h"
#include "tile.h"
#include "work.h"
#include "item.h"
#undef KIND
#endif

#undef REAL
#undef INTEGER
#undef UNIT
#define KIND double
#define REAL double
#define INTEGER int64_t
#define UNIT 1
#include "vector.h"
#include "tile.h"
#include "work.h"
#include "item.h"

static size_t scratch_bytes(const Problem *problem, int phase) {
    return problem->dtype == FLOAT64 ? scratch_double(problem, phase, NULL, NULL) : scratch_float(problem, phase, NULL, NULL);
}

static void run_item(const Problem *problem, int phase, int64_t index, void *memory) {
    if (problem->dtype == FLOAT64)
        item_double(problem, phase, index, memory);
#ifdef PAIRS
    else if (problem->dtype == BFLOAT16 && phase == FORWARD)
        item_pairs(problem, phase, index, memory);
#endif
    else
        item_float(problem, phase, index, memory);
}

static void exp_many(const float *x, float *y, int64_t count) {
    for (int64_t i = 0; i < count; i += LANES_float)
        put_float(y + i, exp_float(get_float(x + i)));
}

/* As many fused multiply-adds as fit into `rounds` rounds of all registers, from nothing but registers; returns the FLOPs. */
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
