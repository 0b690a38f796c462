/* The kernel for AVX-512 (F, DQ, BW, VL) with dot products of bf16 pairs; this file alone is compiled for it. */
#define VECTOR_BYTES 64
#define BLOCK_ROWS 12
#define BLOCK_VECTORS 2
#define TILE_ROWS 96
#define PAIRS
#include "instance.h"

static int runs_here(void) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("avx512bf16");
}

const Kernel native_avx512bf16 = {"avx512bf16", runs_here, scratch_bytes, run_item, exp_many, multiply_add};
