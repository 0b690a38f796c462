"""`dilkit bench --suite seeds`: every table that older implementations published, measured again.

The published figures are data, in seeds.json: `settings` by name, `groups` of settings that a table compares, and the `documents`
with their figures, each with the setting that measures it again and a note on what is known to be wrong with it.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dilkit.comm.launch.processes import mpi_version, transports
from dilkit.comm.launch.task import run
from dilkit.device import device_named
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
from dilkit.tools.measure.case import CaseRunner, output_bytes
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
LONG_CALL = 1e11
"""FLOPs of a call of which fewer samples are taken."""
LONGEST_BACKWARD, LONGEST_EXTRA = 6e10, 3e11
"""FLOPs beyond which a forward and backward pass, and a setting that nobody published, are left to --full."""
HALF_TO, HELD_AT_FIRST = 8192, 5
"""Without --full: tokens to which half types are compared with fp32, and how many of `HELD` are measured."""
PATIENCE = 15
"""Factor by which a call may take longer with --full."""
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
        facts: dict[str, Any] = encode(self)
        texts = {name: "-".join(map(str, value)) for name, value in facts.items() if isinstance(value, list)}
        return facts | texts | {"pass": PASSES[backward]}

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

    def steps(self) -> Iterator[SuiteStep]:
        sizes = self.sizes
        alone = dict.fromkeys([*sizes.alone, *sizes.held[: None if self.full else HELD_AT_FIRST]])
        shortest_first = sorted(alone, key=lambda s: (s.batch * s.seq * max(s.segment_lengths), s.seq, s.heads))
        for setting, backward in self._affordable(shortest_first):
            weight = self._weight(setting, backward) * len(self.who(setting))
            yield SuiteStep("settings", f"{setting}, {PASSES[backward]}", partial(self.case, setting, backward), weight)
        for setting in sizes.cached:
            if self.full or self._flops(setting) <= LONG_CALL:  # in a longer one, making a plan anew is lost in the noise
                yield SuiteStep("cache", f"cache of plans, {setting}", partial(self.cache, setting), self._weight(setting))
        yield from self._steps_over_ranks() if self.device == "cpu" else ()
        for who, backward in product(("auto", "reference"), (False, True)):
            what = f"longest sequence, {who}{', training' * backward}"
            yield SuiteStep("longest", what, partial(self.longest, who, backward), 10.0)

    def _steps_over_ranks(self) -> Iterator[SuiteStep]:
        """One job for each number of ranks, at a fixed length and at fixed tokens a rank."""
        sizes, kind, counts = self.sizes, next(iter(self.processes), "threads"), self.sizes.ranks[: 2 if self.quick else None]
        growing = sizes.growing[self.full]
        fixed = [replace(setting, ranks=ranks) for setting in sizes.sequences for ranks in counts]
        growth = [replace(growing, seq=growing.seq * ranks, ranks=ranks) for ranks in counts]
        for table, settings in (("ranks", fixed), ("growth", growth)):
            calls = list(self._affordable(settings))
            for ranks in dict.fromkeys(setting.ranks for setting, _ in calls):
                of_job = [call for call in calls if call[0].ranks == ranks]
                what = f"{ranks} of {kind}: {len(of_job)} calls, the last {of_job[-1][0]}"
                weight = 5 + sum(self._weight(*call) for call in of_job)
                yield job_step(table, what, partial(self.over_ranks, table, ranks, of_job, kind), weight)

    def case(self, setting: Setting, backward: bool) -> list[Row]:
        """All implementations of a setting, checked, timed in turns beside a matmul in fp32; memory with the inputs counted."""
        problem, work = self.problem(setting, backward), self._flops(setting, backward)
        if setting in GROUPS["implementations"].values():  # the reference computes dense attention in many steps
            work = 4 * replace(problem, pattern=Pattern.dense()).flops() * (1 + BACKWARD_FLOPS * backward)
        samples = samples_of(work, self.repeats)
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
        """Ranks beside one rank that has all cores, in turns; memory of each rank."""
        cores = max(1, min(max(self.sizes.ranks), usable_cores()))
        options: dict[str, Any] = dict(divisor=self.divisor, threads=cores, repeats=self.repeats)
        task = partial(rows_over_ranks, table=table, kind=kind, calls=calls, **options)
        return run(kind, ranks, task, threads=max(1, cores // ranks), limit=1200.0)

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
        entries = beside_one_rank(call, threads, samples_of(call.flops, repeats))
        values: dict[str, Any] = dict(tokens=call.problem.batch * call.problem.seq, memory_note=note)
        if not note:  # calls were made before, so that nothing is loaded or planned in it
            shard = replace(call.problem, seq=len(call.plan.positions(comm.rank)))
            values["rank_bytes"] = peaks_of(comm, partial(called, shard, call.once))
        case = setting.case(backward) | dict(by=kind)
        rows += [row_of(table, case, who, entry, **(values if who == "ranks" else {})) for who, entry in entries.items()]
    return rows


def implementation(name: str, heads: int) -> Implementation:
    """Return the implementation of this name for so many heads: one of `SUMMARIES` or `TWINS`, a peer or a backend.

    Raises KeyError for an unknown name.
    """
    if name in BASELINES:
        return BASELINES[name]
    if name not in (*SUMMARIES, *TWINS):
        return backend_implementations([name])[0]
    summary = SUMMARIES.get(name, f"the automatic choice in {name}")
    auto = Implementation(name, summary, _attention, lambda problem: (), computes=summary)
    if name == "head-split":

        def split(pattern: Pattern) -> Pattern:
            return Pattern.head_split(pattern.segment_lengths, pattern.dilation_rates, heads)

        return replace(auto, attend=lambda inputs, problem: _attention(inputs, problem, split(problem.pattern)), computed=split)
    if name == "multihead":
        return replace(auto, attend=_multihead)
    if name == "ordered":
        return replace(auto, attend=_ordered, checked=replace(auto, attend=_out_of_order))
    return auto


def _attention(inputs: Tensors, problem: Problem, pattern: Pattern | None = None, order: TokenOrder | None = None) -> Tensor:
    module, mask = DilatedAttention(pattern or problem.pattern, order=order), inputs.mask
    out: Tensor = module(inputs.query, inputs.key, inputs.value, is_causal=problem.is_causal, key_padding_mask=mask)
    return out


def _ordered(inputs: Tensors, problem: Problem) -> Tensor:
    """Attention along the curve through the grid of the tokens, which are given and come back row by row."""
    return _attention(inputs, problem, order=grid_order(problem.seq))


def grid_order(seq: int) -> TokenOrder:
    """Return the Hilbert order of `seq` tokens as a grid that is as nearly square as can be."""
    rows = next(side for side in range(math.isqrt(seq), 0, -1) if seq % side == 0)
    return order((rows, seq // rows))


def _out_of_order(inputs: Tensors, problem: Problem) -> Tensor:
    """Compute `_ordered` of tokens given along the curve, so that the result is attention as the oracle computes it."""
    curve = grid_order(problem.seq)
    query, key, value = (curve.restore(x, 1) for x in (inputs.query, inputs.key, inputs.value))
    out: Tensor = curve.apply(_ordered(replace(inputs, query=query, key=key, value=value), problem), 1)
    return out


def _multihead(inputs: Tensors, problem: Problem) -> Tensor:
    """Projections that change nothing but take what any others take, so that the result is that of the attention alone."""
    module = _identity(problem.heads, problem.head_dim, problem.pattern, problem.dtype, problem.device.type)
    out: Tensor = module(*(x.flatten(2) for x in (inputs.query, inputs.key, inputs.value)), need_weights=False)[0]
    return out.view(*out.shape[:2], problem.heads, problem.head_dim)


@lru_cache(maxsize=4)
def _identity(heads: int, head_dim: int, pattern: Pattern, dtype: str, device: str) -> nn.Module:
    size, kind = heads * head_dim, getattr(torch, dtype)
    module = MultiheadDilatedAttention(size, heads, DilatedAttention(pattern), device=device, dtype=kind)
    one = torch.eye(size, device=device, dtype=kind)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(one.repeat(parameter.shape[0] // size, 1) if parameter.dim() == 2 else torch.zeros_like(parameter))
    return module


def longest(one: Implementation, problem: Problem, limit: int, grain: int, budget: float) -> dict[str, Any]:
    """Find the longest `seq` of `problem` of which a call fits into `limit` bytes, inputs counted, as a multiple of `grain`.

    No call is made that is expected to take more than `budget` seconds. Returns values of a row: `seq`, 0 if none fits; the
    lengths `tried`, with peak bytes and seconds; and why it `stopped` where there may be longer ones.
    """
    tried: list[dict[str, Any]] = []

    def fits(seq: int) -> bool:
        longer, start = replace(problem, seq=seq), time.perf_counter()
        try:
            peak = memory.peak_memory(lambda: called(longer, partial(one.once, problem=longer)), problem.device.type)
        except (MemoryError, torch.cuda.OutOfMemoryError):
            tried.append(dict(seq=seq, bytes=None, seconds=None))
            return False
        tried.append(dict(seq=seq, bytes=peak, seconds=time.perf_counter() - start))
        return peak <= limit

    def too_slow(seq: int) -> bool:
        last = tried[-1]
        return bool((last["seconds"] or 0.0) * (seq / last["seq"]) ** (2 if one.quadratic else 1) > budget)

    values = dict(limit_bytes=limit, seq=None, tried=tried, stopped=None)
    try:
        seq, slow = bisect(fits, grain, too_slow)
    except memory.MeasureError as error:
        return values | dict(tried=[], stopped=str(error))
    return values | dict(seq=seq, stopped=f"a call would take more than {budget:g} s (--budget)" if slow else None)


def bisect(fits: Callable[[int], bool], grain: int, too_slow: Callable[[int], bool]) -> tuple[int, bool]:
    """Find the largest multiple of `grain` that fits, 0 if none does, where what is longer than something too long does not fit.

    True beside it: it was `too_slow` to look further.
    """
    low, high = 0, grain
    while fits(high):
        low, high = high, 2 * high
        if too_slow(high):
            return low, True
    while high - low > grain:
        middle = (low + high) // (2 * grain) * grain
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low, False


def called(problem: Problem, call: Callable[[Tensors], Any]) -> Any:
    """Return the result of a call and its random inputs, without a gradient of the output where the problem asks for none."""
    inputs = Tensors.random(problem)
    if not problem.requires_grad:
        inputs = replace(inputs, dout=inputs.query.detach())
    return inputs, call(inputs)
