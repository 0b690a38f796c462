/* Thin slices of own and other rows, on their way from global memory to shared memory.

   "Own" rows are those of the tile, "others" the rows that they see, 64 at a time. The file that includes this one says which those
   are: OF_KEYS 1: own = key, value; other = query, dout. OF_KEYS 0: the reverse.

   Shared memory from one `next_slice` to the next, each of which has a barrier:

                          | slice s is there                                          | slice s + 1 is there
       slices, one half   | read: products                                            | slice s + 2 is being copied
       the other half     | slice s + 1 is being copied, or passes through registers  | read: products
       weights            | after the ACROSS slices each thread writes its own; from the next barrier on all are read
       others             | located 64 ahead, in the other of two buffers, while the second pair is multiplied */
#ifndef DILKIT_FP32_SLICES
#define DILKIT_FP32_SLICES

#include "stored.cuh"

#if TILE_ROWS != 64 || THREADS != 128
#error "tiles of 64 rows, blocks of 128 threads"
#endif

/* A slice is either SLICE columns of the own and the other rows (ACROSS), or SLICE other rows with all columns (ALONG): thicker
   ones where three blocks of 40 KB find room. Pitches, in float4, are such that eight rows one below the other lie in different
   banks. */
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 800 || (__CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200))
#define SLICE 16
#else
#define SLICE 8
#endif
enum { ROW = SLICE / 4 + 1, SIDE = 64 * ROW, QUADS = HEAD_DIM / 4, WEIGHTS = 17, COLUMNS = HEAD_DIM / 16 };
enum { ACROSS_QUADS = SLICE / 8, ALONG_QUADS = (SLICE * QUADS + THREADS - 1) / THREADS };
enum { PREFETCHED = ALONG_QUADS > 2 * ACROSS_QUADS ? ALONG_QUADS : 2 * ACROSS_QUADS };
enum { ACROSS, ALONG };

/* From sm_80 on, slices are copied to shared memory asynchronously; before, they pass through registers. */
#if STORAGE == 0 && VECTOR && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
#define COPIES 1
#else
#define COPIES 0
#endif

/* The query head of the tile that a block works on; own, other: where the head begins in the tensors, in elements. It is in shared
   memory, as registers are short; a pointer from there would not be known to point to global memory. */
typedef struct {
    long long own[2], other[2];
    int query_head, last_head;
} Work;

/* The slices: where the one that is being read begins, 0 or 2 * SIDE, and what this thread loads of the next ACROSS slice: of one
   own row, and up to column `stop` of one other row. */
typedef struct {
    int slice, stop;
    const Storage *own, *other;
    Quad prefetched[PREFETCHED];
} Stream;

SHARED Task task;
SHARED Work work;
SHARED int positions[2][64]; /* of 64 others, and of the next 64 */
SHARED float4 weights[64 * WEIGHTS];
SHARED float4 slices[4 * SIDE];

/* The views of keys and values, or of queries and gradients of out. */
DEVICE const View *view_of(const Args *args, int of_keys, int pair) {
    return of_keys ? pair ? &args->value : &args->key : pair ? &args->dout : &args->query;
}

DEVICE long long head_of(const View *view, int batch, int head) { return batch * view->batch + head * view->head; }

/* The row at `position` of a head that begins at `head`. */
DEVICE const Storage *row_in(const View *view, long long head, int position) {
    return row_at((const Storage *)view->data + head, position, view->row);
}

/* What this thread loads as number `piece`: four numbers of a row, from `column` on, where those up to column `stop` exist. They
   will lie at `target` of the next slice. A copy of nothing has the address of the row. */
DEVICE void start_load(Stream *stream, int piece, const Storage *row, int column, int stop, int target) {
#if COPIES
    copy_async_or_zero(slices + 2 * SIDE - stream->slice + target, row + (column < stop ? column : 0), column < stop);
#else
    stream->prefetched[piece] = load_four(row + column, stop - column);
#endif
}

DEVICE void finish_load(const Stream *stream, int piece, int target) {
    slices[stream->slice + target] = to_floats(stream->prefetched[piece]);
}

DEVICE int side_row(int thread) { return (thread >> 4) * 8 + (thread & 7); }
DEVICE int side_quad(int thread, int share) { return (thread >> 3 & 1) + 2 * share; }

DEVICE void load_across(Stream *stream, const Args *args, int from) {
    int thread = opaque(thread_index());
#pragma unroll
    for (int i = 0; i < ACROSS_QUADS; i++) {
        int target = side_row(thread) * ROW + side_quad(thread, i), column = from + 4 * side_quad(thread, i);
        start_load(stream, 2 * i, stream->own, column, args->head_dim, target);
        start_load(stream, 2 * i + 1, stream->other, column, stream->stop, target + SIDE);
    }
}

DEVICE void finish_across(const Stream *stream) {
    int thread = opaque(thread_index());
#pragma unroll
    for (int i = 0; i < ACROSS_QUADS; i++) {
        int target = side_row(thread) * ROW + side_quad(thread, i);
        finish_load(stream, 2 * i, target);
        finish_load(stream, 2 * i + 1, target + SIDE);
    }
}

/* The first slice of pair `pair`. Where there is no own row, the last one stands for it: its result is not written.
   Other rows that are not there are 0. */
DEVICE void start_across(Stream *stream, const Args *args, int pair, int buffer) {
    int row = side_row(opaque(thread_index())), other = positions[buffer][row];
    stream->stop = other >= 0 ? args->head_dim : 0;
    stream->own = row_in(view_of(args, OF_KEYS, pair), work.own[pair], own_position(&task.tile, row));
    stream->other = row_in(view_of(args, !OF_KEYS, pair), work.other[pair], max_of(other, 0));
    load_across(stream, args, 0);
}

DEVICE void load_along(Stream *stream, const Args *args, int pair, int from, int buffer) {
    int thread = opaque(thread_index());
#pragma unroll
    for (int i = 0; i < ALONG_QUADS; i++) {
        unsigned target = thread + i * THREADS, row = target / QUADS, column = target % QUADS * 4;
        if ((i + 1) * THREADS > SLICE * QUADS && row >= SLICE)
            return;
        int position = positions[buffer][from + row];
        const Storage *other = row_in(view_of(args, !OF_KEYS, pair), work.other[pair], max_of(position, 0));
        start_load(stream, i, other, column, position < 0 ? 0 : args->head_dim, target);
    }
}

DEVICE void finish_along(const Stream *stream) {
    int thread = opaque(thread_index());
#pragma unroll
    for (int i = 0; i < ALONG_QUADS; i++)
        if ((i + 1) * THREADS <= SLICE * QUADS || thread + i * THREADS < SLICE * QUADS)
            finish_load(stream, i, thread + i * THREADS);
}

/* Waits until the next slice is there for all threads, and all have finished with the one before. */
DEVICE void next_slice(Stream *stream, int kind) {
    stream->slice = 2 * SIDE - stream->slice;
#if COPIES
    copy_async_commit();
    copy_async_wait(0);
#else
    if (kind == ACROSS)
        finish_across(stream);
    else
        finish_along(stream);
#endif
    synchronize();
}

#endif
