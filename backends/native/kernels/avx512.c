/* The CPU kernel for AVX-512 (F, DQ, BW, VL): register blocks of 8 x 3 vectors of 16 floats, 24 sums in 32 registers. */
#define VECTOR_BYTES 64
#define REGISTER_ROWS 8
#define ROW_VECTORS 3
#include "instruction_set.h"

static int runs_here(void) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma");
}

const InstructionSet native_avx512 = {"avx512", runs_here, scratch_bytes, run_task_of_dtype, exp2_many, multiply_add, score_tiles, step_code, NULL};
