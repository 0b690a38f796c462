/* Many sequences in one call, or one that falls into many: each is a problem of its own in the tensors of the whole, with blocks
 * by its own length, so that its results are those of a call with it alone, to the bit.
 *
 *     packed   rows of q, k, v, out ...   |- sequence 0 -|- 1 -|------- 2 -------|       starts  0 14 20 38      lse (heads, rows)
 *     cached   rows of k, v               |- sequence 0 ........|- 1 .......|...         lengths 20 12
 *              rows of q, out                        |- last 6 -|  |- last 6 -|          lse (batch, heads, last rows)
 *     classes  rows 0 3 6 9 .. of sequence 0 | 1 4 7 .. | 2 5 8 .. | those of sequence 1 ...      each a sequence, of rows `step` apart
 */
#ifndef DILKIT_NATIVE_SEQUENCES_H
#define DILKIT_NATIVE_SEQUENCES_H

#include "blocks.h"

static inline int has_sequences(const Problem *whole) { return whole->starts || whole->lengths || whole->classes > 1; }

static inline int64_t sequences_in(const Problem *whole) { return whole->batch * whole->classes; }

static inline void move_rows(TensorView *view, int64_t batch, int64_t rows) {
    if (view->data)
        view->data += batch * view->batch + rows * view->row;
}

/* A residue class of a sequence in its place: the rows residue, residue + step, ... */
static inline void take_class(Problem *p, int64_t step, int64_t residue) {
    const int64_t bytes = (p->dtype == FLOAT64 ? 8 : 4) * residue;
    TensorView *views[] = {&p->q, &p->k, &p->v, &p->out, &p->dout, &p->dq, &p->dk, &p->dv};
    for (int n = 0; n < 8; n++) {
        move_rows(views[n], 0, residue);
        views[n]->row *= step;
    }
    move_rows(&p->positions, 0, residue), p->positions.row *= step;
    p->mask = p->mask ? p->mask + residue * p->mask_row : NULL, p->mask_row *= step;
    p->lse += bytes, p->delta = p->delta ? p->delta + bytes : NULL;
    p->seq = p->seq > residue ? parts_of(p->seq - residue, step) : 0;
    p->classes = 1, p->step = step, p->residue = residue;
}

/* The problem of sequence `i`. Its tensors begin where row 0 would be, also where only the last rows are there. */
static inline Problem sequence_of(const Problem *whole, int64_t number) {
    Problem p = *whole;
    const int64_t i = number / whole->classes, bytes = p.dtype == FLOAT64 ? 8 : 4;
    int64_t first = whole->starts ? whole->starts[i] : 0, batch = whole->starts ? 0 : i;
    p.batch = 1, p.starts = p.lengths = NULL, p.first_batch += i;
    p.seq = whole->starts ? whole->starts[i + 1] - first : whole->lengths ? whole->lengths[i] : whole->seq;
    p.first_row = whole->lengths ? p.seq - whole->seq : 0;
    p.mask = p.mask ? p.mask + batch * p.mask_batch : NULL, p.places = p.places ? p.places + batch : NULL;
    TensorView *by_query[] = {&p.q, &p.out, &p.dout, &p.dq}, *by_key[] = {&p.k, &p.v, &p.dk, &p.dv};
    for (int n = 0; n < 4; n++) {
        move_rows(by_query[n], batch, first - p.first_row);
        move_rows(by_key[n], batch, first);
    }
    move_rows(&p.positions, batch, first);
    int64_t moved = (batch * p.heads * p.lse_head + first - p.first_row) * bytes;
    p.lse += moved;
    p.delta = p.delta ? p.delta + moved : NULL;
    if (whole->classes > 1)
        take_class(&p, whole->classes, number % whole->classes);
    p.batch = whole->starts ? whole->classes : whole->lengths ? 1 : sequences_in(whole); /* as many as have blocks of this length */
    if (p.seq > 0)
        choose_blocks(&p);
    p.batch = 1;
    if (p.seq > 0 && whole->lengths)
        share_heads(&p);
    return p;
}

/* The number of tasks of a sequence's phase, in BACKWARD of a round in which it has any: none where it has no rows. */
static inline int64_t tasks_of_sequence(const Problem *p, int phase) { return p->seq <= p->first_row ? 0 : native_tasks(p, phase); }

#endif
