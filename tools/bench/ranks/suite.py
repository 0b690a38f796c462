"""`dilkit bench --suite ring`: what attention over ranks is measured by. Jobs of several processes are started from here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any

from dilkit.problem import Problem
from dilkit.tools.bench.cpu import CONFIGURATIONS
from dilkit.tools.bench.ranks import faults as ring_faults
from dilkit.tools.bench.ranks import rank as ring_rank
from dilkit.tools.bench.ranks import targets as suite_ring_targets
from dilkit.tools.bench.ranks.tasks import problem_of
from dilkit.tools.console import launcher
from dilkit.tools.console.launcher import JobError
from dilkit.tools.report.kinds import suite_ring_report
from dilkit.tools.results import untyped as results

KIND = "suite-ring"
DEVICE = "cpu"
REPORT, judge = suite_ring_report, suite_ring_targets.judge
QUICK = 32
"""By what --quick divides lengths; it takes fewer ranks and a shorter timeout as well."""
SCHEDULES = ("auto", "scatter", "gather", "ring")
HEADS, DIM, THREADS = 8, 64, 4
SEQ, LENGTHS, RATES = CONFIGURATIONS["million"]
SHORTER = 4
"""By how much sequence and segments are shorter where memory is measured: the same ratios, a sixteenth of the work."""
SECONDS_PER_FLOP = 1 / 100e9

LISTS = ("volumes", "work", "bytes", "agreement", "faults", "memory", "growth", "race", "timeline", "million")
"""The lists of a result."""

Step = tuple[str, str, Callable[[], dict[str, Any]]]
Fields = dict[str, Any]

SMALL: tuple[Fields, ...] = (
    dict(lengths=[32, 64, 256], rates=[1, 2, 8], seq=256, heads=8, head_dim=16, is_causal=True),
    dict(
        lengths=[30, 50, 211], rates=[1, 3, 5], seq=211, heads=4, head_dim=8, batch=2, requires_grad=True, key_padding_mask=True
    ),
    dict(lengths=[64, 192], rates=[2, 4], seq=190, heads=8, kv_heads=2, head_dim=16, is_causal=True),
)
"""Problems whose bytes and results are compared: aligned and causal; odd lengths, two sequences, a mask; grouped heads."""


@dataclass(frozen=True)
class Suite:
    """The steps of a run. `repeats`: samples of what is timed; `budget`: seconds that one call may be expected to take."""

    quick: bool = False
    repeats: int = 5
    budget: float = 90.0
    processes: tuple[str, ...] = field(default_factory=lambda: launcher.transports())  # found when asked for, not before

    def steps(self) -> Iterator[Step]:
        """(the list of the result that it goes to, what is going on, the measurement), the shortest first."""
        yield from self._exact()
        yield from self._faults()
        for config, ranks in product(("long", "A"), self._sizes(4)):
            yield from self._job("memory", f"memory, {config}, p={ranks}", partial(self.memory, config, ranks))
        for part, ranks in product(() if self.quick else (2, 4), self._sizes(4)):
            yield from self._job("memory", f"memory, long/{part}, p={ranks}", partial(self.memory, "long", ranks, part))
        for ranks in self._sizes(8):
            yield from self._job("growth", f"memory at fixed n/p, p={ranks}", partial(self.growth, ranks))
        yield from self._job("race", "four ranks beside one", self.race)
        yield from self._job("timeline", "timeline of one step", self.timeline)
        yield "million", "bytes of one million tokens", partial(_try, self.million)

    def _exact(self) -> Iterator[Step]:
        """What does not depend on the machine."""
        yield "volumes", "bytes against p", self.volumes
        yield "work", "work per rank", self.work
        for kind, ranks in self._worlds():
            for name, call in (("bytes", self.bytes), ("agreement", self.agreement)):
                yield name, f"{name}, {kind}, p={ranks}", partial(_try, partial(call, kind, ranks))

    def _worlds(self) -> Iterator[tuple[str, int]]:
        yield from product(("threads",), (1, 2, 3) if self.quick else range(1, 9))
        yield from product(self.processes, (2,) if self.quick else (2, 3, 4))

    def _faults(self) -> Iterator[Step]:
        for kind, transport in product(ring_faults.KINDS, ("threads", *self.processes)):
            if self.quick and transport != "threads" and kind != "killed":
                continue
            yield "faults", f"fault: {kind}, {transport}", partial(_try, partial(self.fault, transport, kind))
        if not self.quick and self.processes[:1] == ("mpi",) and "Open MPI" in launcher.mpi_version():
            ulfm = partial(self.fault, "mpi", "killed", ("--with-ft", "ulfm"))
            yield "faults", "fault: killed, mpi with ULFM", partial(_try, ulfm)

    def _sizes(self, most: int) -> tuple[int, ...]:
        return (1, 2) if self.quick else tuple(2**i for i in range(most.bit_length()))

    def _job(self, name: str, what: str, take: Callable[[], dict[str, Any]]) -> Iterator[Step]:
        if self.processes:
            yield name, what, partial(_try, take)

    def bytes(self, kind: str, ranks: int) -> dict[str, Any]:
        """Bytes counted beside those of the plan, forward and backward, for every schedule."""
        dtypes = ("bfloat16", "float32", "float64")
        problems = [small | dict(dtype=dtype, requires_grad=True) for small, dtype in zip(SMALL, dtypes, strict=True)]
        found = ring_rank.run(kind, ranks, "count_bytes", problems=problems, schedules=list(SCHEDULES))
        return dict(transport=kind, ranks=ranks, calls=found)

    def agreement(self, kind: str, ranks: int) -> dict[str, Any]:
        """Results of all ranks beside those of one rank, for every schedule."""
        problems = [small | dict(requires_grad=True) for small in (SMALL[:1] if self.quick else SMALL)]
        found = ring_rank.run(kind, ranks, "compare", limit=300.0, problems=problems, schedules=list(SCHEDULES))
        return dict(transport=kind, ranks=ranks, calls=found)

    def fields(self, config: str, part: int = 1, **more: Any) -> Fields:
        """The problem of a configuration, as plain data; `part` divides the sequence, not the pattern."""
        seq, lengths, rates = CONFIGURATIONS["A"]
        if config != "A":
            divisor = SHORTER if config == "long" else 1
            seq, lengths, rates = SEQ // divisor, tuple(w // divisor for w in LENGTHS), RATES
        if self.quick:
            seq, lengths = seq // QUICK, tuple(max(w // QUICK, r) for w, r in zip(lengths, rates, strict=True))
        return dict(seq=seq // part, lengths=list(lengths), rates=list(rates), heads=HEADS, head_dim=DIM) | more

    def threads(self, ranks: int) -> int:
        """Threads of each rank where all cores are shared out."""
        return max(1, min(THREADS, results.usable_cores()) // ranks)

    def memory(self, config: str, ranks: int, part: int = 1) -> dict[str, Any]:
        """Peak memory of each rank, forward and backward, inputs counted; each rank a fresh process."""
        return dict(config=config) | self._memory(self.fields(config, part, requires_grad=True), ranks)

    def growth(self, ranks: int) -> dict[str, Any]:
        """The same for a sequence that is as many times longer as there are ranks."""
        fields = self.fields("long", requires_grad=True)
        return self._memory(fields | dict(seq=fields["seq"] // 8 * ranks), ranks)

    def _memory(self, fields: Fields, ranks: int) -> dict[str, Any]:
        threads = self.threads(ranks)
        found = ring_rank.run(self.processes[0], ranks, "memory", threads=threads, limit=600.0, problem=fields)
        return dict(transport=self.processes[0], seq=fields["seq"], ranks=ranks, threads=threads, **found)

    def race(self) -> dict[str, Any]:
        """Four ranks with a thread each, and one with four threads, in turns in one job."""
        ranks = 2 if self.quick else 4
        told = dict(problem=self.fields("A", requires_grad=True), one_rank_threads=self.threads(1), repeats=self.repeats)
        found = ring_rank.run(self.processes[0], ranks, "race", limit=600.0, **told)
        return dict(transport=self.processes[0], ranks=ranks, one_rank_threads=told["one_rank_threads"], **found)

    def timeline(self) -> dict[str, Any]:
        """What each rank does in one forward and backward pass."""
        fields = self.fields("A", requires_grad=True, is_causal=True)
        found = ring_rank.run(self.processes[0], 2 if self.quick else 4, "timeline", limit=300.0, problem=fields)
        return dict(transport=self.processes[0], seq=fields["seq"], **found)

    def fault(self, transport: str, kind: str, options: tuple[str, ...] = ()) -> dict[str, Any]:
        """Seconds until the others know, and what they say."""
        timeout = 0.5 if self.quick else 2.0
        told = dict(transport=transport, kind=kind, timeout=timeout, options=" ".join(options))
        if transport == "threads":
            return told | ring_faults.on_threads(kind, timeout)
        arguments = dict(kind=kind, seconds=timeout)
        ended = ring_rank.start(transport, ring_faults.RANKS, "", "fault", arguments, limit=60.0, options=options)
        return told | ring_faults.read(kind, ended)

    def volumes(self) -> dict[str, Any]:
        """Forward bytes of the busiest rank by the plan, for each schedule and number of ranks; beside a ring of all keys."""
        problem = problem_of(**self.fields("million", dtype="bfloat16"))
        sizes = [2, 4, 8] if self.quick else [2**i for i in range(1, 7)]
        found = {name: [_busiest(problem, ranks, name) for ranks in sizes] for name in SCHEDULES}
        full = [(ranks - 1) * 2 * (problem.seq // ranks) * HEADS * DIM * 2 for ranks in sizes]
        return dict(seq=problem.seq, ranks=sizes, schedules=found, full_ring=full)

    def work(self) -> dict[str, Any]:
        """Causal work of the busiest rank over the mean, where the ranks of every segment divide the heads."""
        found = []
        for config, ranks in product(("A", "million"), (2, 4, 8)):
            plan = _plan(problem_of(**self.fields(config, is_causal=True)), ranks, "auto")
            work = [plan.work(rank) for rank in range(ranks)]
            found.append(dict(config=config, ranks=ranks, max_over_mean=max(work) * ranks / sum(work)))
        return dict(calls=found)

    def million(self) -> dict[str, Any]:
        """Forward bytes by rank of one million tokens over eight ranks, planned, and counted over threads if time allows."""
        fields = self.fields("million", dtype="bfloat16")
        problem, ranks = problem_of(**fields), 8
        planned = [int(count) for count in _plan(problem, ranks, "auto").all_bytes("forward", head_dim=DIM, dtype="bfloat16")]
        told = dict(seq=problem.seq, ranks=ranks, planned_bytes=planned, sent_bytes=None)
        expected = problem.flops() * SECONDS_PER_FLOP
        if expected > self.budget:
            return told | dict(why=f"a run would take about {expected:.0f} s; the budget is {self.budget:g} s (--budget)")
        (call,) = ring_rank.run("threads", ranks, "count_bytes", problems=[fields], schedules=["auto"])
        return told | dict(sent_bytes=call["sent_bytes"])


def _plan(problem: Problem, ranks: int, schedule: str) -> Any:
    from dilkit.comm import exchange_plan, shard_cuts

    cuts = shard_cuts(problem.seq, ranks, problem.pattern)
    return exchange_plan(problem.pattern, cuts, problem.heads, problem.kv_heads, is_causal=problem.is_causal, schedule=schedule)


def _busiest(problem: Problem, ranks: int, schedule: str) -> int:
    plan = _plan(problem, ranks, schedule)
    return int(plan.all_bytes("forward", head_dim=problem.head_dim, dtype=problem.dtype).max())


def _try(take: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `take` finds; of a job that fails, why: the other measurements go on."""
    try:
        return take()
    except JobError as error:
        return dict(failed=str(error))


@contextmanager
def prepared() -> Iterator[dict[str, Any]]:
    """Within the block the suite can run; facts for its result."""
    yield dict(mpi=launcher.mpi_version(), processes=list(launcher.transports()))


def wrong(result: dict[str, Any]) -> bool:
    """Whether bytes or results are not what they must be, or a measurement failed; what falls short otherwise is no error."""
    failed = any("failed" in entry for name in LISTS for entry in result[name])
    return failed or any(figure["verdict"] == "short" and figure["exact"] for figure in result["figures"])
