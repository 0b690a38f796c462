/* The CPU kernel for AVX-512 (F, DQ, BW, VL) with dot products of bf16 pairs; this file alone is compiled for it. They compute
 * bf16, forward and backward; everything else is the code for AVX-512.
 *
 *     register block of a matrix product:   8 rows x 3 vectors of 16 floats = 24 sums, of 32 vector registers
 *     tile of scores:                       96 columns x 48 rows (floats)
 */
#define VECTOR_BYTES 64
#define REGISTER_ROWS 8
#define ROW_VECTORS 3
#define BF16_PAIRS
#include "instruction_set.h"

static int runs_here(void) { return native_avx512.runs_here() && __builtin_cpu_supports("avx512bf16"); }

const InstructionSet native_avx512bf16 = {"avx512bf16", runs_here, scratch_bytes, run_task_of_dtype, exp2_many, multiply_add, score_tiles, step_code, &native_avx512};
