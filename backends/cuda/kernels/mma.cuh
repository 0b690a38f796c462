/* What the kernels on tensor cores share: rows in shared memory, the columns that a tile's rows see, and products of the two.

       rows of a head (global) --copy_tile, copy_columns--> rows of swizzled chunks of 16 bytes (shared)
           of the tile:  --load_fragments--> left fragments (registers), once a tile
           columns:      --multiply_across--> scores (registers) += left fragments . columns      products over HEAD_DIM
                         --multiply_along---> sums (registers) += weights . columns               products over columns

   A tile's rows are the m of every product, ROWS of them a warp's, in FRAGMENTS of 16. What they see are "columns", the n of
   scores: COLUMNS of them are copied at a time, and SCORE_COLUMNS multiplied. Scores leave their sums just where the next product
   needs its left operand, so weights never leave the registers: a lane holds, of each 16 rows, rows lane / 4 and 8 further, and
   of each 8 columns the two from lane % 4 * 2 on.

   The file of a kernel defines COLUMNS and SCORE_COLUMNS before it includes this one. */
#ifndef DILKIT_MMA
#define DILKIT_MMA

#include "scores.cuh"
#include "stored.cuh"

/* Warps next to each other that have the same rows: each has an equal part of HEAD_DIM of their sums. */
#ifndef SHARING
#define SHARING 1
#endif

/* Of a row: chunks of 8 elements, products of 16, and chunks of a sum. Of a warp: rows, and fragments of 16 of them. */
#define CHUNKS (HEAD_DIM / 8)
#define STEPS (HEAD_DIM / 16)
#define SUM_CHUNKS (CHUNKS / SHARING)
#define ROWS (TILE_ROWS / (THREADS / 32) * SHARING)
#define FRAGMENTS (ROWS / 16)

/* Lanes that copy a row, a chunk at a time, and rows that a block copies so. */
#define ROW_LANES (CHUNKS % 8 == 0 ? 8 : CHUNKS % 4 == 0 ? 4 : 2)
#define COPIED (THREADS / ROW_LANES)

/* Chunks of a row that change places: any 8 rows from a multiple of 8 on have the same chunk in different banks. */
#define SWAPPED (CHUNKS % 8 == 0 ? 8 : CHUNKS % 4 == 0 ? 4 : 2)

/* Columns that are located ahead, THREADS at a time, while those of two copies are still needed. */
#define WINDOW (2 * THREADS)

#if TILE_ROWS % (THREADS / 2) || THREADS < 2 * COLUMNS || HEAD_DIM % 16
#error "THREADS must be full warps that share TILE_ROWS by 16 rows, and locate what is copied twice"
#endif

/* One head of a tensor. */
typedef struct {
    Storage *data;
    long long row;
} HeadRows;

/* The window of columns, by number modulo WINDOW: their positions (-1: none, to be read as 0); of 32 columns the lowest and
   highest position, or, if rows have no bounds, 0 and MAX_POSITION if any is there; a bit for each of them that has a bias. */
typedef struct {
    int position[WINDOW], lowest[WINDOW / 32], highest[WINDOW / 32];
    unsigned biased[WINDOW / 32];
} Columns;

/* The first and the last position of a warp's rows. */
typedef struct {
    int first, last;
} Reach;

/* `last` of a warp without rows, which no bound leads from to any column. */
#define NOWHERE (-0x40000001)

typedef float Scores[FRAGMENTS][SCORE_COLUMNS / 8][4];
typedef float Sums[FRAGMENTS][SUM_CHUNKS][4];

DEVICE HeadRows rows_of(View view, int batch, int head) {
    HeadRows rows = {(Storage *)view.data + batch * view.batch + head * view.head, view.row};
    return rows;
}

/* The number of this thread, opaque, so that nothing that follows from it stays in registers beyond its use. */
DEVICE unsigned this_thread(void) { return (unsigned)opaque(thread_index()); }

/* Rows of the tile: the first of a thread's warp; the one in half `h` of a thread's sums of fragment m. */
DEVICE int first_row(unsigned thread) { return thread / (32 * SHARING) * ROWS; }
DEVICE int own_row(unsigned thread, int m, int h) { return first_row(thread) + m * 16 + h * 8 + thread % 32 / 4; }

/* Of warps with the same rows: which this one is; the first chunk of its sums. */
DEVICE int share(unsigned thread) { return thread / 32 % SHARING; }
DEVICE int first_chunk(unsigned thread) { return share(thread) * SUM_CHUNKS; }

/* Where a chunk of 8 elements of a row lies. */
DEVICE int swizzled(int row, int chunk) { return row * CHUNKS + (chunk ^ row / (8 / SWAPPED) % SWAPPED); }

/* Where a lane's part of a fragment begins: lanes have rows 0-7 and 8-15 of the left half, then of the right half; or, of
   columns, which lie as rows, the halves of rows 0-7, then of 8-15. */
DEVICE int row_fragment(unsigned thread) { return swizzled(thread % 16, thread % 32 / 16); }
DEVICE int column_fragment(unsigned thread) { return swizzled(thread % 32 / 16 * 8 + thread % 8, thread / 8 % 2); }

/* The same of the fragment `row` rows (a multiple of 8) and `step` steps further, given where it begins at the first. In bytes: all
   but the exclusive or is a constant part of an address. */
DEVICE const void *fragment_at(const uint4 *slot, int own, int row, int step) {
    int within = 2 * step % SWAPPED, whole = row * CHUNKS + 2 * step - within;
    return (const char *)slot + 16 * whole + (16 * own ^ 16 * within);
}

#if CHANGED
/* The point of a row of the tile, in half `h` of a thread's sums of fragment m; that of column e of a thread's two of each 8. */
DEVICE Point own_point(const ScoreOf *of, const Tile *tile, int m, int h) {
    return point_of(of, own_position(tile, own_row(this_thread(), m, h)));
}

DEVICE Point column_point(const ScoreOf *of, const Columns *columns, int slot, int n, int e) {
    return point_of(of, columns->position[slot + n * 8 + this_thread() % 4 * 2 + e]);
}
#endif

/* Copies */

/* Starts copying a chunk of the row at `position`; zeros for a position of -1 and beyond head_dim: a copy of nothing has the
   address of the head. Element by element two at a time: more would want registers that are not there. */
DEVICE void copy_chunk(uint4 *to, HeadRows from, int position, int chunk, int head_dim) {
    const Storage *source = row_at(from.data, position, from.row) + chunk * 8;
#if VECTOR
    int present = position >= 0 && chunk * 8 < head_dim;
    copy_async_or_zero(to, present ? source : from.data, present);
#else
#pragma unroll 1
    for (int i = 0; i < 4; i++) {
        unsigned low = 0, high = 0;
        if (position >= 0 && chunk * 8 + 2 * i < head_dim)
            low = LOAD(source + 2 * i);
        if (position >= 0 && chunk * 8 + 2 * i + 1 < head_dim)
            high = LOAD(source + 2 * i + 1);
        ((unsigned *)to)[i] = low | high << 16;
    }
#endif
}

/* A thread's chunks of a row: element by element one after the other, for each takes many registers. */
DEVICE void copy_row(uint4 *slot, int row, HeadRows from, int position, int head_dim) {
    int lane = this_thread() % ROW_LANES;
#pragma unroll (VECTOR ? CHUNKS : 1)
    for (int chunk = 0; chunk < CHUNKS; chunk += ROW_LANES)
        copy_chunk(slot + swizzled(row, chunk + lane), from, position, chunk + lane, head_dim);
}

/* Starts copying the rows of a tile. */
DEVICE void copy_tile(uint4 *slot, HeadRows from, const Tile *tile, int head_dim) {
    int first = this_thread() / ROW_LANES;
#pragma unroll (VECTOR ? TILE_ROWS : 1)
    for (int i = 0; i < TILE_ROWS; i += COPIED)
        copy_row(slot, first + i, from, first + i < tile->rows ? own_position(tile, first + i) : -1, head_dim);
    copy_async_commit();
}

/* Starts copying COLUMNS rows, from number `column` of the window on. Positions are read ahead, but for copies element by element:
   copies that follow each other at once are faster. */
DEVICE void copy_columns(uint4 *slot, HeadRows from, const Columns *columns, int column, int head_dim) {
    int first = this_thread() / ROW_LANES;
    const int *position = columns->position + column % WINDOW + first;
    if (COPIED <= COLUMNS || first < COLUMNS) {
#if VECTOR
        int ahead[COLUMNS / COPIED + 1];
#pragma unroll
        for (int i = 0; i < COLUMNS; i += COPIED)
            ahead[i / COPIED] = position[i];
#pragma unroll
        for (int i = 0; i < COLUMNS; i += COPIED)
            copy_row(slot, first + i, from, ahead[i / COPIED], head_dim);
#else
#pragma unroll 1
        for (int i = 0; i < COLUMNS; i += COPIED)
            copy_row(slot, first + i, from, position[i], head_dim);
#endif
    }
    copy_async_commit();
}

/* Columns */

/* Notes of 32 columns, once a warp, the lowest and highest position. */
DEVICE void put_range(Columns *columns, int slot, int lowest, int highest) {
    if (slot % 32 == 0)
        columns->lowest[slot / 32] = lowest, columns->highest[slot / 32] = highest;
}

/* Puts column number `index` into the window. All threads call it, each for a column. */
DEVICE void put_column(Columns *columns, int index, int position, float bias, int bounds) {
    int slot = index % WINDOW;
    unsigned biased = ballot(bias != 0.0f), any = ballot(position >= 0);
    columns->position[slot] = position;
    if (slot % 32 == 0)
        columns->biased[slot / 32] = biased;
    if (bounds)
        put_range(columns, slot, warp_min(position < 0 ? MAX_POSITION : position), warp_max(position));
    else
        put_range(columns, slot, any ? 0 : MAX_POSITION, any ? MAX_POSITION : -1);
}

/* Of this warp's rows. */
DEVICE Reach reach_of(const Tile *tile) {
    int row = first_row(this_thread());
    Reach own = {own_position(tile, row), row < tile->rows ? own_position(tile, row + ROWS - 1) : NOWHERE};
    return own;
}

/* Notes it, by warp, for a step to read two words in the place of the tile's, from which it follows. */
DEVICE void note_reach(Reach *reaches, const Tile *tile) {
    unsigned thread = this_thread();
    if (thread % 32 == 0)
        reaches[thread / 32] = reach_of(tile);
}

/* The lowest and the highest position of the SCORE_COLUMNS columns from number `slot` of the window on. */
DEVICE int lowest_of(const Columns *columns, int slot) {
    return min_of(columns->lowest[slot / 32], columns->lowest[slot / 32 + (SCORE_COLUMNS - 1) / 32]);
}

DEVICE int highest_of(const Columns *columns, int slot) {
    return max_of(columns->highest[slot / 32], columns->highest[slot / 32 + (SCORE_COLUMNS - 1) / 32]);
}

/* Whether of rows in `reach`, which see columns from row - back to row + ahead, none sees any of these columns; whether some see
   not all. */
DEVICE int none_seen(const Columns *columns, int slot, Reach reach, int back, int ahead) {
    return lowest_of(columns, slot) > reach.last + ahead || highest_of(columns, slot) < reach.first - back;
}

DEVICE int some_cut(const Columns *columns, int slot, Reach reach, int back, int ahead) {
    return highest_of(columns, slot) > reach.first + ahead || lowest_of(columns, slot) < reach.last - back;
}

/* Products */

DEVICE void clear(Sums sum) {
#pragma unroll
    for (int m = 0; m < FRAGMENTS; m++)
#pragma unroll
        for (int n = 0; n < SUM_CHUNKS; n++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                sum[m][n][e] = 0.0f;
}

DEVICE void clear_scores(Scores score) {
#pragma unroll
    for (int m = 0; m < FRAGMENTS; m++)
#pragma unroll
        for (int n = 0; n < SCORE_COLUMNS / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                score[m][n][e] = 0.0f;
}

/* The left fragments of this warp's rows of a tile. */
DEVICE void load_fragments(unsigned (*left)[STEPS][4], const uint4 *rows) {
    unsigned thread = this_thread();
    int own = row_fragment(thread);
    const uint4 *first = rows + first_row(thread) * CHUNKS;
#pragma unroll
    for (int m = 0; m < FRAGMENTS; m++)
#pragma unroll
        for (int k = 0; k < STEPS; k++)
            load_matrices_4(left[m][k], fragment_at(first, own, m * 16, k));
}

/* score[m][column / 8] += left[m] . columns, of step k of HEAD_DIM. `own`: column_fragment of this thread. */
DEVICE void multiply_across(Scores score, unsigned (*left)[4], const uint4 *columns, int own, int k) {
#pragma unroll
    for (int n = 0; n < SCORE_COLUMNS / 16; n++) {
        unsigned right[4];
        load_matrices_4(right, fragment_at(columns, own, n * 16, k));
#pragma unroll
        for (int m = 0; m < FRAGMENTS; m++) {
            mma(score[m][n * 2], left[m], right);
            mma(score[m][n * 2 + 1], left[m], right + 2);
        }
    }
}

/* sum[m][element / 8] += left[m] . columns, of 16 columns, from the chunk on that `columns` points to. `own`: row_fragment of this
   thread. */
DEVICE void multiply_along(Sums sum, unsigned (*left)[4], const uint4 *columns, int own) {
#pragma unroll
    for (int n = 0; n < SUM_CHUNKS / 2; n++) {
        unsigned right[4];
        load_matrices_4_transposed(right, fragment_at(columns, own, 0, n));
#pragma unroll
        for (int m = 0; m < FRAGMENTS; m++) {
            mma(sum[m][n * 2], left[m], right);
            mma(sum[m][n * 2 + 1], left[m], right + 2);
        }
    }
}

#endif
