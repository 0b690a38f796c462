"""How the work of a call falls to threads: its tasks, as the kernel's queue has them, with the pairs that each scores.

Pairs are counted by the kernel itself: where all scores are 0, exp(lse) of a query is the number of keys that it sees. A task is
taken to last in proportion to them; what it takes beside, such as packing keys, is not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from dilkit import dilated_attention, dilated_attention_varlen
from dilkit.backends.native.backend import encode_problem, instruction_set
from dilkit.pattern import DilatedSegment, Pattern
from dilkit.problem import Problem
from dilkit.threads import torch_threads, usable_cores
from dilkit.tools.bench.cpu.measured import Idle, IdlePass
from dilkit.tools.bench.cpu.schedule import Task, idle_share
from dilkit.tools.bench.packed_sequences import gradients

BACKEND = "native"
PHASES = {False: 0, True: 2}
"""As the kernel numbers them, by whether they are the backward pass; 1, between them, is short."""
Times = Sequence[tuple[int, float, float]]


@dataclass(frozen=True)
class Load:
    """A problem; with `lengths`, one call on sequences of these, whose longest is as long as the problem."""

    what: str
    problem: Problem
    lengths: tuple[int, ...] = ()

    @property
    def starts(self) -> Tensor | None:
        """Where packed sequences begin, and the end."""
        return torch.tensor([0, *accumulate(self.lengths)], dtype=torch.int32) if self.lengths else None


def idle(load: Load, threads: Sequence[int], calls: int) -> Idle:
    """The idle shares of so many threads, simulated; and measured where there are as many cores, the least of so many calls: what
    disturbs a thread makes others wait."""
    measured = {count: _measured(load, count, calls) for count in threads if count <= usable_cores()}
    passes = []
    for backward in (False, True):
        tasks = counted(load, backward)
        simulated = {str(count): idle_share(tasks, count) for count in threads}
        there = {str(count): shares[backward] for count, shares in measured.items()}
        passes.append(IdlePass(backward=backward, tasks=len(tasks), simulated=simulated, measured=there))
    return Idle(what=load.what, passes=tuple(passes))


def counted(load: Load, backward: bool) -> list[Task]:
    """The tasks of a pass in the order of the queue, each with the pairs that it scores."""
    from dilkit.backends.native import _native

    tasks: list[Task] = []
    seen: dict[tuple[int, Sequence[int]], Tensor] = {}
    encoded = _native.EncodedProblem(*encode_problem(load.problem))
    for sequence, head, rows, columns, after in _native.tasks(encoded, backward, load.starts):
        queries, keys = (columns, rows) if backward else (rows, columns)
        if (sequence, keys) not in seen:
            seen[sequence, keys] = _pairs(load.problem, load.lengths[sequence] if load.lengths else load.problem.seq, keys)
        own = seen[sequence, keys][head, list(queries)]
        tasks.append(Task(own.sum().item(), after))
    return tasks


def _pairs(problem: Problem, seq: int, keys: Sequence[int]) -> Tensor:
    """`(heads, seq)`: with how many of the `keys` each query is scored. Of several segments a pair is scored once."""
    mask = torch.ones(1, seq, dtype=torch.bool)
    mask[:, list(keys)] = False
    zeros = torch.zeros(1, seq, problem.heads, 1)
    attend = partial(dilated_attention, zeros, zeros, zeros, is_causal=problem.is_causal, backend=BACKEND, return_lse=True)
    lses = [attend(pattern=one, key_padding_mask=mask)[1][0] for one in _scored_once(problem.pattern)]
    return torch.stack(lses).double().exp().round().sum(0)


def _scored_once(pattern: Pattern) -> list[Pattern]:
    """Patterns that show each pair once, as it is scored: all segments, and each branch of another kind."""
    segments = [branch for branch in pattern.branches if branch.kind == DilatedSegment.kind]
    others = [(branch,) for branch in pattern.branches if branch.kind != DilatedSegment.kind]
    return [pattern.with_branches(*some, overlap="once", tail="exact") for some in (segments, *others) if some]


def _measured(load: Load, threads: int, calls: int) -> dict[bool, float]:
    """The idle share of threads, of the forward and of the backward pass."""
    from dilkit.backends.native import _native

    problem = load.problem
    tokens = sum(load.lengths) or problem.seq
    rows = torch.randn(4, tokens, problem.heads, problem.head_dim).unbind()
    attend: Callable[..., Any] = dilated_attention
    if load.starts is not None:
        attend = partial(dilated_attention_varlen, cu_seqlens=load.starts, max_seqlen=problem.seq)
    attend = partial(attend, pattern=problem.pattern, is_causal=problem.is_causal, backend=BACKEND)
    tensors = [(x if load.lengths else x[None]).requires_grad_(i < 3) for i, x in enumerate(rows)]
    with torch_threads(threads):
        runs = [_native.timed_tasks(instruction_set(), partial(gradients, attend, tensors)) for _ in range(calls)]
    return {backward: min(_idle_share(times, phase, threads) for times in runs) for backward, phase in PHASES.items()}


def _idle_share(times: Times, phase: int, threads: int) -> float:
    """Of the time from the first task's begin to the last one's end."""
    spans = [(start, end) for of, start, end in times if of == phase]
    whole = max(end for _, end in spans) - min(start for start, _ in spans)
    return 1 - sum(end - start for start, end in spans) / (threads * whole)
