"""Ways to compute the attention of a pattern: native in one pass, in a call for each branch, and torch with a mask."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dilkit import dilated_attention
from dilkit.pattern import BlockSparse, Pattern
from dilkit.problem import Problem
from dilkit.testing.accuracy import expected_rows
from dilkit.testing.tensors import Tensors
from dilkit.tools.bench.serving.entries import checked, timed
from dilkit.tools.measure.baselines import merged
from dilkit.tools.measure.case import CaseFields, failed
from dilkit.tools.measure.correctness import some_rows
from dilkit.tools.measure.single_call import call_once
from dilkit.tools.results.record import Entries, Entry

BACKEND = "native"
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Way:
    """A way to compute `problem` on `inputs`; `held_bytes` are those of what it needs beside them, such as a mask."""

    problem: Problem
    inputs: Tensors
    attend: Attend
    held_bytes: int = 0
    refusals: tuple[str, ...] = ()

    def __call__(self) -> Tensor:
        with torch.no_grad():
            return self.attend(*self.inputs.qkv)


def native(problem: Problem, inputs: Tensors) -> Way:
    """All branches in one pass."""
    return Way(problem, inputs, partial(_native, problem.pattern, problem.is_causal))


def one_by_one(problem: Problem, inputs: Tensors) -> Way:
    """A call for each branch; the results are merged by their logsumexps, in torch."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        alone = [Pattern.of(branch) for branch in problem.pattern.branches]
        outs, lses = zip(*(_native(one, problem.is_causal, query, key, value, True) for one in alone), strict=True)
        return merged(outs, lses)

    return Way(problem, inputs, attend)


def masked(problem: Problem, inputs: Tensors) -> Way:
    """torch's attention with a mask of all pairs, made before it is timed; the pattern is one `BlockSparse`, not causal."""
    (branch,) = problem.pattern.branches
    if not isinstance(branch, BlockSparse):
        raise TypeError(f"pattern {problem.pattern}: a BlockSparse is needed")
    # Of four dimensions, or torch computes without its fused kernel.
    mask = torch.from_numpy(branch.own_layout.array().copy())[None]
    for dim in (2, 3):
        mask = mask.repeat_interleave(branch.block_size, dim).narrow(dim, 0, problem.seq)

    def attend(*rows: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in rows)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2)

    return Way(problem, inputs, attend, held_bytes=mask.nbytes)


def compared(ways: Mapping[str, Way], repeats: int) -> CaseFields:
    """Each way is checked against the definition in some rows; those that are right are timed in turns."""
    entries: Entries = {name: _admitted(way) for name, way in ways.items()}
    return timed(entries, ways, repeats)


def _admitted(way: Way) -> Entry:
    """The beginning of an entry: its verdict; and if it is right the memory of a call that was made before."""
    if way.refusals:
        return Entry(verdict="refused", reasons=way.refusals)
    rows = some_rows(way.inputs, way.problem)
    rows = torch.cat([rows.new_zeros(1), rows])  # the first row too, a global token where there are some
    try:
        out = way()[:, rows]
        (check,) = expected_rows(way.problem, way.inputs, rows).checks({"out": out}, way.problem.seq, " rows")
        if not check.passed:
            return checked(check)
        one = call_once(way)
    except Exception as error:  # no kernel can be compiled, out of memory: the others go on
        return failed(error)
    peak = None if one.peak_bytes is None else one.peak_bytes + way.held_bytes
    held = None if peak is None else peak + sum(x.nbytes for x in way.inputs.qkv)
    return replace(checked(check, one), flops=float(way.problem.flops()), peak_bytes=peak, memory_bytes=held)


def _native(pattern: Pattern, is_causal: bool, query: Tensor, key: Tensor, value: Tensor, return_lse: bool = False) -> Any:
    return dilated_attention(query, key, value, pattern, is_causal=is_causal, backend=BACKEND, return_lse=return_lse)
