"""`dilkit bench --suite cpu`: the CPU kernel beside torch's own, multiply-adds, dense attention and LongNet's procedure."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from math import prod
from typing import Any

import torch

from dilkit import dilated_attention
from dilkit.backends.native.backend import instruction_set
from dilkit.environment import BF16_SETS
from dilkit.integrations.gigapath.config import ARCHITECTURES, SlideEncoderConfig
from dilkit.pattern import DilatedSegment, GlobalTokens, Neighborhood, Pattern, SlidingWindow
from dilkit.problem import Problem
from dilkit.testing import memory
from dilkit.testing.tensors import Tensors
from dilkit.threads import torch_threads, usable_cores
from dilkit.tools.bench.configuration import CONFIGURATIONS, Configuration
from dilkit.tools.bench.suite import NO_OPTION, Suite, SuiteSizes, SuiteStep
from dilkit.tools.bench.workloads import ways
from dilkit.tools.bench.workloads.cpu_calls import Load, encoder, idle, smaller
from dilkit.tools.bench.workloads.cpu_report import FEW, FORMS, HEAD, MASKED, OURS, REPORT, SHORT, TARGETS, WINDOW
from dilkit.tools.bench.workloads.ways import NATIVE
from dilkit.tools.measure.baselines import BASELINES
from dilkit.tools.measure.case import Posed, admit, compare, output_bytes, results_bytes
from dilkit.tools.measure.implementation import Implementation, backend_implementations
from dilkit.tools.measure.timing import Call, time_interleaved
from dilkit.tools.results.record import Entry, Samples
from dilkit.tools.results.rows import Row, rows_of

__all__ = ["REPORT", "CpuSizes", "CpuSuite"]
GATHERED = "AB"
"""The configurations that are also computed by gathering: with rates beyond the number of heads it mostly computes padding."""
RATE = {"gather": 25e9}
"""FLOP/s of a thread by which is foreseen whether a call goes beyond the budget; 50e9 where none is named."""
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
"""Variables that hold torch and the libraries in it to AVX2; these read them when they first compute."""
GRIDS = tuple(Neighborhood(*grid) for grid in (((128, 128), 13), ((24, 24, 28), 7), ((128, 128), 7, 4), ((64, 512), 7, 4)))
DENSE = Pattern.dense()
MakeCall = Callable[[str, Tensors], Call]


@dataclass(frozen=True)
class CpuSizes(SuiteSizes):
    """One head of `long` tokens, where inner loops decide, and of `short` ones, where fixed costs do.

    `passes` over long ones: head_dim, and True with a backward pass. `grids` stand beside torch with a mask up to `masked`
    tokens. `idle`: threads to which tasks of A, of a mix of kinds and of `packed` sequences fall.
    """

    long: int = 4096
    short: tuple[int, ...] = (256, 512, 1024)
    passes: tuple[tuple[int, bool], ...] = ((48, False), (64, False), (128, False), (48, True), (64, True))
    configurations: Mapping[str, Configuration] = field(default_factory=lambda: CONFIGURATIONS)
    head_dim: int = 64
    head_dims: Mapping[str, int] = field(default_factory=lambda: {"G": 48})
    threads: int = field(default=4, kw_only=True)
    few: int = 16
    few_heads: int = 8
    grids: tuple[Neighborhood, ...] = GRIDS
    grid_heads: int = 4
    masked: int = 16_384
    model: SlideEncoderConfig = ARCHITECTURES["gigapath_slide_enc12l768d"]
    tiles: int = 10_000
    idle: tuple[int, ...] = (2, 4, 8, 16)
    window: int = 512
    global_tokens: int = 16
    dilated: tuple[int, int] = (8192, 8)
    packed: tuple[int, ...] = (2_000, 5_000, 9_000, 20_000)


@dataclass(frozen=True)
class CpuSuite(Suite):
    """The shortest measurements first; on one thread, but for those of threads, dtypes, dense attention and a million tokens."""

    NAME = "cpu"
    SUMMARY = "the CPU kernel against torch's own, multiply-adds, dense attention and LongNet's published procedure"
    TARGETS = TARGETS

    budget: float = 90.0
    sizes: CpuSizes = field(default_factory=CpuSizes, metadata=NO_OPTION)

    def steps(self) -> Iterator[SuiteStep]:
        grids = [smaller(cells, self.divisor) for cells in self.sizes.grids]
        yield from self.heads()
        yield from (self.grid(cells, masked=False) for cells in grids)
        for load in self.loads():
            yield SuiteStep("idle", f"idle threads, {load.what}", partial(idle, load, self.sizes.idle, min(self.repeats, 2)))
        yield from self.all_threads()
        for (causal, backward), letter in product(((False, False), (True, False), (False, True)), "BGADC"):
            yield self.configuration(letter, causal, backward)
        yield from (self.grid(cells, masked=True) for cells in grids if cells.tokens <= self.sizes.masked)
        yield SuiteStep("million", "one million tokens", self.million)
        if instruction_set() == "amx":  # last: it takes gigabytes, of which the process keeps some
            yield SuiteStep("encoder", "GigaPath's encoder, forward + backward, bf16", self.encoder, 16)

    @contextmanager
    def prepared(self) -> Iterator[dict[str, Any]]:
        isa = instruction_set()
        held = {name: value for name, value in AVX2.items() if isa == "avx2" and name not in os.environ}
        os.environ.update(held)
        try:
            with torch_threads(min(self.sizes.threads, usable_cores())) as count:
                code = f"avx512 + {isa}" if isa in BF16_SETS else isa
                yield dict(isa=isa, code=code, torch_isa=torch.backends.cpu.get_cpu_capability().lower(), thread_count=count)
        finally:
            for name in held:
                del os.environ[name]

    def problem(self, name: str, **fields: Any) -> Problem:
        """The problem of a configuration."""
        head_dim = self.sizes.head_dims.get(name, self.sizes.head_dim)
        return self.sizes.configurations[name].problem(head_dim, self.divisor, **fields)

    def heads(self) -> Iterator[SuiteStep]:
        """The kernel and torch's attention on a sequence of one head, then on few tokens, where fixed costs are what is timed."""
        sizes = self.sizes
        lengths = [(SHORT, seq, sizes.head_dim, False) for seq in sizes.short]
        for table, whole, dim, backward in lengths + [(HEAD, sizes.long, *passes) for passes in sizes.passes]:
            problem = Problem(pattern=DENSE, seq=whole // self.divisor, heads=1, head_dim=dim, requires_grad=backward)
            what = f"one head of {problem.seq:,}, d={dim}{', backward' * backward}"
            facts = dict(what=what, seq=problem.seq, head_dim=dim, backward=backward)
            yield self.step(table, facts, beside("dense", problem))
        for recorded in (False, True):
            problem = Problem(
                pattern=DENSE, seq=sizes.few, heads=sizes.few_heads, head_dim=sizes.head_dim, requires_grad=recorded
            )
            facts = dict(what=f"{sizes.few:,} tokens{', with a graph' * recorded}", seq=sizes.few, recorded=recorded)
            yield self.step(FEW, facts, beside("dense", problem), call=partial(_public_call, recorded))

    def all_threads(self) -> Iterator[SuiteStep]:
        """The kernel on A, beside itself with one thread and in half types, and beside torch's dense attention; its memory."""
        problem = self.problem("A")
        dim, threads = problem.head_dim, min(self.sizes.threads, usable_cores())
        posed = dict.fromkeys(("one", "all"), (NATIVE, problem))
        facts: dict[str, Any] = dict(what="A", head_dim=dim, threads=threads)
        yield self.step("threads", facts, posed, one_thread=False, call=partial(_on_threads, problem))
        for names, backward in (("float32", "bfloat16", "float16"), False), (("float32", "bfloat16"), True):
            posed = {name: (NATIVE, self.problem("A", dtype=name, requires_grad=backward)) for name in names}
            facts = dict(what=f"d={dim}{', backward' * backward}", head_dim=dim, backward=backward)
            yield self.step("dtypes", facts, posed, one_thread=False, weight=4 if backward else 1)
        facts = dict(what=f"A beside dense attention, d={dim}, all threads", head_dim=dim)
        yield self.step("dense", facts, beside("dense", problem), one_thread=False)
        yield SuiteStep("memory", "A: memory", self.memory)

    def memory(self) -> list[Row]:
        """The bytes beyond results of a forward pass on A."""
        problem = self.problem("A")
        values = _held("scratch_bytes", problem, -results_bytes(problem))
        return [Row(table="memory", case=dict(what="A", head_dim=problem.head_dim), who=OURS, values=values)]

    def configuration(self, letter: str, causal: bool, backward: bool) -> SuiteStep:
        """Backends and LongNet's procedure on one configuration."""
        problem = self.problem(letter, is_causal=causal, requires_grad=backward)
        posed = beside("sdpa", problem)
        if letter in GATHERED and not backward:
            posed["gather"] = BASELINES["gather"], problem
        name = f"{letter}, d={problem.head_dim}"
        facts = dict(what=f"{name}{', causal' * causal}{', backward' * backward}", of=name, causal=causal, backward=backward)
        return self.step(FORMS, facts, posed)

    def grid(self, cells: Neighborhood, masked: bool) -> SuiteStep:
        """Neighborhoods beside a window that shows as many keys or, if `masked`, beside torch with a mask."""
        sides = " x ".join(map(str, cells.kernel_size)) + f", 1 in {cells.dilation[0]}" * (cells.dilation[0] > 1)
        grid = " x ".join(map(str, cells.shape))
        shape: dict[str, Any] = dict(seq=cells.tokens, heads=self.sizes.grid_heads, head_dim=self.sizes.head_dim)
        problem = Problem(pattern=Pattern.of(cells), **shape)
        window = Problem(pattern=Pattern.of(SlidingWindow((prod(cells.kernel_size) + 1) // 2)), **shape)
        other = {MASKED: (ways.MASKED, problem)} if masked else {WINDOW: (NATIVE, window)}
        words = "with a mask" if masked else "beside a window"
        facts = dict(what=f"neighborhoods of {sides} on {grid}, {words}", sides=sides, grid=grid)
        return self.step("masks" if masked else "grids", facts, {OURS: (NATIVE, problem)} | other, weight=4 if masked else 1)

    def million(self) -> list[Row]:
        """Forward passes in turns with A's, and the bytes of inputs, results and scratch of one."""
        problem = self.problem("million")
        posed = {OURS: (NATIVE, problem), "A": (NATIVE, self.problem("A"))}
        rows = self.compare("million", dict(what=f"{problem.seq:,} tokens"), posed, one_thread=False)
        values = _held("held_bytes", problem, 3 * output_bytes(problem))
        return [replace(row, values=row.values | values) if row.who == OURS and row.samples else row for row in rows]

    def encoder(self) -> list[Row]:
        """GigaPath's encoder trained, by its published procedure and by dilkit."""
        model, tiles = self.sizes.model, self.sizes.tiles // self.divisor
        facts = dict(what=f"{tiles:,} tiles, {model.depth} layers, bf16, backward, all threads", tiles=tiles)
        return rows_of("encoder", facts, encoder(model, self.sizes.tiles, self.divisor, min(self.repeats, 2)))

    def loads(self) -> Iterator[Load]:
        """Calls whose tasks fall to threads: a causal pattern, kinds that are mixed, a packed batch."""
        a = self.problem("A", is_causal=True)
        yield Load("A, causal", a)
        length, rate = self.sizes.dilated
        window, dilated = SlidingWindow(self.sizes.window // self.divisor), DilatedSegment(length // self.divisor, rate)
        mixed = Pattern.of(window, GlobalTokens(self.sizes.global_tokens), dilated)
        yield Load("mixed kinds", replace(a, is_causal=False, pattern=mixed))
        lengths = tuple(length // self.divisor for length in self.sizes.packed)
        yield Load("packed", replace(self.problem("G"), seq=max(lengths), varlen=True), lengths)

    def step(self, table: str, facts: Mapping[str, Any], posed: Posed, weight: float = 1.0, **options: Any) -> SuiteStep:
        """The step that compares implementations, with the options of `compare`."""
        return SuiteStep(table, f"{table}, {facts['what']}", partial(self.compare, table, facts, posed, **options), weight)

    def compare(
        self, table: str, facts: Mapping[str, Any], posed: Posed, one_thread: bool = True, call: MakeCall | None = None
    ) -> list[Row]:
        """Check, then time in turns, beside multiply-adds on as many threads; `call`: another function to time."""

        def admitted(one: Implementation, problem: Problem, inputs: Tensors) -> Entry:
            rate = torch.get_num_threads() * RATE.get(one.name, 50e9)
            return admit(one, problem, inputs, self.budget, lambda: one.flops(problem) / rate)

        def timer(calls: Mapping[str, Call]) -> dict[str, Samples]:
            """Short calls are repeated within a sample and give more of them, long ones give three."""
            flops = max(
                one.flops(replace(problem, pattern=DENSE) if one.quadratic else problem) for one, problem in posed.values()
            )
            if flops >= 5e10:
                return time_interleaved(calls, self.repeats if flops < 4e11 else min(self.repeats, 3), warmup=0)
            if self.quick:
                return time_interleaved(calls, self.repeats)
            return time_interleaved(calls, 2 * self.repeats, min_time=0.05)

        with torch_threads(1) if one_thread else nullcontext():
            return rows_of(table, facts, compare(posed, timer, admitted=admitted, call=call))


def beside(other: str, problem: Problem) -> dict[str, tuple[Implementation, Problem]]:
    """The kernel and a baseline or backend on one problem."""
    return {OURS: (NATIVE, problem), other: (BASELINES.get(other) or backend_implementations([other])[0], problem)}


def _public_call(recorded: bool, who: str, inputs: Tensors) -> Call:
    """The public call on the dense pattern, or torch's attention of the same tensors."""
    (q, k, v), (query, key, value) = inputs.qkv, (x.transpose(1, 2) for x in inputs.qkv)
    ours = lambda: dilated_attention(q, k, v, DENSE, backend="native")  # noqa: E731
    theirs = lambda: torch.nn.functional.scaled_dot_product_attention(query, key, value)  # noqa: E731
    return torch.set_grad_enabled(recorded)(ours if who == OURS else theirs)


def _on_threads(problem: Problem, who: str, inputs: Tensors) -> Call:
    call = partial(NATIVE.once, inputs, problem)
    return torch_threads(1)(call) if who == "one" else call


def _held(name: str, problem: Problem, beside: int) -> dict[str, Any]:
    """The peak bytes of a forward pass and those `beside`, under this name; or the reason why they are unknown."""
    call = partial(NATIVE.once, Tensors.random(problem), problem)
    call()
    try:
        return {name: memory.peak_memory(call) + beside}
    except memory.MeasureError as error:
        return dict(memory_note=str(error))
