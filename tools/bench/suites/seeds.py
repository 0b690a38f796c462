"""`dilkit bench --suite seeds`: every table that older implementations published, measured again.

The published figures are data, in seeds.json: `settings` by name, `groups` of settings that a table compares, and the `documents`
with their figures, each with the setting that measures it again and a note on what is known to be wrong with it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dilkit.comm.launch.processes import mpi_version, transports
from dilkit.comm.launch.task import run
from dilkit.device import device_named
from dilkit.pattern import Pattern
from dilkit.plan import cache_clear
from dilkit.problem import Problem
from dilkit.registry import list_backends
from dilkit.testing.tensors import Tensors
from dilkit.threads import usable_cores
from dilkit.tools.bench.over_ranks import memory_note
from dilkit.tools.bench.suite import NO_OPTION, Sizes, Step, Suite
from dilkit.tools.bench.workloads.rank_jobs import beside_one_rank, peaks_of
from dilkit.tools.bench.workloads.seeds_ways import TWINS, called, implementation, longest
from dilkit.tools.commands.bench import PEERS
from dilkit.tools.console.text import error_line
from dilkit.tools.measure.case import CaseRunner, output_bytes
from dilkit.tools.measure.implementation import BACKWARD_FLOPS
from dilkit.tools.measure.ranks_call import RanksCall
from dilkit.tools.measure.timing import time_interleaved
from dilkit.tools.results.decode import decode, encode
from dilkit.tools.results.record import Entry
from dilkit.tools.results.rows import Row, row_of, rows_of

if TYPE_CHECKING:
    from dilkit.comm import Comm

HEAD_DIM = 64
PASSES = ("forward", "forward + backward")
LONG_CALL = 1e11
"""FLOPs of a call of which fewer samples are taken."""
LONGEST_BACKWARD, LONGEST_EXTRA = 6e10, 3e11
"""FLOPs beyond which a forward and backward pass, and a setting that nobody published, are left to --full."""
HALF_TO, HELD_AT_FIRST = 8192, 5
"""Without --full: tokens to which half types are compared with fp32, and how many of `HELD` are measured."""
PATIENCE = 15
"""Factor by which a call may take longer with --full."""


@dataclass(frozen=True)
class Setting:
    """Setting of a published table: `batch` sequences of `seq` tokens, sharded over so many ranks."""

    seq: int
    segment_lengths: tuple[int, ...]
    dilation_rates: tuple[int, ...]
    batch: int = 1
    heads: int = 8
    dtype: str = "float32"
    ranks: int = 1

    def __str__(self) -> str:
        batch = f"{self.batch} x " if self.batch > 1 else ""
        lengths, rates = ("-".join(map(str, numbers)) for numbers in (self.segment_lengths, self.dilation_rates))
        ranks = f", {self.ranks} ranks" if self.ranks > 1 else ""
        return f"{batch}{self.seq:,} tokens, {self.heads} heads, {self.dtype}, w {lengths}, r {rates}{ranks}"

    @property
    def tokens(self) -> int:
        """Tokens of all sequences."""
        return self.batch * self.seq

    def case(self, backward: bool = False) -> dict[str, Any]:
        """Facts of the setting and the pass, for a row."""
        facts: dict[str, Any] = encode(self)
        texts = {name: "-".join(map(str, value)) for name, value in facts.items() if isinstance(value, list)}
        return facts | texts | {"pass": PASSES[backward]}

    @classmethod
    def of(cls, case: dict[str, Any]) -> Setting:
        """The setting of a row."""
        names = ("segment_lengths", "dilation_rates")
        return decode(cls, case | {name: [int(part) for part in case[name].split("-")] for name in names})

    def problem(self, backward: bool = False, divisor: int = 1) -> Problem:
        """The problem of the setting, lengths divided by `divisor`; rates stay, and no segment is shorter than its rate."""
        lengths = [max(w // divisor, r) for w, r in zip(self.segment_lengths, self.dilation_rates, strict=True)]
        sizes: dict[str, Any] = dict(seq=self.seq // divisor, batch=self.batch, heads=self.heads, head_dim=HEAD_DIM)
        return Problem(pattern=Pattern(lengths, self.dilation_rates), dtype=self.dtype, requires_grad=backward, **sizes)


Calls = Sequence[tuple[Setting, bool]]
"""Settings without and with a backward pass."""
DATA: dict[str, Any] = json.loads(Path(__file__).with_name("seeds.json").read_text(encoding="utf-8"))
SETTINGS = {name: decode(Setting, facts, name) for name, facts in DATA["settings"].items()}
GROUPS = {group: {name: SETTINGS[name] for name in names} for group, names in DATA["groups"].items()}
HELD = tuple(Setting(1 << power, (512, 1024), (1, 2)) for power in range(11, 22))
"""The lengths of the published scaling, and longer ones, with segments that stay as they are, as users would have them."""
SEQUENCES = sorted({replace(setting, ranks=1) for setting in GROUPS["ranks"].values()}, key=lambda s: (s.tokens, s.seq))


@dataclass(frozen=True)
class SeedsSizes(Sizes):
    """Settings on one device: those `alone`, and `held`; `cached`, whose plans are cached. Over `ranks`: `sequences`, and one
    `growing` with them, without and with --full.

    `peers`: packages beside dilkit. `memory`, and with --full `card_memory`: bytes into which the longest sequence must fit, to
    one part in `grains` of them.
    """

    alone: tuple[Setting, ...] = tuple(setting for setting in SETTINGS.values() if setting.ranks == 1)
    held: tuple[Setting, ...] = HELD
    cached: tuple[Setting, ...] = tuple(GROUPS["orders"].values())
    sequences: tuple[Setting, ...] = tuple(SEQUENCES)
    growing: tuple[Setting, Setting] = (HELD[0], HELD[7])
    ranks: tuple[int, ...] = (1, 2, 4)
    peers: tuple[str, ...] = PEERS
    memory: int = 128 << 20
    card_memory: int = 8 << 30
    grains: int = 1 << 18


@dataclass(frozen=True)
class SeedsSuite(Suite):
    """The steps of a run. `full`: on to a million tokens and more; `processes`: launchers of processes."""

    NAME = "seeds"
    SUMMARY = "the tables that older implementations published, each figure beside what they claim"
    PEERS = PEERS

    budget: float = 12.0
    full: bool = False
    device: str = "cpu"
    sizes: SeedsSizes = field(default_factory=SeedsSizes, metadata=NO_OPTION)
    processes: tuple[str, ...] = field(default_factory=transports, metadata=NO_OPTION)
    last: dict[str, tuple[float, float]] = field(default_factory=dict, metadata=NO_OPTION)
    """Work and seconds of a call in earlier steps, as in `CaseRunner`."""

    def prepared(self) -> AbstractContextManager[dict[str, Any]]:
        ranks = ", ".join(("threads", *self.processes))
        return nullcontext(dict(mpi=mpi_version() if self.processes else "", ranks=ranks))

    def where(self) -> str:
        return self.device

    def steps(self) -> Iterator[Step]:
        sizes = self.sizes
        alone = dict.fromkeys([*sizes.alone, *sizes.held[: None if self.full else HELD_AT_FIRST]])
        shortest_first = sorted(alone, key=lambda s: (s.tokens * max(s.segment_lengths), s.seq, s.heads))
        for setting, backward in self._affordable(shortest_first):
            weight = self._weight(setting, backward) * len(self.who(setting))
            yield Step("settings", f"{setting}, {PASSES[backward]}", partial(self.case, setting, backward), weight)
        for setting in sizes.cached:
            if self.full or self._flops(setting) <= LONG_CALL:  # in a longer one, making a plan anew is lost in the noise
                yield Step("cache", f"cache of plans, {setting}", partial(self.cache, setting), self._weight(setting))
        kind, counts = next(iter(self.processes), "threads"), sizes.ranks[: 2 if self.quick else None]
        growing = sizes.growing[self.full]
        over_ranks = dict(
            ranks=[replace(setting, ranks=ranks) for setting in sizes.sequences for ranks in counts],
            growth=[replace(growing, seq=growing.seq * ranks, ranks=ranks) for ranks in counts],
        )
        for table, sharded in over_ranks.items() if self.device == "cpu" else ():
            calls = list(self._affordable(sharded))
            for ranks in dict.fromkeys(setting.ranks for setting, _ in calls):
                of_job = tuple(call for call in calls if call[0].ranks == ranks)
                what = f"{table}, {ranks} of {kind}: {len(of_job)} calls, the last {of_job[-1][0]}"
                weight = 5 + sum(self._weight(*call) for call in of_job)
                yield Step(table, what, partial(self.over_ranks, table, ranks, of_job, kind), weight)
        for who, backward in product(("auto", "reference"), (False, True)):
            what = f"longest sequence, {who}{', training' * backward}"
            yield Step("longest", what, partial(self.longest, who, backward), 10.0)

    def case(self, setting: Setting, backward: bool) -> list[Row]:
        """All implementations of a setting, checked, timed in turns beside a matmul in fp32; memory with the inputs counted."""
        problem, samples = self.problem(setting, backward), self._samples(setting, backward)
        measured = CaseRunner(
            [implementation(name, setting.heads) for name in self.who(setting)],
            samples,
            min_time=0.0 if self.quick or samples < self.repeats else 0.03,
            budget=self.patience,
            dtypes=dict(zip(TWINS, TWINS, strict=True)),
            matmul_dtype="float32",
            forward_memory=False,
            last=self.last,
        ).run(problem)
        values: dict[str, dict[str, Any]] = {}
        for name, entry in measured["entries"].items():
            values[name] = dict(tokens=problem.batch * problem.seq)
            if entry.peak_bytes is not None:
                one = output_bytes(replace(problem, dtype=name) if name in TWINS else problem)
                inputs = (4 if backward else 3) * one  # query, key, value, in training the output's gradient
                values[name]["memory_bytes"] = entry.peak_bytes + inputs
            if entry.differs:
                values[name]["differs"] = encode(entry.differs)
        return rows_of("settings", setting.case(backward), measured, values)

    def cache(self, setting: Setting) -> list[Row]:
        """A call with the cache of plans emptied before it, beside one whose plan is there: the second one after it."""
        problem = self.problem(setting)
        call = partial(implementation("auto", setting.heads).once, Tensors.random(problem), problem)

        def without() -> None:
            cache_clear()
            call()

        calls: dict[str, Callable[[], Any]] = {"no cache": without, "refill": call, "auto": call}
        timed = time_interleaved(calls, self.repeats, device=problem.device.type)
        return [row_of("cache", setting.case(), name, Entry(time=timed[name])) for name in ("no cache", "auto")]

    def over_ranks(self, table: str, ranks: int, calls: Calls, kind: str) -> list[Row]:
        """Ranks beside one rank that has all cores, in turns; memory of each rank; of a job that fails, why."""
        cores = max(1, min(max(self.sizes.ranks), usable_cores()))
        options: dict[str, Any] = dict(divisor=self.divisor, threads=cores, repeats=self.repeats)
        task = partial(rows_over_ranks, table=table, kind=kind, calls=calls, **options)
        try:
            return run(kind, ranks, task, threads=max(1, cores // ranks), limit=1200.0)
        except Exception as error:  # one job that fails is one row: the others go on
            case, reasons = dict(ranks=ranks, by=kind), (error_line(error),)
            return [Row(table=table, case=case, who="ranks", verdict="failed", reasons=reasons)]

    def longest(self, who: str, backward: bool) -> list[Row]:
        """The longest sequence of which a call fits into the memory budget, inputs counted."""
        limit = (self.sizes.card_memory if self.full else self.sizes.memory) // self.divisor
        setting = GROUPS["orders"]["multi-segment"]
        problem, one = self.problem(setting, backward), implementation(who, setting.heads)
        one.once(Tensors.random(problem), problem)  # what is loaded at the first call is no part of a call
        values = longest(one, problem, limit, max(1, limit // self.sizes.grains), self.patience)
        return [Row(table="longest", case={"pass": PASSES[backward]}, who=who, values=values)]

    def who(self, setting: Setting) -> tuple[str, ...]:
        """Names of the implementations that are compared at a setting."""
        names = ["auto", *["head-split"] * (len(setting.segment_lengths) > 1)]
        compared = setting in GROUPS["implementations"].values()
        if compared:
            names = ["reference", *names, "multihead", *sorted({*list_backends()} - {"reference"}), *self.sizes.peers]
        if compared or setting in GROUPS["orders"].values():
            names.append("ordered")
        twins = setting in GROUPS["lengths"].values() and (self.full or setting.seq <= HALF_TO)
        return (*names, *(TWINS if twins else ()))

    def problem(self, setting: Setting, backward: bool = False) -> Problem:
        """The problem that is measured: with --quick a shorter one."""
        return replace(setting.problem(backward, self.divisor), device=device_named(self.device))

    @property
    def patience(self) -> float:
        """Seconds that a call may be expected to take."""
        return self.budget * (PATIENCE if self.full else 1)

    def _affordable(self, settings: Sequence[Setting]) -> Iterator[tuple[Setting, bool]]:
        """Settings with and without a backward pass. What takes long, and nobody published, is left to --full."""
        for setting, backward in product(settings, (False, True)):
            long = self._flops(setting, backward) > (LONGEST_BACKWARD if backward else LONGEST_EXTRA)
            if self.full or not long or (not backward and setting in SETTINGS.values()):
                yield setting, backward

    def _flops(self, setting: Setting, backward: bool = False) -> float:
        return self.problem(setting, backward).flops() * (1 + BACKWARD_FLOPS * backward)

    def _samples(self, setting: Setting, backward: bool) -> int:
        """Samples of each implementation; beside the reference, its dense work in many steps decides."""
        if setting in GROUPS["implementations"].values():
            dense = replace(self.problem(setting, backward), pattern=Pattern.dense())
            return samples_of(4 * dense.flops() * (1 + BACKWARD_FLOPS * backward), self.repeats)
        return samples_of(self._flops(setting, backward), self.repeats)

    def _weight(self, setting: Setting, backward: bool = False) -> float:
        return 0.5 + self._flops(setting, backward) / 4e10


def samples_of(flops: float, repeats: int) -> int:
    """Samples of a call of so many FLOPs: fewer where calls are long."""
    return repeats if flops < LONG_CALL else min(3 if flops < 3 * LONG_CALL else 2, repeats)


def rows_over_ranks(comm: Comm, table: str, kind: str, calls: Calls, divisor: int, threads: int, repeats: int) -> list[Row]:
    """Measure settings and passes on every rank: ranks beside one rank that has all cores, in turns, and each rank's memory."""
    note, rows = memory_note(kind != "threads"), []
    for setting, backward in calls:
        call = RanksCall(comm, setting.problem(backward, divisor))
        checks, entries = beside_one_rank(call, threads, samples_of(call.flops, repeats))
        values: dict[str, Any] = dict(tokens=call.problem.batch * call.problem.seq, memory_note=note)
        if not note:  # calls were made before, so that nothing is loaded or planned in it
            shard = replace(call.problem, seq=len(call.plan.positions(comm.rank)))
            values["rank_bytes"] = list(peaks_of(comm, partial(called, shard, call.once)))
        wrong = tuple(check.complaint for check in checks if not check.passed)
        entries["ranks"] = replace(entries["ranks"], check=checks, verdict="wrong" if wrong else "measured", reasons=wrong)
        case = setting.case(backward) | dict(by=kind)
        rows += [row_of(table, case, who, entry, **(values if who == "ranks" else {})) for who, entry in entries.items()]
    return rows
