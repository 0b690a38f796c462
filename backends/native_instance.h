/* The kernel for one instruction set: once in float, for fp32 and the half types, and once in double.
 *
 * The including file defines VECTOR_BYTES, and the register block BLOCK_ROWS x (BLOCK_VECTORS vectors); TILE_ROWS is a multiple
 * of both sides of the block in either type.
 */
#include "native.h"
#include "native_keys.h"
#include "native_rows.h"

#include <math.h>

#define JOIN_(a, b) a##_##b
#define JOIN(a, b) JOIN_(a, b)
#define N(name) JOIN(name, REAL)

#define LOG2_E ((REAL)1.442695040888963407)
#define LN_2 0.69314718055994530942L

/* Vector extensions have no maximum. */
#if VECTOR_BYTES == 64
#include <immintrin.h>
#define LARGER_float(a, b) _mm512_max_ps(a, b)
#define LARGER_double(a, b) _mm512_max_pd(a, b)
#elif VECTOR_BYTES == 32
#include <immintrin.h>
#define LARGER_float(a, b) _mm256_max_ps(a, b)
#define LARGER_double(a, b) _mm256_max_pd(a, b)
#else
#define LARGER_float(a, b) choose_float((Lanes_float)(a > b), a, b)
#define LARGER_double(a, b) choose_double((Lanes_double)(a > b), a, b)
#endif

#define REAL float
#define INTEGER int32_t
#include "native_vector.h"
#include "native_tile.h"
#include "native_work.h"
#include "native_item.h"
#undef REAL
#undef INTEGER

#define REAL double
#define INTEGER int64_t
#include "native_vector.h"
#include "native_tile.h"
#include "native_work.h"
#include "native_item.h"
#undef REAL
#undef INTEGER

static size_t scratch_bytes(const Problem *problem, int phase) {
    return problem->dtype == FLOAT64 ? scratch_double(problem, phase, NULL, NULL) : scratch_float(problem, phase, NULL, NULL);
}

static void run_item(const Problem *problem, int phase, int64_t index, void *memory) {
    if (problem->dtype == FLOAT64)
        item_double(problem, phase, index, memory);
    else
        item_float(problem, phase, index, memory);
}

static void exp_many(const float *x, float *y, int64_t count) {
    for (int64_t i = 0; i < count; i += LANES_float)
        put_float(y + i, exp_float(get_float(x + i)));
}
