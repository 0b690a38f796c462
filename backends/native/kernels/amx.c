/* The CPU kernel for AMX: bf16 in tile registers, forward and backward; everything else is the code for AVX-512. A product is of
 * 2 x 2 tiles of 16 x 16 sums, a tile of scores has 96 columns x 32 rows.
 */
#define _GNU_SOURCE
#define VECTOR_BYTES 64
#define REGISTER_ROWS 32
#define ROW_VECTORS 2
#define BF16_PAIRS
#define BF16_TILES
#include "instruction_set.h"

#if defined(__linux__) && defined(__AMX_BF16__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Whether the CPU has tiles and the system saves them when it changes threads. */
static int has_tiles(void) {
    enum { AMX_BF16 = 1 << 22, AMX_TILE = 1 << 24, OSXSAVE = 1 << 27, TILE_STATE = 3 << 17 };
    unsigned a, b, c, d, state, high;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & OSXSAVE) || !__get_cpuid_count(7, 0, &a, &b, &c, &d))
        return 0;
    __asm__("xgetbv" : "=a"(state), "=d"(high) : "c"(0));
    return (d & AMX_BF16) && (d & AMX_TILE) && (state & TILE_STATE) == TILE_STATE;
}

/* Linux grants tiles to a process, its threads and its children, when it asks. */
static int granted_tiles(void) {
    enum { ASK_FOR_STATE = 0x1023, TILE_DATA = 18 };
    return syscall(SYS_arch_prctl, ASK_FOR_STATE, TILE_DATA) == 0;
}

static int runs_here(void) {
    static int known; /* 0: not yet, 1: no, 2: yes */
    if (!__atomic_load_n(&known, __ATOMIC_RELAXED))
        __atomic_store_n(&known, 1 + (native_avx512bf16.runs_here() && has_tiles() && granted_tiles()), __ATOMIC_RELAXED);
    return __atomic_load_n(&known, __ATOMIC_RELAXED) == 2;
}
#else
static int runs_here(void) { return 0; }
#endif

static void run_task(const Problem *problem, int phase, int64_t index, void *scratch) {
    if (by_pairs(problem, phase))
        use_tiles();
    run_task_of_dtype(problem, phase, index, scratch);
    if (by_pairs(problem, phase))
        give_up_tiles();
}

const InstructionSet native_amx = {"amx", runs_here, scratch_bytes, run_task, exp2_many, multiply_add, score_tiles, step_code, &native_avx512};
