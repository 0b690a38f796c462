/* The CPU kernel for AVX-512 with dot products of bf16 pairs, which compute bf16; everything else is the code for AVX-512. */
#define VECTOR_BYTES 64
#define REGISTER_ROWS 8
#define ROW_VECTORS 3
#define BF16_PAIRS
#include "instruction_set.h"

static int runs_here(void) { return native_avx512.runs_here() && __builtin_cpu_supports("avx512bf16"); }

const InstructionSet native_avx512bf16 = {"avx512bf16", runs_here, scratch_bytes, run_task_of_dtype, exp2_many, multiply_add, score_tiles, step_code, &native_avx512};
