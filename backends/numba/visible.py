"""Device functions that list the keys which a tile of queries sees, or the queries which see a tile of keys.

All rows of a tile see the same keys. They are listed as runs: of each branch, shortest segment first, the positions that are
congruent to the tile's row modulo the dilation rate, without the stretch that an earlier branch of a dividing rate has listed. A
key that is listed a second time all the same gets the bias NEG_INF there, so that each key is scored once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from numpy import float32, uint64

from dilkit.backends.numba.compiling import NEG_INF, ZERO, device, log2
from dilkit.backends.tiles.schedule import MAX_BRANCHES

MAX_RUNS = 2 * MAX_BRANCHES


class VisibleRuns(NamedTuple):
    """The positions that a tile sees, in shared memory. `runs`: (first, step, count, branch); `segments`: (start, stop, rate) of
    the segment of each branch that the tile's row is in; `sizes`: how many positions there are, and how many runs."""

    runs: Any
    segments: Any
    sizes: Any


@device
def add_run(visible, row, branch, low, high):
    """Append the positions of `branch` from `low` on and below `high`, both inside its segment."""
    rate = visible.segments[branch, 2]
    first = low + (row - low) % rate
    if first < high:
        count, run = (high - first - 1) // rate + 1, visible.sizes[1]
        visible.runs[run, 0] = first
        visible.runs[run, 1] = rate
        visible.runs[run, 2] = count
        visible.runs[run, 3] = branch
        visible.sizes[0] += count
        visible.sizes[1] += 1


@device
def list_visible(visible, branches, chosen, row, seq, lowest, highest):
    """List what `row` sees through the branches of the bit set `chosen`, from `lowest` on and below `highest`. One thread of a
    block calls it."""
    visible.sizes[0] = 0
    visible.sizes[1] = 0
    for b in range(branches.shape[0]):
        if chosen >> b & 1:
            segment, rate = branches[b, 0], branches[b, 1]
            low = row // segment * segment
            high = min(low + segment, seq)
            visible.segments[b, 0] = low
            visible.segments[b, 1] = high
            visible.segments[b, 2] = rate
            covered_from, covered_to = high, high
            for j in range(b):
                if chosen >> j & 1 and rate % visible.segments[j, 2] == 0:
                    covered_from, covered_to = max(low, visible.segments[j, 0]), min(high, visible.segments[j, 1])
            add_run(visible, row, b, max(low, lowest), min(covered_from, highest))
            add_run(visible, row, b, max(covered_to, lowest), min(high, highest))


@device
def count_bias(visible, branch_count, chosen, row, position, branch, once):
    """log2 of how many branches show `position` to `row`, 0 if each counts once; NEG_INF if one before `branch` does."""
    count = 0
    for b in range(branch_count):
        inside = chosen >> b & 1 and visible.segments[b, 0] <= position < visible.segments[b, 1]
        if inside and abs(position - row) % visible.segments[b, 2] == 0:
            if b < branch:
                return NEG_INF
            count += 1
    return ZERO if once else log2(float32(count))


@device
def visible_position(visible, index, branch_count, chosen, row, once):
    """Position and bias of number `index` of what is listed; -1 and NEG_INF past the last."""
    if index >= visible.sizes[0]:
        return -1, NEG_INF
    run = 0
    while index >= visible.runs[run, 2]:
        index -= visible.runs[run, 2]
        run += 1
    position = visible.runs[run, 0] + index * visible.runs[run, 1]
    if chosen & (chosen - 1) == 0:
        return position, ZERO
    return position, count_bias(visible, branch_count, chosen, row, position, visible.runs[run, 3], once)


@device
def branches_of_head(branches, head):
    """The bit set of the branches that serve query head `head`."""
    serving = 0
    for b in range(branches.shape[0]):
        if branches[b, 2] <= head < branches[b, 3]:
            serving |= 1 << b
    return serving


@device
def masked(mask, batch, position):
    """True if the mask ignores the key at `position`."""
    return mask.present and mask.numbers[uint64(batch * mask.batch + position * mask.row)] != 0
