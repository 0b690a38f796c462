"""Local branches: what a branch shows of the rows that one rank holds to one another, as a branch of a sequence of its own."""

from __future__ import annotations

from typing import NamedTuple

from dilkit.comm.plan.local_segments import local_range
from dilkit.comm.plan.sharded_segments import segment_tokens
from dilkit.pattern import BlockSparse, Branch, DilatedSegment, GlobalTokens, SlidingWindow


class LocalBranch(NamedTuple):
    """`branch`, applied to the rows `start .. stop - 1` of the sequence as if they were all."""

    start: int
    stop: int
    branch: Branch


def local_branch(branch: Branch, start: int, stop: int, seq: int) -> LocalBranch | None:
    """What a rank with the rows `start .. stop - 1` of `seq` computes of a branch by itself; None: nothing."""
    if isinstance(branch, DilatedSegment):
        first, last = local_range(segment_tokens(branch, seq), start, stop, seq)
        return LocalBranch(first, last, branch) if first < last else None
    if (start, stop) == (0, seq) or isinstance(branch, SlidingWindow):
        return LocalBranch(start, stop, branch) if start < stop else None
    if isinstance(branch, GlobalTokens):
        tokens = global_tokens(branch, start, stop)
        return LocalBranch(start, stop, GlobalTokens(tokens, branch.direction, branch.heads)) if tokens else None
    return _whole_blocks(branch, start, stop, seq) if isinstance(branch, BlockSparse) else None


def _whole_blocks(branch: BlockSparse, start: int, stop: int, seq: int) -> LocalBranch | None:
    """The blocks that lie within the rows `start .. stop - 1`."""
    size = branch.block_size
    first, last = -(-start // size), -(-stop // size) if stop == seq else stop // size
    if first >= last:
        return None
    return LocalBranch(first * size, min(last * size, seq), BlockSparse(branch.layout.part(first, last), size, branch.heads))


def global_tokens(branch: GlobalTokens, start: int, stop: int) -> int | list[int]:
    """The global tokens among the rows `start .. stop - 1`, counted from `start`: their number if they are the first ones."""
    if isinstance(branch.tokens, int):
        return max(min(branch.tokens, stop) - start, 0)
    return [token - start for token in branch.tokens if start <= token < stop]
