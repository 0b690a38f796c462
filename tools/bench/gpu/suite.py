"""`dilkit bench --suite gpu`: the CUDA kernels. Every step checks its implementations, then times them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any

from dilkit.backends.sdpa.one_kernel import one_kernel_backends
from dilkit.problem import Problem
from dilkit.testing import memory
from dilkit.testing.tensors import Tensors
from dilkit.tools.bench.gpu import targets
from dilkit.tools.bench.gpu.cases import GpuSizes
from dilkit.tools.bench.gpu.record import OURS, GpuCase, GpuResult, Longest, Scratch, SeqCase
from dilkit.tools.bench.suite import NO_OPTION, Step, Suite
from dilkit.tools.measure.case import CaseFields, admit, failed, output_bytes, results_bytes, side_by_side
from dilkit.tools.measure.ceilings import Ceilings
from dilkit.tools.measure.implementation import BACKWARD_FLOPS, Implementation, automatic, backend_implementations
from dilkit.tools.measure.timing import Call, cold_cuda_seconds, time_interleaved
from dilkit.tools.results.record import Entry, Samples

LEAST_FLOPS = {"cupy_raw": 5e12, "numba_cuda": 5e11}
"""FLOP/s that each is expected to reach at least, for the budget; 2e12 for the others."""
BACKWARD_SHARE = BACKWARD_FLOPS / (1 + BACKWARD_FLOPS)


@dataclass(frozen=True)
class GpuSuite(Suite[GpuResult]):
    """The shortest measurements first. --quick takes one head_dim alone.

    `backend`: the implementations to measure, by default `automatic` (what a call runs that names none), our kernels, and each of
    torch's. `rows`: words that the name of a step must have, all of them, to be measured. `device`: where, in a rehearsal "cpu".
    """

    NAME = "gpu"
    SUMMARY = "the CUDA kernels against each of torch's own, a matmul and a copy"
    RECORD = GpuResult
    TARGETS = targets.TARGETS

    repeats: int = 15
    budget: float = 20.0
    backend: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    sizes: GpuSizes = field(default_factory=GpuSizes, metadata=NO_OPTION)
    device: str = field(default="cuda", metadata=NO_OPTION)

    def steps(self) -> Iterator[Step]:
        chosen = [step for step in self.every_step() if all(word in f"{step.goes_to} {step.what}" for word in self.rows)]
        if not chosen:
            raise ValueError(f"--rows: no step of the suite has all of {', '.join(map(repr, self.rows))} in its name")
        yield from chosen

    def lists(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(step.goes_to for step in self.every_step()))

    def every_step(self) -> Iterator[Step]:
        """All that there are, whatever `rows` says."""
        yield Step("launch_bound", f"{self.sizes.launch_bound:,} tokens, launches", self.launch_bound)
        for dtype in self.sizes.dtypes:
            yield Step("memory", f"memory of A, {dtype}", partial(self.memory, dtype))
        for seq in self.sizes.seeds[: 2 if self.quick else None]:
            yield Step("seeds", f"{seq:,} tokens", partial(self.forward, seq))
        dims = self.sizes.head_dims[: 1 if self.quick else None]
        for backward, letter, dtype, dim, causal in product((False, True), "BAC", self.sizes.dtypes, dims, (False, True)):
            what = f"{letter}, {dtype}, head_dim {dim}{', causal' * causal}, {'backward' if backward else 'forward'}"
            yield Step("cases", what, partial(self.case, letter, dtype, dim, causal, backward))
        yield Step("long", "the longest sequence", self.long)

    def where(self) -> str:
        return self.device

    @contextmanager
    def prepared(self) -> Iterator[dict[str, Any]]:
        """Each of torch's kernels is a backend of its own."""
        from dilkit.device import cuda_count

        if self.device == "cuda" and not cuda_count():
            raise ValueError("--suite gpu: torch sees no CUDA device; run it where `dilkit info` lists one")
        with one_kernel_backends(self.device):
            yield dict(backends=tuple(i.name for i in self.implementations()))

    def implementations(self) -> list[Implementation]:
        """Those to measure. Raises ValueError for one that is not known."""
        known = implementations()
        if unknown := set(self.backend) - {i.name for i in known}:
            raise ValueError(f"--backend: {', '.join(sorted(unknown))}: the suite knows {', '.join(i.name for i in known)}")
        return [i for i in known if not self.backend or i.name in self.backend]

    def merged(self, results: Sequence[GpuResult]) -> GpuResult:
        """One result of parts of the suite that were measured on one device, such as with several `rows`."""
        devices = {result.environment.device_name for result in results}
        if len(devices) > 1:
            raise ValueError(f"--merge: results of {' and of '.join(sorted(devices))}; give those of one device")
        lists = {name: tuple(row for one in results for row in getattr(one, name)) for name in self.lists()}
        steps = tuple(step for one in results for step in one.steps)
        names = tuple(dict.fromkeys(name for one in results for name in one.backends))
        facts: dict[str, Any] = dict(lists, steps=steps, done=sum(one.done for one in results), backends=names)
        whole = replace(results[-1], **facts, interrupted=any(one.interrupted for one in results))
        return replace(whole, figures=self.figures(whole))

    def wrong(self, result: GpuResult) -> bool:
        """Whether an implementation was wrong, or one of ours failed."""
        verdicts = [(name, entry.verdict) for _, case in result.titled() for name, entry in case.entries.items()]
        verdicts += [(OURS[0], step.verdict) for step in result.long]
        return any(verdict == "wrong" or (verdict == "failed" and name in OURS) for name, verdict in verdicts)

    def problem(self, name: str, dim: int, **fields: Any) -> Problem:
        """A configuration on the first device of the suite's kind."""
        from dilkit.device import probe

        return self.sizes.configurations[name].problem(dim, self.divisor, device=probe(self.device), **fields)

    def case(self, letter: str, dtype: str, dim: int, causal: bool, backward: bool) -> GpuCase:
        """All implementations on one configuration: the forward pass, or the backward pass alone."""
        problem = self.problem(letter, dim, dtype=dtype, is_causal=causal, requires_grad=backward)
        facts = dict(is_causal=causal, backward=backward)
        return GpuCase(config=letter, seq=problem.seq, dtype=dtype, head_dim=dim, **facts, **self.compare(problem))

    def forward(self, seq: int) -> SeqCase:
        """The pattern of B in fp32, whatever its length."""
        return SeqCase(seq=seq, **self.compare(replace(self.problem("B", 64), seq=seq)))

    def launch_bound(self) -> SeqCase:
        """A forward pass too short to fill the device, many in a row: launches are what takes the time."""
        problem = replace(self.problem("B", 64), seq=self.sizes.launch_bound // self.divisor)
        return SeqCase(seq=problem.seq, **self.compare(problem, in_a_row=True))

    def compare(self, problem: Problem, in_a_row: bool = False) -> CaseFields:
        """Check, then time in turns, beside a matmul and a copy."""
        inputs, found = Tensors.random(problem), self.implementations()
        entries = {i.name: self.admit(i, problem, inputs) for i in found}
        calls: dict[str, Call] = {}
        for i in found:
            if entries[i.name].verdict == "measured":
                try:
                    call = timed_call(i, inputs, problem)
                    call()
                    calls[i.name] = call
                except Exception as error:  # what is timed may need more memory than what was checked
                    entries[i.name] = replace(failed(error), check=entries[i.name].check)
        share = BACKWARD_SHARE if problem.requires_grad else 1.0
        flops = {i.name: share * i.flops(problem) for i in found}
        ceilings = Ceilings(problem.dtype, self.device)
        return side_by_side(entries, calls, flops, problem, ceilings, partial(self.time, in_a_row))

    def time(self, in_a_row: bool, calls: Mapping[str, Call]) -> dict[str, Samples]:
        """Each call alone behind a flush of the L2 cache, or many in a row."""
        if in_a_row:
            return time_interleaved(calls, self.repeats, warmup=3, min_time=0.02, device=self.device)
        return time_interleaved(calls, self.repeats, clock=cold_cuda_seconds if self.device == "cuda" else None)

    def admit(self, implementation: Implementation, problem: Problem, inputs: Tensors) -> Entry:
        """The beginning of an entry: the verdict, and the check that it rests on."""
        rate = LEAST_FLOPS.get(implementation.name, 2e12)
        return admit(implementation, problem, inputs, self.budget, lambda: implementation.flops(problem) / rate)

    def memory(self, dtype: str) -> Scratch:
        """What a forward pass on A holds beyond out and lse."""
        problem = self.problem("A", 64, dtype=dtype)
        inputs = Tensors.random(problem)
        peaks: dict[str, int | None] = {}
        for implementation in self.implementations():
            if implementation.refusals(problem):
                continue
            call = partial(implementation.once, inputs, problem)
            try:
                call()
                peaks[implementation.name] = memory.peak_memory(call, self.device) - results_bytes(problem)
            except Exception:  # out of memory, or no way to measure it here: the others go on
                peaks[implementation.name] = None
        return Scratch(dtype=dtype, results_bytes=results_bytes(problem), scratch_bytes=peaks)

    def long(self) -> Longest:
        """One forward pass over sixteen million tokens in bf16, or over eight where those do not fit."""
        measured = self.forward_over(self.sizes.long // self.divisor)
        return self.forward_over(self.sizes.long // self.divisor // 2) if measured.verdict == "failed" else measured

    def forward_over(self, seq: int) -> Longest:
        """One forward pass over so many tokens; both ends must be what they are alone."""
        import torch

        problem = replace(self.problem("C", 64, dtype="bfloat16"), seq=seq)
        (ours,) = backend_implementations(OURS[:1])
        if reasons := ours.refusals(problem):
            return Longest(seq=problem.seq, verdict="refused", reasons=tuple(reasons))
        try:
            call = partial(ours.once, long_inputs(problem), problem)
            different = check_ends(ours, problem, call.args[0], call())
            time = time_interleaved({"": call}, repeats=3, device=self.device)[""]
        except torch.cuda.OutOfMemoryError as error:
            return Longest(seq=problem.seq, verdict="failed", reasons=(str(error).splitlines()[0],))
        wrong = tuple(f"{what}: {bits} results differ" for what, bits in different.items() if bits)
        gflops = ours.flops(problem) / time.median_s / 1e9
        held = 3 * output_bytes(problem) + results_bytes(problem)
        verdict = "wrong" if wrong else "measured"
        return Longest(seq=problem.seq, verdict=verdict, reasons=wrong, time=time, gflops=gflops, held_bytes=held)


def implementations() -> list[Implementation]:
    """The automatic choice, ours, and each of torch's kernels by itself."""
    from dilkit.registry import list_backends

    names = [name for name in list_backends() if name in OURS or name.startswith("sdpa:")]
    return [automatic(), *backend_implementations(names)]


def timed_call(implementation: Implementation, inputs: Tensors, problem: Problem) -> Call:
    """The forward pass; or, where the problem asks for gradients, the backward pass alone."""
    import torch

    if not problem.requires_grad:
        return partial(implementation.once, inputs, problem)
    out, tensors = implementation.attend(inputs, problem), (inputs.query, inputs.key, inputs.value)
    return partial(torch.autograd.grad, out, tensors, inputs.dout, retain_graph=True)


def check_ends(ours: Implementation, problem: Problem, inputs: Tensors, out: Any) -> dict[str, int]:
    """How many results of the first and the last segments differ from those of these tokens alone."""
    longest = max(problem.pattern.segment_lengths)
    alone = replace(problem, seq=longest)
    ends = {}
    for what, start in (("the first tokens", 0), ("the last tokens", problem.seq // longest * longest - longest)):
        rows = slice(start, start + longest)
        query, key, value, dout = (x[:, rows] for x in (inputs.query, inputs.key, inputs.value, inputs.dout))
        part = Tensors(query, key, value, None, dout)
        ends[what] = int((ours.once(part, alone) != out[:, rows]).sum())
    return ends


def long_inputs(problem: Problem) -> Tensors:
    """Random tensors made in their own dtype: in fp32 first, they would not fit."""
    import torch

    shape = problem.batch, problem.seq, problem.heads, problem.head_dim
    query, key, value = (torch.randn(shape, dtype=torch.bfloat16, device=problem.device.type) for _ in range(3))
    return Tensors(query, key, value, None, query)
