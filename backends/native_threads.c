/* Threads that live as long as a call: nothing to inherit over a fork, nothing shared between callers, nothing spins. */
#include "native.h"

#include <pthread.h>
#include <stdlib.h>
#include <time.h>

struct Run {
    const Kernel *kernel;
    const Problem *problem;
    int phase, threads;
    int64_t items, next;
    void *scratch;
    pthread_t thread[];
};

static void *scratch_of(const Run *run) {
    void *memory = NULL;
    return posix_memalign(&memory, 64, run->kernel->scratch(run->problem, run->phase)) ? NULL : memory;
}

static int take(Run *run, void *scratch) {
    int64_t item = __atomic_fetch_add(&run->next, 1, __ATOMIC_RELAXED);
    if (item >= run->items)
        return 0;
    run->kernel->item(run->problem, run->phase, item, scratch);
    return 1;
}

static void *work(void *argument) {
    Run *run = argument;
    void *scratch = scratch_of(run);
    while (scratch && take(run, scratch))
        ;
    free(scratch);
    return NULL;
}

Run *native_start(const Kernel *kernel, const Problem *problem, int phase, int threads) {
    int64_t items = native_items(problem, phase);
    int helpers = (int)(threads < items ? threads : items) - 1;
    Run *run = malloc(sizeof(Run) + sizeof(pthread_t) * (size_t)(helpers > 0 ? helpers : 0));
    if (!run)
        return NULL;
    *run = (Run){.kernel = kernel, .problem = problem, .phase = phase, .items = items};
    run->scratch = scratch_of(run);
    if (!run->scratch) {
        free(run);
        return NULL;
    }
    while (run->threads < helpers && !pthread_create(&run->thread[run->threads], NULL, work, run))
        run->threads++;
    return run;
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

int native_work(Run *run, double seconds) {
    double end = now() + seconds;
    while (take(run, run->scratch))
        if (now() > end)
            return 0;
    return 1;
}

void native_finish(Run *run, int stop) {
    if (stop)
        __atomic_store_n(&run->next, run->items, __ATOMIC_RELAXED);
    for (int i = 0; i < run->threads; i++)
        pthread_join(run->thread[i], NULL);
    free(run->scratch);
    free(run);
}
