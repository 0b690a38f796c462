"""`dilkit bench --suite ring`: what attention over ranks is measured by. Jobs of several processes are started from here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any, TypeVar

from dilkit.comm.launch.processes import JobError, mpi_version, transports
from dilkit.comm.launch.task import ended, run
from dilkit.problem import DTYPE_BYTES, Problem
from dilkit.threads import usable_cores
from dilkit.tools.bench.ranks import faults, targets, tasks
from dilkit.tools.bench.ranks import record as records
from dilkit.tools.bench.ranks.cases import RanksSizes
from dilkit.tools.bench.ranks.record import RanksResult
from dilkit.tools.bench.suite import NO_OPTION, Step, Suite
from dilkit.tools.measure.ranks_call import plan_of

SCHEDULES = ("auto", "scatter", "gather", "ring")
SECONDS_PER_FLOP = 1 / 100e9
S = TypeVar("S", bound=records.Step)


@dataclass(frozen=True)
class RanksSuite(Suite[RanksResult]):
    """The steps of a run. `processes`: what can start processes; without any, ranks are threads."""

    NAME = "ring"
    SUMMARY = "attention over ranks: bytes, agreement with one rank, memory, time, and what becomes of faults"
    RECORD = RanksResult
    TARGETS = targets.TARGETS

    budget: float = 90.0
    sizes: RanksSizes = field(default_factory=RanksSizes, metadata=NO_OPTION)
    processes: tuple[str, ...] = field(default_factory=transports, metadata=NO_OPTION)

    def prepared(self) -> AbstractContextManager[dict[str, Any]]:
        return nullcontext(dict(mpi=mpi_version() if self.processes else "", processes=self.processes))

    def wrong(self, result: RanksResult) -> bool:
        """Whether bytes or results are not what they must be, or a measurement failed; what falls short otherwise is no error."""
        return super().wrong(result) or any(result.failures())

    def steps(self) -> Iterator[Step]:
        yield Step("volumes", "bytes against p", self.volumes)
        yield Step("work", "work per rank", self.work)
        processes = product(self.processes, (2,) if self.quick else (2, 3, 4))
        for kind, ranks in (*product(("threads",), (1, 2, 3) if self.quick else range(1, 9)), *processes):
            yield _step("bytes", f"{kind}, p={ranks}", records.SentCalls, partial(self.bytes, kind, ranks))
            yield _step("agreement", f"{kind}, p={ranks}", records.AgreementCalls, partial(self.agreement, kind, ranks))
        yield from self._faults()
        yield from self._jobs() if self.processes else ()
        yield _step("million", "bytes of one million tokens", records.Million, self.million)

    def _faults(self) -> Iterator[Step]:
        for kind, transport in product(faults.KINDS, ("threads", *self.processes)):
            if not self.quick or transport == "threads" or kind == "killed":
                yield _step("faults", f"{kind}, {transport}", records.Fault, partial(self.fault, transport, kind))
        if not self.quick and self.processes[:1] == ("mpi",) and "Open MPI" in mpi_version():
            ulfm = partial(self.fault, "mpi", "killed", ("--with-ft", "ulfm"))
            yield _step("faults", "killed, mpi with ULFM", records.Fault, ulfm)

    def _jobs(self) -> Iterator[Step]:
        """What is measured of ranks that are processes."""
        sizes, parts = ((1, 2), ()) if self.quick else ((1, 2, 4), (2, 4))
        for config, part, ranks in (*product(("long", "A"), (1,), sizes), *product(("long",), parts, sizes)):
            name = f"{config}{f'/{part}' * (part > 1)}, p={ranks}"
            yield _step("memory", name, records.Memory, partial(self.memory, config, ranks, part))
        for ranks in sizes:
            yield _step("memory", f"A, nothing kept, p={ranks}", records.Memory, partial(self.memory, "A", ranks, keep="nothing"))
        for ranks in (1, 2) if self.quick else (1, 2, 4, 8):
            yield _step("growth", f"memory at fixed n/p, p={ranks}", records.Memory, partial(self.growth, ranks))
        yield _step("race", "four ranks beside one", records.Race, self.race)
        yield _step("timeline", "one step", records.Timeline, self.timeline)

    def volumes(self) -> records.Volumes:
        """Forward bytes of the busiest rank by the plan, for each schedule and number of ranks; beside a ring of all keys."""
        problem = self.problem("million", dtype="bfloat16")
        sizes = (2, 4, 8) if self.quick else tuple(2**i for i in range(1, 7))
        by_name = {
            name: tuple(
                int(plan_of(problem, ranks, name).all_bytes("forward", head_dim=problem.head_dim, dtype=problem.dtype).max())
                for ranks in sizes
            )
            for name in SCHEDULES
        }
        row = problem.heads * problem.head_dim * DTYPE_BYTES[problem.dtype]
        full = tuple((ranks - 1) * 2 * (problem.seq // ranks) * row for ranks in sizes)
        return records.Volumes(problem.seq, sizes, by_name, full)

    def work(self) -> records.Work:
        """Causal work of the busiest rank over the mean, where the ranks of every segment divide the heads."""
        entries = []
        for config, ranks in product(("A", "million"), (2, 4, 8)):
            plan = plan_of(self.problem(config, is_causal=True), ranks)
            work = [plan.work(rank) for rank in range(ranks)]
            entries.append(records.Share(config, ranks, max(work) * ranks / sum(work)))
        return records.Work(tuple(entries))

    def bytes(self, kind: str, ranks: int) -> records.SentCalls:
        """Bytes counted beside those of the plan, forward and backward, for every schedule."""
        problems = tuple(replace(small, requires_grad=True) for small in self.sizes.small)
        task = partial(tasks.count_bytes, problems=problems, schedules=SCHEDULES)
        return replace(run(kind, ranks, task), transport=kind)

    def agreement(self, kind: str, ranks: int) -> records.AgreementCalls:
        """Results of all ranks beside those of one rank, for every schedule."""
        some = self.sizes.small[: 1 if self.quick else None]
        problems = tuple(replace(small, requires_grad=True, dtype="float32") for small in some)
        task = partial(tasks.compare, problems=problems, schedules=SCHEDULES)
        return replace(run(kind, ranks, task, limit=300.0), transport=kind)

    def fault(self, transport: str, kind: str, options: tuple[str, ...] = ()) -> records.Fault:
        """Seconds until the others know, and what they say."""
        timeout = 0.5 if self.quick else 2.0
        if transport == "threads":
            ending = faults.on_threads(kind, timeout)
        else:
            task = partial(faults.fail, kind=kind, seconds=timeout)
            ending = faults.read(kind, ended(transport, faults.RANKS, task, limit=60.0, options=options))
        return replace(ending, transport=transport, kind=kind, timeout=timeout, options=" ".join(options))

    def memory(self, config: str, ranks: int, part: int = 1, keep: str = "rows") -> records.Memory:
        """Peak memory of each rank, forward and backward, inputs counted; each rank a fresh process."""
        problem, name = self.problem(config, requires_grad=True), config if keep == "rows" else f"{config}, {keep} kept"
        return self._peak(replace(problem, seq=problem.seq // part), ranks, name, keep)

    def growth(self, ranks: int) -> records.Memory:
        """The same for a sequence that is as many times longer as there are ranks."""
        problem = self.problem("long", requires_grad=True)
        return self._peak(replace(problem, seq=problem.seq // 8 * ranks), ranks)

    def _peak(self, problem: Problem, ranks: int, config: str = "", keep: str = "rows") -> records.Memory:
        kind, threads = self.processes[0], self.threads(ranks)
        peaks = run(kind, ranks, partial(tasks.memory, problem=problem, keep=keep), threads=threads, limit=600.0)
        return replace(peaks, config=config, transport=kind, seq=problem.seq, threads=threads)

    def race(self) -> records.Race:
        """Four ranks with a thread each, and one with four threads, in turns in one job."""
        problem, threads = self.problem("A", requires_grad=True), self.threads(1)
        task = partial(tasks.race, problem=problem, one_rank_threads=threads, repeats=self.repeats)
        return replace(run(self.processes[0], 2 if self.quick else 4, task, limit=600.0), transport=self.processes[0])

    def timeline(self) -> records.Timeline:
        """What each rank does in one forward and backward pass."""
        task = partial(tasks.timeline, problem=self.problem("A", requires_grad=True, is_causal=True))
        return replace(run(self.processes[0], 2 if self.quick else 4, task, limit=300.0), transport=self.processes[0])

    def million(self) -> records.Million:
        """Forward bytes by rank of one million tokens over eight ranks, planned, and counted over threads if time allows."""
        problem, ranks = self.problem("million", dtype="bfloat16"), 8
        counts = plan_of(problem, ranks).all_bytes("forward", head_dim=problem.head_dim, dtype=problem.dtype)
        record = records.Million(seq=problem.seq, ranks=ranks, planned_bytes=tuple(int(count) for count in counts))
        expected = problem.flops() * SECONDS_PER_FLOP
        if expected > self.budget:
            why = f"a run would take about {expected:.0f} s; the budget is {self.budget:g} s (--budget)"
            return replace(record, why=why)
        (call,) = run("threads", ranks, partial(tasks.count_bytes, problems=(problem,), schedules=("auto",))).calls
        return replace(record, sent_bytes=call.sent_bytes)

    def problem(self, config: str, **more: Any) -> Problem:
        """Of a configuration; "long" is a part of the million."""
        name, divisor = ("million", self.sizes.shorter * self.divisor) if config == "long" else (config, self.divisor)
        return self.sizes.configurations[name].problem(self.sizes.head_dim, divisor, **more)

    def threads(self, ranks: int) -> int:
        """Threads of each rank where all cores are shared out."""
        return max(1, min(self.sizes.threads, usable_cores()) // ranks)


def _step(goes_to: str, what: str, record: type[S], measure: Callable[[], S]) -> Step:
    """Of a job that fails, why: the other measurements go on."""

    def tried() -> S:
        try:
            return measure()
        except JobError as error:
            return record(failed=str(error))

    return Step(goes_to, f"{goes_to}: {what}", tried)
