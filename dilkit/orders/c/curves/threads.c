/* Divides work among threads. */
#include "curves.h"

#include <pthread.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

enum { LEAST_THREADED_CELLS = 1 << 22, MAX_THREADS = 64 };

typedef struct {
    Work work;
    const void *task;
    int64_t first, last;
} ThreadRange;

static void *run_range(void *argument) {
    const ThreadRange *range = argument;
    range->work(range->task, range->first, range->last);
#ifdef __SSE2__
    _mm_sfence(); /* makes the streamed lines visible to other threads */
#endif
    return NULL;
}

void in_threads(Work work, const void *task, int64_t units, int64_t cells, int threads) {
    ThreadRange range[MAX_THREADS];
    pthread_t thread[MAX_THREADS];
    threads = cells < LEAST_THREADED_CELLS ? 1 : threads < MAX_THREADS ? threads : MAX_THREADS;
    int started = 0;
    int64_t first = 0;
    while (started < threads - 1) {
        range[started] = (ThreadRange){work, task, first, units / threads * (started + 1)};
        if (pthread_create(&thread[started], NULL, run_range, &range[started]))
            break;
        first = range[started++].last;
    }
    run_range(&(ThreadRange){work, task, first, units});
    while (started)
        pthread_join(thread[--started], NULL);
}
