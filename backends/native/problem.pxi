# A problem and its tensors as the C kernel reads them: sizes, strides and addresses. A part of _native.pyx.


cdef TensorView view_of(tensor) except *:
    cdef TensorView view
    cdef int64_t[3] strides
    view.data = locate(tensor, strides, 3)
    view.batch, view.row, view.head = strides[0], strides[1], strides[2]
    return view


cdef bytes joined(arrays, const int64_t **at):
    """The numbers of thirteen arrays, int64 and contiguous, in one block of memory; `at` is set to where each begins."""
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


cdef int set_scores(Problem *p, scores) except -1:
    """The softcap, and of a bias what it is a function of, the numbers of a position, whether a row has two, and sizes of a table."""
    p.softcap, p.bias, p.position_dims, apart, table = scores
    p.key_position = p.position_dims if apart else 0
    p.table_size[0], p.table_size[1], p.table_size[2] = table
    p.entries = table_entries(p)
    return 0


cdef class EncodedProblem:
    """A problem's sizes and branches as the C kernel reads them, without tensors: made once, used by many calls.

    `sizes`: batch, seq, heads, kv_heads, head_dim, most rows of a block, rows of a step, least rows of a chunk, residue classes; seq
    is 0 where each call has sequences of its own. `arrays`: those of a `BranchArrays`, int64 and contiguous. `scores`: `set_scores`.
    """

    cdef Problem problem
    cdef bytes numbers
    cdef object lse  # of the shape that each call returns, but one number of memory, for empty_like; or None

    def __init__(self, sizes, int dtype, int causal, int once, double scale, arrays, scores, int64_t given, int is_square=1):
        cdef Problem *p = &self.problem
        cdef const int64_t *at[13]
        p.batch, p.seq, p.heads, p.kv_heads, p.dim, p.most_block_rows, p.row_step, p.least_chunk_rows, p.classes = sizes
        p.step, p.given, p.is_square = 1, given, is_square
        set_scores(p, scores)
        p.dtype, p.causal, p.once, p.scale = dtype, causal, once, scale
        p.branches, p.lse_head, p.keep_scale = len(arrays.kind), p.seq, 1.0
        self.numbers = joined(arrays, at)
        memcpy(&p.kind, at, sizeof(at))
        if p.seq:
            self.lse = empty(1, dtype=float64 if p.dtype == 0 else float32, device="cpu").expand(p.batch, p.heads, p.seq)
            check_grids(p, p.seq)
            p.classes = lesser(p.classes, p.seq)
            p.end_row = p.end_key = p.rows = p.seq
            choose_blocks(p)

    @property
    def chunks(self):
        """The chunks that gradients cut the sequence into."""
        return self.problem.chunks

    @property
    def nbytes(self):
        """Bytes of the arrays."""
        return len(self.numbers)


cdef tuple results_of(EncodedProblem encoded, q):
    """`out` and `lse` of a call with this query, contiguous, not filled in."""
    if encoded.lse is None:
        return empty_outputs(q)
    return empty_like(q, memory_format=contiguous_format), empty_like(encoded.lse)


cdef int set_tensors(Problem *p, q, k, v, out, lse, mask) except -1:
    cdef int64_t[2] strides
    p.q, p.k, p.v, p.out, p.lse = view_of(q), view_of(k), view_of(v), view_of(out), locate(lse, strides, 0)
    if mask is not None:
        p.mask = locate(mask, strides, 2)
        p.mask_batch, p.mask_row = strides[0], strides[1]
    return 0


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


cdef int set_positions(Problem *p, q, k, starts, key_starts, offsets, offset) except -1:
    """The queries and keys of a call in which query i is not key i: where those of each sequence are."""
    cdef int64_t i
    p.lse_head, p.rows, p.aligns_last = q.shape[1], q.shape[1], starts is not None and p.causal
    if starts is None:
        p.batch, p.seq, p.position = q.shape[0], k.shape[1], offset or 0
    elif key_starts is not None:
        p.key_starts = int32_of(key_starts)
        if len(key_starts) != p.batch + 1 or p.key_starts[0] != 0 or p.key_starts[p.batch] != k.shape[1]:
            raise ValueError(f"key_starts is of {len(key_starts) - 1} sequences up to row {p.key_starts[len(key_starts) - 1]}; {p.batch} and {k.shape[1]} are needed")
        for i in range(p.batch):
            if p.key_starts[i] > p.key_starts[i + 1]:
                raise ValueError(f"key_starts decreases at index {i + 1}; the kernel would read beyond the tensors")
    if offsets is not None:
        if len(offsets) != p.batch:
            raise ValueError(f"{len(offsets)} offsets for {p.batch} sequences; as many are needed")
        p.positions_of = int32_of(offsets)
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
    sizes = [p.heads, p.batch, rows, p.entries] if p.bias == ROW_TABLES else [p.heads, p.entries]
    if list(weights.shape) != sizes or weights.itemsize != bytes or not weights.is_contiguous():
        raise ValueError(f"weights of the bias have shape {tuple(weights.shape)}; {tuple(sizes)}, contiguous, is needed")
    p.bias_weights = locate(weights, strides, 0)
    set_row_tables(p, p.batch, rows)
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
