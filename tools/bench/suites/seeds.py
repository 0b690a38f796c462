"""`dilkit bench --suite seeds`: every table that older implementations published, measured again.

The published figures are data, in seeds.json: `settings` by name, `groups` of settings that a table compares, and the `documents`
with their figures, each with the setting that measures it again and a note on what is known to be wrong with it.
"""

from __future__ import annotations

import json
import math
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dilkit.comm.launch.processes import transports
from dilkit.comm.launch.task import run
from dilkit.nn import DilatedAttention, MultiheadDilatedAttention
from dilkit.orders.token_order import TokenOrder, order
from dilkit.pattern import Pattern
from dilkit.plan import cache_clear
from dilkit.problem import Problem
from dilkit.registry import list_backends
from dilkit.testing import memory
from dilkit.testing.tensors import Tensors
from dilkit.threads import usable_cores
from dilkit.tools.bench.configuration import Configuration
from dilkit.tools.bench.suite import NO_OPTION, Suite, SuiteSizes, SuiteStep
from dilkit.tools.bench.workloads.rank_jobs import beside_one_rank, job_step, memory_note, peaks_of
from dilkit.tools.commands.bench import PEERS
from dilkit.tools.measure.baselines import BASELINES
from dilkit.tools.measure.case import CaseRunner
from dilkit.tools.measure.implementation import BACKWARD_FLOPS, Implementation, backend_implementations
from dilkit.tools.measure.ranks_call import RanksCall
from dilkit.tools.measure.timing import time_interleaved
from dilkit.tools.results.decode import decode, encode
from dilkit.tools.results.record import Entry
from dilkit.tools.results.rows import Row, row_of, rows_of

if TYPE_CHECKING:
    from dilkit.comm import Comm

HEAD_DIM = 64
PASSES = ("forward", "forward + backward")
LONG_CALL, LONGEST_BACKWARD, LONGEST_EXTRA = 1e11, 6e10, 3e11
"""FLOPs of a call with fewer samples; those beyond which backward passes and unpublished settings are left to --full."""
HALF_TO, HELD_AT_FIRST = 8192, 5
"""Without --full: tokens to which half types are compared with fp32, and how many of `HELD` are measured."""
PATIENCE = 15
"""Factor by which a call may take longer with --full."""
GRAIN = 512
"""Tokens to which the longest sequence is found."""
TWINS = ("float32", "bfloat16")
"""Implementations that are the automatic choice with tensors of another dtype than the setting's."""
SUMMARIES = {
    "auto": "the automatic choice of backend",
    "head-split": "the attention of each head in one branch alone, as in the older implementations",
    "multihead": "MultiheadDilatedAttention: with its four projections",
    "ordered": "with the order of a grid as nearly square as can be, along a Hilbert curve",
}


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
        template = "{batch} x {seq:,} tokens, {heads} heads, {dtype}, w {segment_lengths}, r {dilation_rates}, p {ranks}"
        return template.format(**self.case())

    def case(self, backward: bool = False) -> dict[str, Any]:
        """Facts of the setting and the pass, for a row."""
        facts = {name: "-".join(map(str, fact)) if isinstance(fact, tuple) else fact for name, fact in vars(self).items()}
        return facts | {"pass": PASSES[backward]}

    def problem(self, backward: bool = False, divisor: int = 1) -> Problem:
        """The problem of the setting, lengths divided by `divisor`."""
        configuration = Configuration(self.seq, self.segment_lengths, self.dilation_rates, self.heads)
        return configuration.problem(HEAD_DIM, divisor, batch=self.batch, dtype=self.dtype, requires_grad=backward)


Calls = Sequence[tuple[Setting, bool]]
"""Settings without and with a backward pass."""
DATA: dict[str, Any] = json.loads(Path(__file__).with_name("seeds.json").read_text(encoding="utf-8"))
SETTINGS = {name: decode(Setting, facts, name) for name, facts in DATA["settings"].items()}
GROUPS = {group: {name: SETTINGS[name] for name in names} for group, names in DATA["groups"].items()}
HELD = tuple(Setting(1 << power, (512, 1024), (1, 2)) for power in range(11, 22))
"""The lengths of the published scaling, and longer ones, with segments that stay as they are, as users would have them."""
SEQUENCES = sorted({replace(one, ranks=1) for one in GROUPS["ranks"].values()}, key=lambda one: (one.batch * one.seq, one.seq))


@dataclass(frozen=True)
class SeedsSizes(SuiteSizes):
    """Settings on one device: those `alone`, and `held`. Over `ranks`: `sequences`. `peers`: packages beside dilkit.

    `memory`: bytes into which the longest sequence must fit.
    """

    alone: tuple[Setting, ...] = tuple(setting for setting in SETTINGS.values() if setting.ranks == 1)
    held: tuple[Setting, ...] = HELD
    sequences: tuple[Setting, ...] = tuple(SEQUENCES)
    ranks: tuple[int, ...] = (1, 2, 4)
    peers: tuple[str, ...] = PEERS
    memory: int = 128 << 20


@dataclass(frozen=True)
class SeedsSuite(Suite):
    """The steps of a run. `full`: on to a million tokens and more; `processes`: launchers of processes."""

    NAME = "seeds"
    SUMMARY = "the tables that older implementations published, each figure beside what they claim"
    PEERS = PEERS

    budget: float = 12.0
    full: bool = False
    sizes: SeedsSizes = field(default_factory=SeedsSizes, metadata=NO_OPTION)
    processes: tuple[str, ...] = field(default_factory=transports, metadata=NO_OPTION)
    last: dict[str, tuple[float, float]] = field(default_factory=dict, metadata=NO_OPTION)
    """Work and seconds of a call in earlier steps, as in `CaseRunner`."""

    def prepared(self) -> AbstractContextManager[dict[str, Any]]:
        return nullcontext(dict(ranks=", ".join(("threads", *self.processes))))

    def steps(self) -> Iterator[SuiteStep]:
        alone = dict.fromkeys([*self.sizes.alone, *self.sizes.held[: None if self.full else HELD_AT_FIRST]])
        shortest_first = sorted(alone, key=lambda s: (s.batch * s.seq * max(s.segment_lengths), s.seq, s.heads))
        for setting, backward in self._affordable(shortest_first):
            weight = self._weight(setting, backward) * len(self.who(setting))
            yield SuiteStep("settings", f"{setting}, {PASSES[backward]}", partial(self.case, setting, backward), weight)
        for setting in GROUPS["orders"].values():
            if setting in alone and self._flops(setting) <= LONG_CALL:  # in a longer one, making a plan is lost in the noise
                yield SuiteStep("cache", f"cache of plans, {setting}", partial(self.cache, setting), self._weight(setting))
        yield from self._steps_over_ranks()
        for who, backward in product(("auto", "reference"), (False, True)):
            what = f"longest sequence, {who}{', training' * backward}"
            yield SuiteStep("longest", what, partial(self.longest, who, backward), 10.0)

    def _steps_over_ranks(self) -> Iterator[SuiteStep]:
        """One job for each number of ranks, at a fixed length and at fixed tokens a rank."""
        kind, counts = next(iter(self.processes), "threads"), self.sizes.ranks
        fixed = [replace(setting, ranks=ranks) for setting in self.sizes.sequences for ranks in counts]
        growth = [replace(HELD[0], seq=HELD[0].seq * ranks, ranks=ranks) for ranks in counts]
        for (table, settings), ranks in product((("ranks", fixed), ("growth", growth)), counts):
            calls = list(self._affordable([setting for setting in settings if setting.ranks == ranks]))
            if not calls:
                continue
            what = f"{ranks} of {kind}: {len(calls)} calls, the last {calls[-1][0]}"
            weight = 5 + sum(self._weight(*call) for call in calls)
            yield job_step(table, what, partial(self.over_ranks, table, ranks, calls, kind), weight)

    def _affordable(self, settings: Sequence[Setting]) -> Iterator[tuple[Setting, bool]]:
        """Settings with and without a backward pass. What takes long, and nobody published, is left to --full."""
        for setting, backward in product(settings, (False, True)):
            long = self._flops(setting, backward) > (LONGEST_BACKWARD if backward else LONGEST_EXTRA)
            if self.full or not long or (not backward and setting in SETTINGS.values()):
                yield setting, backward

    def _flops(self, setting: Setting, backward: bool = False) -> float:
        return setting.problem(backward, self.divisor).flops() * (1 + BACKWARD_FLOPS * backward)

    def _weight(self, setting: Setting, backward: bool = False) -> float:
        return 0.5 + self._flops(setting, backward) / 4e10

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

    @property
    def patience(self) -> float:
        """Seconds that a call may be expected to take."""
        return self.budget * (PATIENCE if self.full else 1)

    def case(self, setting: Setting, backward: bool) -> list[Row]:
        """All implementations of a setting, checked, timed in turns beside a matmul in fp32; memory with the inputs counted."""
        problem, samples = setting.problem(backward, self.divisor), samples_of(self._flops(setting, backward), self.repeats)
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
            if backward and entry.memory_bytes and entry.peak_bytes is not None:  # the output's gradient is an input too
                values[name]["memory_bytes"] = entry.memory_bytes + (entry.memory_bytes - entry.peak_bytes) // 3
            if entry.differs:
                values[name]["differs"] = encode(entry.differs)
        return rows_of("settings", setting.case(backward), measured, values)

    def cache(self, setting: Setting) -> list[Row]:
        """A call with the cache of plans emptied before it, beside one whose plan is there: the second one after it."""
        problem = setting.problem(divisor=self.divisor)
        call = partial(implementation("auto", setting.heads).once, Tensors.random(problem), problem)

        def without() -> None:
            cache_clear()
            call()

        calls: dict[str, Callable[[], Any]] = {"no cache": without, "refill": call, "auto": call}
        timed = time_interleaved(calls, self.repeats)
        return [row_of("cache", setting.case(), name, Entry(time=timed[name])) for name in ("no cache", "auto")]

    def over_ranks(self, table: str, ranks: int, calls: Calls, kind: str) -> list[Row]:
        """Ranks beside one rank that has all cores, in turns; memory of each rank."""
        cores = max(1, min(max(self.sizes.ranks), usable_cores()))
        options: dict[str, Any] = dict(divisor=self.divisor, threads=cores, repeats=self.repeats)
        task = partial(rows_over_ranks, table=table, kind=kind, calls=calls, **options)
        return run(kind, ranks, task, threads=max(1, cores // ranks), limit=1200.0)

    def longest(self, who: str, backward: bool) -> list[Row]:
        """Find the longest sequence of which a call fits into the memory budget, inputs counted."""
        setting, limit, tried = GROUPS["orders"]["multi-segment"], self.sizes.memory // self.divisor, list[dict[str, Any]]()
        problem, one = setting.problem(backward, self.divisor), implementation(who, setting.heads)
        one.once(Tensors.random(problem), problem)  # what is loaded at the first call is no part of a call
        values: dict[str, Any] = dict(limit_bytes=limit, seq=None, tried=tried, stopped=None)

        def fits(seq: int) -> bool:
            last = tried[-1] if tried else dict(seq=seq, seconds=0.0)
            if last["seconds"] * (seq / last["seq"]) ** (2 if one.quadratic else 1) > self.patience:
                values["stopped"] = f"a call would take more than {self.patience:g} s (--budget)"
                return False
            longer, start = replace(problem, seq=seq), time.perf_counter()
            peak = memory.peak_memory(lambda: called(longer, partial(one.once, problem=longer)))
            tried.append(dict(seq=seq, bytes=peak, seconds=time.perf_counter() - start))
            return peak <= limit

        most, grain = 1, max(1, GRAIN // self.divisor)
        try:
            while fits(most * grain):
                most *= 2
            more = bisect_left(range(most // 2 + 1, most), True, key=lambda count: not fits(count * grain))
            values["seq"] = (most // 2 + more) * grain
        except (MemoryError, memory.MeasureError) as error:
            values["stopped"] = str(error)
        return [Row(table="longest", case={"pass": PASSES[backward]}, who=who, values=values)]


def samples_of(flops: float, repeats: int) -> int:
    """Samples of a call of so many FLOPs: fewer where calls are long."""
    return repeats if flops < LONG_CALL else min(3, repeats)


def rows_over_ranks(comm: Comm, table: str, kind: str, calls: Calls, divisor: int, threads: int, repeats: int) -> list[Row]:
    """Measure settings and passes on every rank: ranks beside one rank that has all cores, in turns, and each rank's memory."""
    note, rows = memory_note(kind != "threads"), []
    for setting, backward in calls:
        call = RanksCall(comm, setting.problem(backward, divisor))
        entries = beside_one_rank(call, threads, samples_of(call.flops, repeats))
        values: dict[str, Any] = dict(tokens=call.problem.batch * call.problem.seq, memory_note=note)
        if not note:  # calls were made before, so that nothing is loaded or planned in it
            shard = replace(call.problem, seq=len(call.plan.positions(comm.rank)))
            values["rank_bytes"] = peaks_of(comm, partial(called, shard, call.once))
        case = setting.case(backward) | dict(by=kind)
        rows += [row_of(table, case, who, entry, **(values if who == "ranks" else {})) for who, entry in entries.items()]
    return rows


def called(problem: Problem, call: Callable[[Tensors], Any]) -> Any:
    """Return the result of a call and its random inputs, without a gradient of the output where the problem asks for none."""
    inputs = Tensors.random(problem)
    if not problem.requires_grad:
        inputs = replace(inputs, dout=inputs.query.detach())
    return inputs, call(inputs)


def implementation(name: str, heads: int) -> Implementation:
    """Return the implementation of this name for so many heads: one of `SUMMARIES` or `TWINS`, a peer or a backend."""
    if name in BASELINES:
        return BASELINES[name]
    if name not in (*SUMMARIES, *TWINS):
        return backend_implementations([name])[0]
    summary = SUMMARIES.get(name, f"the automatic choice in {name}")
    auto = Implementation(name, summary, _attention, computes=summary)

    def split(pattern: Pattern) -> Pattern:
        return Pattern.head_split(pattern.segment_lengths, pattern.dilation_rates, heads)

    others: dict[str, dict[str, Any]] = {
        "head-split": dict(attend=lambda inputs, problem: _attention(inputs, problem, split(problem.pattern)), computed=split),
        "multihead": dict(attend=_multihead),
        "ordered": dict(attend=_ordered, checked=replace(auto, attend=_out_of_order)),
    }
    return replace(auto, **others.get(name, {}))


def _attention(inputs: Tensors, problem: Problem, pattern: Pattern | None = None, order: TokenOrder | None = None) -> Tensor:
    out: Tensor = DilatedAttention(pattern or problem.pattern, order=order)(*inputs.qkv)
    return out


def _ordered(inputs: Tensors, problem: Problem) -> Tensor:
    """Attention along the curve through the grid of the tokens, which are given and come back row by row."""
    return _attention(inputs, problem, order=_grid_order(problem.seq))


def _grid_order(seq: int) -> TokenOrder:
    """Return the Hilbert order of `seq` tokens as a grid that is as nearly square as can be."""
    rows = next(side for side in range(math.isqrt(seq), 0, -1) if seq % side == 0)
    return order((rows, seq // rows))


def _out_of_order(inputs: Tensors, problem: Problem) -> Tensor:
    """Compute `_ordered` of tokens given along the curve, so that the result is attention as the oracle computes it."""
    curve = _grid_order(problem.seq)
    query, key, value = (curve.restore(x, 1) for x in inputs.qkv)
    out: Tensor = curve.apply(_ordered(replace(inputs, query=query, key=key, value=value), problem), 1)
    return out


def _multihead(inputs: Tensors, problem: Problem) -> Tensor:
    """Projections that change nothing but take what any others take, so that the result is that of the attention alone."""
    module = _identity(problem.heads, problem.head_dim, problem.pattern, problem.dtype)
    out: Tensor = module(*(x.flatten(2) for x in inputs.qkv), need_weights=False)[0]
    return out.view(*out.shape[:2], problem.heads, problem.head_dim)


@lru_cache(maxsize=4)
def _identity(heads: int, head_dim: int, pattern: Pattern, dtype: str) -> nn.Module:
    size, kind = heads * head_dim, getattr(torch, dtype)
    module = MultiheadDilatedAttention(size, heads, DilatedAttention(pattern), dtype=kind)
    for parameter in module.parameters():
        for part in torch.split(parameter, size):
            nn.init.eye_(part) if part.dim() == 2 else nn.init.zeros_(part)
    return module
