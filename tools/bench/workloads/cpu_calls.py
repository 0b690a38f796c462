"""Calls that the CPU suite measures beside configurations: neighborhoods of grids, idle threads, training GigaPath's encoder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from heapq import heappop, heappush
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from dilkit import dilated_attention, dilated_attention_varlen
from dilkit.backends.native.backend import encode_problem, instruction_set
from dilkit.integrations.gigapath import SlideEncoder, SlideEncoderConfig
from dilkit.pattern import DilatedSegment, Neighborhood
from dilkit.problem import Problem
from dilkit.threads import torch_threads, usable_cores
from dilkit.tools.bench.workloads.slide_calls import CHECKED, published_embedding, shorter, slide
from dilkit.tools.bench.workloads.ways import BACKEND
from dilkit.tools.measure.case import CaseFields, agreement, checked, in_turns
from dilkit.tools.results.rows import Row

PUBLISHED = "published procedure"
AGREEMENT_BF16 = 5e-2
"""Largest difference of results of many layers in bfloat16, which has eight bits, in units of the largest value."""
PHASES = {"forward": 0, "backward": 2}
"""Numbers that the kernel gives the passes; 1, between them, is short."""


def smaller(cells: Neighborhood, divisor: int) -> Neighborhood:
    """Neighborhoods on a grid of about so many times fewer cells, in which there is room for one."""
    part = round(divisor ** (1 / len(cells.shape)))
    least = [kernel * dilation for kernel, dilation in zip(cells.kernel_size, cells.dilation, strict=True)]
    return replace(cells, shape=tuple(max(size // part, room) for size, room in zip(cells.shape, least, strict=True)))


@dataclass(frozen=True)
class Load:
    """A problem; with `lengths`, one call on sequences of these, whose longest is as long as the problem."""

    what: str
    problem: Problem
    lengths: tuple[int, ...] = ()

    @property
    def starts(self) -> Tensor | None:
        """Offsets of packed sequences, and the end."""
        return torch.tensor([0, *accumulate(self.lengths)], dtype=torch.int32) if self.lengths else None


QueuedTask = tuple[float, tuple[int, ...]]
"""A task's work, in any unit, and the numbers of those in the queue that have to end before it begins."""


def idle(load: Load, threads: Sequence[int], calls: int) -> list[Row]:
    """The share of time in which so many threads have no task, simulated; and measured where there are as many cores.

    Of so many calls the least idle one counts: what disturbs a thread makes others wait.
    """
    measured = {count: _measured(load, count, calls) for count in threads if count <= usable_cores()}
    rows = []
    for passes in PHASES:
        tasks = counted(load, passes == "backward")
        for count in threads:
            values = dict(tasks=len(tasks), simulated=idle_share(tasks, count))
            values |= dict(measured=measured[count][passes]) if count in measured else {}
            case = dict(what=load.what, passes=passes, threads=count)
            rows.append(Row(table="idle", case=case, who=BACKEND, values=values))
    return rows


def idle_share(tasks: Sequence[QueuedTask], threads: int) -> float:
    """The share of the time of all threads, until the last task ends, in which they work on none: list scheduling.

    >>> idle_share([(1.0, ()), (1.0, ()), (2.0, (0, 1))], threads=2)
    0.3333333333333333
    """
    free, ends = [0.0] * threads, list[float]()
    for work, after in tasks:
        ends.append(max(heappop(free), *(ends[before] for before in after), 0.0) + work)
        heappush(free, ends[-1])
    return 1 - sum(work for work, _ in tasks) / (threads * max(ends))


def counted(load: Load, backward: bool) -> list[QueuedTask]:
    """The tasks of a pass in the order of the kernel's queue; their work is the pairs that each scores."""
    from dilkit.backends.native import _native

    tasks: list[QueuedTask] = []
    scored: dict[tuple[int, Sequence[int]], Tensor] = {}
    encoded = _native.EncodedProblem(*encode_problem(load.problem))
    for sequence, head, rows, columns, after in _native.tasks(encoded, backward, load.starts):
        queries, keys = (columns, rows) if backward else (rows, columns)
        if (sequence, keys) not in scored:
            seq = load.lengths[sequence] if load.lengths else load.problem.seq
            scored[sequence, keys] = _pairs(load.problem, seq, keys)
        tasks.append((scored[sequence, keys][head, list(queries)].sum().item(), after))
    return tasks


def _pairs(problem: Problem, seq: int, keys: Sequence[int]) -> Tensor:
    """`(heads, seq)`: the number of `keys` that each query is scored with, counted by the kernel itself.

    Where all scores are 0, exp(lse) of a query is the number of keys that it sees. Segments score a pair once, and each branch
    of another kind once more.
    """
    mask = torch.ones(1, seq, dtype=torch.bool)
    mask[:, list(keys)] = False
    zeros = torch.zeros(1, seq, problem.heads, 1)
    segments = [branch for branch in problem.pattern.branches if branch.kind == DilatedSegment.kind]
    others = [(branch,) for branch in problem.pattern.branches if branch.kind != DilatedSegment.kind]
    patterns = [problem.pattern.with_branches(*some, overlap="once", tail="exact") for some in (segments, *others) if some]
    attend = partial(dilated_attention, zeros, zeros, zeros, is_causal=problem.is_causal, backend=BACKEND, return_lse=True)
    return torch.stack([attend(pattern=one, key_padding_mask=mask)[1][0] for one in patterns]).double().exp().round().sum(0)


def _measured(load: Load, threads: int, calls: int) -> dict[str, float]:
    """The idle share of threads, by pass: of the time from the first task's begin to the last one's end."""
    from dilkit.backends.native import _native

    problem = load.problem
    shape = (sum(load.lengths),) if load.lengths else (1, problem.seq)
    *inputs, dout = (torch.randn(*shape, problem.heads, problem.head_dim, requires_grad=i < 3) for i in range(4))
    attend: Callable[..., Any] = dilated_attention
    if load.starts is not None:
        attend = partial(dilated_attention_varlen, cu_seqlens=load.starts, max_seqlen=problem.seq)

    def trained() -> None:
        out = attend(*inputs, pattern=problem.pattern, is_causal=problem.is_causal, backend=BACKEND)
        torch.autograd.grad(out, inputs, dout)

    def share(times: Sequence[tuple[int, float, float]], phase: int) -> float:
        spans = [(start, end) for number, start, end in times if number == phase]
        whole = max(end for _, end in spans) - min(start for start, _ in spans)
        return 1 - sum(end - start for start, end in spans) / (threads * whole)

    with torch_threads(threads):
        runs = [_native.timed_tasks(instruction_set(), trained) for _ in range(calls)]
    return {name: min(share(times, phase) for times in runs) for name, phase in PHASES.items()}


def encoder(config: SlideEncoderConfig, tiles: int, divisor: int, repeats: int) -> CaseFields:
    """GigaPath's encoder trained in bf16, by its published procedure and by dilkit: compared on a short slide, then timed."""
    few = min(tiles // divisor, CHECKED)
    theirs, ours = (call() for call in _trainings(shorter(config, max(tiles // CHECKED, divisor)), few).values())
    results = zip(("embedding", "gradients"), ours, theirs, strict=True)
    entry = checked([agreement(what, own, published, few, AGREEMENT_BF16) for what, own, published in results])
    calls = _trainings(shorter(config, divisor), tiles // divisor)
    return in_turns(dict.fromkeys(calls, entry), calls, repeats)


def _trainings(config: SlideEncoderConfig, tiles: int) -> dict[str, Callable[[], tuple[Tensor, Tensor]]]:
    """Both ways to train one model on one slide; each returns the embedding, and the gradients of all weights, joined."""
    torch.manual_seed(0)
    model = SlideEncoder(config).eval()
    inputs = slide(tiles, config)
    dout = torch.randn(1, config.embed_dim)

    def trained(forward: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
        """One pass forward and one backward, under autocast as GigaPath is trained."""
        weights = [*model.parameters()]
        with torch.autocast("cpu", torch.bfloat16):
            out = forward(*inputs)
        gradients = torch.autograd.grad(out, weights, dout.to(out.dtype), materialize_grads=True)
        return out.detach(), torch.cat([gradient.flatten() for gradient in gradients])

    theirs = partial(trained, partial(published_embedding, model))
    return {PUBLISHED: theirs, BACKEND: partial(trained, lambda *slides: model(*slides)[0])}
