/* What the 32 lanes of a warp do together, at a .sync instruction. All of them have to be at the same one (PTX: the executing threads
   have to be those of the membermask, which here is always the whole warp). */
#ifndef DILKIT_PTX_WARP
#define DILKIT_PTX_WARP

#include "tensor.h"

/* Names of the PTX ISA are as it writes them. */
enum {
    SHUFFLE_bfly,
    SHUFFLE_idx,
    SHUFFLE_up,
    SHUFFLE_down,
    BALLOT,
    REDUCE_add,
    REDUCE_min,
    REDUCE_max,
    MEET,
    LOAD_MATRICES,
    STORE_MATRICES,
    MULTIPLY
};

/* The running thread waits for its warp, which then does `kind` with `in` of each lane. Returns the thread, whose `out` is set. */
static Thread *with_warp(int kind, int line, int first, int second) {
    Thread *t = machine.current;
    t->kind = kind, t->line = line, t->arguments[0] = first, t->arguments[1] = second, t->state = IN_WARP;
    give_way();
    return t;
}

/* The lane that `lane` reads, and in *is_chosen whether it is one of its segment; its own where not. */
static int shuffled_lane(int kind, int lane, uint32_t b, uint32_t c, int *is_chosen) {
    int distance = (int)(b & 31), clamp = (int)(c & 31), segment = (int)(c >> 8 & 31);
    int last = (lane & segment) | (clamp & ~segment), first = lane & segment, from = lane;
    if (kind == SHUFFLE_bfly)
        from = lane ^ distance;
    else if (kind == SHUFFLE_idx)
        from = first | (distance & ~segment & 31);
    else
        from = kind == SHUFFLE_up ? lane - distance : lane + distance;
    *is_chosen = kind == SHUFFLE_up ? from >= last : from <= last;
    return *is_chosen ? from : lane;
}

static void shuffle_lanes(Thread *lanes, int kind) {
    for (int i = 0; i < WARP; i++) {
        int from = shuffled_lane(kind, i, lanes[i].in[1], lanes[i].in[2], &lanes[i].is_chosen);
        lanes[i].out[0] = lanes[from].in[0];
    }
    COUNT(SHUFFLES, 1);
}

static void combine_lanes(Thread *lanes, int kind) {
    uint32_t all = kind == REDUCE_min || kind == REDUCE_max ? lanes[0].in[0] : 0;
    for (int i = 0; i < WARP; i++) {
        uint32_t x = lanes[i].in[0];
        if (kind == BALLOT)
            all |= (uint32_t)(x != 0) << i;
        else if (kind == REDUCE_add)
            all += x;
        else if (kind == REDUCE_min ? (int32_t)x < (int32_t)all : (int32_t)x > (int32_t)all)
            all = x;
    }
    for (int i = 0; i < WARP; i++)
        lanes[i].out[0] = all;
    COUNT(SHUFFLES, 1);
}

static void do_together(Thread *lanes) {
    int kind = lanes->kind, *arguments = lanes->arguments;
    if (kind <= SHUFFLE_down) {
        shuffle_lanes(lanes, kind);
    } else if (kind <= REDUCE_max) {
        combine_lanes(lanes, kind);
    } else if (kind == MEET) {
        lanes->block->warp_meeting[lanes->index / WARP]++;
        COUNT(WARP_BARRIERS, 1);
    } else if (kind == LOAD_MATRICES) {
        load_matrices(lanes, arguments[0], arguments[1]);
    } else if (kind == STORE_MATRICES) {
        store_matrices(lanes, arguments[0], arguments[1], lanes->line);
    } else {
        multiply_matrices(lanes, arguments[0], arguments[1]);
    }
}

/* Lanes 0 and `lane` of a warp have come to different instructions. */
static void fail_meeting(const Thread *lanes, int lane) {
    machine.failed = 1;
    snprintf(machine.launch.error, MESSAGE, "block %d, warp %d: lanes 0 and %d meet at different instructions, lines %d and %d",
             lanes->block->index, lanes->index / WARP, lane, lanes->line, lanes[lane].line);
}

/* If all lanes have come, they do what they came for and may run on. */
static void let_meet(Thread *lanes) {
    for (int i = 0; i < WARP; i++)
        if (lanes[i].state != IN_WARP)
            return;
    count_shared(lanes);
    for (int i = 1; i < WARP; i++)
        if (lanes[i].line != lanes->line) {
            fail_meeting(lanes, i);
            return;
        }
    do_together(lanes);
    for (int i = 0; i < WARP; i++)
        lanes[i].state = READY;
}

CALLED uint32_t warp_value(int kind, uint32_t x, uint32_t members, int line) {
    if (members != 0xffffffffu)
        fail(line, "membermask %x: only whole warps are known", members);
    machine.current->in[0] = x;
    return with_warp(kind, line, 0, 0)->out[0];
}

CALLED uint32_t shuffle(int kind, uint32_t x, uint32_t b, uint32_t c, uint32_t members, int line) {
    machine.current->in[1] = b, machine.current->in[2] = c;
    return warp_value(kind, x, members, line);
}

CALLED const uint32_t *ldmatrix(int count, int is_transposed, uint32_t at, int line) {
    Thread *t = machine.current;
    t->in[0] = at;
    if (t->index % WARP < count * 8)
        shared_place(at, 16, 0, line);
    return with_warp(LOAD_MATRICES, line, count, is_transposed)->out;
}

/* The address and the registers are in `in`. */
CALLED void stmatrix(int count, int is_transposed, int line) { with_warp(STORE_MATRICES, line, count, is_transposed); }

/* `registers` of A, B and C are in `in`. */
CALLED const uint32_t *mma(int depth, int is_bfloat, int line) { return with_warp(MULTIPLY, line, depth, is_bfloat)->out; }

#endif
