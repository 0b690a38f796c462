"""`dilkit bench --suite ring`: attention over ranks. Jobs of several processes are started from here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

from dilkit.comm.launch.processes import mpi_version, transports
from dilkit.comm.launch.task import ended, run
from dilkit.pattern import Pattern
from dilkit.problem import DTYPE_BYTES, Problem
from dilkit.threads import usable_cores
from dilkit.tools.bench.configuration import CONFIGURATIONS
from dilkit.tools.bench.suite import NO_OPTION, Suite, SuiteStep
from dilkit.tools.bench.target import MIB, Target, Values, memory_ratio, time_ratio
from dilkit.tools.bench.workloads import rank_jobs
from dilkit.tools.bench.workloads.rank_faults import FAULT_RANKS, FAULT_TABLE, FAULTS, SLACK, fail, fail_on_threads, fault_row
from dilkit.tools.bench.workloads.rank_jobs import FAILED, SCHEDULES, job_step
from dilkit.tools.console.text import in_seconds
from dilkit.tools.measure.ranks_call import RanksCall, plan_of
from dilkit.tools.report.document import Axis, Plot, Point, Series
from dilkit.tools.report.points import plain
from dilkit.tools.report.views import NAMES, Column, PlotView, Report, TableView, fact, stored, time, value
from dilkit.tools.results.rows import CaseRows, Row, RowsResult

if TYPE_CHECKING:
    from dilkit.comm import Comm

SECONDS_PER_FLOP = 1 / 100e9
HEAD_DIM, THREADS, SHORTER = 64, 4, 4
"""Threads of all ranks together; what the million is divided by where memory is measured: a sixteenth of the work."""
SMALL = {
    "aligned, causal": Problem(
        pattern=Pattern([32, 64, 256], [1, 2, 8]), seq=256, heads=8, head_dim=16, is_causal=True, dtype="bfloat16"
    ),
    "odd lengths, a mask": Problem(
        pattern=Pattern([30, 50, 211], [1, 3, 5]), seq=211, heads=4, head_dim=8, batch=2, key_padding_mask=True
    ),
    "grouped heads": Problem(
        pattern=Pattern([64, 192], [2, 4]), seq=190, heads=8, kv_heads=2, head_dim=16, is_causal=True, dtype="float64"
    ),
}
QUARTER, NOTHING_KEPT, FIXED = "a quarter of the million", "A, nothing kept", "fixed n/p"
FULL_RING = "a ring of all keys and values"
Read = Callable[[RowsResult], Values]


def _target(table: str, name: str, must: float, read: Read, unit: str = "", lower: bool = True, exact: bool = False) -> Target:
    """Return a target of rows of `table`; where one of its jobs failed, there is no figure."""
    return Target(name, must, None, lambda result: {} if result.cases(FAILED, table=table) else read(result), unit, lower, exact)


def combined(table: str, measure: Callable[[Mapping[str, Any]], float | None], combine: Callable[[list[float]], float]) -> Read:
    """Read `combine` of what `measure` makes of the values of all rows of a transport, or else of all."""

    def read(result: RowsResult) -> Values:
        values: dict[str, list[float]] = {}
        for row in (row for row in result.rows if row.table == table):
            if (measured := measure(row.values)) is not None:
                values.setdefault(row.case.get("transport", "worst"), []).append(measured)
        return {label: combine(measured) for label, measured in values.items()}

    return read


def _grows(result: RowsResult) -> Values:
    peaks = {row.who: row.values["peak_bytes"] for row in result.rows if row.table == "growth"}
    return {who: 100 * (peak / peaks["p=1"] - 1) for who, peak in peaks.items() if who != "p=1" and "p=1" in peaks}


def _million(result: RowsResult) -> Values:
    planned = [case.rows["auto"].values["planned_bytes"] for case in result.cases("volumes", ranks=8)]
    counted = [max(sent) for case in result.cases("million") if (sent := case.rows["auto"].values.get("sent_bytes"))]
    return {name: sent / MIB for name, counts in (("plan", planned), ("counted", counted)) for sent in counts}


SENT = "one million tokens, p=8, bf16, forward: bytes that a rank sends"
TARGETS = (
    _target(
        "calls", "calls whose bytes are not those of the plan", 0,
        combined("calls", lambda v: v["sent_bytes"] != v["planned_bytes"] if "sent_bytes" in v else None, sum), exact=True,
    ),
    _target("million", SENT, 1.6, _million, " MiB", exact=True),
    _target(
        "calls", "out, lse, dq, dk, dv over ranks: error over what rounding allows", 1.0,
        combined("calls", lambda v: v.get("ratio"), max), exact=True,
    ),
    _target(
        "calls", "fuse_branches=False: calls that differ from one rank in a bit", 0,
        combined("calls", lambda v: not v["bitwise"] if "bitwise" in v else None, sum), exact=True,
    ),
    *(
        _target(
            "memory", f"{name}p=1 over p={ranks}", must,
            memory_ratio("memory", "p=1", f"p={ranks}", "{tokens:,} tokens", config=config), "x", lower=False,
        )
        for name, config, limits in (
            ("peak memory per rank, ", QUARTER, (1.95, 3.8)),
            ("configuration A: ", "A", (1.95, 3.8)),
            ("configuration A with nothing kept: ", NOTHING_KEPT, (1.9, 3.6)),
        )
        for ranks, must in zip((2, 4), limits, strict=True)
    ),
    _target("growth", "growth of memory per rank at fixed n/p, from p=1", 3.0, _grows, " %"),
    _target(
        "work", "work per rank, causal: max over mean", 1.0,
        combined("work", lambda v: v["max_over_mean"], lambda shares: round(max(shares), 4)), exact=True,
    ),
    _target(
        "race", "A, forward + backward: ranks of one thread, in units of one rank's speed", 0.9,
        time_ratio("race", "one rank", "ranks", "{ranks} ranks, {transport}"), "x", lower=False,
    ),
    _target(
        "faults", "faults: seconds to an error beyond the timeout", SLACK,
        combined("faults", lambda v: v["seconds"] - v["timeout"], max), " s",
    ),
    _target(
        "faults", "faults whose error does not name rank and step", 0,
        combined("faults", lambda v: not (v["names_rank"] and v["names_step"]), sum),
    ),
    _target("faults", "processes left behind", 0, combined("faults", lambda v: v["left_behind"], sum)),
)  # fmt: skip


def _alone_over_this(row: Row, case: CaseRows) -> str:
    alone = case.rows.get("p=1", row)
    return "-" if alone is row else f"{alone.values['peak_bytes'] / row.values['peak_bytes']:.3f}"


MEMORY_TABLE = TableView(
    "Memory per rank, forward and backward",
    ("memory", "shorter", "growth"),
    (
        fact("config", "configuration"),
        fact("tokens", template="{:,}"),
        fact("ranks", "p"),
        fact("threads", "threads a rank"),
        value("peak_bytes", "peak a rank", "bytes"),
        value("tensors_bytes", "its tensors", "bytes"),
        Column("p=1 over this", _alone_over_this),
    ),
    timed=False,
)
RANKS, PEAK = Axis("ranks", "number"), Axis("peak memory of a rank", "bytes")


def _timeline_plot(result: RowsResult) -> Iterator[Plot]:
    """Draw the whole step of each rank, and when it was in its transport."""
    for case in result.cases("timeline"):
        steps = tuple(Point(who, row.values["seconds"], 0.0, row.values["seconds"]) for who, row in case.rows.items())
        waits = (Point(who, end, min(begin, end), end) for who, row in case.rows.items() for begin, end in row.values["waits"])
        series = Series("computing", steps), Series("sending, waiting, agreeing", tuple(waits))
        title = case.label("One step of {tokens:,} tokens, causal ({transport})")
        yield Plot(title, "spans", series, (NAMES, Axis("time", "seconds", log=False)))


def _notes(result: RowsResult) -> Iterator[str]:
    values = [row.values for row in result.rows if row.table == "calls"]
    counted = sum("sent_bytes" in one for one in values)
    yield f"bytes were counted in {counted} calls, results compared in {len(values)}"
    for case in (case for case in result.cases("race") if case.timed("ranks", "one rank")):
        ranks, one = (f"{in_seconds(row.median_s)} on {row.values['what']}" for row in case.rows.values())
        yield f"A, forward + backward: {ranks}, {one}, medians of {result.repeats} samples in turns"
    for case in result.cases("million"):
        if sent := case.rows["auto"].values.get("sent_bytes"):
            planned = case.rows["auto"].values["planned_bytes"]
            run = "counted in a run as well" if sent == planned else "differs in a run"
            yield f"{case.label('{tokens:,} tokens, p={ranks}')}: {max(planned):,} bytes by the plan; {run}"


REPORT = Report(
    place="{device_name}, {cores} cores; ranks: {started}",
    tables=(
        MEMORY_TABLE,
        TableView(
            "Forward bytes of the busiest rank: one million tokens, bf16", "volumes",
            (fact("ranks", "p"), value("planned_bytes", "bytes", "bytes")), timed=False, spread="{who}",
        ),
        FAULT_TABLE,
    ),
    plots=(
        PlotView(
            "Ranks' memory at fixed length, forward and backward", ("shorter", "memory"), "ranks",
            stored("peak_bytes"), (RANKS, PEAK), "lines",
            series="{config}, {tokens:,} tokens",
        ),
        PlotView(
            "Ranks' memory at fixed tokens a rank, forward and backward", "growth", "ranks", stored("peak_bytes"),
            (RANKS, replace(PEAK, log=False)), "lines", series="fixed tokens a rank",
        ),
        PlotView(
            "Forward bytes: one million tokens, bf16", "volumes", "ranks",
            lambda row, case: plain("", row.values["planned_bytes"]) if row.values["planned_bytes"] else None,
            (RANKS, Axis("bytes of the busiest rank", "bytes")), "lines", dashed=(FULL_RING,),
        ),
        PlotView(
            "One step of configuration A, with 95% intervals", "race", "{what}", time,
            (NAMES, Axis("time of a step", "seconds")), series="a step",
        ),
        _timeline_plot,
    ),
    sentences={
        TARGETS[4].name: "of the longest sequence a rank alone needs {} as much memory as each of two",
        TARGETS[5].name: "{} as much as each of four",
        TARGETS[7].name: "of configuration A, which is shorter, {} as much as each of four",
        SENT: "of a million tokens each of eight ranks sends {}",
    },
    notes=_notes,
    method="Bytes are those that the transport counted in a forward and backward pass, beside the plan's formula, for each "
    "schedule: threads with p = 1 .. 8, processes with p = 2, 3, 4; aligned and causal in bf16, odd lengths with a mask in fp32, "
    "grouped heads in fp64. Errors are against fp64, in units of what is allowed: twice (gradients: three times) the error of "
    "plain torch arithmetic of the same dtype, and a few roundings. Memory is the high-water mark of a fresh process's resident "
    "memory over what it held before its tensors were made, of the rank that needs most, in fp32. "
    '"A quarter of the million" is the pattern of a million tokens with sequence and segments a quarter as long: 262,144 '
    "tokens, w = 512, 2048, 8192, 32768, 131072, r = 1, 4, 16, 64, 256. A step's time is the slowest rank's, all having begun "
    "together; both sides are timed in turns in one job. Faults strike rank 1 of three after one call went well; seconds are "
    "those until the last of the others knew, or until the launcher had ended the job.",
)  # fmt: skip


@dataclass(frozen=True)
class RingSuite(Suite):
    """The steps of a run. `processes`: launchers of processes; without any, ranks are threads."""

    NAME = "ring"
    SUMMARY = "attention over ranks: bytes, agreement with one rank, memory, time, and what becomes of faults"
    TARGETS = TARGETS

    budget: float = 90.0
    processes: tuple[str, ...] = field(default_factory=transports, metadata=NO_OPTION)

    def prepared(self) -> AbstractContextManager[dict[str, Any]]:
        jobs = {"mpi": f"mpirun ({mpi_version()})", "torch": "torch.distributed with gloo"} if self.processes else {}
        started = ", ".join(jobs[name] for name in self.processes) or "no processes, only threads"
        return nullcontext(dict(started=f"threads, {started}"))

    def steps(self) -> Iterator[SuiteStep]:
        yield SuiteStep("volumes", "bytes against p", self.volumes)
        yield SuiteStep("work", "work per rank", self.work)
        processes = product(self.processes, (2,) if self.quick else (2, 3, 4))
        for kind, ranks in (*product(("threads",), (1, 2, 3) if self.quick else range(1, 9)), *processes):
            yield job_step("calls", f"{kind}, p={ranks}", partial(self.calls, kind, ranks))
        for kind, transport in product(FAULTS, ("threads", *self.processes)):
            if not self.quick or transport == "threads" or kind == "killed":
                yield job_step("faults", f"{kind}, {transport}", partial(self.fault, transport, kind))
        if not self.quick and self.processes[:1] == ("mpi",) and "Open MPI" in mpi_version():
            yield job_step("faults", "killed, mpi with ULFM", partial(self.fault, "mpi", "killed", ("--with-ft", "ulfm")))
        yield from self._processes() if self.processes else ()
        yield job_step("million", "bytes of one million tokens", self.million)

    def _processes(self) -> Iterator[SuiteStep]:
        """Steps whose ranks are processes, so that memory and time are of a rank alone."""
        whole, quarter = self.problem("A", requires_grad=True), self.problem(QUARTER, requires_grad=True)
        measured = [("memory", "A", whole, "rows"), ("memory", NOTHING_KEPT, whole, "nothing")]
        for part in (1,) if self.quick else (4, 2, 1):
            problem = replace(quarter, seq=quarter.seq // part)
            measured.append(("memory" if part == 1 else "shorter", QUARTER, problem, "rows"))
        for (table, config, problem, keep), ranks in product(measured, (1, 2) if self.quick else (1, 2, 4)):
            memory = partial(self.memory, table, config, problem, ranks, keep)
            yield job_step(table, f"{config}, {problem.seq:,} tokens, p={ranks}", memory)
        for ranks in (1, 2) if self.quick else (1, 2, 4, 8):
            problem = replace(quarter, seq=quarter.seq // 8 * ranks)
            yield job_step("growth", f"{FIXED}, p={ranks}", partial(self.memory, "growth", FIXED, problem, ranks))
        race = partial(rank_jobs.race, one_rank_threads=self.threads(1), repeats=self.repeats)
        yield job_step("race", "four ranks beside one", partial(self.step, race))
        yield job_step("timeline", "one step", partial(self.step, rank_jobs.timeline, is_causal=True))

    def volumes(self) -> list[Row]:
        """Return forward bytes of the busiest rank by the plan, for each schedule and number of ranks; beside a full ring."""
        problem, rows = self.problem("million", dtype="bfloat16"), []
        row_bytes = problem.heads * problem.head_dim * DTYPE_BYTES[problem.dtype]
        for ranks in (2, 4, 8) if self.quick else (2, 4, 8, 16, 32, 64):
            sizes: dict[str, Any] = dict(head_dim=problem.head_dim, dtype=problem.dtype)
            sent = {name: int(plan_of(problem, ranks, name).all_bytes("forward", **sizes).max()) for name in SCHEDULES}
            sent[FULL_RING] = (ranks - 1) * 2 * (problem.seq // ranks) * row_bytes
            case = dict(tokens=problem.seq, ranks=ranks)
            rows += [Row(table="volumes", case=case, who=who, values=dict(planned_bytes=x)) for who, x in sent.items()]
        return rows

    def work(self) -> list[Row]:
        """Return causal work of the busiest rank over the mean, where the ranks of every segment divide the heads."""
        rows = []
        for config, ranks in product(("A", "million"), (2, 4, 8)):
            plan = plan_of(self.problem(config, is_causal=True), ranks)
            work = [plan.work(rank) for rank in range(ranks)]
            values = dict(max_over_mean=max(work) * ranks / sum(work))
            rows.append(Row(table="work", case=dict(config=config, ranks=ranks), who="auto", values=values))
        return rows

    def calls(self, kind: str, ranks: int) -> list[Row]:
        """Return bytes and results of small problems, forward and backward, for every schedule."""
        problems = {name: replace(small, requires_grad=True) for name, small in SMALL.items()}
        task = partial(rank_jobs.check_calls, problems=problems, case=dict(transport=kind, ranks=ranks))
        return run(kind, ranks, task, limit=300.0)

    def fault(self, transport: str, kind: str, options: tuple[str, ...] = ()) -> list[Row]:
        """Return the seconds until the others know, and what they say."""
        timeout = 0.5 if self.quick else 2.0
        if transport == "threads":
            job = fail_on_threads(kind, timeout)
        else:
            job = ended(transport, FAULT_RANKS, partial(fail, kind=kind, seconds=timeout), limit=60.0, options=options)
        return [fault_row(kind, " ".join((transport, *options)), timeout, job)]

    def memory(self, table: str, config: str, problem: Problem, ranks: int, keep: str = "rows") -> list[Row]:
        """Return the peak memory of a rank, forward and backward, inputs counted; each rank a fresh process."""
        threads, task = self.threads(ranks), partial(rank_jobs.memory, problem=problem, keep=keep)
        peak = run(self.processes[0], ranks, task, threads=threads, limit=600.0)
        case, values = dict(config=config, tokens=problem.seq), dict(ranks=ranks, threads=threads) | peak
        return [Row(table=table, case=case, who=f"p={ranks}", values=values)]

    def step(self, task: Callable[..., list[Row]], **options: Any) -> list[Row]:
        """Run a job of a forward and backward pass of configuration A: four ranks with a thread each."""
        kind, ranks = self.processes[0], 2 if self.quick else 4
        problem = self.problem("A", requires_grad=True, **options)
        case = dict(tokens=problem.seq, ranks=ranks, transport=kind)
        return run(kind, ranks, partial(task, problem=problem, case=case), limit=600.0)

    def million(self) -> list[Row]:
        """Return forward bytes of one million tokens over eight ranks, counted over threads if time allows."""
        problem, ranks = self.problem("million", dtype="bfloat16"), 8
        row = Row(table="million", case=dict(tokens=problem.seq, ranks=ranks), who="auto")
        if (expected := problem.flops() * SECONDS_PER_FLOP) > self.budget:
            why = f"a run would take about {expected:.0f} s; the budget is {self.budget:g} s (--budget)"
            return [replace(row, verdict="skipped", reasons=(why,))]

        def counted(comm: Comm) -> list[Row]:
            call = RanksCall(comm, problem)
            return [replace(row, values=call.count(call.shard()))]

        return run("threads", ranks, counted)

    def problem(self, config: str, **fields: Any) -> Problem:
        """Return the problem of a configuration, or of a quarter of the million."""
        name, divisor = ("million", SHORTER * self.divisor) if config == QUARTER else (config, self.divisor)
        return CONFIGURATIONS[name].problem(HEAD_DIM, divisor, **fields)

    def threads(self, ranks: int) -> int:
        """Return the threads of each rank where all cores are shared out."""
        return max(1, min(THREADS, usable_cores()) // ranks)
