"""`dilkit bench --suite seeds`: every table that older implementations published, measured again. Everything is checked first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any

from dilkit.device import probe
from dilkit.pattern import Pattern
from dilkit.problem import Problem
from dilkit.tools.bench.published import judge as seed_claims
from dilkit.tools.bench.published.claim import HEAD_DIM, Setting
from dilkit.tools.bench.published.entrants import TWINS, entrant
from dilkit.tools.bench.published.figures import HILBERT_SETTINGS, settings
from dilkit.tools.bench.published.longest import Search
from dilkit.tools.bench.published.ranks import LONG_CALL, flops_of, samples
from dilkit.tools.bench.published.settings import IMPLEMENTATIONS, LENGTHS, MULTI_SEGMENT, alone, growing, over_ranks
from dilkit.tools.bench.ranks import rank as ring_rank
from dilkit.tools.commands.bench import PEERS
from dilkit.tools.console import launcher
from dilkit.tools.measure import memory
from dilkit.tools.measure import timing as measure
from dilkit.tools.measure.case import CaseRunner, output_bytes
from dilkit.tools.measure.implementation import Inputs
from dilkit.tools.report.kinds import suite_seeds_report
from dilkit.tools.results import untyped as results
from dilkit.tools.results.decode import encode

SUMMARY = "the tables that older implementations published, each figure beside what they claim"
KIND = "suite-seeds"
DEVICE = "cpu"
OPTIONS = ("full", "device")
LISTS = ("cases", "cache", "ranks", "growth", "longest")
"""The lists of a result."""
REPORT, judge = suite_seeds_report, seed_claims.judge
QUICK = 32
"""By what --quick divides lengths and the memory budget."""
SIZES = (1, 2, 4)
LONGEST_BACKWARD, LONGEST_EXTRA = 6e10, 3e11
"""FLOPs beyond which a forward and backward pass, and a setting that nobody published, are left to --full."""
HALF_TO = 8192
"""Tokens to which half types are compared with fp32, without --full."""
PATIENCE = 15
"""How many times longer a call may take with --full."""
PUBLISHED = frozenset(settings())
MEMORY, CARD_MEMORY, GRAINS = 128 << 20, 8 << 30, 1 << 18
"""Bytes into which the longest sequence must fit: by default, and with --full, as on the card. It is found to one part in so many
bytes of it."""

Step = tuple[str, str, Callable[[], dict[str, Any]], float]


@dataclass(frozen=True)
class Suite:
    """The steps of a run. `budget`: seconds that one call may be expected to take; `repeats`: samples of what is timed."""

    quick: bool = False
    repeats: int = 5
    budget: float = 12.0
    full: bool = False
    device: str = DEVICE
    last: dict[str, tuple[float, float]] = field(default_factory=dict)
    """What earlier steps told of how long a call takes, as in `CaseRunner`."""

    def steps(self) -> Iterator[Step]:
        """(the list of the result that it goes to, what is going on, the measurement, its share of the time)."""
        for setting, backward in product(alone(self.full), (False, True)):
            if self.left_out(setting, backward):
                continue
            text = f"{setting}, {'forward + backward' if backward else 'forward'}"
            weight = self.weight(setting, backward) * len(self.who(setting, backward))
            yield "cases", text, partial(self.case, setting, backward), weight
        for setting in filter(self.cached, HILBERT_SETTINGS.values()):
            yield "cache", f"cache of plans, {setting}", partial(self.cache, setting), self.weight(setting)
        if self.device == "cpu":
            yield from self._rank_steps()
        for who, backward in product(("auto", "reference"), (False, True)):
            text = f"longest sequence, {who}{', training' * backward}"
            yield "longest", text, partial(self.longest, who, backward), 10.0

    def _rank_steps(self) -> Iterator[Step]:
        sizes, kind = (SIZES[:2] if self.quick else SIZES), next(iter(launcher.transports()), "threads")
        for name, wanted in (("ranks", over_ranks(sizes)), ("growth", growing(sizes, self.full))):
            for ranks in sizes:
                if calls := list(self._ranked(wanted, ranks)):
                    text = f"{name}, {ranks} of {kind}: {len(calls)} calls, the last {calls[-1][0]}"
                    weight = 5 + sum((1.4 if ranks > 1 else 0.7) * self.weight(*call) for call in calls)
                    yield name, text, partial(self.over_ranks, ranks, calls, kind), weight

    def _ranked(self, wanted: tuple[Setting, ...], ranks: int) -> Iterator[tuple[Setting, bool]]:
        """Settings of so many ranks, forward, and with a backward pass where it is short or there is all the time."""
        for setting, backward in product(wanted, (False, True)):
            if setting.ranks == ranks and not self.left_out(setting, backward):
                yield setting, backward

    def left_out(self, setting: Setting, backward: bool) -> bool:
        """Whether it takes so long that it is left to --full, being none of those that were published."""
        limit = LONGEST_BACKWARD if backward else LONGEST_EXTRA
        return not self.full and self.flops(setting, backward) > limit and (backward or setting not in PUBLISHED)

    def cached(self, setting: Setting) -> bool:
        """Whether the cache of plans is looked at: in a call that takes long, making a plan anew is lost in the noise."""
        return self.full or self.flops(setting) <= LONG_CALL

    def flops(self, setting: Setting, backward: bool = False) -> float:
        """Of a call."""
        return flops_of(self.problem(setting, backward))

    def samples(self, setting: Setting, backward: bool = False) -> int:
        """How many of each who takes part; where the reference does, its dense work in many steps decides."""
        problem = self.problem(setting, backward)
        if setting in IMPLEMENTATIONS:
            return samples(4 * flops_of(replace(problem, pattern=Pattern.dense())), self.repeats)
        return samples(flops_of(problem), self.repeats)

    def weight(self, setting: Setting, backward: bool = False) -> float:
        """About how many seconds a measurement of one who takes part takes, for the progress bar."""
        return 0.5 + (self.samples(setting, backward) + 5) * self.flops(setting, backward) / 4e11

    def problem(self, setting: Setting, backward: bool = False) -> Problem:
        """What is measured: with --quick a shorter one."""
        s = setting.divided(QUICK) if self.quick else setting
        kind, _, index = self.device.partition(":")
        told = dict(batch=s.batch, heads=s.heads, head_dim=HEAD_DIM, dtype=s.dtype, requires_grad=backward)
        return Problem(pattern=s.pattern, seq=s.seq, device=probe(kind, int(index or 0)), **told)

    def who(self, setting: Setting, backward: bool) -> tuple[str, ...]:
        """Who takes part in a setting, whose names are those of `entrant`."""
        names = ["auto", *(["head-split"] if len(setting.segment_lengths) > 1 else [])]
        if setting in IMPLEMENTATIONS:
            from dilkit.registry import list_backends

            names = ["reference", *names, "multihead", *sorted(set(list_backends()) - {"reference"}), *PEERS]
        if setting in IMPLEMENTATIONS or setting in HILBERT_SETTINGS.values():
            names.append("ordered")
        twins = setting in LENGTHS and (self.full or setting.seq <= HALF_TO)
        return (*names, *(TWINS if twins else ()))

    def case(self, setting: Setting, backward: bool) -> dict[str, Any]:
        """All who take part in a setting, checked, timed in turns beside a matmul in fp32; memory with the inputs counted."""
        problem = self.problem(setting, backward)
        contestants = [entrant(name, setting.heads) for name in self.who(setting, backward)]
        options: dict[str, Any] = dict(budget=self.patience, dtypes=dict(zip(TWINS, TWINS, strict=True)), last=self.last)
        samples = self.samples(setting, backward)
        min_time = 0.0 if self.quick or samples < self.repeats else 0.03
        runner = CaseRunner(contestants, samples, min_time, matmul_dtype="float32", forward_memory=False, **options)
        found: dict[str, Any] = encode(runner.run(problem))
        for name, entry in found["entries"].items():
            if entry.get("peak_bytes") is not None:
                own = replace(problem, dtype=name) if name in TWINS else problem
                entry["memory_bytes"] = entry["peak_bytes"] + (4 if backward else 3) * output_bytes(own)
        return dict(setting=setting.to_dict(), backward=backward, tokens=problem.batch * problem.seq) | found

    def cache(self, setting: Setting) -> dict[str, Any]:
        """A call with the cache of plans emptied before it, beside one whose plan is there: the second one after it."""
        from dilkit.plan import cache_clear

        problem = self.problem(setting)
        call = partial(entrant("auto", setting.heads).once, Inputs.random(problem), problem)

        def without() -> None:
            cache_clear()
            call()

        timed = measure.time_interleaved({"no cache": without, "refill": call, "auto": call}, self.repeats, device=self._kind)
        entries = {name: dict(time=encode(timed[name])) for name in ("no cache", "auto")}
        return dict(setting=setting.to_dict(), seq=problem.seq, entries=entries)

    @property
    def patience(self) -> float:
        """Seconds that a call may be expected to take."""
        return self.budget * (PATIENCE if self.full else 1)

    @property
    def _kind(self) -> str:
        return self.device.partition(":")[0]

    def over_ranks(self, ranks: int, calls: list[tuple[Setting, bool]], kind: str) -> dict[str, Any]:
        """Ranks beside one rank that has all cores, in turns; memory of each rank; of a job that fails, why."""
        cores = max(1, min(max(SIZES), results.usable_cores()))
        problems, rows = [], []
        for setting, backward in calls:
            s = setting.divided(QUICK) if self.quick else setting
            sizes = dict(seq=s.seq, batch=s.batch, heads=s.heads, head_dim=HEAD_DIM, dtype=s.dtype, requires_grad=backward)
            problems.append(dict(lengths=list(s.segment_lengths), rates=list(s.dilation_rates)) | sizes)
            rows.append(dict(setting=setting.to_dict(), backward=backward, tokens=s.tokens, transport=kind))
        task = dict(problems=problems, one_rank_threads=cores, repeats=self.repeats, alone=kind != "threads")
        told = dict(ranks=ranks, transport=kind)
        try:
            found = ring_rank.run(kind, ranks, "published", threads=max(1, cores // ranks), limit=1200.0, **task)
        except Exception as error:  # one job that fails is one entry: the others go on
            return told | dict(rows=[], failed=f"{type(error).__name__}: {error}")
        return told | dict(rows=[row | one for row, one in zip(rows, found, strict=True)])

    def longest(self, who: str, backward: bool) -> dict[str, Any]:
        """The longest sequence of which a call fits into the memory budget, inputs counted."""
        limit = (CARD_MEMORY if self.full else MEMORY) // (QUICK if self.quick else 1)
        problem = self.problem(MULTI_SEGMENT, backward)
        told = dict(who=who, backward=backward, setting=MULTI_SEGMENT.to_dict())
        contestant = entrant(who, MULTI_SEGMENT.heads)
        contestant.once(Inputs.random(problem), problem)  # what is loaded at the first call is no part of a call
        try:
            return told | Search(limit, max(1, limit // GRAINS), self.patience).longest(contestant, problem)
        except memory.MeasureError as error:
            return told | dict(seq=None, limit_bytes=limit, tried=[], stopped=str(error))


@contextmanager
def prepared() -> Iterator[dict[str, Any]]:
    """Within the block the suite can run; facts for its result."""
    yield dict(mpi=launcher.mpi_version(), processes=list(launcher.transports()))


def wrong(result: dict[str, Any]) -> bool:
    """Whether something was wrong, or failed, peers left out. What is refused or takes too long is neither."""
    verdicts = {entry["verdict"] for case in result["cases"] for who, entry in case["entries"].items() if who not in PEERS}
    jobs = [*result["ranks"], *result["growth"]]
    failed = any("failed" in job or not all(found["passed"] for row in job["rows"] for found in row["check"]) for job in jobs)
    return failed or bool(verdicts & {"wrong", "failed"})
