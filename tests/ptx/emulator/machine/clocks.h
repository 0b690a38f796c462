/* Order among the threads of a block that do not all meet: of kernels with mbarriers, named barriers or warpgroups.

   A thread has a clock for each thread of its block, as far as it comes after that one (Lamport; "vector clocks"). Its own advances
   when it arrives somewhere, where it leaves its clocks for those who wait there. Where all meet, `meeting` says the same. */
#ifndef PTX_CLOCKS
#define PTX_CLOCKS

#include "thread.h"

enum { GROUP = 128, MOST_GROUPS = 8 };

int has_clocks(void); /* Whether the kernel needs them. */

/* known[thread]: what that thread did until this time. known[threads + thread]: so much of that a fence has shown to the asynchronous
   proxy (fence.proxy.async), which lies between there and here. known[2 threads + thread]: its copies that have
   arrived at an mbarrier, which says nothing of what else it did. known[3 threads + warpgroup]: the last of its products that has been
   waited for. At last, when one last fenced. */
static int clock_count(void) { return 3 * machine.launch.threads + MOST_GROUPS + 1; }

static uint32_t *new_clocks(void) { return calloc(clock_count(), sizeof(uint32_t)); }

static uint32_t fenced_until(const uint32_t *known, int thread) { return known[machine.launch.threads + thread]; }

static uint32_t *completed_in(uint32_t *known, int group) { return &known[3 * machine.launch.threads + group]; }

static uint32_t *copied_in(uint32_t *known, int thread) { return &known[2 * machine.launch.threads + thread]; }

static uint32_t moment_of(const Thread *t) { return t->known ? t->known[t->index] : t->block->warp_meeting[t->index / WARP]; }

static int is_known(const Touch *touch, const uint32_t *known) {
    return touch->thread >= 0 && touch->moment <= known[touch->thread + 2 * machine.launch.threads * touch->is_copied];
}

static void join_clocks(uint32_t *into, const uint32_t *from) {
    for (int i = clock_count(); i--;)
        into[i] = from[i] > into[i] ? from[i] : into[i];
}

/* What `t` has done so far others may know who look there. */
static void leave_clocks(Thread *t, uint32_t *there) {
    t->known[clock_count() - 1] = (uint32_t)t->fenced;
    join_clocks(there, t->known);
    t->known[t->index]++;
}

static void take_clocks(Thread *t, const uint32_t *there) {
    join_clocks(t->known, there);
    if (t->known[clock_count() - 1] > t->fenced)
        t->fenced = t->known[clock_count() - 1];
}

/* `count` threads have met. */
static void meet_clocks(Thread *threads, int count) {
    if (!threads->known)
        return;
    uint32_t *all = new_clocks();
    for (int i = 0; i < count; i++)
        leave_clocks(&threads[i], all);
    for (int i = 0; i < count; i++)
        take_clocks(&threads[i], all);
    free(all);
}

/* fence.proxy.async: products may read what comes before it (PTX: Memory Consistency Model, Causality Order: a proxy fence lies on the way
   from the one to the other). CUTLASS fences where it writes, before it meets others; Triton after that, where it reads. */
CALLED void fence_proxy(void) {
    Thread *t = machine.current;
    memcpy(t->known + machine.launch.threads, t->known, machine.launch.threads * sizeof *t->known);
    t->known[t->index]++;
}

#endif
