/* PTX threads on the CPU. A kernel, which library.py has written in C, includes it:

     launch ─> blocks of fibers ─> a warp is drawn; each of its lanes runs until it waits for the warp, the block, or gives way
                    ^                        │
                    └── warps and blocks that have met run on <──┘

   Which warp is next is random, in one of two ways: any, or nearly always the one of highest priority, drawn anew now and then, so that
   one runs far ahead of the others. A block of which one has given way, as those do that wait for other blocks, comes after these. In
   every other launch one block begins when all others have ended, for a device says of none when it begins. */
#ifndef PTX_MACHINE
#define PTX_MACHINE

#include "barriers.h"

void kernel(void);
int64_t static_shared_bytes(void);
int64_t parameter_bytes(void);

/* ld.param: the address is that of the machine. */
CALLED const void *param_load(uint64_t at, int bytes, int line) {
    uint64_t low = (uint64_t)machine.parameters;
    if (at < low || at + bytes > low + parameter_bytes() || (at - low) % bytes)
        fail(line, "%d bytes of parameters at %lld", bytes, (long long)(at - low));
    return (const void *)at;
}

/* Addresses of shared memory among generic ones (PTX: Addresses as Operands, Generic Addressing). */
#define SHARED_WINDOW 0x7000000000000000ull

CALLED const void *generic_load(uint64_t at, int bytes, int line) {
    return at >> 56 == SHARED_WINDOW >> 56 ? shared_load((uint32_t)at, bytes, line) : global_load(at, bytes, line);
}

CALLED void generic_store(uint64_t at, const void *value, int bytes, int line) {
    (at >> 56 == SHARED_WINDOW >> 56 ? shared_store : global_store)(at & ~SHARED_WINDOW, value, bytes, line);
}

CALLED void barrier(int line) {
    Thread *t = machine.current;
    t->line = line, t->state = IN_BLOCK;
    t->block->waiting++;
    give_way();
}

static void begin_thread(void) {
    kernel();
    Thread *t = machine.current;
    if (t->done < t->begun && !t->arrival_count && machine.launch.checked)
        fail(t->line, "ends with copies under way");
    end_steps(t);
    t->state = DONE;
    t->block->live--;
    while (1)
        give_way();
}

static void start_thread(Block *block, int index) {
    Thread *t = &block->threads[index];
    t->block = block, t->index = index, t->state = READY;
    if (!t->stack)
        t->stack = malloc(STACK_BYTES);
    fiber_start(&t->fiber, t->stack, STACK_BYTES, begin_thread);
}

static Block *start_block(int index) {
    int number = machine.launch.numbers ? machine.launch.numbers[index] : index;
    Block *block = &machine.blocks[index];
    *block = (Block){.index = index, .number = number, .live = machine.launch.threads};
    block->threads = calloc(machine.launch.threads, sizeof(Thread));
    block->shared = aligned_alloc(1024, (machine.shared_bytes + 1023) / 1024 * 1024 + 1024);
    block->words = malloc((machine.shared_bytes / 4 + 1) * sizeof(Word));
    empty_shared(block);
    if (has_clocks())
        begin_barriers(block), begin_warpgroups(block);
    for (int i = 0; i < machine.launch.threads; i++)
        start_thread(block, i);
    return block;
}

static void end_block(Block *block) {
    for (int i = 0; i < machine.launch.threads; i += WARP)
        count_shared(&block->threads[i]);
    for (int i = 0; i < machine.launch.threads; i++)
        free(block->threads[i].stack), free(block->threads[i].copies);
    for (int i = 0; block->barriers && i < machine.launch.threads; i++)
        if (block->threads[i].arrival_count && machine.launch.checked)
            fail_of(&block->threads[i], block->threads[i].line, "ends with copies under way");
    if (block->barriers)
        end_warpgroups(block), end_barriers(block);
    free(block->threads), free(block->shared), free(block->words);
}

/* Which block is the next to begin: they begin in the order of their numbers, but for number `last`. */
static int next_block(int last) {
    int index = machine.begun++;
    if (last >= machine.launch.blocks || index < last)
        return index;
    return index + 1 < machine.launch.blocks ? index + 1 : last;
}

/* Of the next blocks as many as there is room for. */
static void begin_blocks(int last) {
    for (int i = 0; i < machine.launch.resident; i++) {
        Block *block = machine.resident[i];
        if (block && block->live)
            continue;
        if (block)
            end_block(block);
        machine.resident[i] = machine.begun < machine.launch.blocks ? start_block(next_block(last)) : 0;
    }
}

/* bar.sync is as barrier.sync.aligned: all lanes of a warp are at the same one. */
static void check_aligned(const Thread *lanes) {
    for (int i = 1; i < WARP; i++)
        if (lanes[i].line != lanes->line)
            fail_meeting(lanes, i);
}

/* All threads of a block have come to a barrier: what each has fenced, all have. */
static void release_block(Block *block) {
    int64_t fenced = 0;
    for (int i = 0; i < machine.launch.threads; i += WARP)
        check_aligned(&block->threads[i]);
    for (int i = 0; i < machine.launch.threads; i++)
        if (block->threads[i].fenced > fenced)
            fenced = block->threads[i].fenced;
    for (int i = 0; i < machine.launch.threads; i++)
        block->threads[i].fenced = fenced, block->threads[i].state = READY;
    for (int i = 0; i < machine.launch.threads; i += WARP)
        count_shared(&block->threads[i]);
    meet_clocks(block->threads, machine.launch.threads);
    block->meeting++, block->waiting = 0;
    COUNT(BARRIERS, 1);
}

static int is_ready(const Thread *lanes) {
    for (int i = 0; i < WARP; i++)
        if (lanes[i].state == READY)
            return 1;
    return 0;
}

/* Each lane that can run, in random order, until it has to wait. Returns whether one gave way. */
static int run_warp(Thread *lanes) {
    int first = draw() % WARP, step = draw() % 16 * 2 + 1;
    machine.has_yielded = 0;
    for (int i = 0; i < WARP && !machine.failed; i++) {
        Thread *t = &lanes[(first + i * step) % WARP];
        if (t->state != READY)
            continue;
        machine.current = t;
        fiber_switch(&machine.scheduler, &t->fiber);
    }
    if (!machine.failed)
        let_meet(lanes);
    return machine.has_yielded;
}

/* Nobody can run: who waits for what, once a line of the kernel. */
static void fail_stuck(void) {
    int n = 0, line = 0;
    if (machine.failed)
        return;
    for (int i = 0; i < machine.launch.resident; i++)
        for (int k = 0; machine.resident[i] && k < machine.launch.threads; k++) {
            const Thread *t = &machine.resident[i]->threads[k];
            if (t->state == DONE || t->line == line || n > MESSAGE / 2)
                continue;
            machine.failed = 1, line = t->line;
            n += snprintf(machine.launch.error + n, MESSAGE - n, "%sblock %d, thread %d, line %d: waits for ", n ? "; " : "",
                          t->block->index, k, line);
            if (t->state == WAITING)
                n += describe_wait(t, machine.launch.error + n, MESSAGE - n);
            else
                n += snprintf(machine.launch.error + n, MESSAGE - n, "its %s, of which others have ended or wait elsewhere",
                              t->state == IN_WARP ? "warp" : "block");
        }
}

/* The warps of a block that can run; where all of its threads have come to a barrier, all. */
static int ready_warps_of(Block *block, Thread **ready) {
    int count = 0;
    if (block->waiting && block->waiting == machine.launch.threads)
        release_block(block);
    for (int k = 0; block->live && k < machine.launch.threads; k += WARP)
        if (is_ready(&block->threads[k]))
            ready[count++] = &block->threads[k];
    return count;
}

/* Those of all resident blocks but number `last`, which runs after the others. */
static int ready_warps(Thread **ready, int last) {
    int count = 0;
    Block *after = 0;
    begin_blocks(last);
    for (int i = 0; i < machine.launch.resident; i++) {
        Block *block = machine.resident[i];
        if (block && block->index == last)
            after = block;
        else if (block)
            count += ready_warps_of(block, ready + count);
    }
    return count || !after ? count : ready_warps_of(after, ready);
}

static int warp_number(const Thread *lanes) {
    return (lanes->block->index * machine.launch.threads + lanes->index) / WARP;
}

static void lower(uint32_t *priority, Block *block) {
    for (int i = 0; i < machine.launch.threads; i += WARP)
        priority[warp_number(&block->threads[i])] = draw() >> 8;
}

static void run_blocks(void) {
    int most = machine.launch.blocks * machine.launch.threads / WARP, count, by_priority = draw() % 2;
    int last = draw() % (2 * machine.launch.blocks);
    Thread **ready = calloc(most, sizeof *ready);
    uint32_t *priority = calloc(most, sizeof *priority);
    for (int i = 0; i < most; i++)
        priority[i] = draw();
    while (!machine.failed && ((count = ready_warps(ready, last)) || arrive_some())) {
        if (!count || (machine.launch.late == 2 && machine.arriving && draw() % 4 == 0 && arrive_some()))
            continue;
        Thread *chosen = ready[draw() % count];
        if (by_priority && draw() % 16)
            for (int i = 0; i < count; i++)
                if (priority[warp_number(ready[i])] > priority[warp_number(chosen)])
                    chosen = ready[i];
        if (run_warp(chosen))
            lower(priority, chosen->block);
        else if (draw() % 64 == 0)
            priority[warp_number(chosen)] = draw() >> 1;
        if (machine.launch.late == 2 && draw() % 4 == 0)
            bring_some(&chosen[draw() % WARP]);
    }
    free(ready), free(priority);
    fail_stuck();
}

/* Runs a launch with these parameters. Returns 0, or 1 with a text in `error`. */
CALLED __attribute__((visibility("default"))) int ptx_launch(const void *parameters, const Launch *launch) {
    memset(&machine, 0, sizeof machine);
    machine.launch = *launch, machine.parameters = parameters, machine.loops = launch->loops;
    machine.random = launch->seed * 0x9E3779B97F4A7C15ull + 88172645463325252ull;
    machine.shared_bytes = static_shared_bytes() + launch->dynamic_bytes;
    machine.blocks = calloc(launch->blocks, sizeof(Block));
    machine.resident = calloc(launch->resident, sizeof(Block *));
    grow_bytes();
    begin_counts(launch->blocks);
    run_blocks();
    for (int i = 0; i < launch->resident; i++)
        if (machine.resident[i])
            end_block(machine.resident[i]);
    for (int i = 0; i < machine.begun; i++) {
        for (int k = 0; k < machine.blocks[i].fence_count; k++)
            free(machine.blocks[i].fences[k].known);
        free(machine.blocks[i].fences);
    }
    end_counts(launch->blocks);
    forget_bytes();
    free(machine.blocks), free(machine.resident);
    return machine.failed;
}

#define THREAD_X ((uint32_t)(machine.current->index % machine.launch.across))
#define THREAD_Y ((uint32_t)(machine.current->index / machine.launch.across))
#define THREADS_X ((uint32_t)machine.launch.across)
#define THREADS ((uint32_t)machine.launch.threads)
#define BLOCK ((uint32_t)machine.current->block->number)
#define BLOCKS ((uint32_t)(machine.launch.numbers ? machine.launch.grid : machine.launch.blocks))

#endif
