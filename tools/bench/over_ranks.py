"""`dilkit bench --comm ...`: the benchmark of a problem whose sequence is sharded over ranks; it compares schedules."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any

import torch
from tqdm import tqdm

from dilkit.comm import Comm
from dilkit.comm.collectives import gather_values
from dilkit.problem import Problem
from dilkit.testing.tensors import Tensors
from dilkit.tools.bench import one_pattern
from dilkit.tools.bench.workloads.rank_jobs import memory_note, peaks_of
from dilkit.tools.console import rank_arguments as ranks
from dilkit.tools.console.arguments import make_folder
from dilkit.tools.console.text import in_bytes
from dilkit.tools.measure import ceilings
from dilkit.tools.measure.case import over_budget
from dilkit.tools.measure.rank_times import seconds_of, time_in_turns
from dilkit.tools.measure.ranks_call import RanksCall, judged
from dilkit.tools.report import views
from dilkit.tools.report.files import publish
from dilkit.tools.results.file import new_result
from dilkit.tools.results.record import Entry, Yardstick
from dilkit.tools.results.rows import Row, RowsResult

KIND = "bench-ranks"
BUDGET = 20.0
"""Seconds that one call may take."""
MATMUL = ""
"""Name of the yardstick among what is timed: no schedule has an empty name."""


def run(args: Namespace, problem: Problem, lengths: Sequence[int], repeats: int) -> int:
    """Measure on all ranks of the job that `args` names; rank 0 writes the three files and prints the table."""
    make_folder("--out", args.out)
    return ranks.run(args, partial(_work, args=args, problem=problem, lengths=lengths, repeats=repeats))


def _work(comm: Comm, args: Namespace, problem: Problem, lengths: Sequence[int], repeats: int) -> int:
    args.budget = args.budget or BUDGET
    rows = []
    for seq in tqdm(lengths, unit="length", disable=True if comm.rank else None):
        rows += _length_rows(comm, args, replace(problem, seq=seq), repeats)
    facts = one_pattern.facts_of(problem)
    facts |= dict(comm=args.comm, world_size=comm.size, threads_of_a_rank=torch.get_num_threads())
    result = new_result(RowsResult, problem.device, kind=KIND, repeats=repeats, facts=facts, rows=tuple(rows))
    if comm.rank == 0:
        publish(result, args.out, "bench", "dilkit bench", args.json)
    return 1 if any(row.verdict == "wrong" for row in rows) else 0


def _length_rows(comm: Comm, args: Namespace, problem: Problem, repeats: int) -> list[Row]:
    """Return a row for each schedule, whatever became of it: all ranks make the same calls in the same order."""
    calls = {name: RanksCall(comm, problem, name, backend=args.backend) for name in args.schedules}
    inputs = next(iter(calls.values())).shard()
    entries = {name: _admit(call, inputs, args.budget) for name, call in calls.items()}
    able = {name: call for name, call in calls.items() if entries[name].verdict == "measured"}
    # Every rank makes a matmul at the same time, of the size that suits the slowest.
    size, _ = ceilings.square_matmul(problem.dtype, problem.device.type)
    size, multiply = ceilings.square_matmul(problem.dtype, problem.device.type, min(gather_values(comm, size)))
    timed_calls: dict[str, Callable[[], Any]] = {name: partial(call.once, inputs) for name, call in able.items()}
    timed = time_in_turns(comm, {MATMUL: multiply} | timed_calls, repeats)
    gflops = comm.size * 2e-9 * size**3 / timed[MATMUL].median_s
    for name, call in able.items():
        memory = _memory(call, inputs, args.comm != "threads")
        entries[name] = replace(entries[name], time=timed[name], flops=call.flops, **memory)
    matmul = Yardstick(timed[MATMUL], dict(gflops=gflops, size=size, dtype=problem.dtype))
    return one_pattern.call_rows(problem, dict(entries=entries, matmul=matmul))


def _admit(call: RanksCall, inputs: Tensors, budget: float) -> Entry:
    """Return the beginning of an entry: the verdict, and the check and the count of bytes that it rests on."""
    try:
        plan = call.plan
    except ValueError as error:
        return Entry(verdict="refused", reasons=(str(error),))
    checks, counted = call.check(), dict[str, list[int]]()
    seconds = seconds_of(call.comm, lambda: counted.update(call.count(inputs)))
    entry = judged(checks, counted)
    if entry.verdict == "measured" and seconds > budget:
        entry = replace(entry, verdict="skipped", reasons=(over_budget("took", seconds, budget),))
    work = [plan.work(rank) for rank in range(call.comm.size)]
    return replace(entry, ranks=dict(routes=[route.kind for route in plan.routes], **counted, work=work))


def _memory(call: RanksCall, inputs: Tensors, alone: bool) -> dict[str, Any]:
    """Return peak extra bytes of a call on the rank that needs most, and of its forward pass alone; or why not."""
    device = call.problem.device.type
    if reasons := list(filter(None, gather_values(call.comm, memory_note(alone, device)))):
        return dict(memory_note=f"memory is not measured: {reasons[0]}")
    peaks = dict(peak_bytes=max(peaks_of(call.comm, partial(call.once, inputs), device)))
    if call.problem.requires_grad:
        forward = replace(call, problem=replace(call.problem, requires_grad=False))
        peaks["forward_peak_bytes"] = max(peaks_of(call.comm, partial(forward.once, inputs), device))
    return peaks


def _by_rank(name: str, header: str, text: Callable[[Sequence[float]], str]) -> views.Column:
    """Return a column of values that each rank has."""
    return views.Column(header, lambda row, case: text(row.values[name]) if name in row.values else "-")


COLUMNS = (
    _by_rank("sent_bytes", "a rank sends", lambda sent: in_bytes(round(max(sent)))),
    _by_rank("planned_bytes", "plan says", lambda planned: in_bytes(round(max(planned)))),
    _by_rank("work", "work max/mean", lambda work: f"{max(work) / fmean(work):.2f}"),
)
REPORT = replace(
    one_pattern.REPORT,
    subject=("{problem}, over {world_size} ranks ({comm}), threads a rank: {threads_of_a_rank}", "{pattern}"),
    tables=(partial(one_pattern.times, more=COLUMNS), one_pattern.speed_ups),
    method="Medians of {repeats} samples, one call each, in interleaved rounds: all ranks begin together, and a sample is the "
    "slowest rank's. Each schedule was checked against fp64 arithmetic on a shortened problem just before, and its bytes were "
    "counted. GFLOP/s are those of all ranks together, compared with a square matmul that every rank makes at the same time. "
    "Extra memory is the peak over what was held before the call, its result included, on the rank that needs most; one output "
    "is that of the whole sequence.",
)
