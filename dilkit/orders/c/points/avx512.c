/* kernel.h compiled for AVX-512 BW. */
#define VECTOR_BYTES 64
#include "kernel.h"

static int runs_here(void) { return __builtin_cpu_supports("avx512bw"); }

const PointsKernel points_avx512 = {"avx512", runs_here, encode, decode};
