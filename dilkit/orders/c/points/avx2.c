/* kernel.h compiled for AVX2. */
#define VECTOR_BYTES 32
#include "kernel.h"

static int runs_here(void) { return __builtin_cpu_supports("avx2"); }

const PointsKernel points_avx2 = {"avx2", runs_here, encode, decode};
