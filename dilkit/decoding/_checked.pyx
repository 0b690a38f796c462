# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""The tables of a `Step` against the memory of its tensors: what a kernel reads and writes by them lies within.

Held at every step, in C: a step takes tens of microseconds.
"""

from libc.stdint cimport int64_t
from libc.stdlib cimport calloc, free

import numpy as np

from dilkit.op._facts cimport BOOL, FLOAT32, FLOAT64, INT64, Dtype, Facts, facts_of, reach

NO_PAGES = np.zeros(0, np.int64)
DTYPES = "float64", "float32", "bfloat16", "float16", "int8", "int64", "bool", "another dtype"

cdef enum:
    SCALE_BYTES = 4  # as in layout.py

cdef int64_t MOST_POSITIONS = <int64_t>1 << 53  # that a float64 tells apart


cdef class Checked:
    def __dealloc__(self):
        free(self.stored)


def check(step, problem):
    """Raise TypeError or ValueError, naming the tensor or the row of a table, unless `step` is one of `problem`."""
    checked(step, problem)


cdef Checked checked(step, problem):
    cdef Checked c = Checked()
    cdef tuple stored = step.stored
    c.heads, c.kv_heads, c.dim = problem.heads, problem.kv_heads, problem.head_dim
    c.width = c.dim + (SCALE_BYTES if problem.stored == "int8" else 0)
    facts_of("query", step.query, &c.query)
    check_rows("query", step.query, &c.query, DTYPES.index(problem.dtype), c.heads, c)
    c.rows, c.tensors = c.query.shape[0] * c.query.shape[1], len(stored)
    c.stored = <StoredTensor *>calloc(c.tensors + 1, sizeof(StoredTensor))
    if c.stored is NULL:
        raise MemoryError
    check_new(step, c)
    check_stored(stored, DTYPES.index(problem.stored), c)
    check_further(step, problem, c)
    c.spans, c.writes = lines_of("spans", step.spans, SPAN_COLUMNS), lines_of("writes", step.writes, WRITE_COLUMNS)
    c.pages = pages_of(NO_PAGES if step.pages is None else step.pages)
    check_writes(c)
    check_spans(step, c)
    return c


cdef const int64_t[::1] pages_of(array):
    cdef const int64_t[::1] pages
    try:
        pages = array
    except (TypeError, ValueError) as error:
        raise TypeError(f"pages is a {type(array).__name__}: {error}; int64 (pages,), contiguous, is needed") from None
    return pages


cdef int check_rows(str name, tensor, const Facts *x, Dtype dtype, int64_t heads, Checked c) except -1:
    """A tensor (batch, seq, heads, head_dim), with the batch and the seq of the query."""
    if x.dtype != dtype or x.device_type != c.query.device_type or x.device_id != c.query.device_id:
        raise TypeError(f"{name} is {tensor.dtype} on {tensor.device}; {DTYPES[dtype]} on the device of query is needed")
    fits = x.dims == c.query.dims == 4 and x.shape[0] == c.query.shape[0] and x.shape[1] == c.query.shape[1]
    if not fits or x.shape[2] != heads or x.shape[3] != c.dim or (x.stride[3] != 1 and x.shape[3] > 1):
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}, strides {tensor.stride()}; (batch, seq, {heads}, {c.dim}), contiguous in the "
            "last dimension, is needed, with the same batch and seq in all"
        )
    reach(name, tensor, x)
    return 0


cdef int check_new(step, Checked c) except -1:
    if (step.key is None) != (step.value is None):
        raise ValueError("key and value of a step go together: give both, or neither where nothing is written")
    c.has_new = step.key is not None
    if c.has_new:
        facts_of("key", step.key, &c.key)
        facts_of("value", step.value, &c.value)
        check_rows("key", step.key, &c.key, c.query.dtype, c.kv_heads, c)
        check_rows("value", step.value, &c.value, c.query.dtype, c.kv_heads, c)
    return 0


cdef int check_stored(tuple stored, Dtype dtype, Checked c) except -1:
    cdef Facts facts
    cdef int64_t i
    for i in range(c.tensors):
        facts_of("a stored tensor", stored[i], &facts)
        if facts.dtype != dtype or facts.device_type != c.query.device_type or facts.device_id != c.query.device_id:
            raise TypeError(f"stored[{i}] is {stored[i].dtype} on {stored[i].device}; {DTYPES[dtype]} on the device of query is needed")
        c.stored[i].data, c.stored[i].reach = facts.data, reach("a stored tensor", stored[i], &facts)
    return 0


cdef int check_further(step, problem, Checked c) except -1:
    """The sink and the bias, of which a step has one or none."""
    cdef Facts facts
    cdef Dtype wide = FLOAT64 if c.query.dtype == FLOAT64 else FLOAT32
    bias = step.bias
    if (bias is None) != (problem.bias is None):
        raise ValueError(f"bias is {'missing' if bias is None else 'given'}, which the problem does not say")
    if step.sink is not None:
        check_vector("sink", step.sink, wide, (c.heads,), c)
    if bias is None:
        return 0
    check_vector("weights of the bias", bias.weights, wide, (c.heads, problem.bias.entries), c)
    if (bias.positions is None) == problem.bias.placed:
        raise ValueError(f"positions of the bias are {'missing' if bias.positions is None else 'given'}, which the problem does not say")
    if bias.positions is None:
        return 0
    facts_of("positions of the bias", bias.positions, &facts)
    c.tokens = facts.shape[1] if facts.dims == 3 else 0
    sequences = 1 if facts.dims == 3 and facts.shape[0] == 1 else c.query.shape[0]
    check_vector("positions of the bias", bias.positions, wide, (sequences, c.tokens, problem.bias.columns), c)
    if c.tokens == 0:
        raise ValueError("positions of the bias are of no token; those of all rows so far are needed")
    return 0


cdef int check_vector(str name, tensor, Dtype dtype, tuple shape, Checked c) except -1:
    cdef Facts facts
    facts_of(name, tensor, &facts)
    if facts.dtype != dtype or facts.device_type != c.query.device_type or facts.device_id != c.query.device_id:
        raise TypeError(f"{name} is {tensor.dtype} on {tensor.device}; {DTYPES[dtype]} on the device of query is needed")
    if tuple(tensor.shape) != shape or not tensor.is_contiguous():
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, strides {tensor.stride()}; {shape}, contiguous, is needed")
    reach(name, tensor, &facts)
    return 0


cdef const int64_t[:, ::1] lines_of(str name, array, int64_t columns):
    cdef const int64_t[:, ::1] rows
    try:
        rows = array
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} is a {type(array).__name__}: {error}; int64 (rows, {columns}), contiguous, is needed") from None
    if rows.shape[1] != columns:
        raise ValueError(f"{name} has {rows.shape[1]} columns; {columns} are needed")
    return rows


cdef bint moves(int64_t *at, int64_t count, int64_t stride, int64_t limit) noexcept:
    """Move `at`, which is at most `limit`, to the last of `count` places at equal distances; whether it stays within."""
    if count <= 1:
        return True
    if stride < 0 or (stride and count - 1 > (limit - at[0]) // stride):
        return False
    at[0] += (count - 1) * stride
    return True


cdef bint is_within(const int64_t *place, int64_t rows, int64_t heads, int64_t count, int64_t row, Checked c) noexcept:
    """True if all stored rows at a place lie in its tensor. `place`: the tensor, the offset, the strides of sequence and head."""
    cdef int64_t at = place[1], limit
    if not 0 <= place[0] < c.tensors:
        return False
    limit = c.stored[place[0]].reach - c.width
    return 0 <= at <= limit and moves(&at, rows, place[2], limit) and moves(&at, heads, place[3], limit) and moves(&at, count, row, limit)


cdef str why_beyond(const int64_t *place, Checked c):
    if not 0 <= place[0] < c.tensors:
        return f"tensor {place[0]}, of {c.tensors} stored ones"
    return f"offset {place[1]} and strides {place[2]}, {place[3]}, beyond the {c.stored[place[0]].reach} elements of stored[{place[0]}], in rows of {c.width}"


cdef int check_heads(str name, int64_t i, const int64_t *line, Checked c) except -1:
    cdef int64_t last = line[FIRST_HEAD]
    if not (0 <= line[ROW] and 0 <= line[ROWS] <= c.rows and line[ROW] <= c.rows - line[ROWS]):
        raise ValueError(f"{name}[{i}]: row={line[ROW]}, rows={line[ROWS]}; some of the {c.rows} rows are needed")
    if line[HEADS] < 0 or not 0 <= last < c.kv_heads or not moves(&last, line[HEADS], line[HEAD_STEP], c.kv_heads - 1) or (line[HEADS] > 1 and line[HEAD_STEP] < 1):
        raise ValueError(
            f"{name}[{i}]: first_head={line[FIRST_HEAD]}, head_step={line[HEAD_STEP]}, heads={line[HEADS]}; some of the "
            f"{c.kv_heads} key/value heads are needed"
        )
    return 0


cdef int check_writes(Checked c) except -1:
    cdef int64_t i
    cdef int column
    cdef const int64_t *line
    for i in range(c.writes.shape[0]):
        line = &c.writes[i, 0]
        check_heads("writes", i, line, c)
        if line[ROWS] == 0 or line[HEADS] == 0:
            continue
        if not c.has_new:
            raise ValueError(f"writes[{i}]: the step has no key and value to be written")
        for column in (TO_KEY, TO_VALUE):
            if not is_within(line + column, line[ROWS], line[HEADS], 1, 1, c):
                raise ValueError(f"writes[{i}] is to {why_beyond(line + column, c)}")
    return 0


cdef int check_spans(step, Checked c) except -1:
    cdef int64_t i
    cdef const int64_t *line
    for i in range(c.spans.shape[0]):
        line = &c.spans[i, 0]
        check_heads("spans", i, line, c)
        if line[SEEN] < 0:
            raise ValueError(f"spans[{i}]: seen={line[SEEN]} must be at least 0")
        if line[ROWS] == 0 or line[HEADS] == 0 or line[SEEN] == 0:
            continue
        if line[SEEN] > 1 and (line[KEY_ROW] < 1 or line[VALUE_ROW] < 1):
            raise ValueError(f"spans[{i}]: key_row={line[KEY_ROW]}, value_row={line[VALUE_ROW]}; at least 1 is needed of several rows")
        if line[PAGES] != -1:
            check_pages(i, line, c)
        elif not is_within(line + KEY, line[ROWS], line[HEADS], line[SEEN], line[KEY_ROW], c):
            raise ValueError(f"spans[{i}]: seen={line[SEEN]} keys {line[KEY_ROW]} apart from {why_beyond(line + KEY, c)}")
        elif not is_within(line + VALUE, line[ROWS], line[HEADS], line[SEEN], line[VALUE_ROW], c):
            raise ValueError(f"spans[{i}]: seen={line[SEEN]} values {line[VALUE_ROW]} apart from {why_beyond(line + VALUE, c)}")
        check_positions(step, i, line, c)
        if line[UNSEEN] != -1:
            check_unseen(step.unseen, i, line, c)
    return 0


cdef int check_pages(int64_t i, const int64_t *line, Checked c) except -1:
    cdef int64_t last = line[PAGE_FIRST], listed = c.pages.shape[0], number, most = 0
    if line[PAGE_ROWS] < 1 or line[PAGE] < 0 or line[PAGE_STEP] < 1 or last < 0 or not moves(&last, line[SEEN], line[PAGE_STEP], MOST_POSITIONS):
        raise ValueError(
            f"spans[{i}]: page_rows={line[PAGE_ROWS]}, page={line[PAGE]}, page_first={line[PAGE_FIRST]}, page_step={line[PAGE_STEP]}; at "
            "least 1, 0, 0 and 1 are needed"
        )
    if not 0 <= line[PAGES] <= listed or last // line[PAGE_ROWS] >= listed - line[PAGES]:
        raise ValueError(f"spans[{i}]: {last // line[PAGE_ROWS] + 1} pages from pages[{line[PAGES]}] on; {listed} are listed")
    for number in range(line[PAGES] + line[PAGE_FIRST] // line[PAGE_ROWS], line[PAGES] + last // line[PAGE_ROWS] + 1):
        if c.pages[number] < 0:
            raise ValueError(f"pages[{number}]={c.pages[number]} must be at least 0")
        most = max(most, c.pages[number])
    check_page("keys", i, line, line + KEY, line[KEY_ROW], most, c)
    return check_page("values", i, line, line + VALUE, line[VALUE_ROW], most, c)


cdef int check_page(str name, int64_t i, const int64_t *line, const int64_t *given, int64_t row, int64_t page, Checked c) except -1:
    """Raise unless page `page` of a span, its last one, lies in the tensor. `given`: that, the offset, the strides of sequence and head."""
    cdef int64_t[4] place
    cdef int64_t reach
    place[0], place[1], place[2], place[3] = given[0], given[1], given[2], given[3]
    reach = c.stored[place[0]].reach if 0 <= place[0] < c.tensors else -1
    if not (0 <= place[1] <= reach and moves(&place[1], page + 1, line[PAGE], reach) and is_within(place, line[ROWS], line[HEADS], line[PAGE_ROWS], row, c)):
        raise ValueError(
            f"spans[{i}]: {name} of page {page}, {line[PAGE_ROWS]} rows {row} apart, {line[PAGE]} from page to page, from {why_beyond(given, c)}"
        )
    return 0


cdef int check_positions(step, int64_t i, const int64_t *line, Checked c) except -1:
    """Positions within those that the bias has, or that a float64 tells apart."""
    cdef int64_t most = c.tokens if c.tokens else MOST_POSITIONS
    cdef int64_t last = line[POSITION]
    if step.bias is None and (line[POSITIONS] != -1 or not step.by_position):
        return 0
    if not 0 <= line[QUERY_POSITION] < most:
        raise ValueError(f"spans[{i}]: query_position={line[QUERY_POSITION]}; from 0 to {most - 1} is needed")
    if line[POSITIONS] != -1:
        return check_given_positions(step.positions, i, line, most)
    if not (0 <= last < most and moves(&last, line[SEEN], line[POSITION_STEP], most - 1)):
        raise ValueError(
            f"spans[{i}]: position={line[POSITION]}, position_step={line[POSITION_STEP]}, seen={line[SEEN]}; ascending ones "
            f"from 0 to {most - 1} are needed"
        )
    return 0


cdef int check_given_positions(tuple positions, int64_t i, const int64_t *line, int64_t most) except -1:
    cdef Facts facts
    if not 0 <= line[POSITIONS] < len(positions):
        raise ValueError(f"spans[{i}]: positions={line[POSITIONS]}; -1, or one of the {len(positions)} tensors of the step is needed")
    given = positions[line[POSITIONS]]
    facts_of("positions", given, &facts)
    if facts.dtype != INT64 or facts.dims != 1 or facts.shape[0] != line[SEEN] or not given.is_contiguous():
        raise ValueError(f"positions[{line[POSITIONS]}] is {given.dtype} {tuple(given.shape)}; int64 ({line[SEEN]},), contiguous, is needed")
    reach("positions", given, &facts)
    if bool(((given < 0) | (given >= most)).any()):
        raise ValueError(f"positions[{line[POSITIONS]}] reach from {int(given.min())} to {int(given.max())}; from 0 to {most - 1} is needed")
    return 0


cdef int check_unseen(tuple unseen, int64_t i, const int64_t *line, Checked c) except -1:
    cdef Facts facts
    cdef int64_t[3] wanted
    cdef int d
    if not 0 <= line[UNSEEN] < len(unseen):
        raise ValueError(f"spans[{i}]: unseen={line[UNSEEN]}; -1, or one of the {len(unseen)} tensors of the step is needed")
    given = unseen[line[UNSEEN]]
    facts_of("unseen", given, &facts)
    wanted[0], wanted[1], wanted[2] = line[HEADS], c.heads // c.kv_heads, line[SEEN]
    fits = facts.dtype == BOOL and facts.dims == 3 and facts.device_type == c.query.device_type
    for d in range(3):
        fits = fits and facts.shape[d] in (1, wanted[d])
    if not fits:
        raise ValueError(f"unseen[{line[UNSEEN]}] is {given.dtype} {tuple(given.shape)}; bool {(wanted[0], wanted[1], wanted[2])}, or 1 of each, is needed")
    reach("unseen", given, &facts)
    return 0
