/* Threads, warps and blocks of a launch, and how a thread stops for others.

     thread   a fiber; runs until it has to wait for its warp, its block or an atomic operation's turn
     warp     32 of them, which meet at each .sync instruction
     block    shared memory, and threads that meet at each barrier
     launch   so many blocks at once, each of which makes room for another when it ends */
#ifndef PTX_THREAD
#define PTX_THREAD

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

typedef enum { READY, IN_WARP, IN_BLOCK, WAITING, DONE } State;

typedef struct {
    uint32_t to;
    int size, bytes, group;
    uint64_t from;
} Copy;

/* cp.async.mbarrier.arrive: the copies before `end` are to have come before it arrives. */
typedef struct {
    struct Mbarrier *barrier;
    uint32_t moment;
    int end, line;
} Arrival;

/* Memory that a launch may touch: `Range` of library.py. */
typedef struct {
    uint64_t low;
    int64_t bytes;
    const char *name;
    int64_t constant;
} Range;

/* `Launch` of library.py. `across`: threads of a block in the direction of x. With `numbers`, only `blocks` of the `grid` blocks of a
   grid run. Blocks run in the order of their numbers, `resident` at once, but for one that begins last. */
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
    Arrival *arrivals;
    int arrival_count;
    uint32_t *known;     /* clocks.h */
    const void *awaited; /* What it waits for, where it is WAITING; see `wait_for`. */
    const char *awaited_name;
    int steps, groups, fences; /* Of its warpgroup's instructions, of wgmma.commit_group and of wgmma.fence: how many it has executed. */
    uint32_t issued, completed; /* Numbers of its last wgmma.mma_async, and of the last that it has waited for. */
} Thread;

/* Who touched a word of shared memory, and since which meetings. `moment`: of its warp, or by its own clock (clocks.h). */
typedef struct {
    uint32_t meeting, moment;
    int16_t thread;
    uint8_t bytes, is_copied; /* By a copy that has arrived at an mbarrier. */
    int line;
} Touch;

typedef struct {
    Touch written, read, also;
    int16_t copying; /* The thread whose copy to it is under way, + 1; IS_MBARRIER: nobody may touch it. */
} Word;

/* A fence: when, whose, and how often its block had met. */
typedef struct {
    int64_t time;
    int thread;
    uint32_t meeting;
    uint32_t *known;
} Fence;

typedef struct Barriers Barriers;
typedef struct Warpgroup Warpgroup;

struct Block {
    int index, number, live, waiting; /* `number` in the grid */
    uint32_t meeting, warp_meeting[MAX_WARPS];
    Thread *threads;
    uint8_t *shared;
    Word *words;
    Fence *fences;
    int fence_count, fence_capacity;
    uint32_t *readers;     /* Of each word of shared memory: the last product of each warpgroup that reads it. */
    Barriers *barriers;    /* barriers.h */
    Warpgroup *warpgroups; /* warpgroup.h */
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
    int begun, failed, has_yielded, arriving; /* `arriving`: arrivals under way. */
} Machine;

extern Machine machine;

static uint32_t draw(void) {
    machine.random ^= machine.random << 13, machine.random ^= machine.random >> 7, machine.random ^= machine.random << 17;
    return (uint32_t)(machine.random >> 16);
}

static void give_way(void) { fiber_switch(&machine.current->fiber, &machine.scheduler); }

static void report(const Thread *t, int line, const char *text, va_list values) {
    if (machine.failed)
        return;
    int n = snprintf(machine.launch.error, MESSAGE, "block %d, thread %d, line %d: ", t->block->index, t->index, line);
    vsnprintf(machine.launch.error + n, MESSAGE - n, text, values);
    machine.failed = 1;
}

/* Ends the launch with the first text. Does not return. */
__attribute__((noinline, format(printf, 2, 3))) static void fail(int line, const char *text, ...) {
    va_list values;
    va_start(values, text);
    report(machine.current, line, text, values);
    va_end(values);
    while (1)
        give_way();
}

/* The same of thread `t`, and returns: for what happens while no thread runs. */
__attribute__((noinline, format(printf, 3, 4))) static void fail_of(const Thread *t, int line, const char *text, ...) {
    va_list values;
    va_start(values, text);
    report(t, line, text, values);
    va_end(values);
}

/* The running thread waits until `wake` is called with the same `awaited`. */
static void wait_for(const void *awaited, const char *name, int line) {
    Thread *t = machine.current;
    t->awaited = awaited, t->awaited_name = name, t->line = line, t->state = WAITING;
    give_way();
}

static void wake(Block *block, const void *awaited) {
    for (int i = 0; i < machine.launch.threads; i++)
        if (block->threads[i].state == WAITING && block->threads[i].awaited == awaited)
            block->threads[i].state = READY;
}

/* Before a branch to an earlier line, or an atomic operation, for which others may wait. */
CALLED void loop(int turns, int line) {
    if ((machine.loops -= turns) < 0)
        fail(line, "loops for ever");
}

/* Counts of what a launch issues, with COUNTED; without it nothing is compiled. `Counts` of emulator.py has the same order.

   An access to shared memory by several lanes takes a wavefront for each 128 bytes, unless different words are in the same of 32 banks:
   of 8 bytes by half a warp at a time, of 16 by a quarter, as is believed. At least it takes as many as there are different words in
   a bank. What lanes touch at the same line, for the same time since they last met, is one instruction. */
enum {
    PRODUCTS_K8,
    PRODUCTS_K16,
    MATRICES,
    MATRIX_WAVEFRONTS,
    SHARED_INSTRUCTIONS,
    SHARED_WAVEFRONTS,
    SHARED_LEAST_WAVEFRONTS,
    GLOBAL_LOADED,
    GLOBAL_STORED,
    COPIED,
    FMA,
    FP32,
    SPECIAL,
    SHUFFLES,
    WARP_BARRIERS,
    BARRIERS,
    ATOMICS,
    COUNTS
};

#ifdef COUNTED

#define COUNT(what, times) (machine.launch.counts[what] += (times))

enum { BANKS = 32, MOST_WORDS = 4 };

/* An access of a lane: the line, and which time since its warp last met. */
typedef struct {
    int line, time, lane, bytes;
    uint32_t at;
} Noted;

typedef struct {
    Noted *all;
    int count, capacity;
} Notes;

static Notes *notes; /* By warp of the launch. */

static void begin_counts(int blocks) { notes = calloc(blocks * MAX_WARPS, sizeof *notes); }

static void end_counts(int blocks) {
    for (int i = 0; i < blocks * MAX_WARPS; i++)
        free(notes[i].all);
    free(notes);
}

static Notes *notes_of(const Thread *t) { return &notes[t->block->index * MAX_WARPS + t->index / WARP]; }

static void note_shared(uint32_t at, int bytes, int line) {
    Thread *t = machine.current;
    Notes *own = notes_of(t);
    int time = 0;
    for (int i = own->count; i-- && own->all[i].lane == t->index % WARP;)
        if (own->all[i].line == line) {
            time = own->all[i].time + 1;
            break;
        }
    if (own->count == own->capacity) {
        own->capacity = own->capacity * 2 + 1024;
        own->all = realloc(own->all, own->capacity * sizeof *own->all);
    }
    own->all[own->count++] = (Noted){line, time, t->index % WARP, bytes, at};
}

/* The most different words in a bank. */
static int wavefronts(const uint32_t *words, int count) {
    uint32_t known[WARP * MOST_WORDS];
    int used = 0, most = 0, in_bank[BANKS] = {0};
    for (int i = 0; i < count; i++) {
        int is_new = 1;
        for (int k = 0; k < used && is_new; k++)
            is_new = known[k] != words[i];
        if (!is_new)
            continue;
        known[used++] = words[i];
        if (++in_bank[words[i] % BANKS] > most)
            most = in_bank[words[i] % BANKS];
    }
    return most;
}

/* Of the words of lanes `from` and above, below `to`. */
static int wavefronts_of_lanes(const Noted *one, int lanes, int from, int to) {
    uint32_t words[WARP * MOST_WORDS];
    int count = 0;
    for (int i = 0; i < lanes; i++)
        for (int b = 0; one[i].lane >= from && one[i].lane < to && b < one[i].bytes; b += 4)
            words[count++] = one[i].at / 4 + b / 4;
    return wavefronts(words, count);
}

/* Of one instruction. */
static int wavefronts_of(const Noted *one, int lanes) {
    int together = one->bytes <= 4 ? WARP : 4 * BANKS / one->bytes, all = 0;
    for (int from = 0; from < WARP; from += together)
        all += wavefronts_of_lanes(one, lanes, from, from + together);
    return all;
}

static int compare_noted(const void *a, const void *b) {
    const Noted *x = a, *y = b;
    return x->line != y->line ? x->line - y->line : x->time != y->time ? x->time - y->time : x->lane - y->lane;
}

/* The lanes of a warp have met, or are done. */
static void count_shared(const Thread *lanes) {
    Notes *own = notes_of(lanes);
    qsort(own->all, own->count, sizeof *own->all, compare_noted);
    for (int first = 0, next; first < own->count; first = next) {
        const Noted *one = own->all + first;
        for (next = first; next < own->count && own->all[next].line == one->line && own->all[next].time == one->time;)
            next++;
        COUNT(SHARED_INSTRUCTIONS, 1);
        COUNT(SHARED_WAVEFRONTS, wavefronts_of(one, next - first));
        COUNT(SHARED_LEAST_WAVEFRONTS, wavefronts_of_lanes(one, next - first, 0, WARP));
    }
    own->count = 0;
}

#else

#define COUNT(what, times) ((void)0)
static inline void begin_counts(int blocks) { (void)blocks; }
static inline void end_counts(int blocks) { (void)blocks; }
static inline void note_shared(uint32_t at, int bytes, int line) { (void)at, (void)bytes, (void)line; }
static inline void count_shared(const Thread *lanes) { (void)lanes; }

#endif

#endif
