"""`dilkit bench --suite cpu`: the CPU kernel beside torch's own, multiply-adds, dense attention and LongNet's procedure."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any, TypeVar

import torch

from dilkit import dilated_attention
from dilkit.backends.native.backend import instruction_set
from dilkit.environment import BF16_SETS
from dilkit.integrations.gigapath.config import ARCHITECTURES, SlideEncoderConfig
from dilkit.pattern import DilatedSegment, GlobalTokens, Pattern, SlidingWindow
from dilkit.problem import Problem
from dilkit.testing import memory
from dilkit.testing.tensors import Tensors
from dilkit.threads import torch_threads, usable_cores
from dilkit.tools.bench.configuration import CONFIGURATIONS, Configuration
from dilkit.tools.bench.suite import NO_OPTION, Sizes, Step, Suite
from dilkit.tools.bench.workloads.cpu_calls import Grid, Load, encoder, grid_ways, idle
from dilkit.tools.bench.workloads.cpu_report import FEW, FORMS, HEAD, OURS, REPORT, SHORT, TARGETS
from dilkit.tools.bench.workloads.ways import compared
from dilkit.tools.measure.baselines import BASELINES
from dilkit.tools.measure.case import admit, output_bytes, results_bytes, side_by_side
from dilkit.tools.measure.ceilings import MultiplyAdds
from dilkit.tools.measure.implementation import Implementation, backend_implementations
from dilkit.tools.measure.timing import Call, time_interleaved
from dilkit.tools.results.record import Samples
from dilkit.tools.results.rows import Row, rows_of

__all__ = ["REPORT", "CpuSizes", "CpuSuite"]
GATHERED = "AB"
"""The configurations that are also computed by gathering: with rates beyond the number of heads it mostly computes padding."""
RATE = {"gather": 25e9}
"""FLOP/s of a thread by which is foreseen whether a call goes beyond the budget; 50e9 where none is named."""
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
"""Variables that hold torch and the libraries in it to AVX2; these read them when they first compute."""
T = TypeVar("T")


@dataclass(frozen=True)
class CpuSizes(Sizes):
    """One head of `long` tokens, so many that the rate is the inner loops', and of `short` ones, so few that fixed costs show.

    `passes` over long ones: head_dim, and whether with the backward pass. `configurations`, by name, have `head_dim`, but for
    those that have another in `head_dims`. `threads`: of what is not measured on one. A call on `few` tokens with `few_heads`;
    `grids` of `grid_heads`, beside torch with a mask up to `masked` tokens; the slide encoder `model` on so many `tiles`. How
    tasks fall to `idle` threads: of A under causality; of a `window` with some `global_tokens` and `dilated` segments, length
    and rate; of `packed` sequences.
    """

    long: int = 4096
    short: tuple[int, ...] = (256, 512, 1024)
    passes: tuple[tuple[int, bool], ...] = ((48, False), (64, False), (128, False), (48, True), (64, True))
    configurations: Mapping[str, Configuration] = field(default_factory=lambda: CONFIGURATIONS)
    head_dim: int = 64
    head_dims: Mapping[str, int] = field(default_factory=lambda: {"G": 48})
    threads: int = 4
    few: int = 16
    few_heads: int = 8
    grids: tuple[Grid, ...] = (Grid((128, 128), 13), Grid((24, 24, 28), 7), Grid((128, 128), 7, 4), Grid((64, 512), 7, 4))
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

    def steps(self) -> Iterator[Step]:
        sizes = self.sizes
        lengths = [(SHORT, seq, sizes.head_dim, False) for seq in sizes.short]
        for table, seq, dim, backward in lengths + [(HEAD, sizes.long, *passes) for passes in sizes.passes]:
            what = f"one head, {seq:,} tokens, head_dim {dim}, {_passes(backward)}"
            yield Step(table, what, on_one_thread(partial(self.one_head, table, seq, dim, backward)))
        for recorded in (False, True):
            what = f"{sizes.few} tokens{', with a graph' * recorded}"
            yield Step(FEW, what, on_one_thread(partial(self.few, recorded)))
        grids = [grid.smaller(self.divisor) for grid in sizes.grids]
        for grid in grids:
            yield Step("grids", str(grid), on_one_thread(partial(self.grid, grid, False)))
        for load in self.loads():
            yield Step("idle", f"idle threads, {load.what}", partial(idle, load, sizes.idle, min(self.repeats, 2)))
        for name in ("threads", "dtypes", "memory", "dense"):
            yield Step(name, f"A: {name}", getattr(self, name))
        yield Step("dtypes", "A: dtypes, forward + backward", partial(self.dtypes, True), 4)
        for (causal, backward), letter in product(((False, False), (True, False), (False, True)), "BGADC"):
            what = f"{letter}{', causal' * causal}, {_passes(backward)}"
            yield Step(FORMS, what, on_one_thread(partial(self.configuration, letter, causal, backward)))
        for grid in grids:
            if grid.neighborhood.tokens <= sizes.masked:
                yield Step("masks", f"{grid}, by torch too", on_one_thread(partial(self.grid, grid, True)), 4)
        yield Step("million", "one million tokens", self.million)
        if instruction_set() == "amx":  # last: it takes gigabytes, of which the process keeps some
            yield Step("encoder", "GigaPath's encoder, forward + backward, bf16", self.encoder, 16)

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

    def one_head(self, table: str, seq: int, dim: int, backward: bool) -> list[Row]:
        """The kernel and torch's attention on a sequence of one head."""
        tokens = seq // self.divisor
        problem = Problem(pattern=Pattern.dense(), seq=tokens, heads=1, head_dim=dim, requires_grad=backward)
        facts = dict(
            what=f"one head of {tokens:,}, d={dim}{', backward' * backward}", seq=tokens, head_dim=dim, backward=backward
        )
        return self.compare(table, facts, {one.name: (one, problem) for one in (native(), BASELINES["dense"])})

    def configuration(self, letter: str, causal: bool, backward: bool) -> list[Row]:
        """Backends and LongNet's procedure on one configuration."""
        problem = self.problem(letter, is_causal=causal, requires_grad=backward)
        implementations = backend_implementations(["native", "sdpa"])
        if letter in GATHERED and not backward:
            implementations.append(BASELINES["gather"])
        of = f"{letter}, d={problem.head_dim}"
        facts = dict(what=f"{of}{', causal' * causal}{', backward' * backward}", of=of, causal=causal, backward=backward)
        moved = output_bytes(problem) * (8 if backward else 4)  # query, key, value, out; and their gradients
        return self.compare(FORMS, facts, {one.name: (one, problem) for one in implementations}, bytes=moved)

    def dense(self) -> list[Row]:
        """Torch's dense attention on the tokens of A."""
        problem = self.problem("A")
        what = f"A beside dense attention, d={problem.head_dim}, all threads"
        ways = {one.name: (one, problem) for one in (native(), BASELINES["dense"])}
        return self.compare("dense", dict(what=what, head_dim=problem.head_dim), ways)

    def dtypes(self, backward: bool = False) -> list[Row]:
        """The kernel in half types beside itself in fp32, on A; with a backward pass in bf16 alone."""
        names = ("float32", "bfloat16", "float16")[: 2 if backward else 3]
        ways = {dtype: (native(), self.problem("A", dtype=dtype, requires_grad=backward)) for dtype in names}
        dim = self.sizes.head_dim
        return self.compare("dtypes", dict(what=f"d={dim}{', backward' * backward}", head_dim=dim, backward=backward), ways)

    def threads(self) -> list[Row]:
        """The kernel with one thread beside itself with all, on A."""
        problem = self.problem("A")
        facts = dict(what="A", head_dim=problem.head_dim, threads=torch.get_num_threads())

        def call(who: str, inputs: Tensors) -> Call:
            whole = partial(native().once, inputs, problem)
            return on_one_thread(whole) if who == "one" else whole

        return self.compare("threads", facts, dict.fromkeys(("one", "all"), (native(), problem)), call)

    def few(self, recorded: bool) -> list[Row]:
        """The public call on so few tokens that it is what is timed, and torch's attention of the same tensors."""
        seq, heads, dim = self.sizes.few, self.sizes.few_heads, self.sizes.head_dim
        problem = Problem(pattern=Pattern.dense(), seq=seq, heads=heads, head_dim=dim, requires_grad=recorded)

        def call(who: str, inputs: Tensors) -> Call:
            (q, k, v), (query, key, value) = inputs.qkv, (x.transpose(1, 2) for x in inputs.qkv)
            ours = lambda: dilated_attention(q, k, v, problem.pattern, backend="native")  # noqa: E731
            theirs = lambda: torch.nn.functional.scaled_dot_product_attention(query, key, value)  # noqa: E731
            return torch.set_grad_enabled(recorded)(ours if who == OURS else theirs)

        facts = dict(what=f"{seq:,} tokens{', with a graph' * recorded}", seq=seq, recorded=recorded)
        return self.compare(FEW, facts, {one.name: (one, problem) for one in (native(), BASELINES["dense"])}, call)

    def grid(self, grid: Grid, masked: bool) -> list[Row]:
        """Neighborhoods beside a window, or beside torch with a mask."""
        ways = grid_ways(grid, masked, heads=self.sizes.grid_heads, head_dim=self.sizes.head_dim)
        facts = dict(what=f"{grid}, {'with a mask' if masked else 'beside a window'}", **grid.facts)
        return rows_of(
            "masks" if masked else "grids", facts, compared(ways, min(self.repeats, 3) if masked else 2 * self.repeats)
        )

    def memory(self) -> list[Row]:
        """Memory that a forward pass on A holds beyond out and lse."""
        problem = self.problem("A")
        facts = dict(what="A", head_dim=problem.head_dim)
        return [Row(table="memory", case=facts, who=OURS, values=_held("scratch_bytes", problem, -results_bytes(problem)))]

    def million(self) -> list[Row]:
        """Forward passes in turns with A's, and the bytes of inputs, results and scratch of one."""
        problem = self.problem("million")
        ways = {OURS: (native(), problem), "A": (native(), self.problem("A"))}
        rows = self.compare("million", dict(what=f"{problem.seq:,} tokens"), ways)
        values = _held("held_bytes", problem, 3 * output_bytes(problem))
        return [replace(row, values=row.values | values) if row.who == OURS and row.samples else row for row in rows]

    def encoder(self) -> list[Row]:
        """GigaPath's encoder trained, by its published procedure and by dilkit."""
        model, tiles = self.sizes.model, self.sizes.tiles
        facts = dict(what=f"{tiles // self.divisor:,} tiles, {model.depth} layers, bf16, backward, all threads")
        measured = encoder(model, tiles, self.divisor, min(self.repeats, 2))
        return rows_of("encoder", facts | dict(tiles=tiles // self.divisor), measured)

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

    def compare(
        self,
        table: str,
        facts: Mapping[str, Any],
        ways: Mapping[str, tuple[Implementation, Problem]],
        call: Callable[[str, Tensors], Call] | None = None,
        **values: Any,
    ) -> list[Row]:
        """Check, then time in turns, beside multiply-adds on as many threads; `call`: another function to time."""
        inputs = {problem: Tensors.random(problem) for _, problem in ways.values()}
        threads = torch.get_num_threads()
        entries = {
            who: admit(one, problem, inputs[problem], self.budget, partial(_expected_seconds, one, problem, threads))
            for who, (one, problem) in ways.items()
        }
        able = {who: way for who, way in ways.items() if entries[who].verdict == "measured"}
        flops = {who: one.flops(problem) for who, (one, problem) in able.items()}
        calls: dict[str, Call] = {
            who: call(who, inputs[problem]) if call else partial(one.once, inputs[problem], problem)
            for who, (one, problem) in able.items()
        }
        time = partial(self.time, max(flops.values(), default=0.0))
        measured = side_by_side(entries, calls, flops, MultiplyAdds(), time)
        return rows_of(table, facts, measured, dict.fromkeys(ways, values))

    def time(self, flops: float, calls: Mapping[str, Call]) -> dict[str, Samples]:
        """Short calls are repeated within a sample and give more of them, long ones give three."""
        if flops >= 5e10:
            return time_interleaved(calls, self.repeats if flops < 4e11 else min(self.repeats, 3), warmup=0)
        if self.quick:
            return time_interleaved(calls, self.repeats)
        return time_interleaved(calls, 2 * self.repeats, min_time=0.05)


def native() -> Implementation:
    """The CPU kernel."""
    return backend_implementations(["native"])[0]


def on_one_thread(call: Callable[[], T]) -> Callable[[], T]:
    """`call`, with torch set to one thread while it runs."""

    def alone() -> T:
        with torch_threads(1):
            return call()

    return alone


def _expected_seconds(implementation: Implementation, problem: Problem, threads: int) -> float:
    return implementation.flops(problem) / (RATE.get(implementation.name, 50e9) * threads)


def _held(name: str, problem: Problem, beside: int) -> dict[str, Any]:
    """The peak bytes of a forward pass and those `beside`, under this name; or the reason why they are unknown."""
    call = partial(native().once, Tensors.random(problem), problem)
    call()
    try:
        return {name: memory.peak_memory(call) + beside}
    except memory.MeasureError as error:
        return dict(memory_note=str(error))


def _passes(backward: bool) -> str:
    return "forward + backward" if backward else "forward"
