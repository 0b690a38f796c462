/* A step of decoding as plain numbers: query rows, the stored rows that each of them sees, and new rows that are stored before.
 *
 *     write_rows      new rows -> where the writes say                on the caller's thread
 *     attend_piece    up to PIECE_ROWS rows of a span -> a partial    tasks, on all threads
 *     merge_pieces    partials, in their order -> out, lse            on the caller's thread
 *
 *     span    query rows x key/value heads x `count` stored rows, that lie at equal distances
 *     piece   the rows of a span that one query row sees of one key/value head, PIECE_ROWS of them at most
 *
 * A ring of rows is two spans. Rows in pages are one: row x is row x % page_rows of page pages[x / page_rows]. Pieces and their
 * order depend on the spans alone, and so do the results.
 */
#ifndef DILKIT_NATIVE_STEP_H
#define DILKIT_NATIVE_STEP_H

#include "native.h"

enum { INT8 = FLOAT16 + 1 };   /* a dtype of stored rows alone: head_dim integers, then a float by which all of them are multiplied */
enum { PIECE_ROWS = 256, KEYS_TOGETHER = 4, VECTORS_TOGETHER = 4 };

/* Rows of head_dim numbers; strides in bytes. */
typedef struct {
    char *data;
    int64_t sequence, head, row;
} StoredView;

/* Rows first, first + every, ... of a span, so many of them, that count once more for some of its heads: repeats.h. */
typedef struct Repeat {
    const struct Repeat *next; /* of the same span */
    int64_t first_head, head_step, heads, first, every, rows;
} Repeat;

/* For the query rows row .. row + rows - 1, counted over all sequences, and key/value heads first_head, + head_step, ... */
typedef struct {
    int64_t row, rows, first_head, head_step, heads, count;
    StoredView key, value;
    int64_t query_position, position, position_step; /* of the query rows, of the first stored row, from row to row */
    const int64_t *positions; /* (count,): those of the stored rows, in place of both; or NULL */
    const char *unseen;       /* bool, by head of these, query head of its group, and row; or NULL */
    int64_t unseen_head, unseen_group, unseen_row; /* strides in bytes */
    const int64_t *pages; /* of the rows; NULL: they lie at equal distances */
    int64_t page_rows, page, page_first, page_step; /* rows of a page, bytes of one, the first row seen, and rows to the next */
    const Repeat *repeat; /* NULL: none */
    int64_t first_piece;
} Span;

/* Where the new rows row .. row + rows - 1 are stored, of so many heads. */
typedef struct {
    int64_t row, rows, first_head, head_step, heads;
    StoredView key, value;
} Write;

typedef struct {
    Problem problem; /* batch x seq query rows, sizes, dtype, scale, softcap and bias; lse (batch, heads, seq) */
    int stored;      /* the dtype of stored rows */
    int64_t spans, writes, pieces;
    const Span *span; /* (spans,), by first_piece */
    const Write *write;
    TensorView new_key, new_value; /* (batch, seq, kv_heads, dim) */
    const char *sink; /* (heads,), double for FLOAT64, else float; or NULL */
    char *partials;   /* (pieces, group, dim padded + 2): sums, the maximum and the sum of weights */
    int64_t *first_partial; /* (rows, kv_heads): the piece whose partial the others are added to */
} Step;

/* The code for the dtype of a query. */
typedef struct StepCode {
    size_t (*scratch_bytes)(const Step *step); /* of one thread */
    size_t (*partial_bytes)(const Step *step); /* of one piece */
    void (*write_rows)(const Step *step);
    void (*attend_piece)(const Step *step, int64_t piece, void *scratch);
    void (*merge_pieces)(const Step *step);
} StepCode;

/* Where a row of a span lies: its page, and its place there. Without pages, all rows are in one. */
typedef struct {
    int64_t page, row;
} PageRow;

static inline PageRow first_row(const Span *span, int64_t i) {
    int64_t row = span->pages ? span->page_first + i * span->page_step : i;
    return span->pages ? (PageRow){row / span->page_rows, row % span->page_rows} : (PageRow){0, row};
}

static inline PageRow next_row(const Span *span, PageRow at) {
    at.row += span->pages ? span->page_step : 1;
    for (; span->pages && at.row >= span->page_rows; at.page++)
        at.row -= span->page_rows;
    return at;
}

static inline int64_t pieces_of(const Span *span) { return (span->count + PIECE_ROWS - 1) / PIECE_ROWS; }

/* Compute a step with up to `threads` threads. Its `partials` and `first_partial` are allocated here. */
int native_step(const InstructionSet *code, Step *step, int threads, int (*interrupted)(void));

#endif
