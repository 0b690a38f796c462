# The tasks of a pass, for who looks at how work falls to threads. A part of _native.pyx.
#
#     native_run --- a copy of the code, whose run_task notes what it is given --->  tasks         what each computes, what it waits for
#                --- one whose run_task notes when it began and ended --->           timed_tasks   when each ran
#
# The order is that of the queue itself. Calls know nothing of either.

cdef object noted = None  # the list of tasks so far
cdef object written = None  # of a forward pass: zeros in the place of lse; a task is seen to write its rows
cdef Turns *turns = NULL  # of a backward pass, in the place of rounds: the numbers, from 1 on, of the tasks that had a turn last


def tasks(EncodedProblem encoded, bint backward, starts=None):
    """The tasks of a forward or backward pass in the order of the queue: `(sequence, head, rows, columns, after)` of each.

    Forward, `rows` are queries, and those of the `columns` that they see are their keys; backward it is the other way round. Both are
    rows of a sequence, `head` is that of the rows, and `after` the numbers of the tasks that have to end before. `starts`: as of `forward`.
    """
    global noted, written, turns
    cdef Problem p = encoded.problem
    cdef InstructionSet code = native_generic
    if p.seq == 0 and starts is None:
        raise ValueError("starts is missing; sequences of this problem have lengths of their own")
    noted = []
    written = torch.zeros(1, p.batch * p.seq if starts is None else int(starts.max()), p.heads, device="cpu")
    set_sequences(&p, starts, written)
    p.lse = view_of(written).data
    turns = <Turns *>calloc(native_parts(&p) * p.kv_heads + 1, sizeof(Turns))
    if turns is NULL:
        raise MemoryError("no memory for the turns of tasks")
    code.run_task = note_chunks if backward else note_block
    try:
        check_end(native_run(&code, &p, BACKWARD if backward else FORWARD, 1, NULL))
        return noted
    finally:
        free(turns)
        noted = written = None


cdef rows_between(const Problem *p, int64_t start, int64_t stop):
    """Rows of a sequence; of a residue class of it, as rows of the whole."""
    return range(p.residue + start * p.step, p.residue + min(stop, p.seq) * p.step, p.step)


cdef rows_of_brick(const Problem *p, int64_t block):
    """The rows of a brick of a grid, which is a block."""
    cdef Brick brick = brick_at(p, &p.bricks, block)
    cdef Py_ssize_t height = p.grid[0].size[1], width = p.grid[0].size[2]
    sides = [range(brick.first[d], brick.first[d] + brick.sides[d]) for d in range(3)]
    return [(z * height + y) * width + x for z, y, x in product(*sides)]


cdef void note_block(const Problem *p, int phase, int64_t index, void *scratch) noexcept with gil:
    """Which rows a forward task computes: those whose lse it writes, run without branches and, so that it reads nothing, without a bias."""
    cdef Problem alone = p[0]
    cdef char[8] out
    alone.groups, alone.dim, alone.dtype, alone.bias, alone.relations = 0, 1, 1, 0, 0
    alone.out.data, alone.out.batch, alone.out.row, alone.out.head = out, 0, 0, 0
    alone.lse, alone.lse_head, alone.step = view_of(written).data, p.seq, 1
    native_generic.run_task(&alone, phase, index, scratch)
    lse = written.view(-1)[: p.batch * p.heads * p.seq]
    places = lse.nonzero()
    cdef int64_t first = places.min(), last = places.max()
    lse.zero_()
    head, row = first // p.seq, first % p.seq
    rows = rows_between(p, row, row + last + 1 - first)
    if len(places) < len(rows):  # a brick of a grid
        rows = tuple((places[:, 0] % p.seq).tolist())
    noted.append((p.first_batch + head // p.heads, head % p.heads, rows, rows_between(p, 0, p.seq), ()))


cdef void note_chunks(const Problem *p, int phase, int64_t index, void *scratch) noexcept with gil:
    """Which chunks a backward task computes, by the functions that it asks itself, and whose turns come before its own."""
    cdef Turn turn = turn_of(turns + p.first_part * p.kv_heads, p, index, 0)
    cdef int64_t head = index // p.chunks, keys = chunk_of_task(p, index), queries = (keys + p.shift) % p.chunks
    after = sorted({turn.keys[0] - 1, turn.queries[0] - 1} - {-1})
    rows, columns = (rows_between(p, chunk * p.chunk_rows, (chunk + 1) * p.chunk_rows) for chunk in (keys, queries))
    if p.bricks.sides[0]:
        blocks = range(keys * p.chunk_blocks, min((keys + 1) * p.chunk_blocks, p.blocks))
        rows = tuple(chain.from_iterable([rows_of_brick(p, block) for block in blocks]))
    noted.append((p.first_batch + head // p.kv_heads, head % p.kv_heads, rows, columns, tuple(after)))
    turn.keys[0] = turn.queries[0] = len(noted)


cdef object times = None  # the list of times so far
cdef InstructionSet timed  # the code whose tasks are timed, but for run_task
cdef const InstructionSet *untimed = NULL  # the same with its own


def timed_tasks(str isa, call):
    """`(phase, start, end)` in seconds of each task that `call()` runs by the code of `isa`, in no order: 0 forward, 2 backward."""
    global last_name, times, timed, untimed
    untimed, times = code_of(isa), []
    timed = untimed[0]
    timed.run_task, last_name = run_timed, None
    try:
        call()
        return times
    finally:
        untimed, last_name = NULL, None


cdef void run_timed(const Problem *p, int phase, int64_t index, void *scratch) noexcept nogil:
    cdef timespec start, end
    clock_gettime(CLOCK_MONOTONIC, &start)
    untimed.run_task(p, phase, index, scratch)
    clock_gettime(CLOCK_MONOTONIC, &end)
    with gil:
        times.append((phase, start.tv_sec + 1e-9 * start.tv_nsec, end.tv_sec + 1e-9 * end.tv_nsec))
