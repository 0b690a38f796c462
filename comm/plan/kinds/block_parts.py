"""Parts of blocks, numbered through the sequence, and what parts of queries see of parts of keys: runs of parts.

blocks    |-- 0 --|-- 1 --|-- 2 --|-- 3 --|
shards    |---- 0 ----|------ 1 ----------|
parts     |-- 0 --|-1-|-2-|-- 3 --|-- 4 --|      a block that shards cut is several parts
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dilkit.comm.plan.messages import IntArray

Bools = NDArray[np.bool_]


class Parts(NamedTuple):
    """All parts of a sequence: part i is the rows `edges[i] .. edges[i + 1] - 1`, of block `block[i]`, on rank `rank[i]`."""

    edges: IntArray
    block: IntArray
    rank: IntArray
    whole: Bools

    @property
    def rows(self) -> IntArray:
        return np.diff(self.edges)

    def of_blocks(self, blocks: IntArray) -> IntArray:
        """Return the first part of each of these blocks; for the block after the last, the number of parts."""
        return np.searchsorted(self.block, blocks)

    def of_ranks(self, ranks: IntArray) -> IntArray:
        return np.searchsorted(self.rank, ranks)


def parts_of(cuts: Sequence[int], block_size: int) -> Parts:
    """Return the parts of blocks of `block_size` tokens and shards that begin at `cuts`."""
    seq = cuts[-1]
    edges = np.unique(np.concatenate((np.arange(0, seq, block_size), np.array(cuts, np.int64))))
    block, rank = edges[:-1] // block_size, np.searchsorted(np.array(cuts, np.int64), edges[:-1], "right") - 1
    whole = np.diff(edges) == np.minimum(block_size, seq - block * block_size)
    return Parts(edges, block, rank, whole)


class SeenRuns(NamedTuple):
    """Line by line: part `query` of the queries of a unit sees all keys of the parts `start .. stop - 1`, of rank `keys_of`."""

    unit: IntArray
    query: IntArray
    keys_of: IntArray
    start: IntArray
    stop: IntArray

    def where(self, chosen: Bools | IntArray | slice) -> SeenRuns:
        return SeenRuns(*(x[chosen] for x in self))

    def key_rows(self, parts: Parts) -> IntArray:
        return run_rows((self.unit, self.start, self.stop), parts)


def seen_runs(layout_runs: IntArray, parts: Parts, is_causal: bool) -> SeenRuns:
    """Expand lines of a layout `(n, 4)`: unit, query block, first key block, and the one after the last.

    Lines leave out what whole blocks of a rank see of one another; with causality also what lies after a query, or is itself.
    """
    unit, block, first, last = layout_runs.T
    low, high = parts.of_blocks(block), parts.of_blocks(block + 1)
    lines = SeenRuns(unit, low, unit, parts.of_blocks(first), parts.of_blocks(last))
    by_part = _repeated(lines, high - low, "query")
    low = parts.rank[by_part.start]
    by_rank = _repeated(by_part._replace(keys_of=low), parts.rank[by_part.stop - 1] - low + 1, "keys_of")
    start = np.maximum(by_rank.start, parts.of_ranks(by_rank.keys_of))
    stop = np.minimum(by_rank.stop, parts.of_ranks(by_rank.keys_of + 1))
    if is_causal:
        stop = np.minimum(stop, by_rank.query)
    return _without_local(by_rank._replace(start=start, stop=stop), parts)


def cut_diagonal(layout_runs: IntArray, parts: Parts) -> SeenRuns:
    """Return the parts of blocks that see themselves and are not whole."""
    unit, block = layout_runs[(layout_runs[:, 2] <= layout_runs[:, 1]) & (layout_runs[:, 1] < layout_runs[:, 3]), :2].T
    low, high = parts.of_blocks(block), parts.of_blocks(block + 1)
    lines = _repeated(SeenRuns(unit, low, unit, low, low), high - low, "query")
    lines = lines.where(~parts.whole[lines.query])
    return lines._replace(keys_of=parts.rank[lines.query], start=lines.query, stop=lines.query + 1)


def _repeated(lines: SeenRuns, times: IntArray, counting: str) -> SeenRuns:
    """Repeat each line so many times; the field `counting` counts on from its value."""
    line = np.repeat(np.arange(len(times)), times)
    number = np.arange(len(line)) - (np.cumsum(times) - times)[line]
    repeated = lines.where(line)
    return repeated._replace(**{counting: getattr(repeated, counting) + number})


def _without_local(lines: SeenRuns, parts: Parts) -> SeenRuns:
    """Remove what whole blocks of a rank see of one another: they keep the cut parts at its ends."""
    lines = lines.where(lines.start < lines.stop)
    local = parts.whole[lines.query] & (lines.keys_of == parts.rank[lines.query])
    local_lines = lines.where(local)
    left = [lines.where(~local)]
    for part in (parts.of_ranks(local_lines.keys_of), parts.of_ranks(local_lines.keys_of + 1) - 1):
        cut = ~parts.whole[part] & (local_lines.start <= part) & (part < local_lines.stop)
        left.append(local_lines.where(cut)._replace(start=part[cut], stop=part[cut] + 1))
    joined = SeenRuns(*map(np.concatenate, zip(*left, strict=True)))
    return joined.where(np.lexsort((joined.start, joined.query, joined.unit)))


PartRuns = tuple[IntArray, IntArray, IntArray]
"""Runs of parts: labels, and the parts from `start` to before `stop`; by `union` ascending, and those of one label apart."""


def run_rows(runs: PartRuns, parts: Parts) -> IntArray:
    rows: IntArray = parts.edges[runs[2]] - parts.edges[runs[1]]
    return rows


def union(*some: PartRuns) -> PartRuns:
    """Return the parts that are in any of these, by label: each label's as few runs as possible."""
    label, start, stop = (np.concatenate(arrays) for arrays in zip(*some, strict=True))
    if not len(label):
        return label, start, stop
    order = np.lexsort((start, label))
    label, start, stop = label[order], start[order], stop[order]
    apart = int(stop.max()) + 1  # so that runs of two labels never touch
    reached = np.maximum.accumulate(stop + label * apart)
    first = np.concatenate(([True], (start + label * apart)[1:] > reached[:-1]))
    last = np.append(np.flatnonzero(first)[1:], len(label)) - 1
    return label[first], start[first], reached[last] - label[first] * apart


def summed(labels: IntArray, numbers: IntArray, size: int) -> IntArray:
    """Return the sum of the numbers of each label: `(size,)`."""
    total = np.zeros(size, np.int64)
    np.add.at(total, labels, numbers)
    return total


def exactly_summed(labels: IntArray, numbers: IntArray, size: int) -> NDArray[Any]:
    """Return `summed` as Python integers, which do not overflow."""
    high, low = (summed(labels, half, size).astype(object) for half in (numbers >> 31, numbers & (2**31 - 1)))
    total: NDArray[Any] = high * 2**31 + low
    return total
