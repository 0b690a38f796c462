"""A step of decoding in Triton, in one launch: new rows are stored, then each query row attends to the rows that spans show it.

    items, in order       one of them                           waits for     leaves
    writes                the new row of one key/value head     nothing       stored rows
    pieces                1 / splits of what a row sees of a    all writes    partials[piece]: sum of weights * values, their
                          head, for GROUP query heads                         largest score, the sum of weights
    merges                a row, for GROUP query heads          all pieces    out, lse

    queries [GROUP, 1, SIZE] --+
    keys [1, COLUMNS, SIZE] ---+--> scores, weights [GROUP, COLUMNS] --+
    values [1, COLUMNS, SIZE] -----------------------------------------+--> sums [GROUP, COLUMNS, SIZE]

A stored row is loaded once for GROUP query heads. Each column of a tile has an online softmax of its own, so that threads
exchange nothing but parts of scores until the piece ends. The rows of all spans of a row and a head are numbered in tiles of
COLUMNS, and piece s has the tiles s, s + splits, ..., so that the work of a launch does not depend on what tables say. Partials
are merged in their order: equal inputs give equal bits.

A program takes the number of its item from a counter when it begins. So it waits for items alone that have been taken by programs
that run. The second number of the counter is how many are done.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dilkit.backends.triton.products import rounded
from dilkit.backends.triton.scores import LN2, LOG2E, BiasView, biased, capped_scores
from dilkit.backends.triton.spans import (
    LINES,
    ROW,
    SPAN_COLUMNS,
    TO_KEY,
    TO_VALUE,
    WRITE_COLUMNS,
    StepView,
    next_line,
    own_lines,
    place_in,
    seen_at,
    side_at,
)
from dilkit.backends.triton.stored import load_stored, places_at, store_row


@triton.jit
def new_row(view, row, head, seq):
    """Return the address of a head's row in a tensor `(batch, seq, heads, head_dim)`."""
    of_head = view.data + head.to(tl.int64) * view.head
    return of_head + (row // seq).to(tl.int64) * view.batch + (row % seq).to(tl.int64) * view.row


@triton.jit
def write_side(
    view, step, line, side, row, head, place, seq, STORED: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Write a head's new key or value to the place that one side of a write names, unless that is out of bounds."""
    at, _, address = side_at(step, side, row - tl.load(line + ROW), place, WIDTH)
    if at >= 0:
        d = tl.arange(0, SIZE)
        numbers = tl.load(new_row(view, row, head, seq) + d, mask=d < DIM, other=0.0)
        store_row(address.to(tl.pointer_type(STORED)) + at, numbers, STORED, DIM, SIZE, WIDTH)


@triton.jit
def write_row(key, value, step, row, head, seq, STORED: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """Write the new key and value of a row and a key/value head to every place that the table of writes names for them."""
    for first in range(0, step.write_count, LINES):
        own, at = own_lines(step.writes, first, step.write_count, WRITE_COLUMNS, row, head), -1
        for _ in range(tl.sum(own.to(tl.int32), 0)):
            at = next_line(own, at)
            line = step.writes + (first + at).to(tl.int64) * WRITE_COLUMNS
            place = place_in(line, row, head, True)
            write_side(key, step, line, line + TO_KEY, row, head, place, seq, STORED, DIM, SIZE, WIDTH)
            write_side(value, step, line, line + TO_VALUE, row, head, place, seq, STORED, DIM, SIZE, WIDTH)


@triton.jit
def attend_tile(
    sums, most, total, queries, step, seen, bias, numbers, batch, heads, members, scale2, STORED: tl.constexpr,
    DIM: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr, SOFTCAP: tl.constexpr,
    METRIC: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    """Attend to a tile of `COLUMNS` stored rows, one per online softmax. Values of weight 0 add nothing, even if they are NaN."""
    page, own, there = places_at(step, seen, numbers, numbers < seen.count)
    keys, key_scales = load_stored(seen.key, page + own * seen.key_row, there, STORED, DIM, SIZE, WIDTH, WHOLE)
    values, value_scales = load_stored(seen.value, page + own * seen.value_row, there, STORED, DIM, SIZE, WIDTH, WHOLE)
    products = tl.sum(keys * queries, 2) * key_scales[None, :]
    scores = capped_scores(products, scale2, SOFTCAP)
    if METRIC != "":
        positions = seen.position + numbers * seen.position_step
        if seen.positions != 0:
            positions = tl.load(seen.positions.to(tl.pointer_type(tl.int64)) + numbers, mask=there, other=0)
        if DIMS > 0:
            there = there & (positions >= 0) & (positions < step.tokens)
        positions = tl.where(there, positions, 0)
        query = seen.query_position + tl.zeros([1], tl.int64)
        scores = biased(scores, bias, batch, heads[:, None], query, positions, 1, METRIC, DIMS)
    scores = tl.where(there[None, :], scores, -float("inf"))
    if seen.unseen != 0:
        flags = seen.unseen.to(tl.pointer_type(tl.uint8)) + (numbers * seen.unseen_row)[None, :]
        hidden = tl.load(flags + members[:, None] * seen.unseen_group, mask=there[None, :], other=0)
        scores = tl.where(hidden == 0, scores, -float("inf"))
    highest = tl.maximum(most, scores)
    finite = tl.where(highest == -float("inf"), 0.0, highest)
    weights, rescale = tl.exp2(scores - finite), tl.exp2(most - finite)
    added = tl.where((weights != 0.0)[:, :, None], (weights * value_scales[None, :])[:, :, None] * values, 0.0)
    return sums * rescale[:, :, None] + added, highest, total * rescale + weights


@triton.jit
def attend_span(
    sums, most, total, queries, step, seen, bias, first, batch, heads, members, scale2, STORED: tl.constexpr,
    DIM: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, WHOLE: tl.constexpr,
    SOFTCAP: tl.constexpr, METRIC: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    """Attend to every `splits`-th tile of a span, from tile `first` on."""
    for tile in range(first, (seen.count + COLUMNS - 1) // COLUMNS, step.splits):
        numbers = tile * COLUMNS + tl.arange(0, COLUMNS).to(tl.int64)
        sums, most, total = attend_tile(
            sums, most, total, queries, step, seen, bias, numbers, batch, heads, members, scale2, STORED, DIM, SIZE, WIDTH,
            WHOLE, SOFTCAP, METRIC, DIMS,
        )  # fmt: skip
    return sums, most, total


@triton.jit
def partial_at(step, piece, SIZE: tl.constexpr, GROUP: tl.constexpr):
    """Return the addresses of a piece's sums; the largest score and the sum of weights follow after `SIZE` numbers."""
    return step.partials + (piece.to(tl.int64) * GROUP + tl.arange(0, GROUP)) * (SIZE + 2)


@triton.jit
def attend_piece(
    query, step, bias, piece, split, row, kv_head, share, seq, group, scale2, STORED: tl.constexpr, DIM: tl.constexpr,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, COLUMNS: tl.constexpr, SOFTCAP: tl.constexpr,
    METRIC: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    """Attend with `GROUP` query heads of a row to the tiles of a piece, and return the partial."""
    members = tl.minimum(share * GROUP + tl.arange(0, GROUP), group - 1)
    heads, d = kv_head * group + members, tl.arange(0, SIZE)[None, None, :]
    queries = tl.load(new_row(query, row, heads, seq)[:, None, None] + d, mask=d < DIM, other=0.0).to(tl.float32)
    sums = tl.zeros([GROUP, COLUMNS, SIZE], tl.float32)
    most, total = tl.full([GROUP, COLUMNS], -float("inf"), tl.float32), tl.zeros([GROUP, COLUMNS], tl.float32)
    batch, tiles = row // seq, tl.full((), 0, tl.int64)
    for first in range(0, step.span_count, LINES):
        own, at = own_lines(step.spans, first, step.span_count, SPAN_COLUMNS, row, kv_head), -1
        for _ in range(tl.sum(own.to(tl.int32), 0)):
            at = next_line(own, at)
            line = step.spans + (first + at).to(tl.int64) * SPAN_COLUMNS
            seen = seen_at(step, line, row, kv_head, group, DIM, WIDTH, STORED.primitive_bitwidth // 8, METRIC != "", DIMS > 0)
            turn = (split + step.splits - tiles) % step.splits
            if seen.whole:
                sums, most, total = attend_span(
                    sums, most, total, queries, step, seen, bias, turn, batch, heads, members, scale2, STORED, DIM, SIZE, WIDTH,
                    COLUMNS, True, SOFTCAP, METRIC, DIMS,
                )  # fmt: skip
            else:
                sums, most, total = attend_span(
                    sums, most, total, queries, step, seen, bias, turn, batch, heads, members, scale2, STORED, DIM, SIZE, WIDTH,
                    COLUMNS, False, SOFTCAP, METRIC, DIMS,
                )  # fmt: skip
            tiles = (tiles + (seen.count + COLUMNS - 1) // COLUMNS) % step.splits
    highest = tl.max(most, 1)
    factors = tl.exp2(most - tl.where(highest == -float("inf"), 0.0, highest)[:, None])
    partial = partial_at(step, piece, SIZE, GROUP)
    tl.store(partial[:, None] + tl.arange(0, SIZE)[None, :], tl.sum(rounded(sums, factors[:, :, None]), 1))
    tl.store(partial + SIZE, highest)
    tl.store(partial + SIZE + 1, tl.sum(rounded(total, factors), 1))


@triton.jit
def merge_pieces(
    out,
    lse,
    sink,
    step,
    merge,
    row,
    kv_head,
    share,
    seq,
    heads,
    group,
    DIM: tl.constexpr,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Merge the partials of all pieces, and the sinks, into `out` and `lse` of `GROUP` query heads of a row."""
    members, d = share * GROUP + tl.arange(0, GROUP), tl.arange(0, SIZE)[None, :]
    real, own = members < group, kv_head * group + tl.minimum(members, group - 1)
    most, total = tl.full([GROUP], -float("inf"), tl.float32), tl.zeros([GROUP], tl.float32)
    if sink is not None:
        most = tl.load(sink + own) * LOG2E
        total = tl.exp2(most - tl.where(most == -float("inf"), 0.0, most))
    sums = tl.zeros([GROUP, SIZE], tl.float32)
    for split in range(step.splits):
        partial = partial_at(step, merge * step.splits + split, SIZE, GROUP)
        further = tl.load(partial + SIZE)
        highest = tl.maximum(most, further)
        finite = tl.where(highest == -float("inf"), 0.0, highest)
        ours, theirs = tl.exp2(most - finite), tl.exp2(further - finite)
        sums = sums * ours[:, None] + tl.load(partial[:, None] + d) * theirs[:, None]
        total = total * ours + tl.load(partial + SIZE + 1) * theirs
        most = highest
    seen = total != 0.0
    whole = tl.where(seen, total, 1.0)
    to = new_row(out, row, own, seq)[:, None] + d
    tl.store(
        to, tl.where(seen[:, None], sums / whole[:, None], 0.0).to(out.data.dtype.element_ty), mask=real[:, None] & (d < DIM)
    )
    place = ((row // seq).to(tl.int64) * heads + own) * seq + row % seq
    tl.store(lse + place, tl.where(seen, (most + tl.log2(whole)) * LN2, -float("inf")), mask=real)


@triton.jit
def wait_for(done, count):
    """Wait until `count` items are done, and what they have left is there."""
    while tl.atomic_add(done, 0, sem="acquire") < count:
        pass


@triton.jit(do_not_specialize=range(31))  # nothing is compiled anew while tokens are waited for; in tuples it would be
def attend_stored(
    query, key, value, out, lse, sink, spans, writes, pages, memory, partials, page_count, span_count, write_count, stored,
    positions, unseen, tokens, splits, weights, places, places_apart, entries, sizes, counter, seq, heads, kv_heads, written,
    merges, scale2, STORED: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr,
    COLUMNS: tl.constexpr, SOFTCAP: tl.constexpr, METRIC: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    """Do one item of a step: a write, a piece or a merge. `written`: the number of writes."""
    counts = page_count, span_count, write_count, stored, positions, unseen, tokens, splits
    step = StepView(spans, writes, pages, memory, partials, *counts)
    bias = BiasView(weights, places, weights, places_apart, entries, sizes)
    taken = counter.to(tl.int64).to(tl.pointer_type(tl.int32))
    done, item, pieces = taken + 1, tl.atomic_add(taken, 1, sem="relaxed"), merges * step.splits
    group = heads // kv_heads
    shares = tl.cdiv(group, GROUP)
    if item < written:
        write_row(key, value, step, item // kv_heads, item % kv_heads, seq, STORED, DIM, SIZE, WIDTH)
    elif item < written + pieces:
        wait_for(done, written)
        piece = item - written
        merge = piece // step.splits
        pair = merge // shares
        attend_piece(
            query, step, bias, piece, piece % step.splits, pair // kv_heads, pair % kv_heads, merge % shares, seq, group, scale2,
            STORED, DIM, SIZE, WIDTH, GROUP, COLUMNS, SOFTCAP, METRIC, DIMS,
        )  # fmt: skip
    else:
        wait_for(done, written + pieces)
        merge = item - written - pieces
        pair = merge // shares
        merge_pieces(
            out, lse, sink, step, merge, pair // kv_heads, pair % kv_heads, merge % shares, seq, heads, group, DIM, SIZE, GROUP
        )
    tl.debug_barrier()  # all threads have written what others wait for
    if tl.atomic_add(done, 1, sem="acq_rel") == written + pieces + merges - 1:
        tl.store(taken, 0)
        tl.store(done, 0)
