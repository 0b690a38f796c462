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

static inline int has_sequences(const Problem *whole) {
    return whole->starts || whole->lengths || !whole->is_square || whole->classes > 1;
}

static inline int64_t sequences_in(const Problem *whole) { return whole->batch * whole->classes; }

static inline void move_rows(TensorView *view, int64_t batch, int64_t rows) {
    if (view->data)
        view->data += batch * view->batch + rows * view->row;
}

/* Let the weights of ROW_TABLES, and their gradients, begin so many numbers later. */
static inline void move_row_tables(Problem *p, int64_t numbers) {
    p->bias_weights = p->bias_weights ? p->bias_weights + numbers * (p->dtype == FLOAT64 ? 8 : 4) : NULL;
    p->dbias = p->dbias ? p->dbias + numbers : NULL;
}

/* A residue class of a sequence in its place: the rows residue, residue + step, ... */
static inline void take_class(Problem *p, int64_t step, int64_t residue) {
    const int64_t bytes = (p->dtype == FLOAT64 ? 8 : 4) * residue;
    move_row_tables(p, residue * p->row_entries);
    p->row_entries *= step;
    TensorView *views[] = {&p->q, &p->k, &p->v, &p->out, &p->dout, &p->dq, &p->dk, &p->dv};
    for (int n = 0; n < 8; n++) {
        move_rows(views[n], 0, residue);
        views[n]->row *= step;
    }
    move_rows(&p->positions, 0, residue), p->positions.row *= step;
    p->mask = p->mask ? p->mask + residue * p->mask_row : NULL, p->mask_row *= step;
    p->lse += bytes, p->delta = p->delta ? p->delta + bytes : NULL;
    p->seq = p->end_row = p->end_key = p->seq > residue ? parts_of(p->seq - residue, step) : 0;
    p->classes = 1, p->step = step, p->residue = residue;
}

/* The positions of the queries and keys of sequence `i`; returns how many queries before the first key see nothing. */
static inline int64_t place_sequence(Problem *p, const Problem *whole, int64_t i) {
    const int64_t rows = whole->starts ? whole->starts[i + 1] - whole->starts[i] : whole->rows;
    const int64_t keys = whole->key_starts ? whole->key_starts[i + 1] - whole->key_starts[i]
                       : whole->starts     ? rows
                       : whole->lengths    ? whole->lengths[i]
                                           : whole->seq;
    int64_t offset = whole->positions_of ? whole->positions_of[i] : whole->aligns_last ? keys - rows : whole->position, unseen = 0;
    if (p->causal && offset < 0)
        unseen = lesser(-offset, rows), offset = 0;
    p->first_row = greater(offset, 0), p->first_key = greater(-offset, 0);
    p->end_row = p->first_row + rows - unseen, p->end_key = p->first_key + keys;
    p->seq = greater(p->end_row, p->end_key);
    return unseen;
}

/* The problem of sequence `i`. Its tensors begin where the position 0 would be, also where only the last rows are there. */
static inline Problem sequence_of(const Problem *whole, int64_t number) {
    Problem p = *whole;
    const int64_t i = number / whole->classes, bytes = p.dtype == FLOAT64 ? 8 : 4, batch = whole->starts ? 0 : i;
    const int64_t unseen = place_sequence(&p, whole, i), row = (whole->starts ? whole->starts[i] : 0) + unseen - p.first_row;
    const int64_t key = (whole->key_starts ? whole->key_starts[i] : whole->starts ? whole->starts[i] : 0) - p.first_key;
    p.batch = 1, p.starts = p.lengths = p.key_starts = p.positions_of = NULL, p.first_batch += i;
    p.mask = p.mask ? p.mask + batch * p.mask_batch - p.first_key * p.mask_row : NULL, p.places = p.places ? p.places + batch : NULL;
    TensorView *by_query[] = {&p.q, &p.out, &p.dout, &p.dq}, *by_key[] = {&p.k, &p.v, &p.dk, &p.dv};
    for (int n = 0; n < 4; n++) {
        move_rows(by_query[n], batch, row);
        move_rows(by_key[n], batch, key);
    }
    move_rows(&p.positions, batch, key);
    move_row_tables(&p, batch * p.batch_entries + row * p.row_entries);
    p.first_query = unseen;
    int64_t moved = (batch * p.heads * p.lse_head + row) * bytes;
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
static inline int64_t tasks_of_sequence(const Problem *p, int phase) {
    return p->end_row <= p->first_row || (phase == BACKWARD && p->end_key <= p->first_key) ? 0 : native_tasks(p, phase);
}

#endif
