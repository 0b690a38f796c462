/* A step of decoding over the keys and values of a problem, in buffers of exactly the size needed, and the same by definition.
 *
 *     k, v of the problem ---> pools (batch, kv_heads, seq) of stored rows ---> two spans a sequence, the first in pages or not, some of the second unseen
 *                                                                            and a third that shows every other row of the first again
 *     its last row        ---> query; its key and value are written first  ---> native_step, and a loop in double over the pools
 */
#include "repeats.h"

enum { PAGE_ROWS = 3, SPANS = 3 };

typedef struct {
    char *pool[2];
    int64_t *pages; /* of the first span of every other sequence: page i is the i-th few rows of the pool */
    char *unseen; /* (kv_heads, group, rows of the second span) */
    int64_t cut, width, seq; /* rows of the first span, bytes of a stored row, rows of a sequence */
    int stored;
} Stored;

static int64_t stored_bytes(int64_t dim, int stored) { return stored == INT8 ? dim + 4 : dim * size_of(stored); }

static char *pool_of(const Problem *p, const TensorView *x, int stored, int64_t width) {
    char *pool = malloc((size_t)(p->batch * p->kv_heads * p->seq * width)), *at = pool;
    const float scale = 0.02f;
    for (int64_t b = 0; b < p->batch; b++)
        for (int64_t h = 0; h < p->kv_heads; h++)
            for (int64_t i = 0; i < p->seq; i++, at += width) {
                const char *row = row_address(x, b, i, h);
                if (stored == p->dtype) {
                    memcpy(at, row, (size_t)width);
                    continue;
                }
                for (int64_t d = 0; d < p->dim; d++)
                    at[d] = (char)((i * 7 + d * 13 + h) % 255 - 127);
                memcpy(at + p->dim, &scale, 4);
            }
    return pool;
}

static double stored_number(const char *row, int64_t d, int64_t dim, int stored) {
    float scale;
    if (stored != INT8)
        return number(row, d, stored);
    memcpy(&scale, row + dim, 4);
    return (double)scale * (double)(int8_t)row[d];
}

static int is_seen(const Stored *s, int64_t head, int64_t i) {
    int64_t rest = s->seq - s->cut;
    return i < s->cut || !s->unseen[head * rest + i - s->cut];
}

/* How often a row is shown: the third span is for every other head. */
static int times(const Stored *s, int64_t kv_head, int64_t i) { return 1 + (i < s->cut && (s->cut - 1 - i) % 2 == 0 && kv_head % 2 == 0); }

/* What a query head gets, by definition. */
static void expect_row(const Problem *p, const Stored *s, int64_t b, int64_t head, double *out) {
    int64_t kv_head = head / (p->heads / p->kv_heads), first = (b * p->kv_heads + kv_head) * s->seq;
    double total = 0, most = -INFINITY, *score = malloc(sizeof(double) * (size_t)s->seq);
    for (int64_t i = 0; i < s->seq; i++) {
        score[i] = 0;
        for (int64_t d = 0; d < p->dim; d++)
            score[i] += number(row_address(&p->q, b, 0, head), d, p->dtype) * stored_number(s->pool[0] + (first + i) * s->width, d, p->dim, s->stored);
        score[i] = is_seen(s, head, i) ? score[i] * p->scale : -INFINITY;
        most = fmax(most, score[i]);
    }
    for (int64_t d = 0; d < p->dim; d++)
        out[d] = 0;
    for (int64_t i = 0; i < s->seq; i++) {
        double weight = score[i] == -INFINITY ? 0 : times(s, kv_head, i) * exp(score[i] - most);
        total += weight;
        for (int64_t d = 0; d < p->dim && weight > 0; d++)
            out[d] += weight * stored_number(s->pool[1] + (first + i) * s->width, d, p->dim, s->stored);
    }
    for (int64_t d = 0; d < p->dim && total > 0; d++)
        out[d] /= total;
    free(score);
}

/* Every other row of the first span, up to its last, for every other head. `at`: byte where the sequence begins in its pool. */
static void set_again(const Problem *p, const Stored *s, Span *span, int64_t at) {
    int64_t count = (s->cut + 1) / 2, first = s->cut - 1 - 2 * (count - 1), from = at + (count ? first : 0) * s->width;
    StoredView key = {s->pool[0] + from, 0, 2 * s->seq * s->width, 2 * s->width}, value = key;
    value.data = s->pool[1] + from;
    *span = (Span){.row = at / (p->kv_heads * s->seq * s->width), .rows = 1, .head_step = 2, .heads = (p->kv_heads + 1) / 2};
    span->key = key, span->value = value, span->count = count;
    span->query_position = s->seq - 1, span->position = first, span->position_step = 2;
}

/* Number the pieces of spans, from which rows are left out that others show, and say how many there are. */
static int64_t number_pieces(Span *span, int64_t spans) {
    int64_t pieces = 0;
    for (int64_t i = 0; i < spans; i++)
        span[i].first_piece = pieces, pieces += span[i].heads * pieces_of(&span[i]);
    return pieces;
}

static void set_tables(const Problem *p, const Stored *s, Span *span, Write *write) {
    int64_t head = s->seq * s->width, group = p->heads / p->kv_heads, rest = s->seq - s->cut;
    for (int64_t b = 0; b < p->batch; b++) {
        int64_t at = b * p->kv_heads * head, last = (s->seq - 1) * s->width;
        for (int part = 0; part < 2; part++, span++) {
            int64_t from = at + part * s->cut * s->width;
            *span = (Span){.row = b, .rows = 1, .head_step = 1, .heads = p->kv_heads, .count = part ? rest : s->cut};
            span->key = (StoredView){s->pool[0] + from, 0, head, s->width}, span->value = (StoredView){s->pool[1] + from, 0, head, s->width};
            span->query_position = s->seq - 1, span->position = part * s->cut, span->position_step = 1;
            if (!part && b % 2 == 0)
                span->pages = s->pages, span->page_rows = PAGE_ROWS, span->page = PAGE_ROWS * s->width, span->page_step = 1;
            if (part)
                span->unseen = s->unseen, span->unseen_head = group * rest, span->unseen_group = rest, span->unseen_row = 1;
        }
        set_again(p, s, span++, at);
        write[b] = (Write){b, 1, 0, 1, p->kv_heads, {s->pool[0] + at + last, 0, head, 0}, {s->pool[1] + at + last, 0, head, 0}};
    }
}

/* A step with the code for one instruction set. With a bias or a softcap nothing is compared: what is read is looked at. */
static int check_step(const InstructionSet *code, Problem p, int threads, int stored, int shared) {
    int64_t rows = p.batch * p.heads, row = p.dim * size_of(p.dtype), plain = p.bias == NO_BIAS && p.softcap == 0;
    Stored s = {.cut = p.seq / 2, .width = stored_bytes(p.dim, stored), .seq = p.seq, .stored = stored};
    s.pool[0] = pool_of(&p, &p.k, stored, s.width), s.pool[1] = pool_of(&p, &p.v, stored, s.width);
    s.pages = malloc(sizeof(int64_t) * (size_t)((s.cut + PAGE_ROWS - 1) / PAGE_ROWS));
    for (int64_t i = 0; i * PAGE_ROWS < s.cut; i++)
        s.pages[i] = i;
    s.unseen = malloc((size_t)(p.heads * (s.seq - s.cut)));
    for (int64_t i = 0; i < p.heads * (s.seq - s.cut); i++)
        s.unseen[i] = i % 3 == 0;
    Span *span = malloc(sizeof(Span) * SPANS * (size_t)p.batch);
    Repeat *repeats = malloc(sizeof(Repeat) * SPANS * SPANS_BACK * (size_t)p.batch);
    Write *write = malloc(sizeof(Write) * (size_t)p.batch);
    p.q.data += (p.seq - 1) * p.q.row, p.k.data += (p.seq - 1) * p.k.row, p.v.data += (p.seq - 1) * p.v.row, p.seq = 1;
    char *out = malloc((size_t)(rows * row)), *lse = malloc((size_t)rows * (p.dtype == FLOAT64 ? 8 : 4));
    p.out = view(out, 1, p.heads, p.dim, p.dtype), p.lse = lse;
    set_tables(&p, &s, span, write);
    if (shared)
        share_rows(span, SPANS * p.batch, repeats);
    Step step = {.problem = p, .stored = stored, .spans = SPANS * p.batch, .writes = p.batch, .span = span, .write = write, .new_key = p.k, .new_value = p.v};
    step.pieces = number_pieces(span, step.spans);
    int right = native_step(code, &step, threads, NULL) == NATIVE_DONE;
    double *wanted = malloc(sizeof(double) * (size_t)(rows * p.dim));
    for (int64_t i = 0; i < rows; i++)
        expect_row(&p, &s, i / p.heads, i % p.heads, wanted + i * p.dim);
    right &= !plain || agrees("out of a step", out, wanted, rows * p.dim, p.dtype, p.dtype);
    free(s.pool[0]), free(s.pool[1]), free(s.unseen), free(s.pages), free(span), free(repeats), free(write), free(out), free(lse), free(wanted);
    return right;
}

/* The rows stored as they are, and as integers; what spans show again is read again, or counted. */
static int check_steps(const InstructionSet *code, Problem p, int threads) {
    int right = 1;
    for (int shared = 0; shared < 2; shared++)
        right &= check_step(code, p, threads, p.dtype, shared) & (p.dtype == FLOAT64 || check_step(code, p, threads, INT8, shared));
    return right;
}
