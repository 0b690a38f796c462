/* Which rows see which. Rows that take part in the same branches make a list; columns that the same branches see come together.
 *
 *     a column seen by the branches c counts m = |c & s| times for the rows of the branches s: scored once, with + log m
 *
 * "Rows" are queries and "columns" keys, or the other way round in the backward pass of keys: the relation is symmetric.
 */
#ifndef DILKIT_NATIVE_KEYS_H
#define DILKIT_NATIVE_KEYS_H

#include "native.h"

enum { LISTS = 8, TILE_COLUMNS = 96, OPEN_TILES = 16 };

/* The part of a branch that some rows see: start, start + rate, ... below stop. */
typedef struct {
    int64_t start, stop, rate;
} Segment;

static inline int sees(const Segment *segment, int64_t x) {
    if (x < segment->start || x >= segment->stop)
        return 0;
    uint64_t from = (uint64_t)(x - segment->start), rate = (uint64_t)segment->rate;
    return (rate & (rate - 1)) ? from % rate == 0 : (from & (rate - 1)) == 0;
}

/* The branches of `group` that serve `head`, as a bit set. */
static inline uint64_t serving(const Problem *problem, uint64_t group, int64_t head) {
    uint64_t found = 0;
    for (int64_t b = 0; b < problem->branches; b++)
        if ((group >> b & 1) && problem->offset[head * problem->branches + b] >= 0)
            found |= (uint64_t)1 << b;
    return found;
}

/* Fill in the segments around row `at`; return where the first of them ends, at most `stop`. */
static inline int64_t open_cell(
    const Problem *problem, uint64_t served, int64_t head, int64_t at, int64_t stop, Segment *segments
) {
    for (int64_t b = 0; b < problem->branches; b++) {
        if (!(served >> b & 1))
            continue;
        int64_t start = at / problem->length[b] * problem->length[b], end = start + problem->length[b];
        end = end < problem->seq ? end : problem->seq;
        segments[b] = (Segment){start + problem->offset[head * problem->branches + b], end, problem->rate[b]};
        stop = stop < end ? stop : end;
    }
    return stop;
}

/* The branches of `served` whose segments have anything of first .. last - 1. */
static inline uint64_t reaching(const Segment *segments, uint64_t served, int64_t first, int64_t last) {
    uint64_t found = 0;
    for (uint64_t left = served; left; left &= left - 1) {
        int b = __builtin_ctzll(left);
        found |= (uint64_t)(segments[b].start < last && segments[b].stop > first) << b;
    }
    return found;
}

/* The branches that row or column `x` takes part in. */
static inline uint64_t branches_of(const Segment *segments, uint64_t among, int64_t x) {
    uint64_t found = 0;
    for (uint64_t left = among; left; left &= left - 1) {
        int b = __builtin_ctzll(left);
        found |= (uint64_t)sees(&segments[b], x) << b;
    }
    return found;
}

/* Rows that take part in the same branches, at the places first .. first + count - 1 of what is packed; first begins a panel. */
typedef struct {
    uint64_t set;
    int64_t first, count;
} List;

/* Columns of one tile, ascending: all seen by the same branches. */
typedef struct {
    uint64_t set;
    int64_t count, column[TILE_COLUMNS];
} Columns;

/* All columns that some branch of `among` sees, each once: branch by branch, dealt out to the tiles of their sets. */
typedef struct {
    const Segment *segments;
    uint64_t among, left;  /* the branches, and those to come with the one at hand */
    int64_t at, from, to;  /* the next column, -1 = a branch begins; only columns from .. to - 1 */
    const char *mask;      /* columns that nobody sees, NULL = none */
    int64_t mask_row;
    Columns *given;        /* what was returned last, to be emptied */
    Columns tile[OPEN_TILES];
} Stream;

/* All columns from .. to - 1 of `among`; the mask may be set afterwards. */
static inline void open_stream(Stream *s, const Segment *segments, uint64_t among, int64_t from, int64_t to) {
    s->segments = segments, s->among = s->left = among;
    s->at = -1, s->from = from, s->to = to;
    s->mask = NULL, s->given = NULL;
    for (int i = 0; i < OPEN_TILES; i++)
        s->tile[i].count = 0;
}

/* The tile that collects `set`, or an empty one for it, or NULL. */
static inline Columns *tile_for(Stream *s, uint64_t set) {
    Columns *empty = NULL;
    for (int i = 0; i < OPEN_TILES; i++) {
        if (s->tile[i].count && s->tile[i].set == set)
            return &s->tile[i];
        if (!s->tile[i].count && !empty)
            empty = &s->tile[i];
    }
    if (empty)
        empty->set = set;
    return empty;
}

static inline Columns *fullest(Stream *s) {
    Columns *found = &s->tile[0];
    for (int i = 1; i < OPEN_TILES; i++)
        if (s->tile[i].count > found->count)
            found = &s->tile[i];
    return found;
}

/* The next tile, which stays as it is until the next call; NULL after the last. */
static Columns *next_columns(Stream *s) {
    if (s->given)
        s->given->count = 0;
    for (; s->left; s->left &= s->left - 1, s->at = -1) {
        const Segment *segment = &s->segments[__builtin_ctzll(s->left)];
        int64_t stop = segment->stop < s->to ? segment->stop : s->to, rate = segment->rate;
        uint64_t before = s->among & ((s->left & -s->left) - 1);
        if (s->at < 0)
            s->at = segment->start + (s->from > segment->start ? (s->from - segment->start + rate - 1) / rate * rate : 0);
        for (; s->at < stop; s->at += rate) {
            uint64_t set = branches_of(s->segments, s->among, s->at);
            if ((set & before) || (s->mask && s->mask[s->at * s->mask_row]))
                continue;
            Columns *tile = tile_for(s, set);
            if (!tile || tile->count == TILE_COLUMNS)
                return s->given = tile ? tile : fullest(s);
            tile->column[tile->count++] = s->at;
        }
        /* Sets that begin with this branch are complete. */
        s->given = fullest(s);
        if (s->given->count)
            return s->given;
    }
    return NULL;
}

#endif
