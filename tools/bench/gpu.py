"""`dilkit bench --suite gpu`: what the CUDA kernels are measured by. Every step checks its contestants, then times them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

from dilkit.pattern import Pattern
from dilkit.problem import Problem
from dilkit.tools.bench import gpu_targets as suite_gpu_targets
from dilkit.tools.measure import case, memory
from dilkit.tools.measure import timing as measure
from dilkit.tools.measure.ceilings import Ceilings
from dilkit.tools.measure.implementation import Implementation, Inputs, backend_implementations
from dilkit.tools.report.kinds import suite_gpu_report
from dilkit.tools.results.decode import encode
from dilkit.tools.results.record import Entry, Samples
from dilkit.tools.verify.one_kernel import one_kernel_backends

SUMMARY = "the CUDA kernels against each of torch's own, a matmul and a copy"
KIND = "suite-gpu"
DEVICE = "cuda"
LISTS = ("cases", "launch_bound", "memory", "seeds", "long")
"""The lists of a result."""
REPORT, judge = suite_gpu_report, suite_gpu_targets.judge
CONFIGURATIONS = {
    "A": (131072, (2048, 4096, 8192, 16384, 32768), (1, 2, 4, 8, 16)),
    "B": (32768, (512, 1024), (1, 2)),
    "C": (1 << 20, (2048, 8192, 32768, 131072, 524288), (1, 4, 16, 64, 256)),
}
SEEDS = (1024, 2048, 4096, 8192, 16384, 32768)
"""Lengths of the tables that users of earlier implementations know, with the pattern of B."""
LAUNCH_BOUND, LONG = 8192, 1 << 24
HEADS, HEAD_DIMS, DTYPES = 8, (64, 128), ("float32", "bfloat16")
QUICK = 32
"""By what --quick divides lengths; it takes one head_dim alone."""

OURS = ("cupy_raw", "numba_cuda")
LEAST_FLOPS = {"cupy_raw": 5e12, "numba_cuda": 5e11}
"""FLOP/s that each is expected to reach at least, for the budget; 2e12 for the others."""

Step = tuple[str, str, Callable[[], dict[str, Any]]]


@dataclass(frozen=True)
class Suite:
    """The steps of a run. `budget`: seconds a call may be expected to take; `repeats`: samples of each contestant."""

    quick: bool = False
    repeats: int = 15
    budget: float = 20.0

    def steps(self) -> Iterator[Step]:
        """(the list of the result that it goes to, what is going on, the measurement), the shortest first."""
        yield "launch_bound", f"{LAUNCH_BOUND:,} tokens, launches", self.launch_bound
        for dtype in DTYPES:
            yield "memory", f"memory of A, {dtype}", partial(self.memory, dtype)
        for seq in SEEDS[: 2 if self.quick else None]:
            yield "seeds", f"{seq:,} tokens", partial(self.seed, seq)
        dims = HEAD_DIMS[:1] if self.quick else HEAD_DIMS
        for backward, letter, dtype, dim, causal in product((False, True), "BAC", DTYPES, dims, (False, True)):
            text = f"{letter}, {dtype}, head_dim {dim}{', causal' * causal}, {'backward' if backward else 'forward'}"
            yield "cases", text, partial(self.case, letter, dtype, dim, causal, backward)
        yield "long", "the longest sequence", self.long

    def problem(self, name: str, dim: int, **fields: Any) -> Problem:
        """A configuration on the first device of the suite's kind."""
        from dilkit.device import probe

        seq, lengths, rates = CONFIGURATIONS[name]
        if self.quick:
            seq, lengths = seq // QUICK, tuple(max(w // QUICK, r) for w, r in zip(lengths, rates, strict=True))
        return Problem(pattern=Pattern(lengths, rates), seq=seq, heads=HEADS, head_dim=dim, device=probe(DEVICE), **fields)

    def case(self, letter: str, dtype: str, dim: int, causal: bool, backward: bool) -> dict[str, Any]:
        """All contestants on one configuration: the forward pass, or the backward pass alone."""
        problem = self.problem(letter, dim, dtype=dtype, is_causal=causal, requires_grad=backward)
        told = dict(config=letter, seq=problem.seq, dtype=dtype, head_dim=dim, is_causal=causal, backward=backward)
        return told | self.compare(problem)

    def seed(self, seq: int) -> dict[str, Any]:
        """The pattern of B in fp32, whatever its length: the forward pass."""
        return dict(seq=seq) | self.compare(replace(self.problem("B", 64), seq=seq))

    def launch_bound(self) -> dict[str, Any]:
        """A forward pass too short to fill the device, by the clock on the wall: launches are what takes the time."""
        problem = replace(self.problem("B", 64), seq=LAUNCH_BOUND // (QUICK if self.quick else 1))
        return dict(seq=problem.seq) | self.compare(problem, by_the_wall=True)

    def compare(self, problem: Problem, by_the_wall: bool = False) -> dict[str, Any]:
        """Check, then time in turns, beside a matmul and a copy; an entry a contestant, whatever became of it."""
        inputs = Inputs.random(problem)
        contestants = backend_implementations(_names())
        entries = {c.name: self.admit(c, problem, inputs) for c in contestants}
        ready: dict[str, Callable[[], Any]] = {}
        for c in contestants:
            if entries[c.name].verdict == "measured":
                try:
                    ready[c.name] = timed_call(c, inputs, problem)
                    ready[c.name]()
                except Exception as error:  # what is timed may need more memory than what was checked
                    entries[c.name] = replace(entries[c.name], verdict="failed", reasons=case.failed(error).reasons)
        able = [c for c in contestants if entries[c.name].verdict == "measured"]
        ceilings = Ceilings(problem.dtype, DEVICE)
        timed = self.time({**ceilings.calls, **{c.name: ready[c.name] for c in able}}, by_the_wall)
        rates = ceilings.rates(timed)
        for c in able:
            flops = c.flops(problem) * (2.5 / 3.5 if problem.requires_grad else 1.0)  # of a backward pass alone
            entries[c.name] = case.with_speed(entries[c.name], timed[c.name], flops, problem.seq, rates["matmul"].gflops)
        found: dict[str, Any] = encode(dict(**rates, entries=entries))
        return found

    def time(self, calls: dict[str, Callable[[], Any]], by_the_wall: bool) -> dict[str, Samples]:
        """Each call alone behind a flush of the L2 cache, or many in a row by the wall."""
        if by_the_wall:
            return measure.time_interleaved(calls, self.repeats, warmup=3, min_time=0.02, device=DEVICE)
        return measure.time_interleaved(calls, self.repeats, warmup=1, device=DEVICE, cold=DEVICE == "cuda")

    def admit(self, implementation: Implementation, problem: Problem, inputs: Inputs) -> Entry:
        """The beginning of an entry: the verdict, and the check that it rests on."""
        rate = LEAST_FLOPS.get(implementation.name, 2e12)
        return case.admit(implementation, problem, inputs, self.budget, lambda: implementation.flops(problem) / rate)

    def memory(self, dtype: str) -> dict[str, Any]:
        """What a forward pass on A holds beyond out and lse, in bytes, by contestant."""
        problem = self.problem("A", 64, dtype=dtype)
        inputs = Inputs.random(problem)
        results_bytes = case.output_bytes(problem) + 4 * problem.batch * problem.heads * problem.seq
        found: dict[str, int | None] = {}
        for contestant in backend_implementations(_names()):
            if contestant.refusals(problem):
                continue
            call = partial(contestant.once, inputs, problem)
            try:
                call()
                found[contestant.name] = memory.peak_memory(call, DEVICE) - results_bytes
            except Exception:  # out of memory, or no way to measure it here: the others go on
                found[contestant.name] = None
        return dict(dtype=dtype, results_bytes=results_bytes, scratch_bytes=found)

    def long(self) -> dict[str, Any]:
        """One forward pass over sixteen million tokens in bf16; both ends must be what they are alone."""
        import torch

        problem = replace(self.problem("C", 64, dtype="bfloat16"), seq=LONG // (QUICK if self.quick else 1))
        (ours,) = backend_implementations(OURS[:1])
        told = dict(seq=problem.seq, held_bytes=None, time=None)
        if reasons := ours.refusals(problem):
            return told | dict(verdict="refused", reasons=tuple(reasons))
        try:
            inputs = _long_inputs(problem)
            call = partial(ours.once, inputs, problem)
            findings = check_ends(ours, problem, inputs, call())
            samples = measure.time_interleaved({"": call}, repeats=3, device=DEVICE)[""]
        except torch.cuda.OutOfMemoryError as error:
            return told | dict(verdict="failed", reasons=[str(error).splitlines()[0]])
        wrong = [f"{what}: {bits} results differ" for what, bits in findings.items() if bits]
        held = 4 * case.output_bytes(problem) + 4 * problem.heads * problem.seq
        verdict = dict(verdict="wrong" if wrong else "measured", reasons=wrong)
        gflops = ours.flops(problem) / samples.median_s / 1e9
        return told | verdict | dict(time=encode(samples), gflops=gflops, held_bytes=held)


def timed_call(contestant: Implementation, inputs: Inputs, problem: Problem) -> Callable[[], Any]:
    """The forward pass; or, where the problem asks for gradients, the backward pass alone."""
    import torch

    if not problem.requires_grad:
        return partial(contestant.once, inputs, problem)
    out, tensors = contestant.attend(inputs, problem), (inputs.query, inputs.key, inputs.value)
    return partial(torch.autograd.grad, out, tensors, inputs.dout, retain_graph=True)


def check_ends(ours: Implementation, problem: Problem, inputs: Inputs, out: Any) -> dict[str, int]:
    """How many results of the first and the last segments differ from those of these tokens alone."""
    longest = max(problem.pattern.segment_lengths)
    alone = replace(problem, seq=longest)
    found = {}
    for what, start in (("the first tokens", 0), ("the last tokens", problem.seq // longest * longest - longest)):
        rows = slice(start, start + longest)
        part = Inputs(*(x[:, rows] for x in (inputs.query, inputs.key, inputs.value, inputs.dout)), key_padding_mask=None)
        found[what] = int((ours.once(part, alone) != out[:, rows]).sum())
    return found


def _long_inputs(problem: Problem) -> Inputs:
    """Random tensors made in their own dtype: in fp32 first, they would not fit."""
    import torch

    shape = problem.batch, problem.seq, problem.heads, problem.head_dim
    query, key, value = (torch.randn(shape, dtype=torch.bfloat16, device=DEVICE) for _ in range(3))
    return Inputs(query, key, value, query, None)


def _names() -> list[str]:
    from dilkit.registry import list_backends

    return [name for name in list_backends() if name in OURS or name.startswith("sdpa:")]


@contextmanager
def prepared() -> Iterator[dict[str, Any]]:
    """Within the block the suite can run, each of torch's kernels a backend; facts for its result."""
    from dilkit.device import cuda_count

    if DEVICE == "cuda" and not cuda_count():
        raise ValueError("--suite gpu: torch sees no CUDA device; run it where `dilkit info` lists one")
    with one_kernel_backends(DEVICE):
        yield dict(backends=_names())


def wrong(result: dict[str, Any]) -> bool:
    """Whether a contestant was wrong, or one of ours failed."""
    steps = [*result["cases"], *result["seeds"], *result["launch_bound"]]
    entries = [(name, entry["verdict"]) for step in steps for name, entry in step["entries"].items()]
    entries += [("cupy_raw", step["verdict"]) for step in result["long"]]
    return any(verdict == "wrong" or (verdict == "failed" and name in OURS) for name, verdict in entries)
