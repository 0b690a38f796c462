/* Which rows see which, as lists: rows that take part in the same branches and segments see the same columns.
 *
 *     column x of a list counts m = |{b in branches of the list : b sees x}| times: scored once, with + log m
 *
 * "Rows" are queries and "columns" keys, or the other way round in the backward pass of keys: the relation is symmetric.
 */
#ifndef DILKIT_NATIVE_KEYS_H
#define DILKIT_NATIVE_KEYS_H

#include "native.h"

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

/* The branches that row or column `x` takes part in. */
static inline uint64_t branches_of(const Segment *segments, uint64_t among, int64_t x) {
    uint64_t found = 0;
    for (uint64_t left = among; left; left &= left - 1) {
        int b = __builtin_ctzll(left);
        found |= (uint64_t)sees(&segments[b], x) << b;
    }
    return found;
}

/* The columns of a list, branch by branch; one seen before is passed over. */
typedef struct {
    const Segment *segments;
    uint64_t left, before; /* branches to come, the one at hand included, and those done */
    int64_t at, from, to;  /* the next column, -1 = a branch begins; columns within from .. to - 1 */
    const char *mask;
    int64_t mask_row;
    int once;
} Columns;

/* Up to `room` further columns with their multiplicities; returns how many. */
static inline int64_t next_columns(Columns *c, int64_t room, int64_t *column, int *times) {
    int64_t count = 0;
    while (c->left) {
        int b = __builtin_ctzll(c->left);
        const Segment *s = &c->segments[b];
        uint64_t later = c->left & (c->left - 1);
        int64_t stop = s->stop < c->to ? s->stop : c->to;
        if (c->at < 0)
            c->at = s->start + (c->from > s->start ? (c->from - s->start + s->rate - 1) / s->rate * s->rate : 0);
        for (; c->at < stop; c->at += s->rate) {
            if ((c->mask && c->mask[c->at * c->mask_row]) || branches_of(c->segments, c->before, c->at))
                continue;
            if (count == room)
                return count;
            column[count] = c->at;
            times[count++] = c->once ? 1 : 1 + __builtin_popcountll(branches_of(c->segments, later, c->at));
        }
        c->before |= c->left & -c->left;
        c->left = later;
        c->at = -1;
    }
    return count;
}

#endif
