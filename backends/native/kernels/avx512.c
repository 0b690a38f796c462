/* The kernel for AVX-512 (F, DQ, BW, VL); this file alone is compiled for it. */
#define VECTOR_BYTES 64
#define BLOCK_ROWS 12
#define BLOCK_VECTORS 2
#define TILE_ROWS 96
#include "instance.h"

static int runs_here(void) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma");
}

const Kernel native_avx512 = {"avx512", runs_here, scratch_bytes, run_item, exp_many, multiply_add};
