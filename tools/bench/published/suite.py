"""`dilkit bench --suite seeds`: every table that older implementations published, measured again. Everything is checked first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any

from dilkit.comm.launch.processes import mpi_version, transports
from dilkit.comm.launch.task import run
from dilkit.device import device_named
from dilkit.pattern import Pattern
from dilkit.problem import Problem
from dilkit.registry import list_backends
from dilkit.testing.tensors import Tensors
from dilkit.threads import usable_cores
from dilkit.tools.bench.published import judge, rank_job
from dilkit.tools.bench.published.cases import PublishedSizes
from dilkit.tools.bench.published.claims import group, settings
from dilkit.tools.bench.published.implementations import implementation
from dilkit.tools.bench.published.longest import longest
from dilkit.tools.bench.published.rank_job import LONG_CALL, samples_of
from dilkit.tools.bench.published.record import (
    PASSES,
    TWINS,
    Job,
    Longest,
    PublishedCase,
    PublishedFigure,
    PublishedResult,
    Setting,
)
from dilkit.tools.bench.suite import NO_OPTION, Step, Suite
from dilkit.tools.commands.bench import PEERS
from dilkit.tools.console.text import error_line
from dilkit.tools.measure.case import CaseRunner, output_bytes
from dilkit.tools.measure.implementation import BACKWARD_FLOPS
from dilkit.tools.measure.timing import time_interleaved
from dilkit.tools.results.record import Entry

LONGEST_BACKWARD, LONGEST_EXTRA = 6e10, 3e11
"""FLOPs beyond which a forward and backward pass, and a setting that nobody published, are left to --full."""
HALF_TO = 8192
"""Tokens to which half types are compared with fp32, without --full."""
PATIENCE = 15
"""How many times longer a call may take with --full."""


@dataclass(frozen=True)
class PublishedSuite(Suite[PublishedResult]):
    """The steps of a run. `full`: on to a million tokens and more; `processes`: what can start processes."""

    NAME = "seeds"
    SUMMARY = "the tables that older implementations published, each figure beside what they claim"
    RECORD = PublishedResult

    budget: float = 12.0
    full: bool = False
    device: str = "cpu"
    sizes: PublishedSizes = field(default_factory=PublishedSizes, metadata=NO_OPTION)
    processes: tuple[str, ...] = field(default_factory=transports, metadata=NO_OPTION)
    last: dict[str, tuple[float, float]] = field(default_factory=dict, metadata=NO_OPTION)
    """How long a call took in earlier steps, as in `CaseRunner`."""

    def prepared(self) -> AbstractContextManager[dict[str, Any]]:
        return nullcontext(dict(mpi=mpi_version() if self.processes else "", processes=self.processes))

    def where(self) -> str:
        return self.device

    def figures(self, result: PublishedResult) -> tuple[PublishedFigure, ...]:
        return judge.figures(result)

    def wrong(self, result: PublishedResult) -> bool:
        """Whether something was wrong, or failed, peers left out. What is refused or takes too long is neither."""
        verdicts = {entry.verdict for case in result.cases for who, entry in case.entries.items() if who not in PEERS}
        checks = (check for job in result.jobs for row in job.rows for check in row.check)
        failed = any(job.failed is not None for job in result.jobs) or not all(check.passed for check in checks)
        return failed or bool(verdicts & {"wrong", "failed"})

    def steps(self) -> Iterator[Step]:
        sizes = self.sizes
        for setting, backward in self._fitting(sizes.on_one_device(self.full)):
            weight = self._weight(setting, backward) * len(self.who(setting))
            yield Step("cases", f"{setting}, {PASSES[backward]}", partial(self.case, setting, backward), weight)
        for setting in sizes.cached:
            if self.full or self._flops(setting) <= LONG_CALL:  # in a longer one, making a plan anew is lost in the noise
                yield Step("cache", f"cache of plans, {setting}", partial(self.cache, setting), self._weight(setting))
        kind = next(iter(self.processes), "threads")
        over_ranks = dict(ranks=sizes.over_ranks(self.quick), growth=sizes.grown(self.full, self.quick))
        for name, sharded in over_ranks.items() if self.device == "cpu" else ():
            calls = list(self._fitting(sharded))
            for ranks in dict.fromkeys(setting.ranks for setting, _ in calls):
                of_job = tuple(call for call in calls if call[0].ranks == ranks)
                text = f"{name}, {ranks} of {kind}: {len(of_job)} calls, the last {of_job[-1][0]}"
                weight = 5 + sum(self._weight(*call) for call in of_job)
                yield Step(name, text, partial(self.over_ranks, ranks, of_job, kind), weight)
        for who, backward in product(("auto", "reference"), (False, True)):
            text = f"longest sequence, {who}{', training' * backward}"
            yield Step("longest", text, partial(self.longest, who, backward), 10.0)

    def _fitting(self, found: tuple[Setting, ...]) -> Iterator[tuple[Setting, bool]]:
        """Settings with and without a backward pass. What takes long, and nobody published, is left to --full."""
        for setting, backward in product(found, (False, True)):
            long = self._flops(setting, backward) > (LONGEST_BACKWARD if backward else LONGEST_EXTRA)
            if self.full or not long or (not backward and setting in settings()):
                yield setting, backward

    def _flops(self, setting: Setting, backward: bool = False) -> float:
        return self.problem(setting, backward).flops() * (1 + BACKWARD_FLOPS * backward)

    def samples(self, setting: Setting, backward: bool = False) -> int:
        """How many of each implementation; beside the reference, its dense work in many steps decides."""
        if setting in group("implementations").values():
            dense = replace(self.problem(setting, backward), pattern=Pattern.dense())
            return samples_of(4 * dense.flops() * (1 + BACKWARD_FLOPS * backward), self.repeats)
        return samples_of(self._flops(setting, backward), self.repeats)

    def _weight(self, setting: Setting, backward: bool = False) -> float:
        """About how long a measurement of one implementation takes, for the progress bar."""
        return 0.5 + self._flops(setting, backward) / 4e10

    def problem(self, setting: Setting, backward: bool = False) -> Problem:
        """What is measured: with --quick a shorter one."""
        return replace(setting.problem(backward, self.divisor), device=device_named(self.device))

    def who(self, setting: Setting) -> tuple[str, ...]:
        """Which implementations are compared at a setting, by name."""
        names = ["auto", *["head-split"] * (len(setting.segment_lengths) > 1)]
        compared = setting in group("implementations").values()
        if compared:
            names = ["reference", *names, "multihead", *sorted({*list_backends()} - {"reference"}), *self.sizes.peers]
        if compared or setting in group("orders").values():
            names.append("ordered")
        twins = setting in group("lengths").values() and (self.full or setting.seq <= HALF_TO)
        return (*names, *(TWINS if twins else ()))

    def case(self, setting: Setting, backward: bool) -> PublishedCase:
        """All implementations of a setting, checked, timed in turns beside a matmul in fp32; memory with the inputs counted."""
        problem, samples = self.problem(setting, backward), self.samples(setting, backward)
        fields = CaseRunner(
            [implementation(name, setting.heads) for name in self.who(setting)],
            samples,
            min_time=0.0 if self.quick or samples < self.repeats else 0.03,
            budget=self.patience,
            dtypes=dict(zip(TWINS, TWINS, strict=True)),
            matmul_dtype="float32",
            forward_memory=False,
            last=self.last,
        ).run(problem)
        for name, entry in fields["entries"].items():
            if entry.peak_bytes is not None:
                own = replace(problem, dtype=name) if name in TWINS else problem
                inputs = (4 if backward else 3) * output_bytes(own)  # query, key, value, in training the output's gradient
                fields["entries"][name] = replace(entry, memory_bytes=entry.peak_bytes + inputs)
        tokens, size = problem.batch * problem.seq, output_bytes(problem)
        return PublishedCase(setting=setting, backward=backward, tokens=tokens, seq=problem.seq, output_bytes=size, **fields)

    def cache(self, setting: Setting) -> PublishedCase:
        """A call with the cache of plans emptied before it, beside one whose plan is there: the second one after it."""
        from dilkit.plan import cache_clear

        problem = self.problem(setting)
        call = partial(implementation("auto", setting.heads).once, Tensors.random(problem), problem)

        def without() -> None:
            cache_clear()
            call()

        calls: dict[str, Callable[[], Any]] = {"no cache": without, "refill": call, "auto": call}
        timed = time_interleaved(calls, self.repeats, device=problem.device.type)
        entries = {name: Entry(time=timed[name]) for name in ("no cache", "auto")}
        return PublishedCase(setting=setting, seq=problem.seq, entries=entries)

    @property
    def patience(self) -> float:
        """Seconds that a call may be expected to take."""
        return self.budget * (PATIENCE if self.full else 1)

    def over_ranks(self, ranks: int, calls: tuple[tuple[Setting, bool], ...], kind: str) -> Job:
        """Ranks beside one rank that has all cores, in turns; memory of each rank; of a job that fails, why."""
        cores = max(1, min(max(self.sizes.ranks), usable_cores()))
        task = partial(
            rank_job.over_ranks,
            transport=kind,
            calls=calls,
            divisor=self.divisor,
            one_rank_threads=cores,
            repeats=self.repeats,
        )
        try:
            return run(kind, ranks, task, threads=max(1, cores // ranks), limit=1200.0)
        except Exception as error:  # one job that fails is one entry: the others go on
            return Job(ranks=ranks, transport=kind, failed=error_line(error))

    def longest(self, who: str, backward: bool) -> Longest:
        """The longest sequence of which a call fits into the memory budget, inputs counted."""
        limit = (self.sizes.card_memory if self.full else self.sizes.memory) // self.divisor
        setting = group("orders")["multi-segment"]
        problem, one = self.problem(setting, backward), implementation(who, setting.heads)
        one.once(Tensors.random(problem), problem)  # what is loaded at the first call is no part of a call
        grain = max(1, limit // self.sizes.grains)
        return replace(longest(one, problem, limit, grain, self.patience), setting=setting)
