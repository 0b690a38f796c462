"""`dilkit bench --suite cpu`: what the CPU kernel is measured by. Every step checks its contestants, then times them in turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

from dilkit.pattern import Pattern
from dilkit.problem import Problem
from dilkit.tools.bench import untyped_target as suite_targets
from dilkit.tools.measure import case, memory
from dilkit.tools.measure import timing as measure
from dilkit.tools.measure.baselines import BASELINES
from dilkit.tools.measure.ceilings import Ceilings
from dilkit.tools.measure.implementation import Implementation, Inputs, backend_implementations
from dilkit.tools.measure.overhead import one_thread
from dilkit.tools.report.kinds import suite_report
from dilkit.tools.results import untyped as results
from dilkit.tools.results.decode import encode
from dilkit.tools.results.record import Entry, Samples

SUMMARY = "the CPU kernel against torch's own, matmul, dense attention and LongNet's published procedure"
KIND = "suite"
DEVICE = "cpu"
LISTS = ("cases", "dense", "dtypes", "threads", "memory", "inner_loops", "million")
"""The lists of a result."""
REPORT, judge = suite_report, suite_targets.judge
CONFIGURATIONS = {
    "A": (32768, (2048, 4096, 8192, 16384, 32768), (1, 2, 4, 8, 16)),
    "B": (16384, (512, 1024), (1, 2)),
    "C": (131072, (2048, 8192, 32768, 131072), (1, 4, 16, 64)),
    "D": (65536, (1024, 4096, 16384, 65536), (1, 4, 16, 64)),
    "million": (1 << 20, (2048, 8192, 32768, 131072, 524288), (1, 4, 16, 64, 256)),
}
HEADS, HEAD_DIMS, MATMUL, THREADS = 8, (64, 128), 4096, 4
QUICK = 32
"""By what --quick divides lengths; it takes one head_dim alone."""

Step = tuple[str, str, Callable[[], dict[str, Any]]]


@dataclass(frozen=True)
class Suite:
    """The steps of a run. `budget`: seconds a call may be expected to take; `repeats`: samples, fewer where calls are long."""

    quick: bool = False
    repeats: int = 5
    budget: float = 45.0

    def steps(self) -> Iterator[Step]:
        """(the list of the result that it goes to, what is going on, the measurement), the shortest first."""
        dims = HEAD_DIMS[:1] if self.quick else HEAD_DIMS
        for dim in dims:
            for what in (self.inner_loops, self.threads, self.dtypes, self.memory, self.dense):
                yield what.__name__, f"{what.__name__.replace('_', ' ')}, head_dim {dim}", partial(what, dim)
        for backward, letter, dim, causal in product((False, True), "BADC", dims, (False, True)):
            text = f"{letter}, head_dim {dim}{', causal' * causal}, {'forward + backward' if backward else 'forward'}"
            yield "cases", text, partial(self.case, letter, dim, causal, backward)
        yield "million", "one million tokens", self.million

    def problem(self, name: str, dim: int, **fields: Any) -> Problem:
        seq, lengths, rates = CONFIGURATIONS[name]
        if self.quick:
            seq, lengths = seq // QUICK, tuple(max(w // QUICK, r) for w, r in zip(lengths, rates, strict=True))
        return Problem(pattern=Pattern(lengths, rates), seq=seq, heads=HEADS, head_dim=dim, **fields)

    def case(self, letter: str, dim: int, causal: bool, backward: bool) -> dict[str, Any]:
        """Backends and LongNet's procedure on one configuration, beside a matmul."""
        problem = self.problem(letter, dim, is_causal=causal, requires_grad=backward)
        contestants = backend_implementations(["native", "sdpa"])
        if not backward or letter in "AB":  # on the others it takes minutes
            contestants.append(BASELINES["gather"])
        told = dict(config=letter, seq=problem.seq, head_dim=dim, is_causal=causal, backward=backward)
        return told | self.compare(contestants, problem)

    def dense(self, dim: int) -> dict[str, Any]:
        """Torch's dense attention on the tokens of A."""
        contestants = [*backend_implementations(["native"]), BASELINES["dense"]]
        return dict(head_dim=dim) | self.compare(contestants, self.problem("A", dim))

    def compare(self, contestants: list[Implementation], problem: Problem) -> dict[str, Any]:
        """Check, then time in turns; an entry a contestant, whatever became of it."""
        inputs = Inputs.random(problem)
        entries = {c.name: self.admit(c, problem, inputs) for c in contestants}
        able = [c for c in contestants if entries[c.name].verdict == "measured"]
        ceilings = Ceilings("float32", size=MATMUL // (QUICK if self.quick else 1))
        calls = {**ceilings.calls, **{c.name: partial(c.once, inputs, problem) for c in able}}
        timed = self.time(calls, max((c.flops(problem) for c in able), default=0))
        rates = ceilings.rates(timed)
        for c in able:
            tokens = problem.batch * problem.seq
            entries[c.name] = case.with_speed(entries[c.name], timed[c.name], c.flops(problem), tokens, rates["matmul"].gflops)
        found: dict[str, Any] = encode(dict(**rates, entries=entries))
        return found

    def time(self, calls: dict[str, Callable[[], Any]], flops: float) -> dict[str, Samples]:
        """Short calls are repeated within a sample, long ones get three samples."""
        repeats = self.repeats if flops < 4e11 else min(self.repeats, 3)
        return measure.time_interleaved(calls, repeats, warmup=0, min_time=0.3 if flops < 1e11 and not self.quick else 0.0)

    def admit(self, implementation: Implementation, problem: Problem, inputs: Inputs) -> Entry:
        """The beginning of an entry: the verdict, and the check that it rests on."""
        rate = 60e9 if implementation.name == "gather" else 120e9
        return case.admit(implementation, problem, inputs, self.budget, lambda: implementation.flops(problem) / rate)

    def dtypes(self, dim: int) -> dict[str, Any]:
        """The kernel in half types beside itself in fp32, on A."""
        (native,) = backend_implementations(["native"])
        problems = {dtype: self.problem("A", dim, dtype=dtype) for dtype in ("float32", "bfloat16", "float16")}
        inputs = {dtype: Inputs.random(problem) for dtype, problem in problems.items()}
        entries = {dtype: self.admit(native, problem, inputs[dtype]) for dtype, problem in problems.items()}
        calls = {dtype: partial(native.once, inputs[dtype], problem) for dtype, problem in problems.items()}
        timed = self.time(calls, native.flops(problems["float32"]))
        return dict(
            head_dim=dim, isa=instruction_set(), entries={d: encode(entries[d]) | dict(time=encode(timed[d])) for d in calls}
        )

    def threads(self, dim: int) -> dict[str, Any]:
        """The kernel with one thread beside itself with four, on A."""
        (native,) = backend_implementations(["native"])
        problem = self.problem("A", dim)
        call = partial(native.once, Inputs.random(problem), problem)
        timed = self.time({"one": on_one_thread(call), "all": call}, native.flops(problem))
        entries = {name: dict(time=encode(samples)) for name, samples in timed.items()}
        return dict(head_dim=dim, threads=results.environment(problem.device)["threads"], entries=entries)

    def memory(self, dim: int) -> dict[str, Any]:
        """What a forward pass on A holds beyond out and lse, in bytes; None and why where that cannot be measured."""
        (native,) = backend_implementations(["native"])
        problem = self.problem("A", dim)
        call = partial(native.once, Inputs.random(problem), problem)
        call()
        try:
            peak = memory.peak_memory(call)
        except memory.MeasureError as error:
            return dict(head_dim=dim, scratch_bytes=None, why=str(error))
        results_bytes = case.output_bytes(problem) + 4 * problem.batch * problem.heads * problem.seq
        return dict(head_dim=dim, scratch_bytes=peak - results_bytes)

    def inner_loops(self, dim: int) -> dict[str, Any]:
        """On one thread: fused multiply-adds from registers, and dense attention of the kernel, whose FLOPs are all done."""
        from dilkit.backends.native import _native

        (native,) = backend_implementations(["native"])
        problem = Problem(pattern=Pattern.dense(), seq=256 if self.quick else 4096, heads=1, head_dim=dim)
        inputs, rounds = Inputs.random(problem), 1 << 20
        with one_thread():
            calls = dict(fma=partial(_native.multiply_add, instruction_set(), rounds), tile=partial(native.once, inputs, problem))
            timed = measure.time_interleaved(calls, 2 * self.repeats, min_time=0.02)
        fma = _native.multiply_add(instruction_set(), rounds) / timed["fma"].median_s
        tile = native.flops(problem) / timed["tile"].median_s
        samples = {name: encode(taken) for name, taken in timed.items()}
        return dict(head_dim=dim, isa=instruction_set(), fma_gflops=fma / 1e9, tile_gflops=tile / 1e9, entries=samples)

    def million(self) -> dict[str, Any]:
        """One forward pass, and what it holds in all: inputs, results, scratch."""
        (native,) = backend_implementations(["native"])
        problem = self.problem("million", HEAD_DIMS[0])
        inputs = Inputs.random(problem)
        entry = encode(self.admit(native, problem, inputs))
        samples = measure.time_interleaved({"": partial(native.once, inputs, problem)}, repeats=2, warmup=0)[""]
        try:
            peak: int | None = memory.peak_memory(partial(native.once, inputs, problem)) + 3 * case.output_bytes(problem)
        except memory.MeasureError:
            peak = None
        gflops = native.flops(problem) / samples.median_s / 1e9
        return dict(seq=problem.seq, entry=entry, time=encode(samples), gflops=gflops, held_bytes=peak)


def instruction_set() -> str:
    """Whose code the kernel runs."""
    from dilkit.backends.native import backend as native

    return native.instruction_set()


def on_one_thread(call: Callable[[], Any]) -> Callable[[], Any]:
    """`call`, with torch set to one thread while it runs."""

    def alone() -> Any:
        with one_thread():
            return call()

    return alone


@contextmanager
def four_threads() -> Iterator[int]:
    """Within the block, torch computes with four threads, or with as many as there are cores; how many these are."""
    import torch

    before = torch.get_num_threads()
    count = min(THREADS, results.usable_cores())
    torch.set_num_threads(count)
    try:
        yield count
    finally:
        torch.set_num_threads(before)


@contextmanager
def prepared() -> Iterator[dict[str, Any]]:
    """Within the block the suite can run; facts for its result."""
    with four_threads() as count:
        yield dict(isa=instruction_set(), thread_count=count)


def wrong(result: dict[str, Any]) -> bool:
    """Whether a contestant was wrong."""
    entries = [entry for case in [*result["cases"], *result["dense"], *result["dtypes"]] for entry in case["entries"].values()]
    return any(entry["verdict"] == "wrong" for entry in entries)
