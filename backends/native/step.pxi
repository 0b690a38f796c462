# A step of decoding as the C kernel reads it. A part of _native.pyx.


cdef StoredView stored_view(Checked c, const int64_t *place, int64_t row, int64_t element) noexcept:
    """Of a place in a table: tensor, offset, strides of sequence and head; `element`: the bytes of one."""
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
            span.pages, span.page_rows, span.page = &c.pages[line[PAGES]], line[PAGE_ROWS], line[PAGE] * element
            span.page_first, span.page_step = line[PAGE_FIRST], line[PAGE_STEP]
        if line[POSITIONS] >= 0:
            span.position_step = 0  # they are not at equal distances
            if step.bias is not None:
                span.positions = <const int64_t *>locate(step.positions[line[POSITIONS]], NULL, 0)
        if line[UNSEEN] >= 0:
            set_unseen(span, step.unseen[line[UNSEEN]])
    return 0


cdef int64_t number_pieces(Step *s, Span *spans) noexcept:
    """Give the pieces of all spans their numbers; returns how many stored rows are read."""
    cdef int64_t i, rows = 0
    for i in range(s.spans):
        spans[i].first_piece = s.pieces
        s.pieces += spans[i].rows * spans[i].heads * pieces_of(spans + i)
        rows += spans[i].rows * spans[i].heads * spans[i].count
    return rows


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


def attend_stored(step, problem, scores, str isa, int threads):
    """`(out, lse)` of a step, as `DecodingBackend.attend_stored` returns them; `scores` are those of an `EncodedProblem`."""
    cdef Step s
    cdef int end
    cdef const InstructionSet *code = code_of(isa)
    cdef Checked c = checked(step, problem)
    if c.query.device_type != CPU:
        raise ValueError(f"query is on {step.query.device}; the CPU is needed")
    memset(&s, 0, sizeof(Step))
    cdef Problem *p = &s.problem
    p.batch, p.seq, p.heads, p.kv_heads, p.dim = c.query.shape[0], c.query.shape[1], c.heads, c.kv_heads, c.dim
    p.dtype, p.scale, s.stored = c.query.dtype, problem.scale, DTYPES.index(problem.stored)
    set_scores(p, scores)
    set_bias(p, step.bias, c.tokens)
    cdef int64_t rows, bytes = BYTES[p.dtype], element = BYTES[s.stored], spans = c.spans.shape[0], writes = c.writes.shape[0]
    out = empty_like(step.query, memory_format=contiguous_format)
    lse = empty((p.batch, p.heads, p.seq), dtype=float64 if bytes == 8 else float32, device="cpu")
    p.q, p.out, p.lse = checked_view(&c.query, bytes), view_of(out), locate(lse, NULL, 0)
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
        rows = number_pieces(&s, <Span *>s.span)
        set_writes(<Write *>s.write, c, element)
        threads = <int>lesser(threads, 1 + 2 * rows * p.dim * element // BYTES_PER_THREAD)
        with nogil:
            end = native_step(code, &s, threads, interrupted)
    finally:
        free(tables)
    check_end(end)
    return out, lse
