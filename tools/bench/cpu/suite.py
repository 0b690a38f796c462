"""`dilkit bench --suite cpu`: the CPU kernel. Every step checks its implementations, then times them in turns."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any, TypeVar

from dilkit.pattern import DilatedSegment, GlobalTokens, Pattern, SlidingWindow
from dilkit.problem import Problem
from dilkit.testing import memory
from dilkit.testing.tensors import Tensors
from dilkit.threads import torch_threads, usable_cores
from dilkit.tools.bench.cpu import machines, targets
from dilkit.tools.bench.cpu.cases import CpuSizes
from dilkit.tools.bench.cpu.encoder import encoder
from dilkit.tools.bench.cpu.grids import beside_mask, beside_window
from dilkit.tools.bench.cpu.idle import Load, idle
from dilkit.tools.bench.cpu.measured import CpuCase, DimCase, FewCase, HeadCase, Memory, Million
from dilkit.tools.bench.cpu.record import CpuResult
from dilkit.tools.bench.overhead import call_pairs
from dilkit.tools.bench.suite import NO_OPTION, Step, Suite
from dilkit.tools.measure.baselines import BASELINES
from dilkit.tools.measure.case import CaseFields, admit, output_bytes, results_bytes, side_by_side
from dilkit.tools.measure.ceilings import MultiplyAdds
from dilkit.tools.measure.implementation import Implementation, backend_implementations
from dilkit.tools.measure.timing import Call, time_interleaved
from dilkit.tools.results.record import Entry, Samples

GATHERED = "AB"
"""The configurations that are also computed by gathering: with rates beyond the number of heads it mostly computes padding."""
RATE = {"gather": 25e9}
"""FLOP/s of a thread by which is foreseen whether a call goes beyond the budget; 50e9 where none is named."""
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
"""What holds torch and the libraries in it to AVX2. They read it when they first compute."""
T = TypeVar("T")


@dataclass(frozen=True)
class CpuSuite(Suite[CpuResult]):
    """The shortest measurements first; on one thread, but for those of threads, dtypes, dense attention and a million tokens."""

    NAME = "cpu"
    SUMMARY = "the CPU kernel against torch's own, multiply-adds, dense attention and LongNet's published procedure"
    RECORD = CpuResult
    TARGETS = targets.TARGETS

    budget: float = 90.0
    sizes: CpuSizes = field(default_factory=CpuSizes, metadata=NO_OPTION)

    def steps(self) -> Iterator[Step]:
        lengths = [(seq, self.sizes.head_dim, False) for seq in self.sizes.short]
        for seq, dim, backward in lengths + [(self.sizes.long, *passes) for passes in self.sizes.passes]:
            what = f"one head, {seq:,} tokens, head_dim {dim}, {_passes(backward)}"
            yield Step("one_head", what, on_one_thread(partial(self.one_head, seq, dim, backward)))
        for recorded in (False, True):
            what = f"{self.sizes.few} tokens{', with a graph' * recorded}"
            yield Step("few", what, on_one_thread(partial(self.few, recorded)))
        grids = [grid.of(self.divisor) for grid in self.sizes.grids]
        heads = dict(heads=self.sizes.grid_heads, head_dim=self.sizes.head_dim)
        for grid in grids:
            yield Step("grids", str(grid), on_one_thread(partial(beside_window, grid, 2 * self.repeats, **heads)))
        for load in self.loads():
            yield Step("idle", f"idle threads, {load.what}", partial(idle, load, self.sizes.idle, min(self.repeats, 2)))
        for name in ("threads", "dtypes", "memory", "dense"):
            yield Step(name, f"A: {name}", getattr(self, name))
        yield Step("dtypes", "A: dtypes, forward + backward", partial(self.dtypes, True), 4)
        for (causal, backward), letter in product(((False, False), (True, False), (False, True)), "BGADC"):
            what = f"{letter}{', causal' * causal}, {_passes(backward)}"
            yield Step("cases", what, on_one_thread(partial(self.case, letter, causal, backward)))
        for grid in grids:
            if grid.neighborhood.tokens <= self.sizes.masked:
                masked = partial(beside_mask, grid, min(self.repeats, 3), **heads)
                yield Step("masked", f"{grid}, by torch too", on_one_thread(masked), 4)
        yield Step("million", "one million tokens", self.million)
        if instruction_set() == "amx":  # last: it takes gigabytes, of which the process keeps some
            trained = partial(encoder, self.sizes.model, self.sizes.tiles, self.divisor, min(self.repeats, 2))
            yield Step("encoder", "GigaPath's encoder, forward + backward, bf16", trained, 16)

    @contextmanager
    def prepared(self) -> Iterator[dict[str, Any]]:
        import torch

        isa = instruction_set()
        held = {name: value for name, value in AVX2.items() if isa == "avx2" and name not in os.environ}
        os.environ.update(held)
        try:
            with torch_threads(min(self.sizes.threads, usable_cores())) as count:
                yield dict(isa=isa, torch_isa=torch.backends.cpu.get_cpu_capability().lower(), thread_count=count)
        finally:
            for name in held:
                del os.environ[name]

    def merged(self, results: Sequence[CpuResult]) -> CpuResult:
        return machines.merged(results)

    def wrong(self, result: CpuResult) -> bool:
        """Whether an implementation was wrong or failed."""
        cases = [*(case for _, case in result.titled()), *result.dtypes]
        entries = [*(entry for case in cases for entry in case.entries.values()), *(step.entry for step in result.million)]
        return any(entry.verdict in ("wrong", "failed") for entry in entries)

    def problem(self, name: str, **fields: Any) -> Problem:
        """The problem of a configuration."""
        head_dim = self.sizes.head_dims.get(name, self.sizes.head_dim)
        return self.sizes.configurations[name].problem(head_dim, self.divisor, **fields)

    def one_head(self, seq: int, dim: int, backward: bool) -> HeadCase:
        """The kernel and torch's attention on a sequence of one head."""
        tokens = seq // self.divisor
        problem = Problem(pattern=Pattern.dense(), seq=tokens, heads=1, head_dim=dim, requires_grad=backward)
        case = self.compare([native(), BASELINES["dense"]], problem)
        return HeadCase(seq=tokens, head_dim=dim, backward=backward, **case)

    def case(self, letter: str, causal: bool, backward: bool) -> CpuCase:
        """Backends and LongNet's procedure on one configuration."""
        problem = self.problem(letter, is_causal=causal, requires_grad=backward)
        implementations = backend_implementations(["native", "sdpa"])
        if letter in GATHERED and not backward:
            implementations.append(BASELINES["gather"])
        sizes = dict(seq=problem.seq, heads=problem.heads, head_dim=problem.head_dim, threads=1)
        case = self.compare(implementations, problem)
        return CpuCase(config=letter, **sizes, is_causal=causal, backward=backward, **case)

    def dense(self) -> DimCase:
        """Torch's dense attention on the tokens of A."""
        problem = self.problem("A")
        return DimCase(head_dim=problem.head_dim, **self.compare([native(), BASELINES["dense"]], problem))

    def compare(self, implementations: list[Implementation], problem: Problem) -> CaseFields:
        """Check, then time in turns, beside multiply-adds on as many threads."""
        inputs = Tensors.random(problem)
        entries = {i.name: self.admit(i, problem, inputs) for i in implementations}
        able = [i for i in implementations if entries[i.name].verdict == "measured"]
        flops = {i.name: i.flops(problem) for i in able}
        calls = {i.name: partial(i.once, inputs, problem) for i in able}
        time = partial(self.time, max(flops.values(), default=0.0))
        return side_by_side(entries, calls, flops, problem, MultiplyAdds(), time)

    def time(self, flops: float, calls: Mapping[str, Call]) -> dict[str, Samples]:
        """Short calls are repeated within a sample and give more of them, long ones give three."""
        if flops >= 5e10:
            return time_interleaved(calls, self.repeats if flops < 4e11 else min(self.repeats, 3), warmup=0)
        if self.quick:
            return time_interleaved(calls, self.repeats)
        return time_interleaved(calls, 2 * self.repeats, min_time=0.05)

    def admit(self, implementation: Implementation, problem: Problem, inputs: Tensors) -> Entry:
        """The beginning of an entry: the verdict, and the check that it rests on."""
        import torch

        rate = RATE.get(implementation.name, 50e9) * torch.get_num_threads()
        return admit(implementation, problem, inputs, self.budget, lambda: implementation.flops(problem) / rate)

    def dtypes(self, backward: bool = False) -> DimCase:
        """The kernel in half types beside itself in fp32, on A; with a backward pass in bf16 alone."""
        names = ("float32", "bfloat16", "float16")[: 2 if backward else 3]
        problems = {dtype: self.problem("A", dtype=dtype, requires_grad=backward) for dtype in names}
        inputs = {dtype: Tensors.random(problem) for dtype, problem in problems.items()}
        entries = {dtype: self.admit(native(), problem, inputs[dtype]) for dtype, problem in problems.items()}
        able = [dtype for dtype, entry in entries.items() if entry.verdict == "measured"]
        calls = {dtype: partial(native().once, inputs[dtype], problems[dtype]) for dtype in able}
        timed = self.time(native().flops(problems["float32"]), calls)
        timed_entries = entries | {dtype: replace(entries[dtype], time=samples) for dtype, samples in timed.items()}
        return DimCase(head_dim=self.sizes.head_dim, backward=backward, isa=instruction_set(), entries=timed_entries)

    def threads(self) -> DimCase:
        """The kernel with one thread beside itself with all, on A."""
        import torch

        problem = self.problem("A")
        call = partial(native().once, Tensors.random(problem), problem)
        timed = self.time(native().flops(problem), {"one": on_one_thread(call), "all": call})
        entries = {name: Entry(time=samples) for name, samples in timed.items()}
        return DimCase(head_dim=problem.head_dim, threads=torch.get_num_threads(), entries=entries)

    def memory(self) -> Memory:
        """What a forward pass on A holds beyond out and lse."""
        problem = self.problem("A")
        call = partial(native().once, Tensors.random(problem), problem)
        call()
        try:
            return Memory(head_dim=problem.head_dim, scratch_bytes=memory.peak_memory(call) - results_bytes(problem))
        except memory.MeasureError as error:
            return Memory(head_dim=problem.head_dim, scratch_bytes=None, why=str(error))

    def million(self) -> Million:
        """Forward passes in turns with A's, and what one holds in all: inputs, results, scratch."""
        ours, problems = native(), {"native": self.problem("million"), "A": self.problem("A")}
        inputs = {name: Tensors.random(problem) for name, problem in problems.items()}
        admitted = {name: self.admit(ours, problem, inputs[name]) for name, problem in problems.items()}
        seq = problems["native"].seq
        if {entry.verdict for entry in admitted.values()} != {"measured"}:
            return Million(seq=seq, entry=admitted["native"], a=admitted["A"])
        calls = {name: partial(ours.once, inputs[name], problem) for name, problem in problems.items()}
        timed = time_interleaved(calls, min(self.repeats, 3), warmup=0)
        rates = {name: ours.flops(problem) / timed[name].median_s / 1e9 for name, problem in problems.items()}
        a = replace(admitted["A"], time=timed["A"], gflops=rates["A"])
        try:
            held: int | None = memory.peak_memory(calls["native"]) + 3 * output_bytes(problems["native"])
        except memory.MeasureError:
            held = None
        return Million(seq=seq, entry=admitted["native"], a=a, time=timed["native"], gflops=rates["native"], held_bytes=held)

    def few(self, recorded: bool) -> FewCase:
        """The public call on so few tokens that it is what is timed, and torch's attention of the same tensors."""
        import torch

        seq, heads, dim = self.sizes.few, self.sizes.few_heads, self.sizes.head_dim
        problem = Problem(pattern=Pattern.dense(), seq=seq, heads=heads, head_dim=dim, requires_grad=recorded)
        inputs = Tensors.random(problem)
        entries = {one.name: self.admit(one, problem, inputs) for one in (native(), BASELINES["dense"])}
        q, k, v = (x.transpose(1, 2) for x in inputs.qkv)
        _, pairs = call_pairs(problem, "native")
        ours, _ = pairs["forward, gradients recorded" if recorded else "forward, no gradients"]
        theirs = torch.set_grad_enabled(recorded)(lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v))
        calls = {"native": ours, "dense": theirs}
        flops = dict.fromkeys(calls, float(problem.flops()))
        fields = side_by_side(entries, calls, flops, problem, MultiplyAdds(), partial(self.time, 0.0))
        return FewCase(seq=problem.seq, recorded=recorded, **fields)

    def loads(self) -> Iterator[Load]:
        """What falls to threads: a causal pattern, kinds that are mixed, a packed batch."""
        a = self.problem("A", is_causal=True)
        yield Load("A, causal", a)
        length, rate = self.sizes.dilated
        window, dilated = SlidingWindow(self.sizes.window // self.divisor), DilatedSegment(length // self.divisor, rate)
        mixed = Pattern.of(window, GlobalTokens(self.sizes.global_tokens), dilated)
        yield Load("mixed kinds", replace(a, is_causal=False, pattern=mixed))
        lengths = tuple(length // self.divisor for length in self.sizes.packed)
        yield Load("packed", replace(self.problem("G"), seq=max(lengths), varlen=True), lengths)


def native() -> Implementation:
    """The CPU kernel."""
    return backend_implementations(["native"])[0]


def instruction_set() -> str:
    """Whose code the kernel runs."""
    from dilkit.backends.native import backend

    return backend.instruction_set()


def on_one_thread(call: Callable[[], T]) -> Callable[[], T]:
    """`call`, with torch set to one thread while it runs."""

    def alone() -> T:
        with torch_threads(1):
            return call()

    return alone


def _passes(backward: bool) -> str:
    return "forward + backward" if backward else "forward"
