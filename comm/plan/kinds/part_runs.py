"""Parts of blocks, numbered through the sequence, and runs of them by label: everything that a plan of blocks looks at.

blocks    |-- 0 --|-- 1 --|-- 2 --|-- 3 --|
shards    |---- 0 ----|------ 1 ----------|
parts     |-- 0 --|-1-|-2-|-- 3 --|-- 4 --|      a block that shards cut is several parts
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dilkit.comm.plan.sharded_segments import IntArray

Bools = NDArray[np.bool_]


class Parts(NamedTuple):
    """All parts of a sequence: part i is the rows `edges[i] .. edges[i + 1] - 1`, of block `block[i]`, on rank `rank[i]`."""

    edges: IntArray
    block: IntArray
    rank: IntArray
    whole: Bools

    @classmethod
    def of(cls, cuts: Sequence[int], block_size: int) -> Parts:
        """Those of blocks of `block_size` tokens and shards that begin at `cuts`."""
        seq = cuts[-1]
        edges = np.unique(np.concatenate((np.arange(0, seq, block_size), np.array(cuts, np.int64))))
        block, rank = edges[:-1] // block_size, np.searchsorted(np.array(cuts, np.int64), edges[:-1], "right") - 1
        whole = np.diff(edges) == np.minimum(block_size, seq - block * block_size)
        return cls(edges, block, rank, whole)

    @property
    def rows(self) -> IntArray:
        """Rows of each part."""
        return np.diff(self.edges)

    def __len__(self) -> int:
        return len(self.block)

    def of_blocks(self, blocks: IntArray) -> IntArray:
        """The first part of each of these blocks, which ascend or not; of the block after the last, the number of parts."""
        return np.searchsorted(self.block, blocks)

    def of_ranks(self, ranks: IntArray) -> IntArray:
        """The first part of each of these ranks."""
        return np.searchsorted(self.rank, ranks)


class PartRuns(NamedTuple):
    """Runs of parts `start .. stop - 1`, each with a label; ascending, and those of one label apart, where `union` made them."""

    label: IntArray
    start: IntArray
    stop: IntArray

    @classmethod
    def none(cls) -> PartRuns:
        """No runs."""
        return cls(*np.zeros((3, 0), np.int64))

    def rows(self, parts: Parts) -> IntArray:
        """Rows of each run."""
        lengths: IntArray = parts.edges[self.stop] - parts.edges[self.start]
        return lengths

    def of_labels(self, first: int, stop: int) -> PartRuns:
        """Those of the labels `first .. stop - 1`."""
        low, high = np.searchsorted(self.label, (first, stop)).tolist()
        return PartRuns(*(x[low:high] for x in self))

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Start and stop of each."""
        return list(zip(self.start.tolist(), self.stop.tolist(), strict=True))


def union(*some: PartRuns) -> PartRuns:
    """The parts that are in any of these, by label: each label's as few runs as possible."""
    label, start, stop = (np.concatenate(arrays) for arrays in zip(*some, strict=True))
    if not len(label):
        return PartRuns.none()
    order = np.lexsort((start, label))
    label, start, stop = label[order], start[order], stop[order]
    apart = int(stop.max()) + 1  # so that runs of two labels never touch
    reached = np.maximum.accumulate(stop + label * apart)
    first = np.concatenate(([True], (start + label * apart)[1:] > reached[:-1]))
    last = np.append(np.flatnonzero(first)[1:], len(label)) - 1
    return PartRuns(label[first], start[first], reached[last] - label[first] * apart)


def summed(labels: IntArray, numbers: IntArray, size: int) -> IntArray:
    """`(size,)`: the sum of the numbers of each label."""
    total = np.zeros(size, np.int64)
    np.add.at(total, labels, numbers)
    return total


def exactly_summed(labels: IntArray, numbers: IntArray, size: int) -> NDArray[Any]:
    """The same as Python's integers, of any size."""
    high, low = (summed(labels, half, size).astype(object) for half in (numbers >> 31, numbers & (2**31 - 1)))
    total: NDArray[Any] = high * 2**31 + low
    return total
