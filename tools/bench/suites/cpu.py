"""`dilkit bench --suite cpu`: the CPU kernel beside torch's own, multiply-adds, dense attention and LongNet's procedure."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from dilkit.backends.native.backend import instruction_set
from dilkit.environment import BF16_SETS
from dilkit.integrations.gigapath import ARCHITECTURES, SlideEncoder, SlideEncoderConfig
from dilkit.pattern import Neighborhood, Pattern
from dilkit.problem import Problem
from dilkit.testing import memory
from dilkit.testing.tensors import Tensors
from dilkit.threads import torch_threads, usable_cores
from dilkit.tools.bench.configuration import CONFIGURATIONS, Configuration
from dilkit.tools.bench.suite import NO_OPTION, Suite, SuiteSizes, SuiteStep
from dilkit.tools.bench.suites.slides import CHECKED, published_embedding, shorter, slide
from dilkit.tools.bench.workloads import ways
from dilkit.tools.bench.workloads.cpu_report import FORMS, HEAD, MASKED, OURS, PUBLISHED, REPORT, SHORT, TARGETS
from dilkit.tools.bench.workloads.ways import NATIVE
from dilkit.tools.measure.baselines import BASELINES
from dilkit.tools.measure.case import CaseFields, Posed, admit, agreement, checked, compare, in_turns, output_bytes, results_bytes
from dilkit.tools.measure.implementation import Implementation, backend_implementations
from dilkit.tools.measure.timing import Call, time_interleaved
from dilkit.tools.results.rows import ResultRow, rows_of

__all__ = ["REPORT", "CpuSizes", "CpuSuite"]
GATHERED = "AB"
"""The configurations that are also computed by gathering: with rates beyond the number of heads it mostly computes padding."""
RATE = 50e9
"""FLOP/s of a thread by which is foreseen whether a call goes beyond the budget."""
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
"""Variables that hold torch and the libraries in it to AVX2; these read them when they first compute."""
GRIDS = tuple(Neighborhood(*grid) for grid in (((128, 128), 13), ((24, 24, 28), 7), ((128, 128), 7, 4)))
DENSE = Pattern.dense()
AGREEMENT_BF16 = 5e-2
"""Largest difference of results of many layers in bfloat16, which has eight bits, in units of the largest value."""


@dataclass(frozen=True)
class CpuSizes(SuiteSizes):
    """One head of `long` tokens, where inner loops decide, and of `short` ones, where fixed costs do.

    `passes` over long ones: head_dim, and True with a backward pass. `grids` stand beside torch with a mask.
    """

    long: int = 4096
    short: tuple[int, ...] = (256, 512, 1024)
    passes: tuple[tuple[int, bool], ...] = ((48, False), (64, False), (128, False), (48, True), (64, True))
    configurations: Mapping[str, Configuration] = field(default_factory=lambda: CONFIGURATIONS)
    head_dim: int = 64
    head_dims: Mapping[str, int] = field(default_factory=lambda: {"G": 48})
    threads: int = field(default=4, kw_only=True)
    grids: tuple[Neighborhood, ...] = GRIDS
    grid_heads: int = 4
    model: SlideEncoderConfig = ARCHITECTURES["gigapath_slide_enc12l768d"]
    tiles: int = 10_000


@dataclass(frozen=True)
class CpuSuite(Suite):
    """The shortest measurements first; on one thread, but for those of threads, dtypes, dense attention and a million tokens."""

    NAME = "cpu"
    SUMMARY = "the CPU kernel against torch's own, multiply-adds, dense attention and LongNet's published procedure"
    TARGETS = TARGETS

    budget: float = 90.0
    sizes: CpuSizes = field(default_factory=CpuSizes, metadata=NO_OPTION)

    def steps(self) -> Iterator[SuiteStep]:
        yield from self.heads()
        yield from self.all_threads()
        for (causal, backward), letter in product(((False, False), (True, False), (False, True)), "BGADC"):
            yield self.configuration(letter, causal, backward)
        yield from (self.grid(smaller(cells, self.divisor)) for cells in self.sizes.grids)
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
        head_dim = self.sizes.head_dims.get(name, self.sizes.head_dim)
        return self.sizes.configurations[name].problem(head_dim, self.divisor, **fields)

    def heads(self) -> Iterator[SuiteStep]:
        sizes = self.sizes
        lengths = [(SHORT, seq, sizes.head_dim, False) for seq in sizes.short]
        for table, whole, dim, backward in lengths + [(HEAD, sizes.long, *passes) for passes in sizes.passes]:
            problem = Problem(pattern=DENSE, seq=whole // self.divisor, heads=1, head_dim=dim, requires_grad=backward)
            what = f"one head of {problem.seq:,}, d={dim}{', backward' * backward}"
            facts = dict(what=what, seq=problem.seq, head_dim=dim, backward=backward)
            yield self.step(table, facts, beside("dense", problem))

    def all_threads(self) -> Iterator[SuiteStep]:
        """Time the kernel on A in all dtypes and beside torch's dense attention; measure its memory."""
        problem = self.problem("A")
        dim = problem.head_dim
        for names, backward in (("float32", "bfloat16", "float16"), False), (("float32", "bfloat16"), True):
            posed = {name: (NATIVE, self.problem("A", dtype=name, requires_grad=backward)) for name in names}
            facts = dict[str, Any](what=f"d={dim}{', backward' * backward}", head_dim=dim, backward=backward)
            yield self.step("dtypes", facts, posed, one_thread=False, weight=4 if backward else 1)
        facts = dict(what=f"A beside dense attention, d={dim}, all threads", head_dim=dim)
        yield self.step("dense", facts, beside("dense", problem), one_thread=False)
        yield SuiteStep("memory", "A: memory", self.memory)

    def memory(self) -> list[ResultRow]:
        problem = self.problem("A")
        values = _held("scratch_bytes", problem, -results_bytes(problem))
        return [ResultRow(table="memory", case=dict(what="A", head_dim=problem.head_dim), who=OURS, values=values)]

    def configuration(self, letter: str, causal: bool, backward: bool) -> SuiteStep:
        problem = self.problem(letter, is_causal=causal, requires_grad=backward)
        posed = beside("sdpa", problem)
        if letter in GATHERED and not backward:
            posed["gather"] = BASELINES["gather"], problem
        name = f"{letter}, d={problem.head_dim}"
        facts = dict(what=f"{name}{', causal' * causal}{', backward' * backward}", of=name, causal=causal, backward=backward)
        return self.step(FORMS, facts, posed)

    def grid(self, cells: Neighborhood) -> SuiteStep:
        sides = " x ".join(map(str, cells.kernel_size)) + f", 1 in {cells.dilation[0]}" * (cells.dilation[0] > 1)
        grid = " x ".join(map(str, cells.shape))
        pattern, heads = Pattern.of(cells), self.sizes.grid_heads
        problem = Problem(pattern=pattern, seq=cells.tokens, heads=heads, head_dim=self.sizes.head_dim)
        facts = dict(what=f"neighborhoods of {sides} on {grid}, with a mask", sides=sides, grid=grid)
        return self.step("masks", facts, {OURS: (NATIVE, problem), MASKED: (ways.MASKED, problem)}, weight=4)

    def million(self) -> list[ResultRow]:
        """Forward passes in turns with A's, and the bytes of inputs, results and scratch of one."""
        problem = self.problem("million")
        posed = {OURS: (NATIVE, problem), "A": (NATIVE, self.problem("A"))}
        rows = self.compare("million", dict(what=f"{problem.seq:,} tokens"), posed, one_thread=False)
        values = _held("held_bytes", problem, 3 * output_bytes(problem))
        return [replace(row, values=row.values | values) if row.who == OURS and row.samples else row for row in rows]

    def encoder(self) -> list[ResultRow]:
        model, tiles = self.sizes.model, self.sizes.tiles // self.divisor
        facts = dict(what=f"{tiles:,} tiles, {model.depth} layers, bf16, backward, all threads", tiles=tiles)
        return rows_of("encoder", facts, encoder(model, self.sizes.tiles, self.divisor, min(self.repeats, 2)))

    def step(self, table: str, facts: Mapping[str, Any], posed: Posed, weight: float = 1.0, **options: Any) -> SuiteStep:
        return SuiteStep(table, f"{table}, {facts['what']}", partial(self.compare, table, facts, posed, **options), weight)

    def compare(self, table: str, facts: Mapping[str, Any], posed: Posed, one_thread: bool = True) -> list[ResultRow]:
        """Check, then time in turns, beside multiply-adds on as many threads."""

        def admitted(one: Implementation, problem: Problem, inputs: Tensors) -> ResultRow:
            return admit(one, problem, inputs, self.budget, lambda: one.flops(problem) / RATE / torch.get_num_threads())

        def timer(calls: Mapping[str, Call]) -> dict[str, ResultRow]:
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
            return rows_of(table, facts, compare(posed, timer, admitted=admitted))


def beside(other: str, problem: Problem) -> dict[str, tuple[Implementation, Problem]]:
    return {OURS: (NATIVE, problem), other: (BASELINES.get(other) or backend_implementations([other])[0], problem)}


def _held(name: str, problem: Problem, beside: int) -> dict[str, Any]:
    """Return the peak bytes of a forward pass plus `beside`, under this name, or why they are unknown."""
    call = partial(NATIVE.once, Tensors.random(problem), problem)
    call()
    try:
        return {name: memory.peak_memory(call) + beside}
    except memory.MeasureError as error:
        return dict(memory_note=str(error))


def smaller(cells: Neighborhood, divisor: int) -> Neighborhood:
    """Return the neighborhoods on a grid of about so many times fewer cells, which still has room for one."""
    part = round(divisor ** (1 / len(cells.shape)))
    least = [kernel * dilation for kernel, dilation in zip(cells.kernel_size, cells.dilation, strict=True)]
    return replace(cells, shape=tuple(max(size // part, room) for size, room in zip(cells.shape, least, strict=True)))


def encoder(config: SlideEncoderConfig, tiles: int, divisor: int, repeats: int) -> CaseFields:
    """GigaPath's encoder trained in bf16, by its published procedure and by dilkit: compared on a short slide, then timed."""
    few = min(tiles // divisor, CHECKED)
    theirs, ours = (call() for call in _trainings(shorter(config, max(tiles // CHECKED, divisor)), few).values())
    results = zip(("embedding", "gradients"), ours, theirs, strict=True)
    entry = checked([agreement(what, own, published, few, AGREEMENT_BF16) for what, own, published in results])
    calls = _trainings(shorter(config, divisor), tiles // divisor)
    return in_turns(dict.fromkeys(calls, entry), calls, repeats)


def _trainings(config: SlideEncoderConfig, tiles: int) -> dict[str, Callable[[], tuple[Tensor, Tensor]]]:
    """Both ways to train one model on one slide; each returns the embedding, and the gradients of all weights, joined."""
    torch.manual_seed(0)
    model = SlideEncoder(config).eval()
    inputs = slide(tiles, config)
    dout = torch.randn(1, config.embed_dim)

    def trained(forward: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
        """One pass forward and one backward, under autocast as GigaPath is trained."""
        weights = [*model.parameters()]
        with torch.autocast("cpu", torch.bfloat16):
            out = forward(*inputs)
        gradients = torch.autograd.grad(out, weights, dout.to(out.dtype), materialize_grads=True)
        return out.detach(), torch.cat([gradient.flatten() for gradient in gradients])

    theirs = partial(trained, partial(published_embedding, model))
    return {PUBLISHED: theirs, OURS: partial(trained, lambda *slides: model(*slides)[0])}
