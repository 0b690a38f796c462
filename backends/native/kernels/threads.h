/* Threads that run a function once each. Included by work_queue.c alone. They are those of the OpenMP runtime that torch has
 * loaded, so that torch's do not spin in the way of others; a child process made by fork cannot use them. Else they are our own,
 * for the call.
 */
#ifndef DILKIT_NATIVE_THREADS_H
#define DILKIT_NATIVE_THREADS_H

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef void (*ThreadFunction)(void *data);
typedef void (*ParallelRegion)(ThreadFunction function, void *data, unsigned threads, unsigned flags);

static int forked = 0;

static void in_child(void) { forked = 1; }

/* Whether this process is a child that never called exec, as Linux says: what its parent did before this library was loaded
 * is not known. */
static int forked_before(void) {
    enum { FORKED_NO_EXEC = 0x40 };
    char text[1024] = "";
    unsigned flags = 0;
    FILE *file = fopen("/proc/self/stat", "re");
    if (!file)
        return 0;
    text[fread(text, 1, sizeof text - 1, file)] = 0;
    fclose(file);
    const char *name_end = strrchr(text, ')'); /* the name of a program may hold anything */
    return name_end && sscanf(name_end, ") %*c %*d %*d %*d %*d %*d %u", &flags) == 1 && flags & FORKED_NO_EXEC;
}

__attribute__((constructor)) static void watch_forks(void) {
    forked = forked_before();
    pthread_atfork(NULL, NULL, in_child);
}

/* The entry point of torch's OpenMP runtime, or NULL. */
static ParallelRegion openmp_of_torch(void) {
    void *torch = forked ? NULL : dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
    if (!torch)
        return NULL;
    ParallelRegion found = (ParallelRegion)dlsym(torch, "GOMP_parallel");
    dlclose(torch);
    return found;
}

typedef struct {
    ThreadFunction function;
    void *data;
} ThreadCall;

static void *thread_main(void *call) {
    ((ThreadCall *)call)->function(((ThreadCall *)call)->data);
    return NULL;
}

static void run_on_own_threads(ThreadFunction function, void *data, int threads) {
    pthread_t *thread = malloc(sizeof(pthread_t) * (size_t)threads);
    ThreadCall call = {function, data};
    int started = 0;
    while (thread && started < threads - 1 && !pthread_create(&thread[started], NULL, thread_main, &call))
        started++;
    function(data);
    while (started)
        pthread_join(thread[--started], NULL);
    free(thread);
}

/* `function(data)` on each of at most `threads` threads, the caller's first; it must need no more than one. */
static void run_on_threads(ThreadFunction function, void *data, int threads) {
    ParallelRegion parallel = threads > 1 ? openmp_of_torch() : NULL;
    if (parallel)
        parallel(function, data, (unsigned)threads, 0);
    else
        run_on_own_threads(function, data, threads);
}

#endif
