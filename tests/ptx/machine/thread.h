/* Threads, warps and blocks of a launch, and how a thread stops for others.

     thread   a fiber; runs until it has to wait for its warp, its block or an atomic operation's turn
     warp     32 of them, which meet at each .sync instruction
     block    shared memory, and threads that meet at each barrier
     launch   so many blocks at once, each of which makes room for another when it ends */
#ifndef DILKIT_PTX_THREAD
#define DILKIT_PTX_THREAD

#include "fiber.h"
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <wchar.h>

/* What kernels call is compiled by itself, without KERNEL, and linked to each of them, which knows it by name alone. */
#ifdef KERNEL
#define CALLED extern inline __attribute__((gnu_inline))
#else
#define CALLED
#endif

enum { WARP = 32, MAX_WARPS = 32, MESSAGE = 900, STACK_BYTES = 1 << 20 };
/* An atomic operation is as many turns of a loop. */
enum { ATOMIC_LOOPS = 100 };

typedef enum { READY, IN_WARP, IN_BLOCK, DONE } State;

typedef struct {
    uint32_t to;
    int size, bytes, group;
    uint64_t from;
} Copy;

/* Which memory a launch may touch: `Span` of tests/helpers/host_launcher.py. */
typedef struct {
    uint64_t low;
    int64_t bytes;
    const char *name;
    int64_t constant;
} Range;

/* `Launch` of tests/ptx/library.py. `across`: threads of a block in the direction of x. With `numbers`, `blocks` of a grid of `grid`
   blocks run, and the others do not. */
typedef struct {
    int32_t blocks, threads, across, resident, checked, late, group, fraction, ulps, range_count;
    uint64_t seed;
    int64_t dynamic_bytes, loops; /* After so many turns of loops it is taken to run for ever. */
    Range *ranges;
    char *error;
    int64_t *counts;
    const int32_t *numbers;
    int32_t grid;
} Launch;

typedef struct Block Block;

typedef struct {
    Fiber fiber;
    char *stack;
    Block *block;
    int index, line, kind, arguments[2], is_chosen;
    State state;
    uint32_t in[12], out[4];
    Copy *copies;
    int begun, done, group, capacity; /* Of its copies: how many have begun, and have come; the group of the next. */
    int64_t fenced;                   /* When it, or a thread that it has met since, last fenced. */
} Thread;

/* Who touched a word of shared memory, and since which meetings. */
typedef struct {
    uint32_t meeting, warp_meeting;
    int16_t thread;
    uint8_t bytes;
    int line;
} Touch;

typedef struct {
    Touch written, read, also;
    int16_t copying; /* The thread whose copy to it is under way, + 1. */
} Word;

/* A fence: when, whose, and how often its block had met. */
typedef struct {
    int64_t time;
    int thread;
    uint32_t meeting;
} Fence;

struct Block {
    int index, number, live, waiting; /* `number` in the grid */
    uint32_t meeting, warp_meeting[MAX_WARPS];
    Thread *threads;
    uint8_t *shared;
    Word *words;
    Fence *fences;
    int fence_count, fence_capacity;
};

typedef struct {
    Launch launch;
    const uint8_t *parameters;
    Block *blocks, **resident;
    Thread *current;
    Fiber scheduler;
    uint64_t random;
    int64_t time, loops;
    int64_t shared_bytes;
    int begun, failed, has_yielded;
} Machine;

extern Machine machine;

static uint32_t draw(void) {
    machine.random ^= machine.random << 13, machine.random ^= machine.random >> 7, machine.random ^= machine.random << 17;
    return (uint32_t)(machine.random >> 16);
}

static void give_way(void) { fiber_switch(&machine.current->fiber, &machine.scheduler); }

/* Ends the launch with the first text. Does not return. */
__attribute__((noinline, format(printf, 2, 3))) static void fail(int line, const char *text, ...) {
    if (!machine.failed) {
        va_list values;
        va_start(values, text);
        int n = snprintf(machine.launch.error, MESSAGE, "block %d, thread %d, line %d: ", machine.current->block->index,
                         machine.current->index, line);
        vsnprintf(machine.launch.error + n, MESSAGE - n, text, values);
        va_end(values);
        machine.failed = 1;
    }
    while (1)
        give_way();
}

/* Before a branch to an earlier line, or an atomic operation, for which others may wait. */
CALLED void loop(int turns, int line) {
    if ((machine.loops -= turns) < 0)
        fail(line, "loops for ever");
}

#endif
