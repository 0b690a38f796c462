"""`dilkit bench --suite ring`: attention over ranks. Jobs of several processes are started from here."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any

from dilkit.comm import Comm
from dilkit.comm.launch.processes import mpi_version, transports
from dilkit.comm.launch.task import ended, run
from dilkit.problem import DTYPE_BYTES, Problem
from dilkit.threads import usable_cores
from dilkit.tools.bench.configuration import CONFIGURATIONS
from dilkit.tools.bench.suite import NO_OPTION, Suite, SuiteStep
from dilkit.tools.bench.target import MIB, Target, Values, memory_ratio, time_ratio
from dilkit.tools.bench.workloads import rank_jobs
from dilkit.tools.bench.workloads.rank_faults import FAULT_RANKS, FAULT_TABLE, FAULTS, SLACK, fail, fault_row
from dilkit.tools.bench.workloads.rank_jobs import FAILED, SCHEDULES, job_step
from dilkit.tools.console.text import in_seconds
from dilkit.tools.measure.ranks_call import RanksCall, judged, plan_of
from dilkit.tools.report.document import Axis
from dilkit.tools.report.views import PlotView, Report, ResultTable, fact, stored, value
from dilkit.tools.results.rows import ResultRow, RowsResult, row_of

HEAD_DIM = 64
QUARTER, NOTHING_KEPT, FIXED = "a quarter of the million", "A, nothing kept", "fixed n/p"
FULL_RING = "a ring of all keys and values"
Read = Callable[[RowsResult], Values]


def _target(table: str, name: str, must: float, read: Read, unit: str = "", lower: bool = True, exact: bool = False) -> Target:
    return Target(name, must, None, lambda result: {} if result.cases(FAILED, table=table) else read(result), unit, lower, exact)


def faults(measure: Callable[[Mapping[str, Any]], float], combine: Callable[[list[float]], float]) -> Read:
    """Read `combine` of what `measure` makes of the values of all faults of a transport."""

    def read(result: RowsResult) -> Values:
        values: dict[str, list[float]] = {}
        for row in (row for row in result.rows if row.table == "faults"):
            values.setdefault(row.case["transport"], []).append(measure(row.values))
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
    _target("million", SENT, 1.6, _million, " MiB", exact=True),
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
        "race", "A, forward + backward: ranks of one thread, in units of one rank's speed", 0.9,
        time_ratio("race", "one rank", "ranks", "{ranks} ranks, {transport}"), "x", lower=False,
    ),
    _target(
        "faults", "faults: seconds to an error beyond the timeout", SLACK,
        faults(lambda v: v["seconds"] - v["timeout"], max), " s",
    ),
    _target(
        "faults", "faults whose error does not name rank and step", 0,
        faults(lambda v: not (v["names_rank"] and v["names_step"]), sum),
    ),
    _target("faults", "processes left behind", 0, faults(lambda v: v["left_behind"], sum)),
)  # fmt: skip


def _notes(result: RowsResult) -> Iterator[str]:
    for case in (case for case in result.cases("race") if case.timed("ranks", "one rank")):
        ranks, one = (f"{in_seconds(row.median_s)} on {row.values['what']}" for row in case.rows.values())
        yield f"A, forward + backward: {ranks}, {one}, medians of {result.repeats} samples in turns"


REPORT = Report(
    place="{device_name}, {cores} cores; ranks: {started}",
    tables=(
        ResultTable(
            "Memory per rank, forward and backward", ("memory", "growth"),
            (
                *(fact("config", "configuration"), fact("tokens", template="{:,}"), fact("ranks", "p")),
                *(value("peak_bytes", "peak a rank", "bytes"), value("tensors_bytes", "its tensors", "bytes")),
            ),
            timed=False,
        ),
        ResultTable(
            "Forward bytes of the busiest rank: one million tokens, bf16", "volumes",
            (fact("ranks", "p"), value("planned_bytes", "bytes", "bytes")), timed=False, spread="{who}",
        ),
        FAULT_TABLE,
    ),
    plots=(
        PlotView(
            "Ranks' memory at fixed length, forward and backward", "memory", "ranks", stored("peak_bytes"),
            (Axis("ranks", "number"), Axis("peak memory of a rank", "bytes")), "lines", series="{config}, {tokens:,} tokens",
        ),
    ),
    sentences={
        TARGETS[1].name: "of the longest sequence a rank alone needs {} as much memory as each of two",
        TARGETS[2].name: "{} as much as each of four",
        TARGETS[4].name: "of configuration A, which is shorter, {} as much as each of four",
        SENT: "of a million tokens each of eight ranks sends {}",
    },
    notes=_notes,
    method="Bytes are those that the transport counted, beside the plan's. Memory is the high-water mark of a fresh process's "
    "resident memory over what it held before its tensors were made, of the rank that needs most, in fp32. "
    '"A quarter of the million" is the pattern of a million tokens with sequence and segments a quarter as long: 262,144 '
    "tokens, w = 512, 2048, 8192, 32768, 131072, r = 1, 4, 16, 64, 256. A step's time is the slowest rank's, all having begun "
    "together; both sides are timed in turns in one job. Faults strike rank 1 of three after one call went well; seconds are "
    "those until the last of the others knew, or until the launcher had ended the job.",
)  # fmt: skip


@dataclass(frozen=True)
class RingSuite(Suite):
    """The steps of a run. `processes`: launchers of processes; without any, ranks are threads."""

    NAME = "ring"
    SUMMARY = "attention over ranks: bytes, memory, time, and what becomes of faults"
    TARGETS = TARGETS

    processes: tuple[str, ...] = field(default_factory=transports, metadata=NO_OPTION)

    @contextmanager
    def prepared(self) -> Iterator[dict[str, Any]]:
        jobs = {"mpi": f"mpirun ({mpi_version()})", "torch": "torch.distributed with gloo"} if self.processes else {}
        started = ", ".join(jobs[name] for name in self.processes) or "no processes, only threads"
        yield dict(started=f"threads, {started}")

    def steps(self) -> Iterator[SuiteStep]:
        yield SuiteStep("volumes", "bytes against p", self.volumes)
        for kind, transport in product(FAULTS[: 1 if self.quick else None], self.processes):
            yield job_step("faults", f"{kind}, {transport}", partial(self.fault, transport, kind))
        yield from self._processes() if self.processes else ()
        yield job_step("million", "bytes of one million tokens", self.million)

    def _processes(self) -> Iterator[SuiteStep]:
        """Steps whose ranks are processes, so that memory and time are of a rank alone."""
        whole, quarter = self.problem("A", requires_grad=True), self.problem(QUARTER, requires_grad=True)
        measured = ("A", whole, "rows"), (NOTHING_KEPT, whole, "nothing"), (QUARTER, quarter, "rows")
        for (config, problem, keep), ranks in product(measured, (1, 2) if self.quick else (1, 2, 4)):
            memory = partial(self.memory, "memory", config, problem, ranks, keep)
            yield job_step("memory", f"{config}, {problem.seq:,} tokens, p={ranks}", memory)
        for ranks in (1, 2) if self.quick else (1, 2, 4, 8):
            problem = replace(quarter, seq=quarter.seq // 8 * ranks)
            yield job_step("growth", f"{FIXED}, p={ranks}", partial(self.memory, "growth", FIXED, problem, ranks))
        yield job_step("race", "four ranks beside one", self.race)

    def volumes(self) -> list[ResultRow]:
        """Return forward bytes of the busiest rank by the plan, for each schedule and number of ranks; beside a full ring."""
        problem, rows = self.problem("million", dtype="bfloat16"), []
        row_bytes = problem.heads * problem.head_dim * DTYPE_BYTES[problem.dtype]
        for ranks in (2, 4, 8) if self.quick else (2, 4, 8, 16, 32, 64):
            sizes: dict[str, Any] = dict(head_dim=problem.head_dim, dtype=problem.dtype)
            sent = {name: int(plan_of(problem, ranks, name).all_bytes("forward", **sizes).max()) for name in SCHEDULES}
            sent[FULL_RING] = (ranks - 1) * 2 * (problem.seq // ranks) * row_bytes
            case = dict(tokens=problem.seq, ranks=ranks)
            rows += [ResultRow(table="volumes", case=case, who=who, values=dict(planned_bytes=x)) for who, x in sent.items()]
        return rows

    def fault(self, transport: str, kind: str) -> list[ResultRow]:
        timeout = 0.5 if self.quick else 2.0
        job = ended(transport, FAULT_RANKS, partial(fail, kind=kind, seconds=timeout), limit=60.0)
        return [fault_row(kind, transport, timeout, job)]

    def memory(self, table: str, config: str, problem: Problem, ranks: int, keep: str = "rows") -> list[ResultRow]:
        """Return the peak memory of a rank, forward and backward, inputs counted; each rank a fresh process."""
        threads, task = self.threads(ranks), partial(rank_jobs.memory, problem=problem, keep=keep)
        peak = run(self.processes[0], ranks, task, threads=threads, limit=600.0)
        case, values = dict(config=config, tokens=problem.seq), dict(ranks=ranks, threads=threads) | peak
        return [ResultRow(table=table, case=case, who=f"p={ranks}", values=values)]

    def race(self) -> list[ResultRow]:
        kind, ranks, problem = self.processes[0], 2 if self.quick else 4, self.problem("A", requires_grad=True)
        case = dict(tokens=problem.seq, ranks=ranks, transport=kind)
        options: dict[str, Any] = dict(one_rank_threads=self.threads(1), repeats=self.repeats, case=case)
        return run(kind, ranks, partial(rank_jobs.race, problem=problem, **options), limit=600.0)

    def million(self) -> list[ResultRow]:
        problem, ranks = self.problem("million", dtype="bfloat16"), 8

        def counted(comm: Comm) -> list[ResultRow]:
            call = RanksCall(comm, problem)
            bytes_sent = call.count(call.shard())
            return [row_of("million", dict(tokens=problem.seq, ranks=ranks), "auto", judged((), bytes_sent), **bytes_sent)]

        return run("threads", ranks, counted)

    def problem(self, config: str, **fields: Any) -> Problem:
        name, divisor = ("million", 4 * self.divisor) if config == QUARTER else (config, self.divisor)
        return CONFIGURATIONS[name].problem(HEAD_DIM, divisor, **fields)

    def threads(self, ranks: int) -> int:
        """Return the threads of each rank where all cores, but four at most, are shared out."""
        return max(1, min(4, usable_cores()) // ranks)
