/* The kernel for whatever the compiler's baseline is: SSE2, NEON, or plain scalars. */
#define VECTOR_BYTES 16
#define BLOCK_ROWS 6
#define BLOCK_VECTORS 2
#define TILE_ROWS 48
#include "instance.h"

static int runs_here(void) { return 1; }

const Kernel native_generic = {"generic", runs_here, scratch_bytes, run_item, exp_many, multiply_add};
