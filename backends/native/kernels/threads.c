/* Who computes: the threads that torch computes with, so that those do not spin in the way of others; else our own.
 *
 * Torch's are those of the OpenMP runtime that it has loaded, which a child process made by fork cannot use. Our own live as long
 * as a call: nothing to inherit, nothing shared between callers.
 */
#define _GNU_SOURCE
#include "native.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <time.h>

typedef struct {
    const Kernel *kernel;
    const Problem *problem;
    int (*interrupted)(void);
    int phase, stopped;
    int64_t items, next;
    char *scratch; /* a piece a thread: one block, for allocators keep what is freed in other threads than the first */
    size_t piece;
    unsigned arrived;
    pthread_t caller;
    double look;
} Run;

typedef void (*Parallel)(void (*work)(void *), void *data, unsigned threads, unsigned flags);

static int forked = 0;

static void in_child(void) { forked = 1; }

__attribute__((constructor)) static void watch_forks(void) { pthread_atfork(NULL, NULL, in_child); }

/* The entry point of torch's OpenMP runtime, or NULL. */
static Parallel torch_parallel(void) {
    void *torch = forked ? NULL : dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
    if (!torch)
        return NULL;
    Parallel found = (Parallel)dlsym(torch, "GOMP_parallel");
    dlclose(torch);
    return found;
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

/* Ten times a second, on the caller's thread: whether to stop. */
static void look(Run *run) {
    if (now() < run->look)
        return;
    run->look = now() + 0.1;
    if (run->interrupted && run->interrupted()) {
        run->stopped = 1;
        __atomic_store_n(&run->next, run->items, __ATOMIC_RELAXED);
    }
}

static void work(void *argument) {
    Run *run = argument;
    int caller = pthread_equal(pthread_self(), run->caller);
    char *scratch = run->scratch + run->piece * __atomic_fetch_add(&run->arrived, 1, __ATOMIC_RELAXED);
    int64_t item;
    while ((item = __atomic_fetch_add(&run->next, 1, __ATOMIC_RELAXED)) < run->items) {
        run->kernel->item(run->problem, run->phase, item, scratch);
        if (caller)
            look(run);
    }
}

static void *work_alone(void *argument) {
    work(argument);
    return NULL;
}

static void own_threads(Run *run, int threads) {
    pthread_t *helper = malloc(sizeof(pthread_t) * (size_t)threads);
    int started = 0;
    while (helper && started < threads - 1 && !pthread_create(&helper[started], NULL, work_alone, run))
        started++;
    work(run);
    while (started)
        pthread_join(helper[--started], NULL);
    free(helper);
}

int native_run(const Kernel *kernel, const Problem *problem, int phase, int threads, int (*interrupted)(void)) {
    Run run = {.kernel = kernel, .problem = problem, .phase = phase, .interrupted = interrupted};
    run.items = native_items(problem, phase), run.caller = pthread_self(), run.look = now() + 0.1;
    run.piece = kernel->scratch(problem, phase);
    threads = (int)(threads < run.items ? threads : run.items);
    threads = threads > 1 ? threads : 1;
    void *memory = NULL;
    if (posix_memalign(&memory, 64, run.piece * (size_t)threads))
        return NATIVE_NO_MEMORY;
    run.scratch = memory;
    Parallel parallel = threads > 1 ? torch_parallel() : NULL;
    if (parallel)
        parallel(work, &run, (unsigned)threads, 0);
    else
        own_threads(&run, threads);
    free(memory);
    return run.stopped ? NATIVE_INTERRUPTED : NATIVE_DONE;
}
