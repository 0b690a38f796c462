/* How the rows of a sequence are cut into blocks (whole segments, or an equal part of one) and, for BACKWARD, these into chunks;
 * and which branches share scores. It follows from the problem of that sequence alone: results depend neither on the machine nor
 * on what is computed beside it.
 */
#ifndef DILKIT_NATIVE_BLOCKS_H
#define DILKIT_NATIVE_BLOCKS_H

#include "bricks.h"

enum {
    BLOCK_NUMBERS = 1 << 17, /* rows times dim of a block, at most: what the cache of a core holds */
    MIN_TASKS = 64,          /* shorter problems are cut into about as many blocks, so that every core gets some, */
    SHORT_BLOCK_ROWS = 192,  /* but not into blocks of fewer rows: packing the keys takes longer then */
    VECTOR_ROWS = 16,        /* of the widest vector, in fp32 */
    SHORT_BLOCK_LINES = 8,   /* nor of fewer lines of a grid: patches of rows are as high as wide then */
    MAX_CHUNKS = 16,
    PARALLEL_TASKS = 32, /* chunks times key/value heads that can run side by side, even if that takes shorter chunks */
    MIN_SHARED_ROWS = 32 /* rows that a branch keeps, at least, of a segment of those that it shares scores with; of a block, if it can */
};

/* About `wanted` rows, of so many numbers at most: whole segments of the branch with the shortest ones, or an equal part of one,
 * for keys are packed once more where a segment ends. Other blocks have a multiple of the widest tile's rows, or where they are
 * few of the widest vector's: two threads then wait for the longer of two blocks. */
static inline int64_t choose_block_rows(const Problem *p, int64_t wanted, int64_t numbers) {
    int64_t rows = greater(wanted, SHORT_BLOCK_ROWS), segment = p->seq;
    for (int64_t b = 0; b < p->branches; b++)
        if (p->kind[b] == GRID && p->length[b] < p->seq)
            rows = greater(rows, lesser(SHORT_BLOCK_LINES, p->seq / p->length[b]) * p->length[b]);
        else if (p->kind[b] == BAND)
            rows = greater(rows, MIN_SHARED_ROWS * lesser(p->rate[b], p->seq));
    rows = greater(lesser(lesser(rows, p->most_block_rows), numbers / p->dim), 1);
    for (int64_t b = 0; b < p->branches; b++)
        segment = p->kind[b] == BAND ? segment : lesser(segment, p->length[b]);
    if (segment <= rows)
        return lesser(rows / segment, parts_of(p->seq, segment)) * segment;
    rows = parts_of(segment, parts_of(segment, rows));
    return segment < p->seq ? rows : round_up(rows, rows < SHORT_BLOCK_ROWS ? VECTOR_ROWS : p->row_step);
}

/* Blocks of about `wanted` rows of so many, of so many numbers at most: their rows, at most, and how many there are. */
static inline void cut_rows(
    const Problem *p, int64_t count, int64_t wanted, int64_t numbers, Bricks *bricks, int64_t *rows, int64_t *blocks
) {
    *bricks = (Bricks){{0}, {0}};
    if (is_one_grid(p))
        *bricks = choose_bricks(p, lesser(lesser(greater(wanted, SHORT_BLOCK_ROWS), p->most_block_rows), numbers / p->dim));
    *rows = cells_of(bricks->sides), *blocks = cells_of(bricks->across);
    if (!*rows)
        *rows = choose_block_rows(p, wanted, numbers), *blocks = parts_of(count, *rows);
}

/* Chunks of at least `least_chunk_rows` rows, for shorter ones are slower; blocks of BACKWARD are as large as chunks, but for the
 * scratch of a row, which is twice that of FORWARD. */
static inline void choose_chunks(Problem *p) {
    int64_t wanted = parts_of(PARALLEL_TASKS, greater(p->batch * p->kv_heads, 1)), keys = greater(p->end_key - p->first_key, 1);
    wanted = lesser(greater(keys / p->least_chunk_rows, wanted), MAX_CHUNKS);
    cut_rows(p, keys, parts_of(keys, wanted), BLOCK_NUMBERS / 2, &p->key_bricks, &p->key_rows, &p->key_blocks);
    p->chunk_blocks = parts_of(p->key_blocks, wanted), p->chunks = parts_of(p->key_blocks, p->chunk_blocks);
    p->chunk_rows = p->chunk_blocks * p->key_rows;
    if (cells_of(p->key_bricks.sides) || !p->is_square)
        p->chunk_rows = parts_of(greater(p->end_row - p->first_row, 1), p->chunks);
}

/* The rows of a group of branches are cut at every segment's end, so a branch with few rows in the group's shortest segment
 * begins another group, unless each pair counts once. Each branch of another kind than SEGMENTS is a group. */
static inline void choose_branch_groups(Problem *p) {
    int64_t order[MAX_BRANCHES], segments = 0, shortest = 0;
    p->groups = 0;
    for (int64_t b = 0; b < p->branches; b++) {
        int64_t at = segments;
        if (p->kind[b] != SEGMENTS)
            continue;
        for (; at > 0 && p->length[order[at - 1]] > p->length[b]; at--)
            order[at] = order[at - 1];
        order[at] = b, segments++;
    }
    for (int64_t i = 0; i < segments; i++) {
        int64_t b = order[i], length = lesser(p->length[b], p->seq);
        int joins = p->groups && (p->once || shortest == length || parts_of(shortest, p->rate[b]) >= MIN_SHARED_ROWS);
        if (!joins)
            p->branch_group[p->groups++] = 0, shortest = length;
        p->branch_group[p->groups - 1] |= (uint64_t)1 << b;
    }
    for (int64_t b = 0; b < p->branches; b++)
        if (p->kind[b] != SEGMENTS)
            p->branch_group[p->groups++] = (uint64_t)1 << b;
}

/* Whether the query heads of a key/value head see the same keys: the branches that serve one of them serve all. */
static inline int heads_see_the_same(const Problem *p) {
    int64_t group = p->heads / p->kv_heads;
    for (int64_t i = 0; i < p->heads * p->branches; i++) {
        int64_t head = i / p->branches, first = head - head % group;
        if (p->offset[i] != p->offset[first * p->branches + i % p->branches])
            return 0;
    }
    return 1;
}

/* For the last rows only: query heads that see the same keys go together, so that these are packed once, and a row of each head
 * takes no more of a vector than one head would. */
static inline void share_heads(Problem *p) {
    if (heads_see_the_same(p))
        p->shared_heads = p->heads / p->kv_heads;
    p->block_rows = lesser(greater(p->block_rows / p->shared_heads, 1), p->end_row - p->first_row);
    p->blocks = parts_of(p->end_row - p->first_row, p->block_rows);
}

/* The problem with the blocks of a phase. */
static inline void take_phase(Problem *p, int phase) {
    if (phase == BACKWARD)
        p->block_rows = p->key_rows, p->blocks = p->key_blocks, p->bricks = p->key_bricks;
}

/* Everything that follows from the sizes and branches of a problem with at least one row. */
static inline void choose_blocks(Problem *p) {
    p->shared_heads = 1;
    const int64_t rows = p->end_row - p->first_row, wanted = p->batch * p->heads * (p->is_square ? p->seq : rows) / MIN_TASKS;
    cut_rows(p, rows, wanted, BLOCK_NUMBERS, &p->bricks, &p->block_rows, &p->blocks);
    choose_chunks(p);
    choose_branch_groups(p);
    p->relations = 0;
    for (int64_t i = 0; i < p->heads * p->branches; i++)
        p->relations = greater(p->relations, (p->kind[i % p->branches] == GRID) + __builtin_popcountll(p->shown[i]));
}

#endif
