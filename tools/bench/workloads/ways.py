"""The CPU kernel, and torch with a matrix of all pairs, which is made once for a problem before it is timed."""

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from dilkit import CoordinateAlibi, dilated_attention
from dilkit.pattern import BlockSparse, Pattern
from dilkit.problem import Problem
from dilkit.testing.tensors import Tensors
from dilkit.tools.bench.suite import SuiteStep
from dilkit.tools.measure.baselines import merged
from dilkit.tools.measure.case import Posed, compare
from dilkit.tools.measure.implementation import Implementation
from dilkit.tools.measure.timing import time_interleaved
from dilkit.tools.report import views
from dilkit.tools.results.rows import ResultRow, rows_of

BACKEND = "native"
PLACE = "{device_name}, instruction set {isa}, {thread_count} threads of {cores} cores"
MASK_ROWS = 1024
"""Rows of a mask that are made at once."""


def times(title: str, table: str, base: str, *more: views.Column, note: str = "{what}: {problem}") -> views.ResultTable:
    """Tabulate the times of all cases, also as multiples of the time of `base`, with `more` columns."""
    columns = views.fact("what"), views.WHO, views.TIME, views.QUARTILES, views.SAMPLES, views.over(base)
    return views.ResultTable(title, table, (*columns, *more), note=note)


def step(table: str, words: str, what: str, posed: Posed, repeats: int, weight: float) -> SuiteStep:
    """Return the step that checks, times in turns and measures the memory of the implementations of a case `what`.

    Their rates count the forward pass alone.
    """

    def measure() -> list[ResultRow]:
        measured = compare(posed, partial(time_interleaved, repeats=repeats, warmup=0), memory_too=True)
        for made_once in (_mask, _block_numbers):
            made_once.cache_clear()
        values = {name: dict(problem=str(problem), flops=float(problem.flops())) for name, (_, problem) in posed.items()}
        return rows_of(table, dict(what=what), measured, values)

    return SuiteStep(table, words, measure, weight)


def _native(inputs: Tensors, problem: Problem, **arguments: Any) -> tuple[Tensor, Tensor]:
    options: dict[str, Any] = dict(is_causal=problem.is_causal, softcap=problem.softcap or None, bias=inputs.bias)
    options |= dict(pattern=problem.pattern, backend=BACKEND, return_lse=True) | arguments
    out, lse = dilated_attention(*inputs.qkv, **options)
    return out, lse


def _one_by_one(inputs: Tensors, problem: Problem) -> Tensor:
    parts = [_native(inputs, problem, pattern=Pattern.of(branch)) for branch in problem.pattern.branches]
    return merged([out for out, _ in parts], [lse for _, lse in parts])


def _by_layout(inputs: Tensors, problem: Problem, renew: bool) -> tuple[Tensor, Tensor]:
    numbers, pattern = _block_numbers(problem)
    layout = numbers[..., torch.randperm(numbers.shape[-1])] if renew else numbers
    return _native(inputs, problem, pattern=pattern, block_layout=layout)


@lru_cache(maxsize=1)
def _block_numbers(problem: Problem) -> tuple[Tensor, Pattern]:
    """Numbers of the blocks that each block of queries sees, then -1; and the pattern that is given them at each call."""
    (branch,) = problem.pattern.branches
    assert isinstance(branch, BlockSparse)
    blocks = -(-problem.seq // branch.block_size)
    seen = torch.from_numpy(branch.own_layout.array()[0, :blocks, :blocks].copy())
    numbers = torch.arange(blocks).where(seen, -1).sort(-1, descending=True).values
    return numbers[None, None, :, : int(seen.sum(-1).max())], Pattern.of(BlockSparse(None, branch.block_size))


def _eager(inputs: Tensors, problem: Problem) -> Tensor:
    group = problem.heads // problem.kv_heads
    key, value = (x.repeat_interleave(group, 2) for x in (inputs.key, inputs.value))
    q, k, v = (x.transpose(1, 2) for x in (inputs.query, key, value))
    scores = torch.tanh(q @ k.mT * problem.scale / problem.softcap) * problem.softcap
    later = torch.full((problem.seq, problem.seq), -math.inf, dtype=scores.dtype).triu(1)
    return ((scores + later).softmax(-1) @ v).transpose(1, 2)


def _by_torch(inputs: Tensors, matrix: Tensor) -> Tensor:
    """torch's attention with a matrix that is added to the scores, or a mask of the pairs that are seen."""
    q, k, v = (x.transpose(1, 2) for x in inputs.qkv)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, matrix).transpose(1, 2)


@lru_cache(maxsize=1)
def _mask(problem: Problem) -> Tensor:
    """Return a mask of the pairs seen, in four dimensions: torch's fused kernel takes no other."""
    parts = torch.split(torch.arange(problem.seq), MASK_ROWS)
    return torch.cat([problem.pattern.count_rows(rows, problem.seq, 1)[0] > 0 for rows in parts])[None, None]


def _by_matrix(inputs: Tensors, problem: Problem) -> Tensor:
    """torch's attention with the matrix of all biases, of distances by torch's own function for them."""
    assert isinstance(inputs.bias, CoordinateAlibi)
    coordinates, slopes = inputs.bias.coordinates, inputs.bias.slopes
    exact = "donot_use_mm_for_euclid_dist"  # by its products distances have half the digits
    distances = torch.cdist(coordinates, coordinates, compute_mode=exact)
    return _by_torch(inputs, -slopes[:, None, None] * distances.unsqueeze(1))


def _implementation(summary: str, attend: Callable[[Tensors, Problem], Tensor], **fields: Any) -> Implementation:
    return Implementation(summary, summary, attend, **fields)


def _kernel(summary: str, with_lse: Callable[[Tensors, Problem], tuple[Tensor, Tensor]]) -> Implementation:
    return _implementation(summary, lambda inputs, problem: with_lse(inputs, problem)[0], with_lse=with_lse)


NATIVE = _kernel("the CPU kernel, all branches in one pass", _native)
ONE_BY_ONE = _implementation("a call of the CPU kernel for each branch, merged by their logsumexps in torch", _one_by_one)
LAYOUT = _kernel("the CPU kernel, given the blocks of a BlockSparse at every call", partial(_by_layout, renew=False))
NEW_LAYOUT = _kernel("the CPU kernel, given the blocks in a new order at every call", partial(_by_layout, renew=True))
EAGER = _implementation("causal attention with a softcap, operator by operator, as models write it out", _eager)
MASKED = _implementation(
    "torch's attention with a mask of all pairs, the same for all heads",
    lambda inputs, problem: _by_torch(inputs, _mask(problem)),
    prepared_bytes=lambda problem: problem.seq**2,
    quadratic=True,
)
MATRIX = _implementation("torch's attention with the bias of all pairs, made in the call", _by_matrix)
