"""The tables of a step of decoding on the device, in Triton (`dilkit.decoding.protocol`), and the stored rows that they lead to.

    spans, writes (int64) --own_lines, LINES at a time--> those of a row and a head --next_line--> one of them
    line, memory  (int64) --seen_at--> Seen: where the rows of a span lie, for a row and a head

Tables may change between launches. Nothing beyond the tensors in `memory` is touched, whatever they say: a span or a write is
left out where it leads beyond for a row and a head, a stored row where its page or its position is none.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from dilkit.backends.triton.stored import VECTOR
from dilkit.decoding.protocol import Span, Write

ROW, ROWS, FIRST_HEAD, HEAD_STEP, HEADS, SEEN, KEY, VALUE, QUERY_POSITION, POSITION, POSITION_STEP = (
    tl.constexpr(Span._fields.index(name))
    for name in (
        *("row", "rows", "first_head", "head_step", "heads", "seen", "key", "value"),
        *("query_position", "position", "position_step"),
    )
)
POSITIONS, UNSEEN, PAGES, PAGE_ROWS, PAGE, PAGE_FIRST, PAGE_STEP = (
    tl.constexpr(Span._fields.index(name))
    for name in ("positions", "unseen", "pages", "page_rows", "page", "page_first", "page_step")
)
SPAN_COLUMNS, WRITE_COLUMNS = tl.constexpr(len(Span._fields)), tl.constexpr(len(Write._fields))
TO_KEY, TO_VALUE = (tl.constexpr(Write._fields.index(name)) for name in ("key", "value"))
OFFSET, OF_SEQUENCE, OF_HEAD, OF_ROW = (tl.constexpr(i) for i in range(1, 5))
"""Fields of the key or the value of a line, after the number of its tensor."""
ADDRESS, REACH, UNSEEN_HEAD, UNSEEN_GROUP, UNSEEN_ROW, MEMORY_COLUMNS = (tl.constexpr(i) for i in range(6))
"""Columns of a line of `memory`."""
LINES = tl.constexpr(128)
"""Lines of a table that are read together."""
FAR, FARTHEST = tl.constexpr(4e18), tl.constexpr(2**62)
"""Below 2**63, for products of numbers that tables say."""
MOST_POSITIONS = tl.constexpr(2**53)


class StepView(NamedTuple):
    """In a kernel: the tables of a `PlacedStep`, the partials, how many there are of everything, as in `Counts`, and splits."""

    spans: Any
    writes: Any
    pages: Any
    memory: Any
    partials: Any
    page_count: Any
    span_count: Any
    write_count: Any
    stored: Any
    positions: Any
    unseen: Any
    tokens: Any
    splits: Any


class Seen(NamedTuple):
    """Stored rows of a span that a query row sees, for one key/value head: `count`, 0 if out of bounds. Scalars of a kernel."""

    count: Any
    key: Any
    value: Any
    key_row: Any
    value_row: Any
    whole: Any
    """True if all rows are read `VECTOR` elements at a time."""
    pages: Any
    """First page, -1 where there are none, and how many are listed from there on."""
    listed: Any
    page_rows: Any
    page: Any
    page_first: Any
    page_step: Any
    page_limit: Any
    query_position: Any
    position: Any
    position_step: Any
    positions: Any
    """The address of the positions that are given, or 0."""
    unseen: Any
    """The address of what the first query head of the group does not see, or 0."""
    unseen_group: Any
    unseen_row: Any


@triton.jit
def place_in(line, row, head, there):
    """Return the index of key/value head `head` among the heads of a line; -1 if the line is not of this row and head."""
    first, rows = tl.load(line + ROW, mask=there, other=0), tl.load(line + ROWS, mask=there, other=0)
    apart = head - tl.load(line + FIRST_HEAD, mask=there, other=0)
    step, heads = tl.load(line + HEAD_STEP, mask=there, other=0), tl.load(line + HEADS, mask=there, other=0)
    distance = tl.where(step < 1, 1, step)
    place = apart // distance
    of_row = (row >= first) & (row - first < rows)
    of_head = (apart == 0) | ((apart > 0) & (step >= 1) & (place * distance == apart))
    return tl.where(of_row & of_head & (place < heads), place, -1)


@triton.jit
def own_lines(table, first, count, COLUMNS: tl.constexpr, row, head):
    """Return a mask of the `LINES` lines from `first` on that belong to a row and a head."""
    numbers = first + tl.arange(0, LINES)
    there = numbers < count
    return there & (place_in(table + numbers.to(tl.int64) * COLUMNS, row, head, there) >= 0)


@triton.jit
def next_line(own, at):
    """Return the first line after `at` that `own` marks."""
    numbers = tl.arange(0, LINES)
    return tl.min(tl.where(own & (numbers > at), numbers, LINES - 1))


@triton.jit
def moved(at, count, stride, limit):
    """Return the offset `count` - 1 strides after `at`; -1 if it is beyond `limit`."""
    steps, room = count - 1, limit - at
    short = (steps >= 0) & (stride >= 0) & (steps <= room) & (stride <= room)
    short = short & (steps.to(tl.float32) * stride.to(tl.float32) <= FAR)
    apart = tl.where(short, steps, 0) * tl.where(short, stride, 0)
    within = (at >= 0) & (room >= 0) & ((steps == 0) | (stride == 0) | (short & (apart <= room)))
    return tl.where(within, at + apart, -1)


@triton.jit
def side_at(step, side, row, place, WIDTH: tl.constexpr):
    """Return a row and head's offset in the tensor of a side of a line, -1 if out of bounds.

    Also return the last offset at which a row of `WIDTH` elements fits, and the tensor's address.
    """
    tensor = tl.load(side)
    known = (tensor >= 0) & (tensor < step.stored)
    memory = step.memory + tl.where(known, tensor, 0) * MEMORY_COLUMNS
    limit = tl.load(memory + REACH, mask=known, other=0) - WIDTH  # there is no room in no tensor
    at = moved(tl.load(side + OFFSET), row + 1, tl.load(side + OF_SEQUENCE), limit)
    at = moved(at, place + 1, tl.load(side + OF_HEAD), limit)
    return at, limit, tl.load(memory + ADDRESS, mask=known, other=0)


@triton.jit
def pages_within(at, page_rows, page, apart, limit):
    """Count the pages of a side that lie before `limit`."""
    last = moved(at, page_rows, apart, limit)
    pages = tl.where(page > 0, (limit - last) // tl.where(page > 0, page, 1) + 1, FARTHEST)
    return tl.where((last >= 0) & (apart >= 1) & (page >= 0), pages, 0)


@triton.jit
def last_is_listed(listed, count, page_rows, page_first, page_step):
    """True if all rows of a span lie in listed pages."""
    last = moved(page_first, count, page_step, MOST_POSITIONS)
    rows = tl.where(page_rows > 0, page_rows, 1)
    return (last >= 0) & (page_rows > 0) & (page_step > 0) & (last // rows < listed)


@triton.jit
def positions_at(step, line, count, PLACED: tl.constexpr):
    """Return the address of a span's positions, 0 if they are evenly spaced, and whether they are within bounds."""
    given, query = tl.load(line + POSITIONS), tl.load(line + QUERY_POSITION)
    known = (given >= 0) & (given < step.positions)
    memory = step.memory + tl.where(known, step.stored + given, 0) * MEMORY_COLUMNS
    enough = tl.load(memory + REACH, mask=known, other=0) >= count
    there = (given == -1) | (known & enough)
    if PLACED:
        there = there & (query >= 0) & (query < step.tokens)
    return tl.load(memory + ADDRESS, mask=known, other=0), there


@triton.jit
def unseen_at(step, line, place, group, count):
    """Return the address of the flags of a span's hidden rows, or 0, their strides by head and row, and if they are in bounds."""
    given = tl.load(line + UNSEEN)
    known = (given >= 0) & (given < step.unseen)
    memory = step.memory + tl.where(known, step.stored + step.positions + given, 0) * MEMORY_COLUMNS
    limit = tl.load(memory + REACH, mask=known, other=0) - 1
    of_head, of_group = tl.load(memory + UNSEEN_HEAD, mask=known, other=0), tl.load(memory + UNSEEN_GROUP, mask=known, other=0)
    of_row = tl.load(memory + UNSEEN_ROW, mask=known, other=0)
    first = moved(0, place + 1, of_head, limit)
    last = moved(moved(first, group, of_group, limit), count, of_row, limit)
    address = tl.load(memory + ADDRESS, mask=known, other=0) + first
    return tl.where(known, address, 0), of_group, of_row, (given == -1) | (known & (last >= 0))


@triton.jit
def all_are_there(
    key, value, count, key_row, value_row, key_limit, value_limit, pages, listed, page_rows, page, page_first, page_step
):  # fmt: skip
    """Return whether all rows of a span lie in its tensors or in listed pages, and the number of pages of the tensors."""
    there = (count >= 1) & (key >= 0) & (value >= 0) & ((count == 1) | ((key_row >= 1) & (value_row >= 1)))
    if pages == -1:
        there = there & (moved(key, count, key_row, key_limit) >= 0) & (moved(value, count, value_row, value_limit) >= 0)
        page_limit = page
    else:
        there = there & last_is_listed(listed, count, page_rows, page_first, page_step)
        of_keys = pages_within(key, page_rows, page, key_row, key_limit)
        page_limit = tl.minimum(of_keys, pages_within(value, page_rows, page, value_row, value_limit))
    return there, page_limit


@triton.jit
def seen_at(
    step, line, row, head, group, DIM: tl.constexpr, WIDTH: tl.constexpr, BYTES: tl.constexpr, BIASED: tl.constexpr,
    PLACED: tl.constexpr,
):  # fmt: skip
    """Return the stored rows of a span that a query row sees for a key/value head."""
    place, own_row, count = place_in(line, row, head, True), row - tl.load(line + ROW), tl.load(line + SEEN)
    key, key_limit, key_address = side_at(step, line + KEY, own_row, place, WIDTH)
    value, value_limit, value_address = side_at(step, line + VALUE, own_row, place, WIDTH)
    key_row, value_row = tl.load(line + KEY + OF_ROW), tl.load(line + VALUE + OF_ROW)
    pages, page_rows, page = tl.load(line + PAGES), tl.load(line + PAGE_ROWS), tl.load(line + PAGE)
    page_first, page_step = tl.load(line + PAGE_FIRST), tl.load(line + PAGE_STEP)
    listed = tl.where((pages >= 0) & (pages < step.page_count), step.page_count - pages, 0)
    there, page_limit = all_are_there(
        key, value, count, key_row, value_row, key_limit, value_limit, pages, listed, page_rows, page, page_first, page_step
    )
    positions = 0
    if BIASED:
        positions, placed = positions_at(step, line, count, PLACED)
        there = there & placed
    unseen, unseen_group, unseen_row, masked = unseen_at(step, line, place, group, count)
    key_address, value_address = key_address + key * BYTES, value_address + value * BYTES
    apart = key_row | value_row | tl.where(pages == -1, 0, page) | DIM
    whole = (key_address | value_address | (apart * BYTES)) % (VECTOR * BYTES) == 0
    return Seen(
        tl.where(there & masked, count, 0), key_address, value_address, key_row, value_row, whole,
        pages, listed, page_rows, page, page_first, page_step, page_limit,
        tl.load(line + QUERY_POSITION), tl.load(line + POSITION), tl.load(line + POSITION_STEP), positions,
        unseen, unseen_group, unseen_row,
    )  # fmt: skip
