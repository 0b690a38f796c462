/* The CPU kernel for AVX2 with FMA: register blocks of 4 x 3 vectors of 8 floats, 12 sums in 16 registers. */
#define VECTOR_BYTES 32
#define REGISTER_ROWS 4
#define ROW_VECTORS 3
#include "instruction_set.h"

static int runs_here(void) { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

const InstructionSet native_avx2 = {"avx2", runs_here, scratch_bytes, run_task_of_dtype, exp2_many, multiply_add, score_tiles, step_code, NULL};
