"""Blocks that each call gives, as models choose them at every step: native, and torch with a mask of all pairs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from dilkit.pattern import BlockSparse, Pattern
from dilkit.problem import Problem
from dilkit.testing.tensors import Tensors
from dilkit.tools.bench.scores import ways
from dilkit.tools.bench.scores.ways import Way


def random_blocks(blocks: int, block_size: int, share: int) -> BlockSparse:
    """Of each block of queries its own and others at random, one in `share` in all, the same each time."""
    scores = torch.rand(blocks, blocks, generator=torch.Generator().manual_seed(0)).fill_diagonal_(2.0)
    chosen = scores.topk(max(1, blocks // share)).indices
    return BlockSparse(torch.zeros(blocks, blocks, dtype=torch.bool).scatter(-1, chosen, True).tolist(), block_size)


def given(problem: Problem, inputs: Tensors) -> Way:
    """The CPU kernel, given the blocks of `problem.pattern` at every call, in the same tensor."""
    pattern = Pattern.of(BlockSparse(None, _branch(problem).block_size))
    way = ways.native(replace(problem, pattern=pattern), inputs)
    return replace(way, problem=problem, attend=partial(way.attend, block_layout=_numbers(problem)))


def renewed(problem: Problem, inputs: Tensors) -> Way:
    """The same, given a tensor of other numbers at every call: the blocks of each row in another order."""
    way, numbers = given(problem, inputs), _numbers(problem)

    def attend(*rows: Any) -> Any:
        return way.attend(*rows, block_layout=numbers[..., torch.randperm(numbers.shape[-1])])

    return replace(way, attend=attend)


def masked(problem: Problem, inputs: Tensors) -> Way:
    """torch's attention with a mask of all pairs, made before it is timed."""
    mask = _seen(problem)[None, None]
    for dim in (2, 3):
        mask = mask.repeat_interleave(_branch(problem).block_size, dim).narrow(dim, 0, problem.seq)
    return Way(problem, inputs, lambda *rows: ways.masked(rows, mask), held_bytes=mask.nbytes)


def _branch(problem: Problem) -> BlockSparse:
    (branch,) = problem.pattern.branches
    return cast(BlockSparse, branch)


def _seen(problem: Problem) -> Tensor:
    """Bool `(blocks, blocks)`, of as many as the sequence has."""
    branch = _branch(problem)
    blocks = -(-problem.seq // branch.block_size)
    return torch.from_numpy(branch.own_layout.array()[0, :blocks, :blocks].copy())


def _numbers(problem: Problem) -> Tensor:
    """`(1, 1, blocks, k)`, as `block_layout` takes them."""
    seen = _seen(problem)
    numbers = torch.arange(len(seen)).where(seen, -1).sort(-1, descending=True).values
    return numbers[None, None, :, : int(seen.sum(-1).max())]
