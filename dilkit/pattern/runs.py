"""Sets of positions as runs of consecutive ones: int64 `(runs, 2)`, the start and the stop of each, ascending, none touching."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Positions = NDArray[np.int64]

UNBOUNDED = 2**62
"""No tensor has as many rows: lengths, rates and positions beyond it are the same."""


def union(*sets: Positions) -> Positions:
    joined: list[list[int]] = []
    for start, stop in sorted(run for runs in sets for run in runs.tolist()):
        if joined and start <= joined[-1][1]:
            joined[-1][1] = max(joined[-1][1], stop)
        else:
            joined.append([start, stop])
    return np.array(joined, np.int64).reshape(-1, 2)


def complement(runs: Positions, seq: int) -> Positions:
    ends = np.concatenate(([0], np.minimum(runs, seq).reshape(-1), [seq])).reshape(-1, 2)
    return ends[ends[:, 0] < ends[:, 1]]


def difference(runs: Positions, without: Positions, seq: int) -> Positions:
    return complement(union(complement(runs, seq), without), seq)


def progressions(runs: Positions) -> Positions:
    """Return arithmetic progressions `(n, 3)` of the positions: first, step, count. Single ones at equal distances are joined."""
    lengths = runs[:, 1] - runs[:, 0]
    if (lengths > 1).all():
        return np.stack((runs[:, 0], np.ones(len(runs), np.int64), lengths), axis=1)
    longer, single = runs[lengths > 1], runs[lengths == 1, 0].tolist()
    triples = np.stack((longer[:, 0], np.ones(len(longer), np.int64), longer[:, 1] - longer[:, 0]), axis=1).tolist()
    first = 0
    while first < len(single):
        step = single[first + 1] - single[first] if first + 1 < len(single) else 1
        stop = first + 1
        while stop < len(single) and single[stop] == single[stop - 1] + step:
            stop += 1
        triples.append([single[first], step, stop - first])
        first = stop
    return np.array(sorted(triples), np.int64).reshape(-1, 3)


def classes(runs: Positions, rate: int) -> Positions:
    """Split each run into residue classes modulo `rate`: arithmetic progressions `(n, 3)` as of `progressions`."""
    if rate == 1:
        return progressions(runs)
    lengths = runs[:, 1] - runs[:, 0]
    residues = np.minimum(lengths, rate)
    run = np.repeat(np.arange(len(runs)), residues)
    residue = np.arange(len(run)) - np.repeat(np.cumsum(residues) - residues, residues)
    return np.stack((runs[run, 0] + residue, np.full(len(run), rate), (lengths[run] - residue - 1) // rate + 1), axis=1)
