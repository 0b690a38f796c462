/* The kernel for AVX2 with FMA; this file alone is compiled for them. */
#define VECTOR_BYTES 32
#define BLOCK_ROWS 6
#define BLOCK_VECTORS 2
#define TILE_ROWS 48
#include "instance.h"

static int runs_here(void) { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

const Kernel native_avx2 = {"avx2", runs_here, scratch_bytes, run_item, exp_many, multiply_add};
