# What the kernel's headers declare. A part of _native.pyx.

cdef extern from "native.h":
    ctypedef struct TensorView:
        char *data
        int64_t batch, row, head
    ctypedef struct Place:
        int64_t batch, head, query, key, step
    ctypedef struct RunTables:
        const int64_t *table
        const int64_t *rows_end
        const int64_t *first_columns
        const int64_t (*columns)[2]
    ctypedef struct Grid:
        int64_t[3] size, kernel, step
        int64_t cut
    ctypedef struct Problem:
        int64_t batch, seq, heads, kv_heads, dim, end_row, end_key, rows, position
        int is_square, aligns_last
        int dtype, causal, once
        double scale
        int64_t branches
        const int64_t *kind
        RunTables given_runs
        int64_t given, given_batches, given_heads
        const Grid *grid
        int64_t most_block_rows, row_step, least_chunk_rows
        const int32_t *starts
        const int32_t *lengths
        const int32_t *key_starts
        const int32_t *positions_of
        int64_t chunks, classes, step, residue
        int dropout
        uint64_t seed
        uint32_t threshold
        double keep_scale
        int64_t first_batch, first_head
        const Place *places
        double softcap
        int bias
        int64_t position_dims
        int64_t key_position
        int64_t[3] table_size
        int64_t entries
        int64_t row_entries
        const char *bias_weights
        TensorView positions
        double *dbias
        int one_part
        const char *mask
        int64_t mask_batch, mask_row
        TensorView q, k, v, out, dout, dq, dk, dv
        char *lse
        char *delta
        int64_t lse_head
    ctypedef struct InstructionSet:
        const char *name
        int (*runs_here)() nogil
        void (*exp2)(const float *x, float *y, int64_t count) nogil
        int64_t (*multiply_add)(int64_t rounds, float *result) nogil
        int64_t (*score_tiles)(int64_t rounds) nogil
        const InstructionSet *instead
    int GRID
    int FORWARD, DELTA, BACKWARD
    int ROW_TABLES
    int NATIVE_DONE, NATIVE_INTERRUPTED, NATIVE_NO_MEMORY
    int64_t lesser(int64_t a, int64_t b) nogil
    int64_t table_entries(const Problem *problem) nogil
    void set_row_tables(Problem *problem, int64_t batch, int64_t rows) nogil
    int64_t native_parts(const Problem *problem) nogil
    int native_run(const InstructionSet *code, const Problem *problem, int phase, int threads, int (*interrupted)() noexcept) nogil

cdef extern from "step.h":
    ctypedef struct StoredView:
        char *data
        int64_t sequence, head, row
    ctypedef struct Repeat:
        int64_t rows
    ctypedef struct Span:
        int64_t row, rows, first_head, head_step, heads, count
        StoredView key, value
        int64_t query_position, position, position_step
        const int64_t *positions
        const char *unseen
        int64_t unseen_head, unseen_group, unseen_row
        const int64_t *pages
        int64_t page_rows, page, page_first, page_step
        const Repeat *repeat
        int64_t first_piece
    ctypedef struct Write:
        int64_t row, rows, first_head, head_step, heads
        StoredView key, value
    ctypedef struct Step:
        Problem problem
        int stored
        int64_t spans, writes, pieces
        const Span *span
        const Write *write
        TensorView new_key, new_value
        const char *sink
    int64_t pieces_of(const Span *span) nogil
    int native_step(const InstructionSet *code, Step *step, int threads, int (*interrupted)() noexcept) nogil

cdef extern from "repeats.h":
    int SPANS_BACK
    void share_rows(Span *spans, int64_t count, Repeat *repeats)

cdef extern from "blocks.h":
    void choose_blocks(Problem *problem) nogil
