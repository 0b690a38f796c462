"""`dilkit bench --suite cpu`: the CPU kernel. Every step checks its implementations, then times them in turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

from dilkit.environment import BF16_SETS
from dilkit.pattern import Pattern
from dilkit.problem import Problem
from dilkit.testing import memory
from dilkit.testing.tensors import Tensors
from dilkit.threads import torch_threads, usable_cores
from dilkit.tools.bench.configuration import Configuration
from dilkit.tools.bench.suite import Step, Suite
from dilkit.tools.bench.target import GIB, MIB, Target, Values, least
from dilkit.tools.measure.baselines import BASELINES
from dilkit.tools.measure.case import CaseFields, admit, output_bytes, results_bytes, side_by_side
from dilkit.tools.measure.ceilings import Ceilings
from dilkit.tools.measure.implementation import Implementation, backend_implementations
from dilkit.tools.measure.timing import Call, time_interleaved
from dilkit.tools.results.kinds.cpu import CpuCase, CpuResult, DimCase, InnerLoops, Memory, Million
from dilkit.tools.results.record import Case, Entry, Samples

CONFIGURATIONS = {
    "A": Configuration(32768, (2048, 4096, 8192, 16384, 32768), (1, 2, 4, 8, 16)),
    "B": Configuration(16384, (512, 1024), (1, 2)),
    "C": Configuration(131072, (2048, 8192, 32768, 131072), (1, 4, 16, 64)),
    "D": Configuration(65536, (1024, 4096, 16384, 65536), (1, 4, 16, 64)),
    "million": Configuration(1 << 20, (2048, 8192, 32768, 131072, 524288), (1, 4, 16, 64, 256)),
}
HEAD_DIMS, MATMUL, THREADS = (64, 128), 4096, 4


@dataclass(frozen=True)
class CpuSuite(Suite[CpuResult]):
    """The shortest measurements first. --quick takes one head_dim alone."""

    NAME = "cpu"
    SUMMARY = "the CPU kernel against torch's own, matmul, dense attention and LongNet's published procedure"
    RECORD = CpuResult
    DIVISOR = 32

    def steps(self) -> Iterator[Step]:
        dims = HEAD_DIMS[:1] if self.quick else HEAD_DIMS
        for dim in dims:
            for measure in (self.inner_loops, self.threads, self.dtypes, self.memory, self.dense):
                name = measure.__name__
                yield Step(name, f"{name.replace('_', ' ')}, head_dim {dim}", partial(measure, dim))
        for backward, letter, dim, causal in product((False, True), "BADC", dims, (False, True)):
            what = f"{letter}, head_dim {dim}{', causal' * causal}, {'forward + backward' if backward else 'forward'}"
            yield Step("cases", what, partial(self.case, letter, dim, causal, backward))
        yield Step("million", "one million tokens", self.million)

    @contextmanager
    def prepared(self) -> Iterator[dict[str, Any]]:
        with torch_threads(min(THREADS, usable_cores())) as count:
            yield dict(isa=instruction_set(), thread_count=count)

    def targets(self) -> tuple[Target[CpuResult], ...]:
        return TARGETS

    def wrong(self, result: CpuResult) -> bool:
        """Whether an implementation was wrong or failed."""
        cases: tuple[Case, ...] = (*result.cases, *result.dense, *result.dtypes)
        return any(entry.verdict in ("wrong", "failed") for case in cases for entry in case.entries.values())

    def problem(self, name: str, dim: int, **fields: Any) -> Problem:
        """The problem of a configuration."""
        return CONFIGURATIONS[name].problem(dim, self.divisor, **fields)

    def case(self, letter: str, dim: int, causal: bool, backward: bool) -> CpuCase:
        """Backends and LongNet's procedure on one configuration, beside a matmul."""
        problem = self.problem(letter, dim, is_causal=causal, requires_grad=backward)
        implementations = backend_implementations(["native", "sdpa"])
        if not backward or letter in "AB":  # on the others it takes minutes
            implementations.append(BASELINES["gather"])
        found = self.compare(implementations, problem)
        return CpuCase(config=letter, seq=problem.seq, head_dim=dim, is_causal=causal, backward=backward, **found)

    def dense(self, dim: int) -> DimCase:
        """Torch's dense attention on the tokens of A."""
        return DimCase(head_dim=dim, **self.compare([native(), BASELINES["dense"]], self.problem("A", dim)))

    def compare(self, implementations: list[Implementation], problem: Problem) -> CaseFields:
        """Check, then time in turns."""
        inputs = Tensors.random(problem)
        entries = {i.name: self.admit(i, problem, inputs) for i in implementations}
        able = [i for i in implementations if entries[i.name].verdict == "measured"]
        flops = {i.name: i.flops(problem) for i in able}
        calls = {i.name: partial(i.once, inputs, problem) for i in able}
        ceilings = Ceilings("float32", size=MATMUL // (self.divisor))
        return side_by_side(entries, calls, flops, problem, ceilings, partial(self.time, max(flops.values(), default=0.0)))

    def time(self, flops: float, calls: Mapping[str, Call]) -> dict[str, Samples]:
        """Short calls are repeated within a sample, long ones get three samples."""
        repeats = self.repeats if flops < 4e11 else min(self.repeats, 3)
        return time_interleaved(calls, repeats, warmup=0, min_time=0.3 if flops < 1e11 and not self.quick else 0.0)

    def admit(self, implementation: Implementation, problem: Problem, inputs: Tensors) -> Entry:
        """The beginning of an entry: the verdict, and the check that it rests on."""
        rate = 60e9 if implementation.name == "gather" else 120e9
        return admit(implementation, problem, inputs, self.budget, lambda: implementation.flops(problem) / rate)

    def dtypes(self, dim: int) -> DimCase:
        """The kernel in half types beside itself in fp32, on A."""
        problems = {dtype: self.problem("A", dim, dtype=dtype) for dtype in ("float32", "bfloat16", "float16")}
        inputs = {dtype: Tensors.random(problem) for dtype, problem in problems.items()}
        entries = {dtype: self.admit(native(), problem, inputs[dtype]) for dtype, problem in problems.items()}
        calls = {dtype: partial(native().once, inputs[dtype], problem) for dtype, problem in problems.items()}
        timed = self.time(native().flops(problems["float32"]), calls)
        found = {dtype: replace(entry, time=timed[dtype]) for dtype, entry in entries.items()}
        return DimCase(head_dim=dim, isa=instruction_set(), entries=found)

    def threads(self, dim: int) -> DimCase:
        """The kernel with one thread beside itself with all, on A."""
        import torch

        problem = self.problem("A", dim)
        call = partial(native().once, Tensors.random(problem), problem)
        timed = self.time(native().flops(problem), {"one": on_one_thread(call), "all": call})
        entries = {name: Entry(time=samples) for name, samples in timed.items()}
        return DimCase(head_dim=dim, threads=torch.get_num_threads(), entries=entries)

    def memory(self, dim: int) -> Memory:
        """What a forward pass on A holds beyond out and lse."""
        problem = self.problem("A", dim)
        call = partial(native().once, Tensors.random(problem), problem)
        call()
        try:
            return Memory(head_dim=dim, scratch_bytes=memory.peak_memory(call) - results_bytes(problem))
        except memory.MeasureError as error:
            return Memory(head_dim=dim, scratch_bytes=None, why=str(error))

    def inner_loops(self, dim: int) -> InnerLoops:
        """On one thread: fused multiply-adds from registers, and dense attention of the kernel, whose FLOPs are all done."""
        from dilkit.backends.native import _native

        isa, rounds = instruction_set(), 1 << 20
        problem = Problem(pattern=Pattern.dense(), seq=256 if self.quick else 4096, heads=1, head_dim=dim)
        attention = partial(native().once, Tensors.random(problem), problem)
        with torch_threads(1):
            calls = dict(fma=partial(_native.multiply_add, isa, rounds), tile=attention)
            timed = time_interleaved(calls, 2 * self.repeats, min_time=0.02)
        fma = _native.multiply_add(isa, rounds) / timed["fma"].median_s
        tile = native().flops(problem) / timed["tile"].median_s
        return InnerLoops(head_dim=dim, isa=isa, fma_gflops=fma / 1e9, tile_gflops=tile / 1e9, entries=timed)

    def million(self) -> Million:
        """One forward pass, and what it holds in all: inputs, results, scratch."""
        problem = self.problem("million", HEAD_DIMS[0])
        inputs = Tensors.random(problem)
        entry, call = self.admit(native(), problem, inputs), partial(native().once, inputs, problem)
        time = time_interleaved({"": call}, repeats=2, warmup=0)[""]
        try:
            held: int | None = memory.peak_memory(call) + 3 * output_bytes(problem)
        except memory.MeasureError:
            held = None
        gflops = native().flops(problem) / time.median_s / 1e9
        return Million(seq=problem.seq, entry=entry, time=time, gflops=gflops, held_bytes=held)


def native() -> Implementation:
    """The CPU kernel."""
    return backend_implementations(["native"])[0]


def instruction_set() -> str:
    """Whose code the kernel runs."""
    from dilkit.backends.native import backend

    return backend.instruction_set()


def on_one_thread(call: Callable[[], Any]) -> Callable[[], Any]:
    """`call`, with torch set to one thread while it runs."""

    def alone() -> Any:
        with torch_threads(1):
            return call()

    return alone


def _matmul_fraction(config: str, result: CpuResult) -> Values:
    cases = [c for c in result.cases if (c.config, c.is_causal, c.backward) == (config, False, False)]
    return {str(c.head_dim): c.entries["native"].matmul_fraction or 0.0 for c in cases if c.timed("native")}


def _against_sdpa(backward: bool, causal: tuple[bool, ...], result: CpuResult) -> Values:
    cases = [c for c in result.cases if c.backward == backward and c.is_causal in causal and c.timed("native", "sdpa")]
    return least((str(c.head_dim), c.ratio("sdpa", "native")) for c in cases)


def _ratio(steps: str, slow: str, fast: str, result: CpuResult) -> Values:
    cases: tuple[DimCase, ...] = getattr(result, steps)
    return {str(case.head_dim): case.ratio(slow, fast) for case in cases if case.timed(slow, fast)}


def _peak_fraction(result: CpuResult) -> Values:
    return {str(loops.head_dim): loops.tile_gflops / loops.fma_gflops for loops in result.inner_loops}


def _scratch(result: CpuResult) -> Values:
    return {str(m.head_dim): m.scratch_bytes / MIB for m in result.memory if m.scratch_bytes is not None}


def _held(result: CpuResult) -> Values:
    return {"64": max(held) / GIB} if (held := [m.held_bytes for m in result.million if m.held_bytes]) else {}


def _against_a(result: CpuResult) -> Values:
    cases = [c for c in result.cases if (c.config, c.head_dim, c.is_causal, c.backward) == ("A", 64, False, False)]
    rates = [c.entries["native"].gflops for c in cases if c.timed("native")]
    return {"64": result.million[0].gflops / rates[0]} if rates and rates[0] and result.million else {}


def _no_pairs(result: CpuResult) -> str | None:
    sets = {step.isa for step in result.dtypes}
    return None if sets and sets <= set(BF16_SETS) else "this CPU has no dot products of bf16 pairs"


def _few_cores(result: CpuResult) -> str | None:
    threads = min((step.threads or 0 for step in result.threads), default=4)
    return None if threads >= 4 else f"{threads} cores"


TARGETS: tuple[Target[CpuResult], ...] = (
    Target("A: fp32 forward, nominal rate over torch's fp32 matmul", 1.2, 1.6, partial(_matmul_fraction, "A")),
    Target("B: the same", 1.0, 1.4, partial(_matmul_fraction, "B")),
    Target("forward: sdpa's time over native's, worst of A-D", 1.6, 2.5, partial(_against_sdpa, False, (False,))),
    Target("the same, causal", 2.0, 3.5, partial(_against_sdpa, False, (True,))),
    Target("forward + backward: the same, causal and not", 1.6, 2.5, partial(_against_sdpa, True, (False, True))),
    Target("A: bf16 over its own fp32 speed", 1.4, 1.9, partial(_ratio, "dtypes", "float32", "bfloat16"), missing=_no_pairs),
    Target("A: four threads over one", 3.4, 3.8, partial(_ratio, "threads", "one", "all"), missing=_few_cores),
    Target("inner loops over the core's fused multiply-add peak", 0.60, 0.75, _peak_fraction, unit=""),
    Target("A: forward's memory beyond out and lse", 8, 2, _scratch, unit=" MiB", lower=True),
    Target("A: torch's dense attention over native", 8, 12, partial(_ratio, "dense", "dense", "native")),
    Target("one million tokens, forward: memory in all", 16, 16, _held, unit=" GiB", lower=True),
    Target("one million tokens: nominal rate over A's", None, 1.0, _against_a),
)
