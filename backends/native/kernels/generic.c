/* The CPU kernel for whatever the compiler's baseline is: SSE2, NEON, or plain scalars. Register blocks of 4 x 3 vectors of 4
 * floats for 16 vector registers, as on x86-64; of 8 x 3 for the 32 of aarch64.
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
