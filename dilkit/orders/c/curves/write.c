/* Writes blocks, ranks and lines of cells into an output, with the widest vectors of the machine, and divides work among
 * threads.
 *
 *   put_blocks --> shifted_32 / shifted_64 (write_loops.h) --> out            outputs that fit into the caches
 *                                                          --> stage --> out  larger ones, by non-temporal stores of cache lines
 */
#include "write.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
enum { STREAMS = 1 };
#else
enum { STREAMS = 0 };
#endif

/* The widest instructions are chosen at run time: a wheel is compiled for the oldest machine. */
#if defined(__has_attribute)
#if defined(__x86_64__) && defined(__GLIBC__) && __has_attribute(target_clones)
#define WIDEST __attribute__((target_clones("avx2", "default")))
#endif
#endif
#ifndef WIDEST
#define WIDEST
#endif

enum { VECTOR = 32, LINE = 64, STAGED_BYTES = 8 * 1024, STREAMED_BYTES = 1 << 25 };
enum { LEAST_THREADED_CELLS = 1 << 22, MAX_THREADS = 64 };

#define LANES(type) ((int)(VECTOR / sizeof(type)))
#define INTEGER int32_t
#define NAMED(name) name##_32
#include "write_loops.h"
#define INTEGER int64_t
#define NAMED(name) name##_64
#include "write_loops.h"
#define WRITE_LOOP(name, ...) (out->bytes == 4 ? name##_32(__VA_ARGS__) : name##_64(__VA_ARGS__))

/* A buffer for elements that are streamed afterwards: a streamed cache line is not read first, and evicts no other line. */
typedef struct {
    _Alignas(LINE) char bytes[LINE + STAGED_BYTES];
} Stage;

Output output_of(void *data, int bytes, int64_t count) {
    return (Output){data, bytes, STREAMS && count >= STREAMED_BYTES / bytes};
}

BlockTable new_block_table(const Output *out, int64_t count) {
    char *memory = malloc((size_t)(count * out->bytes) + 2 * LINE);
    if (!memory)
        return (BlockTable){NULL, NULL};
    return (BlockTable){memory + LINE - (uintptr_t)memory % LINE + (uintptr_t)out->data % LINE, memory};
}

/* The position in the stage with the same alignment within a cache line as `to`. */
static inline char *staged(Stage *stage, const char *to) { return stage->bytes + (uintptr_t)to % LINE; }

static void stream(char *to, const char *from, int64_t bytes) {
#ifdef __SSE2__
    int64_t head = (int64_t)(-(uintptr_t)to % LINE), tail;
    if (head > bytes)
        head = bytes;
    tail = (bytes - head) % LINE;
    memcpy(to, from, (size_t)head);
    for (int64_t at = head; at < bytes - tail; at += LINE) {
        __m128i line[4]; /* the whole line in one go: a line written in parts goes to memory several times */
        for (int i = 0; i < 4; i++)
            line[i] = _mm_load_si128((const __m128i *)(from + at) + i);
        for (int i = 0; i < 4; i++)
            _mm_stream_si128((__m128i *)(to + at) + i, line[i]);
    }
    memcpy(to + bytes - tail, from + bytes - tail, (size_t)tail);
#else
    memcpy(to, from, (size_t)bytes);
#endif
}

void put_cells(const Output *out, int64_t at, const Grid *grid, const uint16_t *cell, int64_t origin, int64_t count) {
    WRITE_LOOP(cells, (void *)(out->data + at * out->bytes), grid, cell, origin, count);
}

void put_blocks(const Output *out, int64_t at, const void *const *table, const int64_t *by, int64_t cells, int64_t blocks) {
    Stage stage;
    char *to = out->data + at * out->bytes;
    int64_t bytes = cells * out->bytes, most = out->stream ? STAGED_BYTES / bytes : blocks;
    for (int64_t i = 0, some; i < blocks; i += some, to += some * bytes) {
        some = blocks - i < most ? blocks - i : most;
        char *where = out->stream ? staged(&stage, to) : to;
        WRITE_LOOP(shifted, (void *)where, table + i, by + i, cells, some);
        if (out->stream)
            stream(to, where, some * bytes);
    }
}

void put_ranks(
    const Output *out, int64_t at, const int64_t *first, const uint16_t *const *rank, int64_t row, int width, int64_t blocks) {
    Stage stage;
    char *to = out->data + at * out->bytes;
    int64_t bytes = width * out->bytes, most = out->stream ? STAGED_BYTES / bytes : blocks;
    for (int64_t i = 0, some; i < blocks; i += some, to += some * bytes) {
        some = blocks - i < most ? blocks - i : most;
        char *where = out->stream ? staged(&stage, to) : to;
        WRITE_LOOP(ranks, (void *)where, first + i, rank + i, row, width, some);
        if (out->stream)
            stream(to, where, some * bytes);
    }
}

void put_line(const Output *out, int64_t at, int64_t from, int64_t step, int64_t count) {
    WRITE_LOOP(line, (void *)(out->data + at * out->bytes), from, step, count);
}

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
