# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""The CPU kernel as Python calls it. kernels/native.h describes what the numbers mean."""

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memset

from functools import cache
from time import perf_counter

import torch

from dilkit.decoding._checked cimport Checked, checked
from dilkit.decoding._tables cimport (
    FIRST_HEAD, HEAD_STEP, HEADS, KEY, KEY_ROW, PAGE, PAGE_FIRST, PAGE_ROWS, PAGE_STEP, PAGES, POSITION, POSITION_STEP, POSITIONS,
    QUERY_POSITION, ROW, ROWS, SEEN, TO_KEY, TO_VALUE, UNSEEN, VALUE, VALUE_ROW
)
from dilkit.op._facts cimport Facts, locate

from dilkit.op.boundary import empty_outputs

cdef enum:
    CPU = 1  # as DLPack numbers devices
    BYTES_PER_THREAD = 1 << 19  # of stored rows, for which one more thread is worth its start
    ROUNDS = 2  # of the products of a tile, in each of the samples of their speed
    SAMPLES = 8
    MOST_PARTS = 1 << 23  # numbers of the gradient of a bias in parts; beyond, tasks add to one part, one after the other

zeros_like, empty_like, empty, contiguous = torch.zeros_like, torch.empty_like, torch.empty, torch.contiguous_format
float64, float32 = torch.float64, torch.float32
DTYPES = "float64", "float32", "bfloat16", "float16", "int8"  # by their numbers in native.h and step.h
cdef int64_t[5] BYTES = [8, 4, 2, 2, 1]
LEAST_GAIN = 1.25
"""Of products of bf16 pairs over those of floats, to be used: on CPUs measured so far it is half, nearly twice, or eight times and more."""

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
        int64_t batch, seq, heads, kv_heads, dim
        int dtype, causal, once
        double scale
        int64_t branches
        const int64_t *kind
        const int64_t *length
        const int64_t *ahead
        const int64_t *rate
        const int64_t *offset
        const int64_t *without
        const int64_t *beyond
        const uint64_t *shown
        RunTables runs, given_runs
        int64_t given, given_batches, given_heads
        const Grid *grid
        int64_t most_block_rows, row_step, least_chunk_rows
        const int32_t *starts
        const int32_t *lengths
        int64_t chunks, round, classes, step
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
        const char *bias_weights
        TensorView positions
        double *dbias
        int64_t first_part
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
        void (*exp)(const float *x, float *y, int64_t count) nogil
        int64_t (*multiply_add)(int64_t rounds, float *result) nogil
        int64_t (*score_tiles)(int64_t rounds) nogil
        const InstructionSet *instead
    const InstructionSet native_generic
    int GRID
    int FORWARD, DELTA, BACKWARD
    int NATIVE_DONE, NATIVE_INTERRUPTED, NATIVE_NO_MEMORY
    int64_t lesser(int64_t a, int64_t b) nogil
    int64_t native_rounds(const Problem *problem) nogil
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

cdef extern from "Python.h":
    int PyErr_CheckSignals() noexcept

cdef extern from *:
    """
    static const InstructionSet *const native_codes[] = {
    #ifdef HAVE_AMX
        &native_amx,
    #endif
    #ifdef HAVE_AVX512BF16
        &native_avx512bf16,
    #endif
    #ifdef HAVE_AVX512
        &native_avx512,
    #endif
    #ifdef HAVE_AVX2
        &native_avx2,
    #endif
        &native_generic,
    };
    enum { NATIVE_CODES = sizeof native_codes / sizeof *native_codes };
    """
    const InstructionSet *const native_codes[]
    int NATIVE_CODES


@cache
def instruction_sets():
    """The names of the instruction sets that this machine can run, the fastest first: those for bf16 are last where they are slow."""
    here = [i for i in range(NATIVE_CODES) if native_codes[i].runs_here()]
    return tuple(native_codes[i].name.decode() for i in sorted(here, key=is_slow))


def is_slow(int i):
    """Whether products of bf16 pairs are hardly faster here than those in whose place they are, or slower: measured, in microseconds."""
    cdef const InstructionSet *code = native_codes[i]
    return code.instead is not NULL and flops_of(code) < LEAST_GAIN * flops_of(code.instead)


cdef double flops_of(const InstructionSet *code):
    """FLOP/s of the products of a tile: the most of several samples, because whatever else the machine does makes some slower."""
    cdef double best = 0, start
    cdef int sample
    for sample in range(SAMPLES):
        start = perf_counter()
        best = max(best, code.score_tiles(ROUNDS) / (perf_counter() - start))
    return best


def built_for():
    """The names of the instruction sets that there is code for, whether this machine can run them or not."""
    return tuple(native_codes[i].name.decode() for i in range(NATIVE_CODES))


cdef object last_name = None  # of the instruction set that was asked for last, which is that of nearly every call
cdef const InstructionSet *last_code = NULL


cdef const InstructionSet *code_of(str name) except NULL:
    global last_name, last_code
    if name is not last_name:
        last_code = found_code(name)
        last_name = name
    return last_code


cdef const InstructionSet *found_code(str name) except NULL:
    cdef int i
    for i in range(NATIVE_CODES):
        if native_codes[i].name.decode() == name and native_codes[i].runs_here():
            return native_codes[i]
    raise ValueError(f"instruction set {name!r} is none of those that this machine can run: {', '.join(instruction_sets())}")


cdef TensorView view_of(tensor) except *:
    cdef TensorView view
    cdef int64_t[3] strides
    view.data = locate(tensor, strides, 3)
    view.batch, view.row, view.head = strides[0], strides[1], strides[2]
    return view


cdef bytes joined(arrays, const int64_t **at):
    """The numbers of thirteen arrays, int64 and contiguous, one after the other; `at` is set to where each begins.

    Kept as arrays, which are two blocks of memory each, those of many problems would keep the allocator from using what lies between.
    """
    cdef int i
    cdef const int64_t *start
    for array in arrays:
        if not (array.dtype == "int64" and array.flags.c_contiguous):
            raise TypeError(f"an array is {array.dtype}; contiguous int64 is needed")
    cdef bytes numbers = b"".join(arrays)
    start = <const int64_t *><const char *>numbers
    for i, array in enumerate(arrays):
        at[i] = start
        start += <Py_ssize_t>array.size
    return numbers


cdef int check_grids(const Problem *p, int64_t seq) except -1:
    """Raise ValueError where a sequence has other tokens than a grid has cells."""
    cdef int64_t b, cells
    for b in range(p.branches):
        if p.kind[b] == GRID:
            cells = p.grid[b].size[0] * p.grid[b].size[1] * p.grid[b].size[2]
            if seq != cells:
                raise ValueError(f"a sequence has {seq} tokens; the {cells} of a grid are needed, or the kernel would read beyond the tensors")
    return 0


cdef class EncodedProblem:
    """A problem's sizes and branches as the C kernel reads them, without tensors: made once, used by many calls.

    `sizes`: batch, seq, heads, kv_heads, head_dim, most rows of a block, rows of a step, least rows of a chunk, residue classes; seq
    is 0 where each call has sequences of its own. `arrays`: those of a `BranchArrays`, int64 and contiguous. `scores`: the softcap,
    and of a bias what it is a function of, the numbers of a position, whether a row has two positions, and three sizes of a table.
    """

    cdef Problem problem
    cdef bytes numbers

    def __init__(
        self, sizes, int dtype, int causal, int once, double scale, arrays, scores=(0.0, 0, 0, False, (1, 1, 1)), int64_t given=-1
    ):
        cdef Problem *p = &self.problem
        cdef const int64_t *at[13]
        p.batch, p.seq, p.heads, p.kv_heads, p.dim, p.most_block_rows, p.row_step, p.least_chunk_rows, p.classes = sizes
        p.step, p.given = 1, given
        p.softcap, p.bias, p.position_dims, apart, table = scores
        p.key_position = p.position_dims if apart else 0
        p.table_size[0], p.table_size[1], p.table_size[2] = table
        p.entries = p.table_size[0] * p.table_size[1] * p.table_size[2]
        p.dtype, p.causal, p.once, p.scale = dtype, causal, once, scale
        p.branches, p.lse_head, p.keep_scale = len(arrays.kind), p.seq, 1.0
        self.numbers = joined(arrays, at)
        p.kind, p.length, p.ahead, p.rate, p.grid = at[0], at[1], at[2], at[3], <const Grid *>at[4]
        p.offset, p.without, p.beyond, p.shown = at[5], at[6], at[7], <const uint64_t *>at[8]
        p.runs.table, p.runs.rows_end, p.runs.first_columns = at[9], at[10], at[11]
        p.runs.columns = <const int64_t (*)[2]>at[12]
        if p.seq:
            check_grids(p, p.seq)
            p.classes = lesser(p.classes, p.seq)
            choose_blocks(p)

    @property
    def chunks(self):
        """The chunks that gradients cut the sequence into."""
        return self.problem.chunks

    @property
    def nbytes(self):
        """Bytes of the arrays."""
        return len(self.numbers)


cdef Problem with_tensors(EncodedProblem encoded, q, k, v, out, lse, mask) except *:
    cdef Problem p = encoded.problem
    cdef int64_t[2] strides
    p.q, p.k, p.v, p.out, p.lse = view_of(q), view_of(k), view_of(v), view_of(out), locate(lse, strides, 0)
    if mask is not None:
        p.mask = locate(mask, strides, 2)
        p.mask_batch, p.mask_row = strides[0], strides[1]
    return p


cdef int32_t *int32_of(tensor) except? NULL:
    cdef int64_t[1] none
    return <int32_t *>locate(tensor, none, 0)


cdef int set_sequences(Problem *p, starts, q) except -1:
    """The problem of a packed call; `starts` may be None, for a call that is none."""
    cdef int64_t i, rows, longest = 1
    if starts is None:
        return 0
    p.starts, p.batch, rows = int32_of(starts), len(starts) - 1, q.shape[1]
    for i in range(p.batch):
        if p.starts[i] > p.starts[i + 1]:
            raise ValueError(f"starts decreases at index {i + 1}; the kernel would read beyond the tensors")
        if p.starts[i] < p.starts[i + 1]:
            check_grids(p, p.starts[i + 1] - p.starts[i])
        longest = max(longest, p.starts[i + 1] - p.starts[i])
    p.classes = lesser(p.classes, longest)
    if p.starts[0] != 0 or p.starts[p.batch] != rows:
        raise ValueError(f"starts goes from {p.starts[0]} to {p.starts[p.batch]}; from 0 to the {rows} rows is needed")
    p.lse_head = rows
    return 0


cdef int set_dropout(Problem *p, dropout, starts) except -1:
    """What a call drops: a `Dropout`, or None for nothing."""
    cdef int64_t[2] strides
    if dropout is None:
        return 0
    p.dropout, p.seed, p.threshold, p.keep_scale = 1, dropout.seed, dropout.threshold, dropout.factor
    p.first_batch, p.first_head, places = dropout.first_batch, dropout.first_head, dropout.places
    if places is None:
        return 0
    if starts is not None or tuple(places.shape) != (p.batch, 5) or places.itemsize != 8 or not places.is_contiguous():
        raise ValueError(f"places has shape {tuple(places.shape)}; int64 ({p.batch}, 5), contiguous, is needed, and no starts")
    p.places = <const Place *>locate(places, strides, 2)
    return 0


cdef int set_bias(Problem *p, bias, int64_t rows) except -1:
    """The tensors of a bias, a `LoweredBias`; None where the problem has none. `rows`: those of the keys."""
    cdef int64_t[2] strides
    cdef int64_t bytes = 8 if p.dtype == 0 else 4
    if (bias is None) != (p.bias == 0):
        raise ValueError(f"bias is {'missing' if bias is None else 'given'}, which the problem does not say")
    if bias is None:
        return 0
    weights, positions = bias.weights, bias.positions
    if tuple(weights.shape) != (p.heads, p.entries) or weights.itemsize != bytes or not weights.is_contiguous():
        raise ValueError(f"weights of the bias have shape {tuple(weights.shape)}; ({p.heads}, {p.entries}), contiguous, is needed")
    p.bias_weights = locate(weights, strides, 0)
    if positions is None:
        return 0
    columns = p.key_position + p.position_dims
    if tuple(positions.shape) not in ((1, rows, columns), (p.batch, rows, columns)) or positions.itemsize != bytes or not positions.is_contiguous():
        raise ValueError(f"positions have shape {tuple(positions.shape)}; ({p.batch} or 1, {rows}, {columns}), contiguous, is needed")
    p.positions.data = locate(positions, strides, 2)
    p.positions.row = strides[1]
    p.positions.batch = strides[0] if positions.shape[0] > 1 else 0
    return 0


cdef const int64_t *numbers_of(array, int64_t count, str name) except NULL:
    """The address of so many numbers."""
    if not (array.dtype == "int64" and array.flags.c_contiguous and array.size == count):
        raise ValueError(f"{name} of a block layout has {array.size} numbers of {array.dtype}; {count} contiguous int64 are needed")
    return <const int64_t *><size_t>array.ctypes.data


cdef int set_layout(Problem *p, given) except -1:
    """The tables of a call, `GivenTables`; None where the problem has no branch for them."""
    if (given is None) != (p.given < 0):
        raise ValueError(f"block_layout is {'missing' if given is None else 'given'}, which the problem does not say")
    if given is None:
        return 0
    cdef int64_t tables = 2 * given.batches * given.heads, rows = len(given.rows_end), runs = len(given.columns)
    if given.batches not in (1, p.batch) or given.heads < 1 or p.heads % given.heads:
        raise ValueError(f"a block layout of {given.batches} sequences and {given.heads} heads; those of {p.batch} and {p.heads} are needed")
    p.given_batches, p.given_heads = given.batches, given.heads
    p.given_runs.table = numbers_of(given.table, tables + 1, "table")
    p.given_runs.rows_end = numbers_of(given.rows_end, rows, "rows_end")
    p.given_runs.first_columns = numbers_of(given.first_columns, rows + 1, "first_columns")
    if runs == 0:
        p.given_runs.columns = NULL
    else:
        p.given_runs.columns = <const int64_t (*)[2]>numbers_of(given.columns, 2 * runs, "columns")
    ascending = all((x[1:] >= x[: len(x) - 1]).all() for x in (given.table, given.first_columns))
    ends = (given.table[0], given.table[tables], given.first_columns[0], given.first_columns[rows]) == (0, rows, 0, runs)
    if not ascending or not ends or (runs and (given.columns.min() < 0 or (given.columns[:, 0] >= p.seq).any())):
        raise ValueError("a block layout has runs beyond its tables or the sequence; the kernel would read beyond the tensors")
    return 0


cdef int interrupted() noexcept with gil:
    """Whether a signal's handler has raised, as that of Ctrl-C does; what it raised stays set."""
    return PyErr_CheckSignals()


cdef int run(const InstructionSet *code, const Problem *problem, int phase, int threads) except -1:
    """Compute a phase without the GIL; an exception of a signal's handler, such as Ctrl-C, ends it."""
    cdef int end
    with nogil:
        end = native_run(code, problem, phase, threads, interrupted)
    return check_end(end)


cdef int check_end(int end) except -1:
    """Raise what ended a call before its time."""
    if end == NATIVE_INTERRUPTED:
        return -1
    if end == NATIVE_NO_MEMORY:
        raise MemoryError("no memory for the scratch of the CPU kernel")
    return 0


def forward(EncodedProblem encoded, str isa, int threads, q, k, v, mask, starts=None, dropout=None, bias=None, given=None):
    """`(out, lse)`, as `Backend.forward` returns them. The tensors must be what the problem says; `mask` may be None.

    `starts`: contiguous int32 on the CPU, where the sequences of a packed call begin, and the end of the last. `dropout`: a
    `Dropout` whose `places`, if there are any, are contiguous int64 on the CPU. `bias`: a `LoweredBias`, where the problem has one.
    """
    out, lse = empty_outputs(q)
    cdef Problem p = with_tensors(encoded, q, k, v, out, lse, mask)
    set_dropout(&p, dropout, starts)
    set_bias(&p, bias, k.shape[1])
    set_layout(&p, given)
    set_sequences(&p, starts, q)
    run(code_of(isa), &p, FORWARD, threads)
    return out, lse


def forward_last(EncodedProblem encoded, str isa, int threads, q, k, v, lengths, bias=None):
    """`(out, lse)` of the last rows of sequences of these `lengths`, contiguous int32, none less than the rows of `q`."""
    out, lse = empty_outputs(q)
    cdef Problem p = with_tensors(encoded, q, k, v, out, lse, None)
    cdef int64_t i, capacity = k.shape[1]
    p.lengths, p.batch = int32_of(lengths), len(lengths)
    p.seq = p.lse_head = q.shape[1]
    if not p.batch == q.shape[0] == k.shape[0]:
        raise ValueError(f"{p.batch} lengths for {q.shape[0]} sequences and {k.shape[0]} in the cache; as many are needed")
    set_bias(&p, bias, capacity)
    set_layout(&p, None)
    for i in range(p.batch):
        if not p.seq <= p.lengths[i] <= capacity:
            raise ValueError(f"lengths[{i}] = {p.lengths[i]}; from {p.seq} rows to the {capacity} of the cache are needed")
        check_grids(&p, p.lengths[i])
    run(code_of(isa), &p, FORWARD, threads)
    return out, lse


def zero_sums(x, lse):
    """Zeros for the gradient of `x`, of the dtype of `lse`: laid out as results, or head by head, as tasks add to them, if they are none."""
    if x.dtype is lse.dtype:
        return zeros_like(x, memory_format=contiguous)
    return zeros_like(x.transpose(1, 2), dtype=lse.dtype, memory_format=contiguous).transpose(1, 2)


def backward(EncodedProblem encoded, str isa, int threads, dout, q, k, v, out, lse, mask, starts=None, dropout=None, bias=None, given=None):
    """`(dq, dk, dv, dbias)` in the dtype of `lse`, which is contiguous.

    `dbias` is that of the weights of a learned bias in parts `(parts, heads, entries)`, float64, to be added up; else None.
    """
    if lse.dtype is not (float64 if encoded.problem.dtype == 0 else float32):
        raise TypeError(f"lse is {lse.dtype}, in which the kernel would sum gradients up; it would write beyond the tensors")
    dq, dk, dv, delta = zero_sums(q, lse), zero_sums(k, lse), zero_sums(v, lse), empty_like(lse)
    cdef Problem p = with_tensors(encoded, q, k, v, out, lse, mask)
    set_dropout(&p, dropout, starts)
    set_bias(&p, bias, k.shape[1])
    set_layout(&p, given)
    set_sequences(&p, starts, q)
    cdef int64_t[1] none
    cdef int64_t parts = 1
    gradient = None
    if bias is not None and bias.form.learned:
        parts = native_parts(&p)
        p.one_part = parts * p.heads * p.entries > MOST_PARTS
        gradient = lse.new_zeros((1 if p.one_part else max(parts, 1), p.heads, p.entries), dtype=torch.float64)
        p.dbias = <double *>locate(gradient, none, 0)
    p.dout, p.dq, p.dk, p.dv, p.delta = view_of(dout), view_of(dq), view_of(dk), view_of(dv), locate(delta, none, 0)
    run(code_of(isa), &p, DELTA, threads)
    for p.round in range(native_rounds(&p)):
        run(code_of(isa), &p, BACKWARD, 1 if p.one_part else threads)
    return dq, dk, dv, gradient


cdef StoredView stored_view(Checked c, const int64_t *place, int64_t row, int64_t element) noexcept:
    """Of a place in a table: the tensor, the offset, and the strides of sequence and head; `element`: the bytes of one."""
    return StoredView(c.stored[place[0]].data + place[1] * element, place[2] * element, place[3] * element, row * element)


cdef TensorView checked_view(const Facts *x, int64_t element) noexcept:
    return TensorView(x.data, x.stride[0] * element, x.stride[1] * element, x.stride[2] * element)


cdef int set_spans(Span *spans, step, Checked c, int64_t element) except -1:
    """The spans of a step."""
    cdef int64_t i
    cdef const int64_t *line
    cdef Span *span
    for i in range(c.spans.shape[0]):
        line, span = &c.spans[i, 0], spans + i
        span.row, span.rows, span.first_head = line[ROW], line[ROWS], line[FIRST_HEAD]
        span.head_step, span.heads, span.count = line[HEAD_STEP], line[HEADS], line[SEEN]
        span.positions, span.unseen, span.pages, span.repeat = NULL, NULL, NULL, NULL
        if span.rows == 0 or span.heads == 0 or span.count == 0:
            span.count = 0
            continue  # its places are none
        span.key = stored_view(c, line + KEY, line[KEY_ROW], element)
        span.value = stored_view(c, line + VALUE, line[VALUE_ROW], element)
        span.query_position, span.position, span.position_step = line[QUERY_POSITION], line[POSITION], line[POSITION_STEP]
        if line[PAGES] >= 0:
            set_pages(span, line, c, element)
        if line[POSITIONS] >= 0:
            span.position_step = 0  # they are not at equal distances
            if step.bias is not None:
                span.positions = <const int64_t *>locate(step.positions[line[POSITIONS]], NULL, 0)
        if line[UNSEEN] >= 0:
            set_unseen(span, step.unseen[line[UNSEEN]])
    return 0


cdef int64_t number_pieces(Span *spans, int64_t count) noexcept:
    """Give the pieces of all spans their numbers; returns how many there are."""
    cdef int64_t i, pieces = 0
    for i in range(count):
        spans[i].first_piece = pieces
        pieces += spans[i].rows * spans[i].heads * pieces_of(spans + i)
    return pieces


cdef int set_pages(Span *span, const int64_t *line, Checked c, int64_t element) noexcept:
    span.pages, span.page_rows, span.page = &c.pages[line[PAGES]], line[PAGE_ROWS], line[PAGE] * element
    span.page_first, span.page_step = line[PAGE_FIRST], line[PAGE_STEP]
    return 0


cdef int set_unseen(Span *span, unseen) except -1:
    cdef int64_t[3] strides
    span.unseen = locate(unseen, strides, 3)
    span.unseen_head = strides[0] if unseen.shape[0] > 1 else 0
    span.unseen_group = strides[1] if unseen.shape[1] > 1 else 0
    span.unseen_row = strides[2] if unseen.shape[2] > 1 else 0
    return 0


cdef int set_writes(Write *writes, Checked c, int64_t element) noexcept:
    cdef int64_t i
    cdef const int64_t *line
    cdef Write *write
    for i in range(c.writes.shape[0]):
        line, write = &c.writes[i, 0], writes + i
        write.row, write.rows, write.first_head = line[ROW], line[ROWS], line[FIRST_HEAD]
        write.head_step, write.heads = line[HEAD_STEP], line[HEADS]
        if write.rows and write.heads:
            write.key, write.value = stored_view(c, line + TO_KEY, 0, element), stored_view(c, line + TO_VALUE, 0, element)
    return 0


cdef int set_scored(Problem *p, problem, scores, step, Checked c) except -1:
    """The sizes of a step, and what its scores are."""
    p.batch, p.seq, p.heads, p.kv_heads, p.dim = c.query.shape[0], c.query.shape[1], c.heads, c.kv_heads, c.dim
    p.dtype, p.scale = c.query.dtype, problem.scale
    p.softcap, p.bias, p.position_dims, apart, table = scores
    p.key_position = p.position_dims if apart else 0
    p.table_size[0], p.table_size[1], p.table_size[2] = table
    p.entries = p.table_size[0] * p.table_size[1] * p.table_size[2]
    return set_bias(p, step.bias, c.tokens)


cdef int64_t bytes_read(const Step *s, int64_t element) noexcept:
    """Bytes of the stored rows that are read."""
    cdef int64_t i, rows = 0
    for i in range(s.spans):
        rows += s.span[i].rows * s.span[i].heads * s.span[i].count
    return 2 * rows * s.problem.dim * element


def attend_stored(step, problem, scores, str isa, int threads):
    """`(out, lse)` of a step, as `Backend.attend_stored` returns them; `scores` are those of an `EncodedProblem`."""
    cdef Step s
    cdef int end
    cdef const InstructionSet *code = code_of(isa)
    cdef Checked c = checked(step, problem)
    if c.query.device_type != CPU:
        raise ValueError(f"query is on {step.query.device}; the CPU is needed")
    memset(&s, 0, sizeof(Step))
    set_scored(&s.problem, problem, scores, step, c)
    s.stored = DTYPES.index(problem.stored)
    cdef int64_t bytes = BYTES[s.problem.dtype], element = BYTES[s.stored], spans = c.spans.shape[0], writes = c.writes.shape[0]
    out = empty_like(step.query, memory_format=contiguous)
    lse = empty((s.problem.batch, s.problem.heads, s.problem.seq), dtype=float64 if bytes == 8 else float32)
    s.problem.q, s.problem.out, s.problem.lse = checked_view(&c.query, bytes), view_of(out), locate(lse, NULL, 0)
    s.new_key, s.new_value = checked_view(&c.key, bytes), checked_view(&c.value, bytes)
    if step.sink is not None:
        s.sink = locate(step.sink, NULL, 0)
    cdef int64_t repeats = spans * SPANS_BACK if step.by_position else 0
    cdef char *tables = <char *>malloc(spans * sizeof(Span) + writes * sizeof(Write) + repeats * sizeof(Repeat) + 1)
    if tables is NULL:
        raise MemoryError("no memory for the tables of a step")
    try:
        s.spans, s.writes, s.span, s.write = spans, writes, <Span *>tables, <Write *>(tables + spans * sizeof(Span))
        set_spans(<Span *>s.span, step, c, element)
        if step.by_position:
            share_rows(<Span *>s.span, spans, <Repeat *>(tables + spans * sizeof(Span) + writes * sizeof(Write)))
        s.pieces = number_pieces(<Span *>s.span, spans)
        set_writes(<Write *>s.write, c, element)
        threads = <int>lesser(threads, 1 + bytes_read(&s, element) // BYTES_PER_THREAD)
        with nogil:
            end = native_step(code, &s, threads, interrupted)
    finally:
        free(tables)
    check_end(end)
    return out, lse


def exp(str isa, const float[::1] x, float[::1] y):
    """Write e**x into `y`, as the kernel of `isa` computes it; the length must be a multiple of 16."""
    code_of(isa).exp(&x[0], &y[0], x.shape[0])


def multiply_add(str isa, int64_t rounds):
    """Run fused multiply-adds in registers and nothing else, on this thread; return the number of FLOPs."""
    cdef float result = 0.5
    cdef int64_t flops
    cdef const InstructionSet *code = code_of(isa)
    with nogil:
        flops = code.multiply_add(rounds, &result)
    return flops
