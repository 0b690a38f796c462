/* Spans that show the same keys to a query row: each key is read once, and counted as often as it is shown.
 *
 *     tokens            0 1 2 3 4 5 6 7 8 9 10 11 12
 *     span a, every 1           x x x x x x  x  x  x     read; 4, 6, 8, 10 and 12 count twice: a repeat of the span, for the heads of b
 *     span b, every 2   x   x   .   .   .    .     .     only 0 and 2 are read
 *
 * Where a has lost its own last rows to a span before it, b has lost them to that one first.
 */
#ifndef DILKIT_NATIVE_REPEATS_H
#define DILKIT_NATIVE_REPEATS_H

#include "step.h"

enum { SPANS_BACK = 16 }; /* so many spans before one are looked at, which are more than patterns have branches */

static inline int shows_head(int64_t first_head, int64_t head_step, int64_t heads, int64_t head) {
    int64_t place = head - first_head;
    return heads == 1 ? place == 0 : place >= 0 && place % head_step == 0 && place / head_step < heads;
}

static inline int64_t last_position(const Span *span) { return span->position + (span->count - 1) * span->position_step; }

/* Whether the last row of b is one of a, and so are those before it as far back as a reaches. */
static inline int shows_end(const Span *a, const Span *b) {
    if (a->row != b->row || a->rows != b->rows || a->query_position != b->query_position || a->unseen || b->unseen)
        return 0;
    if (a->count == 0 || b->count == 0 || a->position_step < 1 || b->position_step < 1 || b->position_step % a->position_step)
        return 0;
    int64_t last = last_position(b), last_head = b->first_head + (b->heads - 1) * b->head_step;
    if (last < a->position || last > last_position(a) || (last - a->position) % a->position_step)
        return 0;
    return shows_head(a->first_head, a->head_step, a->heads, b->first_head) &&
           shows_head(a->first_head, a->head_step, a->heads, last_head) && (b->heads < 2 || b->head_step % a->head_step == 0);
}

/* Leave out of each span the last rows that one before it shows. `repeats` has room for SPANS_BACK a span. */
static inline void share_rows(Span *spans, int64_t count, Repeat *repeats) {
    for (int64_t i = 0; i < count; i++)
        for (int64_t j = i > SPANS_BACK ? i - SPANS_BACK : 0; j < i; j++) {
            Span *a = spans + j, *b = spans + i;
            if (!shows_end(a, b))
                continue;
            int64_t last = last_position(b), from = a->position > b->position ? a->position : b->position;
            int64_t rows = (last - from) / b->position_step + 1, first = last - (rows - 1) * b->position_step;
            *repeats = (Repeat){a->repeat, b->first_head, b->head_step, b->heads, (first - a->position) / a->position_step,
                                b->position_step / a->position_step, rows};
            a->repeat = repeats++, b->count -= rows;
        }
}

#endif
