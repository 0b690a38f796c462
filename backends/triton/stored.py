"""Stored rows in Triton, in their dtype: loaded as fp32, and stored.

span --places_at, COLUMNS rows at a time--> elements from the first row on --load_stored--> fp32 [1, COLUMNS, SIZE], scales
new row --store_row--> rounded to the dtype, or to integers and their scale (`dilkit.decoding.layout`)
"""

from __future__ import annotations

import triton
import triton.language as tl

from dilkit.decoding.layout import SCALE_BYTES

SCALE = tl.constexpr(SCALE_BYTES)
VECTOR = tl.constexpr(4)
"""Elements that are read at a time where rows allow it."""
ROUNDING = tl.constexpr(1.5 * 2**23)
"""Added to a number below 2**22 in fp32 and taken away again, it leaves the nearest integer."""
NAN_BITS = tl.constexpr(0x7FC00000)


@triton.jit
def places_at(step, seen, numbers, there):
    """Return the places of stored rows after the first: elements of whole pages, rows, and a mask of rows that exist."""
    page, own = numbers * 0, numbers
    if seen.pages != -1:
        at = seen.page_first + numbers * seen.page_step
        in_page = at // seen.page_rows
        page = tl.load(step.pages + seen.pages + in_page, mask=there, other=-1)
        there = there & (page >= 0) & (page < seen.page_limit)
        page, own = tl.where(there, page, 0) * seen.page, at - in_page * seen.page_rows
    return page, own, there


@triton.jit
def load_stored(
    address, places, there, STORED: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr
):  # fmt: skip
    """Stored rows, `[1, COLUMNS, SIZE]`, and what their integers are multiplied by."""
    rows, d = address.to(tl.pointer_type(STORED)) + places, tl.arange(0, SIZE)[None, None, :]
    if WHOLE:
        rows = tl.multiple_of(rows, VECTOR * (STORED.primitive_bitwidth // 8))
    numbers = tl.load(rows[None, :, None] + d, mask=there[None, :, None] & (d < DIM), other=0.0).to(tl.float32)
    scales = tl.full(places.shape, 1.0, tl.float32)
    if WIDTH > DIM:
        if WHOLE:
            scales = tl.load((rows + DIM).to(tl.pointer_type(tl.float32), bitcast=True), mask=there, other=0.0)
        else:
            bits = tl.zeros(places.shape, tl.int32)
            for byte in tl.static_range(SCALE):
                own = tl.load(rows + DIM + byte, mask=there, other=0)
                bits = bits | ((own.to(tl.int32) & 255) << (8 * byte))
            scales = bits.to(tl.float32, bitcast=True)
    return numbers, scales


@triton.jit
def store_integers(to, numbers, d, DIM: tl.constexpr):
    """Store a row as integers and their scale, which is NaN where any number of the row is not finite."""
    sizes = tl.abs(numbers)
    finite = tl.max(tl.where(sizes < float("inf"), 0, 1), 0) == 0
    most = tl.max(sizes, 0)
    scale = tl.div_rn(most, 127.0)
    used = finite & (most > 0.0)
    integers = tl.div_rn(tl.where(used, numbers, 0.0), tl.where(used, scale, 1.0) + tl.zeros_like(numbers))
    integers = tl.minimum(tl.maximum((integers + ROUNDING) - ROUNDING, -127.0), 127.0)
    tl.store(to + d, integers.to(tl.int8), mask=d < DIM)
    bits = tl.where(finite, scale.to(tl.int32, bitcast=True), NAN_BITS)
    byte = tl.arange(0, SCALE)
    tl.store(to + DIM + byte, ((bits >> (8 * byte)) & 255).to(tl.uint8).to(tl.int8, bitcast=True))


@triton.jit
def store_row(to, numbers, STORED: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """Store the `DIM` real numbers of a row of `SIZE`: in STORED, or as integers with a scale."""
    d = tl.arange(0, SIZE)
    if WIDTH > DIM:
        store_integers(to, numbers.to(tl.float32), d, DIM)
    else:
        tl.store(to + d, numbers.to(STORED), mask=d < DIM)
