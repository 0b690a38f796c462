"""Which pairs a branch sees, in torch's operators on indices: for `mask_mod` of FlexAttention, which compiles them.

count(h, i, j) = in how many branches query i of head h sees key j          h, i, j: tensors of indices, of any shapes
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import torch

from dilkit.pattern import BlockSparse, Branch, DilatedSegment, GlobalTokens, Neighborhood, SlidingWindow, Strided
from dilkit.problem import Problem

Counter = Callable[[Any, Any, Any], Any]


def counter(problem: Problem, device: torch.device) -> Counter:
    """`count(h, i, j)` of the problem's pattern, causality and overlap aside."""
    tests = [_test(branch, problem, device) for branch in problem.pattern.branches]

    def count(h: Any, i: Any, j: Any) -> Any:
        total = 0
        for test in tests:
            total = total + test(h, i, j).to(torch.int32)
        return total

    return count


def _test(branch: Branch, problem: Problem, device: torch.device) -> Counter:
    """Whether query i of head h sees key j in `branch`."""
    if isinstance(branch, DilatedSegment):
        return _segment(branch, problem, device)
    test = _of_kind(branch, problem, device)
    if branch.heads is None:
        return test
    start, stop = branch.heads
    return lambda h, i, j: (h >= start) & (h < stop) & test(h, i, j)


def _of_kind(branch: Branch, problem: Problem, device: torch.device) -> Counter:
    match branch:
        case SlidingWindow(reach=reach, dilation_rate=rate):
            return lambda h, i, j: (i - j <= reach) & (j - i <= reach) & (i % rate == j % rate)
        case GlobalTokens(direction=direction):
            chosen = _global(branch, problem.seq, device)
            return lambda h, i, j: chosen[i] | chosen[j] if direction == "both" else chosen[j] & (i == i)
        case Strided(stride=stride):
            return lambda h, i, j: i % stride == j % stride
        case BlockSparse(layout=layout, block_size=size):
            blocks, first = torch.from_numpy(layout.array().copy()).to(device), problem.first_head
            return lambda h, i, j: blocks[h + first if layout.heads > 1 else h * 0, i // size, j // size]
        case Neighborhood():
            return partial(_near, branch)
    raise TypeError(f"branch {branch!r} is of kind {branch.kind!r}, which is not known here")


def _segment(branch: DilatedSegment, problem: Problem, device: torch.device) -> Counter:
    length, rate, group = min(branch.segment_length, problem.seq), branch.dilation_rate, problem.heads // problem.kv_heads
    offsets = [
        problem.pattern.head_offset(rate, head // group, problem.kv_heads) if branch.serves(head) else -1
        for head in range(problem.heads)
    ]
    first_of = torch.tensor(offsets, dtype=torch.int32, device=device)

    def test(h: Any, i: Any, j: Any) -> Any:
        first = first_of[h]
        return (i // length == j // length) & (i % length % rate == first) & (j % length % rate == first)

    return test


def _global(branch: GlobalTokens, seq: int, device: torch.device) -> torch.Tensor:
    """Which tokens are global, bool `(seq,)`."""
    tokens = branch.positions[: branch.count(seq)]
    chosen = torch.zeros(seq, dtype=torch.bool, device=device)
    chosen[list(tokens)] = True
    return chosen


def _near(branch: Neighborhood, h: Any, i: Any, j: Any) -> Any:
    """Whether cell j is in the window of cell i, dimension by dimension."""
    near = i == i
    for dim, (size, width, step) in enumerate(zip(branch.shape, branch.kernel_size, branch.dilation, strict=True)):
        cells = prod(branch.shape[dim + 1 :])
        at, to = i // cells % size, j // cells % size
        last = (size - 1 - at % step) // step + 1 - width  # the last start of a window among the coordinates of this residue
        start = (at // step - width // 2).clamp(min=0).minimum(last)
        near = near & (at % step == to % step) & (to // step >= start) & (to // step < start + width)
    return near
