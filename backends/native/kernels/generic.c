/* The CPU kernel for whatever the compiler's baseline is: SSE2, NEON, or plain scalars.
 *
 *     register block of a matrix product:   4 rows x 3 vectors of 4 floats = 12 sums, of 16 vector registers on
 *                                           x86-64; 8 rows and 24 sums, of 32 on aarch64
 *     tile of scores:                       96 columns x 12 rows (floats)
 */
#define VECTOR_BYTES 16
#ifdef __aarch64__
#define REGISTER_ROWS 8
#else
#define REGISTER_ROWS 4
#endif
#define ROW_VECTORS 3
#include "instruction_set.h"

static int runs_here(void) { return 1; }

const InstructionSet native_generic = {"generic", runs_here, scratch_bytes, run_task_of_dtype, exp2_many, multiply_add, score_tiles, step_code, NULL};
