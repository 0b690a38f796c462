"""`dilkit bench --comm ...`: the benchmark of a problem whose sequence is sharded over ranks; it compares schedules."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
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
from dilkit.tools.report.document import Axis, Plot, Series
from dilkit.tools.report.files import publish
from dilkit.tools.report.points import plain
from dilkit.tools.results.file import new_result
from dilkit.tools.results.record import Entry, Exchange
from dilkit.tools.results.rows import CaseRows, Row, RowsResult

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
    with tqdm(lengths, unit="length", disable=True if comm.rank else None) as bar:
        runner = RanksRunner(comm, args, repeats, bar.set_description)
        rows = [row for seq in bar for row in runner.run(replace(problem, seq=seq))]
    facts = one_pattern.facts_of(problem) | dict(
        budget_s=args.budget or BUDGET, comm=args.comm, transport=transport_name(args.comm), world_size=comm.size,
        threads_of_a_rank=torch.get_num_threads(),
    )  # fmt: skip
    result = new_result(RowsResult, problem.device, kind=KIND, repeats=repeats, facts=facts, rows=tuple(rows))
    if comm.rank == 0:
        publish(result, args.out, "bench", "dilkit bench", args.json)
    return 1 if any(row.verdict == "wrong" for row in rows) else 0


def transport_name(kind: str) -> str:
    """The transport of rows, with its version."""
    if kind == "mpi":
        from mpi4py import MPI

        first = str(MPI.Get_library_version()).splitlines()[0].split(",")[0].strip("\0")
        return " ".join(first.replace("Version:", "").split())
    if kind == "torch":
        return f"torch.distributed {torch.__version__}, {dist.get_backend()}"
    return "threads of one process"


@dataclass(frozen=True)
class RanksRunner:
    """Schedules on the ranks of `comm`: all ranks make the same calls in the same order, and get the same results.

    `say(text)` is called with what comes next.
    """

    comm: Comm
    args: Namespace
    repeats: int
    say: Callable[[str], Any]

    def run(self, problem: Problem) -> list[Row]:
        """A row for each schedule at the length of `problem`, whatever became of it."""
        calls = {name: RanksCall(self.comm, problem, name, backend=self.args.backend) for name in self.args.schedules}
        inputs = next(iter(calls.values())).shard()
        entries = {name: self._admit(call, inputs) for name, call in calls.items()}
        able = {name: call for name, call in calls.items() if entries[name].verdict == "measured"}
        self.say(f"{problem.seq:,} tokens: time")
        # Every rank makes a matmul at the same time, of the size that suits the slowest.
        own_size, _ = ceilings.square_matmul(problem.dtype, problem.device.type)
        smallest = min(gather_values(self.comm, own_size))
        size, multiply = ceilings.square_matmul(problem.dtype, problem.device.type, smallest)
        timed_calls: dict[str, Callable[[], Any]] = {name: partial(call.once, inputs) for name, call in able.items()}
        timed = time_in_turns(self.comm, {MATMUL: multiply} | timed_calls, self.repeats)
        one = ceilings.matmul_rate(size, problem.dtype, timed[MATMUL])
        for name, call in able.items():
            self.say(f"{problem.seq:,} tokens: memory of {name}")
            entries[name] = replace(entries[name], time=timed[name], flops=call.flops, **self._memory(call, inputs))
        measured = dict(entries=entries, matmul=replace(one, gflops=self.comm.size * one.gflops))
        return one_pattern.call_rows(problem, measured)

    def _admit(self, call: RanksCall, inputs: Tensors) -> Entry:
        """The beginning of an entry: the verdict, and the check and the count of bytes that it rests on."""
        try:
            plan = call.plan
        except ValueError as error:
            return Entry(verdict="refused", reasons=(str(error),))
        self.say(f"{call.problem.seq:,} tokens: check of {call.schedule}")
        checks, counted = call.check(), dict[str, list[int]]()
        seconds = seconds_of(self.comm, lambda: counted.update(call.count(inputs)))
        entry, budget = judged(checks, counted), self.args.budget or BUDGET
        if entry.verdict == "measured" and seconds > budget:
            entry = replace(entry, verdict="skipped", reasons=(over_budget("took", seconds, budget),))
        sent, planned = (tuple(counted[name]) for name in ("sent_bytes", "planned_bytes"))
        work = tuple(plan.work(rank) for rank in range(self.comm.size))
        routes = tuple(route.kind for route in plan.routes)
        return replace(entry, ranks=Exchange(routes=routes, planned_bytes=planned, sent_bytes=sent, work=work))

    def _memory(self, call: RanksCall, inputs: Tensors) -> dict[str, Any]:
        """Peak extra bytes of a call on the rank that needs most, and of its forward pass alone; or why they are not known."""
        device = call.problem.device.type
        if reasons := list(filter(None, gather_values(self.comm, memory_note(self.args.comm != "threads", device)))):
            return dict(memory_note=f"memory is not measured: {reasons[0]}")
        peaks = dict(peak_bytes=max(peaks_of(self.comm, partial(call.once, inputs), device)))
        if call.problem.requires_grad:
            forward = replace(call, problem=replace(call.problem, requires_grad=False))
            peaks["forward_peak_bytes"] = max(peaks_of(self.comm, partial(forward.once, inputs), device))
        return peaks


def _busiest(name: str, header: str) -> views.Column:
    """The most bytes of any rank."""

    def cell(row: Row, case: CaseRows) -> str:
        known = row.values.get(name)
        return in_bytes(max(known)) if known else "-"

    return views.Column(header, cell)


def _evenness(row: Row, case: CaseRows) -> str:
    work = row.values.get("work")
    return f"{max(work) / (sum(work) / len(work)):.2f}" if work else "-"


def _sent(result: RowsResult) -> Iterator[Plot]:
    """Bytes by rank at the longest length."""
    *_, longest = [case for case, _ in one_pattern.timed_lengths(result)] or result.cases()
    series = tuple(
        Series(who, tuple(plain(f"rank {i}", value) for i, value in enumerate(row.values["sent_bytes"])))
        for who, row in longest.rows.items()
        if row.samples and "sent_bytes" in row.values
    )
    axes = views.NAMES, Axis("bytes", "bytes", log=False)
    yield Plot(f"Bytes that a rank sends in a call, {longest.case['length']}", "bars", series, axes)


COLUMNS = (
    _busiest("sent_bytes", "a rank sends"),
    _busiest("planned_bytes", "plan says"),
    views.Column("work max/mean", _evenness),
)
REPORT = replace(
    one_pattern.REPORT,
    subject=("{problem}, over {world_size} ranks ({transport}), threads a rank: {threads_of_a_rank}", "{pattern}"),
    tables=(partial(one_pattern.times, more=COLUMNS), one_pattern.speed_ups),
    plots=(one_pattern.drawn, _sent),
    method="Medians of {repeats} samples, one call each, in interleaved rounds: all ranks begin together, and a sample is the "
    "slowest rank's. Each schedule was checked against fp64 arithmetic on a shortened problem just before, and its bytes were "
    "counted. GFLOP/s are those of all ranks together, compared with a square matmul that every rank makes at the same time. "
    "Extra memory is the peak over what was held before the call, its result included, on the rank that needs most; one output "
    "is that of the whole sequence.",
)
