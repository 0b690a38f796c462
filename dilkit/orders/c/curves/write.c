#include "write.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

/* The widest instructions that a machine has are chosen where the code runs: a wheel is compiled for the plainest machine. */
#if defined(__has_attribute)
#if defined(__x86_64__) && defined(__GLIBC__) && __has_attribute(target_clones)
#define WIDEST __attribute__((target_clones("avx2", "default")))
#endif
#endif
#ifndef WIDEST
#define WIDEST
#endif

enum { VECTOR = 32, LINE = 64, STAGED_BYTES = 8 * 1024, STREAMED_BYTES = 1 << 25, THREADED_CELLS = 1 << 22, MOST_THREADS = 64 };

#define LANES(type) ((int)(VECTOR / sizeof(type)))
#define INTEGER int32_t
#define NAMED(name) name##_32
#include "kernels.h"
#define INTEGER int64_t
#define NAMED(name) name##_64
#include "kernels.h"
#define KERNEL(name, ...) (out->bytes == 4 ? name##_32(__VA_ARGS__) : name##_64(__VA_ARGS__))

/* Where elements are computed that are then streamed: a line that is streamed is not read first, and drives no other line out of
 * the caches. */
typedef struct {
    _Alignas(LINE) char bytes[LINE + STAGED_BYTES];
} Stage;

Target target_of(void *data, int bytes, int64_t count) {
    Target out = {data, bytes, 0};
#ifdef __SSE2__
    out.stream = count >= STREAMED_BYTES / bytes;
#endif
    return out;
}

Table new_table(const Target *out, int64_t count) {
    char *memory = malloc((size_t)(count * out->bytes) + 2 * LINE);
    if (!memory)
        return (Table){NULL, NULL};
    return (Table){memory + LINE - (uintptr_t)memory % LINE + (uintptr_t)out->data % LINE, memory};
}

/* The place in the stage that is as far from a line's start as `to` is. */
static inline char *staged(Stage *stage, const char *to) { return stage->bytes + (uintptr_t)to % LINE; }

static void stream(char *to, const char *from, int64_t bytes) {
#ifdef __SSE2__
    int64_t head = (int64_t)(-(uintptr_t)to % LINE), tail;
    if (head > bytes)
        head = bytes;
    tail = (bytes - head) % LINE;
    memcpy(to, from, (size_t)head);
    for (int64_t at = head; at < bytes - tail; at += LINE) {
        __m128i line[4]; /* at once: a line that is not written in one go is written several times */
        for (int i = 0; i < 4; i++)
            line[i] = _mm_load_si128((const __m128i *)(from + at) + i);
        for (int i = 0; i < 4; i++)
            _mm_stream_si128((__m128i *)(to + at) + i, line[i]);
    }
    memcpy(to + bytes - tail, from + bytes - tail, (size_t)tail);
#endif
}

void put_cells(const Target *out, int64_t at, const Grid *grid, const uint16_t *cell, int64_t origin, int64_t count) {
    KERNEL(cells, (void *)(out->data + at * out->bytes), grid, cell, origin, count);
}

void put_blocks(const Target *out, int64_t at, const void *const *table, const int64_t *by, int64_t cells, int64_t blocks) {
    Stage stage;
    char *to = out->data + at * out->bytes;
    int64_t bytes = cells * out->bytes, most = out->stream ? STAGED_BYTES / bytes : blocks;
    for (int64_t i = 0, some; i < blocks; i += some, to += some * bytes) {
        some = blocks - i < most ? blocks - i : most;
        char *where = out->stream ? staged(&stage, to) : to;
        KERNEL(shifted, (void *)where, table + i, by + i, cells, some);
        if (out->stream)
            stream(to, where, some * bytes);
    }
}

void put_ranks(
    const Target *out, int64_t at, const int64_t *first, const uint16_t *const *rank, int64_t row, int width, int64_t blocks) {
    Stage stage;
    char *to = out->data + at * out->bytes;
    int64_t bytes = width * out->bytes, most = out->stream ? STAGED_BYTES / bytes : blocks;
    for (int64_t i = 0, some; i < blocks; i += some, to += some * bytes) {
        some = blocks - i < most ? blocks - i : most;
        char *where = out->stream ? staged(&stage, to) : to;
        KERNEL(ranks, (void *)where, first + i, rank + i, row, width, some);
        if (out->stream)
            stream(to, where, some * bytes);
    }
}

void put_line(const Target *out, int64_t at, int64_t from, int64_t step, int64_t count) {
    KERNEL(line, (void *)(out->data + at * out->bytes), from, step, count);
}

typedef struct {
    Work work;
    const void *task;
    int64_t first, last;
} Share;

static void *work_on(void *argument) {
    const Share *share = argument;
    share->work(share->task, share->first, share->last);
#ifdef __SSE2__
    _mm_sfence(); /* what was streamed is there for other threads only now */
#endif
    return NULL;
}

void in_shares(Work work, const void *task, int64_t units, int64_t cells, int threads) {
    Share share[MOST_THREADS];
    pthread_t helper[MOST_THREADS];
    threads = cells < THREADED_CELLS ? 1 : threads < MOST_THREADS ? threads : MOST_THREADS;
    int started = 0;
    int64_t first = 0;
    while (started < threads - 1) {
        share[started] = (Share){work, task, first, units / threads * (started + 1)};
        if (pthread_create(&helper[started], NULL, work_on, &share[started]))
            break;
        first = share[started++].last;
    }
    work_on(&(Share){work, task, first, units});
    while (started)
        pthread_join(helper[--started], NULL);
}
