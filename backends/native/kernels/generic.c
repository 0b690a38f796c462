/* The CPU kernel for whatever the compiler's baseline is: SSE2, NEON, or plain scalars.
 *
 *     register block of a matrix product:   6 rows x 2 vectors of 4 floats = 12 sums, of 16 vector registers on x86-64
 *     tile of scores:                       96 columns x 48 rows
 */
#define VECTOR_BYTES 16
#define REGISTER_ROWS 6
#define REGISTER_VECTORS 2
#define TILE_ROWS 48
#include "instruction_set.h"

static int runs_here(void) { return 1; }

const InstructionSet native_generic = {"generic", runs_here, scratch_bytes, run_task_of_dtype, exp_many, multiply_add};
