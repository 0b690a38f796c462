"""`dilkit bench --suite gpu`: the CUDA kernels beside each of torch's own, and a matmul."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from dilkit.backends.sdpa.kernels import KERNELS
from dilkit.backends.sdpa.one_kernel import one_kernel_backends
from dilkit.device import cuda_count, probe
from dilkit.problem import Problem
from dilkit.registry import list_backends
from dilkit.testing import memory
from dilkit.testing.tensors import Tensors
from dilkit.tools.bench.configuration import Configuration
from dilkit.tools.bench.suite import NO_OPTION, Suite, SuiteStep
from dilkit.tools.bench.target import MIB, Target, Values, each, stored, time_ratio
from dilkit.tools.console.text import error_line
from dilkit.tools.measure.case import CaseFields, admit, failed, results_bytes, side_by_side
from dilkit.tools.measure.ceilings import Ceilings
from dilkit.tools.measure.implementation import BACKWARD_FLOPS, Implementation, automatic, backend_implementations
from dilkit.tools.measure.timing import Call, captured, clock_of, cold_cuda_seconds, time_interleaved
from dilkit.tools.report import views
from dilkit.tools.report.document import Table
from dilkit.tools.report.targets import suite_sentence
from dilkit.tools.results.rows import CaseRows, Entries, ResultRow, RowsResult, row_of, rows_of

CONFIGURATIONS = {
    "A": Configuration(131072, (2048, 4096, 8192, 16384, 32768), (1, 2, 4, 8, 16)),
    "B": Configuration(32768, (512, 1024), (1, 2)),
    "C": Configuration(1 << 20, (2048, 8192, 32768, 131072, 524288), (1, 4, 16, 64, 256)),
}
OURS = ("cupy_raw", "triton")
TORCHS = tuple(f"sdpa:{kernel.name}" for kernel in KERNELS)
EFFICIENT, CUDNN, AUTOMATIC = "sdpa:memory-efficient", "sdpa:cudnn", "automatic"
FORMS, LAUNCHES, EAGER = "configurations", "launches", "with launches"
SHORT = {"float32": "fp32", "bfloat16": "bf16"}
LAUNCH_BOUND = 8192
"""Tokens with the pattern of B at which launches take the time."""
EAGER_UP_TO = 0.005
"""Seconds of GPU time up to which a case is timed with launches too: longer calls hide them."""
BACKWARD_SHARE = BACKWARD_FLOPS / (1 + BACKWARD_FLOPS)
H100_TFLOPS = 67.0
"""fp32 on the CUDA cores of an H100 SXM, nominal."""


def _best_of_torch(case: CaseRows) -> float | None:
    return min((case.ratio(name, OURS[0]) for name in case.rows if name in TORCHS and case.timed(name, OURS[0])), default=None)


def _training(result: RowsResult) -> Values:
    cases = [case for case in result.cases(FORMS, **A64) if case.timed(CUDNN, AUTOMATIC)]
    if {case.case["backward"] for case in cases} != {False, True}:
        return {}
    slow, fast = (sum(case.rows[name].median_s for case in cases) for name in (CUDNN, AUTOMATIC))
    return {"64": slow / fast}


FORWARD: dict[str, Any] = dict(of="A", backward=False, causal=False)
A64: dict[str, Any] = dict(of="A", dtype="bfloat16", head_dim=64, causal=False)
OVER_AUTOMATIC = "time over the automatic choice's"
WORST = partial(time_ratio, FORMS, EFFICIENT, OURS[0], "{head_dim}", combine=min, dtype="float32")
"""Read the least ratio of times of all configurations in fp32, by head_dim."""
TARGETS = (
    Target(
        f"A: bf16 forward, sdpa:cudnn's {OVER_AUTOMATIC}", 1.15, 1.4,
        time_ratio(FORMS, CUDNN, AUTOMATIC, "{head_dim}", **FORWARD, dtype="bfloat16", head_dim=128),
    ),
    Target("A: bf16 forward and backward, the same", 1.1, 1.3, _training),
    Target(
        f"A: fp32 forward, sdpa:memory-efficient's {OVER_AUTOMATIC}", 1.0, 1.3,
        time_ratio(FORMS, EFFICIENT, AUTOMATIC, "{head_dim}", **FORWARD, dtype="float32"),
    ),
    Target(
        "A: fp32 forward, nominal rate over an H100's 67 TFLOP/s", 0.5, 0.7,
        each(
            FORMS, lambda case: case.rows[OURS[0]].gflops / 1000 / H100_TFLOPS if case.timed(OURS[0]) else None,
            "{head_dim}", **FORWARD, dtype="float32",
        ), "",
        missing=lambda result: None if result.environment.capability == "9.0" else "stated for an H100",
    ),
    Target(
        "fp32 forward: sdpa memory-efficient's time over cupy_raw's, worst of A-C, causal and not", 1.3, 2.0,
        WORST(backward=False),
    ),
    Target("fp32 backward: the same", 1.5, 2.5, WORST(backward=True)),
    Target(
        "A: bf16 forward, the fastest sdpa kernel's time over cupy_raw's", 0.9, 1.3,
        each(FORMS, _best_of_torch, "64", **A64, backward=False),
    ),
    Target(
        "B at 8,192 tokens, launches and all: the fastest sdpa kernel's time over cupy_raw's", 2, 4,
        each(LAUNCHES, _best_of_torch, "64"),
    ),
    Target(
        "A: forward's memory beyond out and lse", 1, 0,
        each("memory", stored(OURS[0], ("scratch_bytes",), lambda size: size / MIB), "64", max), " MiB", lower=True,
    ),
)  # fmt: skip


WHAT = views.fact("what", "configuration")
FIRST = (WHAT, views.WHO, views.TIME, views.QUARTILES, views.Column("TFLOP/s", lambda row, case: f"{row.gflops / 1000:,.1f}"))
OVER_OURS = views.over(OURS[0], "time / cupy_raw's")
BEYOND = views.value("scratch_bytes", "beyond out and lse", "bytes")
SPEED_UPS = "Speed-up of cupy_raw over {who}, with 95% intervals"
SENTENCES = {
    TARGETS[4].name: "in fp32, worst of A to C, torch's memory-efficient kernel takes {} the time of dilkit's CUDA kernels",
    TARGETS[6].name: "on A in bf16, torch's fastest kernel takes {} of it",
}
ONE_BY_ONE = "calls one by one, launches included"
"""The times of results from before graph replays, whose facts lack `timed`."""
COLD = (
    "Measured before graph replays: each call by itself behind a flush of the L2 cache. One shorter than its launches, as B's in "
    "bf16, shows the processor's time. The matmul was one such call too, of 4096 square."
)


def _times(result: RowsResult) -> Iterator[Table]:
    timed = result.facts.get("timed", ONE_BY_ONE)
    columns = *FIRST, views.OF_MATMUL, OVER_OURS
    yield views.ResultTable(f"{timed[0].upper()}{timed[1:]}", FORMS, columns, COLD * (timed == ONE_BY_ONE)).made(result)


REPORT = views.Report(
    place="{device_name}, capability {capability}, CUDA {cuda}",
    tables=(
        _times,
        views.ResultTable("With launches: calls in a row", (LAUNCHES, EAGER), (*FIRST, OVER_OURS)),
        views.ResultTable("Memory of a forward pass", "memory", (WHAT, views.WHO, BEYOND), timed=False),
    ),
    plots=(views.PlotView(SPEED_UPS, FORMS, "{what}", views.faster(OURS[0]), (views.NAMES, views.TIMES), mark=1.0),),
    summary=lambda result: suite_sentence(
        result, SENTENCES, f"{result.environment.device_name}, {result.facts.get('timed', ONE_BY_ONE)}"
    ),
    method="GPU time is that of replays of a CUDA graph of one call, each behind a flush of the L2 cache; with launches, calls "
    f"of at most {1000 * EAGER_UP_TO:.0f} ms follow each other without a pause. Both are medians by CUDA events, implementations "
    "in turns; square matmuls of the same dtype, in a row, are timed beside GPU time. Each implementation is "
    "checked against fp64 arithmetic just before it is timed, a short problem as a whole and rows at the real length. "
    "TFLOP/s count the pattern's nominal FLOPs, keys of several branches each time; a backward pass counts 2.5 times "
    "a forward pass. sdpa:NAME is torch's kernel of that name on strided views, one call a block, merged by lse.",
)


@dataclass(frozen=True)
class GpuSuite(Suite):
    """The shortest measurements first. --quick takes one head_dim alone.

    `backend`: the implementations to measure, by default `automatic` (what a call runs that names none), our kernels, and each of
    torch's. `rows`: words that the name of a step must have, all of them, to be measured. `device`: where, in a rehearsal "cpu".
    """

    NAME = "gpu"
    SUMMARY = "the CUDA kernels against each of torch's own, and a matmul"
    TARGETS = TARGETS
    MAY_FAIL = (AUTOMATIC, *TORCHS)

    repeats: int = 15
    budget: float = 20.0
    backend: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    device: str = field(default="cuda", metadata=NO_OPTION)
    rates: dict[tuple[str, str, bool], float] = field(default_factory=dict, metadata=NO_OPTION)
    """FLOP/s of the last case timed, by implementation, dtype, and True for a backward pass."""

    def steps(self) -> Iterator[SuiteStep]:
        steps = [SuiteStep(LAUNCHES, f"{LAUNCH_BOUND:,} tokens, launches", self.launch_bound)]
        steps += [SuiteStep("memory", f"memory of A, {dtype}", partial(self.memory, dtype)) for dtype in SHORT]
        dims = (64,) if self.quick else (64, 128)
        for backward, letter, dtype, dim, causal in product((False, True), "BAC", SHORT, dims, (False, True)):
            what = f"{letter}, {dtype}, head_dim {dim}{', causal' * causal}, {'backward' if backward else 'forward'}"
            steps.append(SuiteStep(FORMS, what, partial(self.configuration, letter, dtype, dim, causal, backward)))
        chosen = [step for step in steps if all(word in f"{step.table} {step.what}" for word in self.rows)]
        if not chosen:
            raise ValueError(f"--rows: no step of the suite has all of {', '.join(map(repr, self.rows))} in its name")
        yield from chosen

    def where(self) -> str:
        return self.device

    @contextmanager
    def prepared(self) -> Iterator[dict[str, Any]]:
        """Make each of torch's kernels a backend of its own."""
        if self.device == "cuda" and not cuda_count():
            raise ValueError("--suite gpu: torch sees no CUDA device; run it where `dilkit info` lists one")
        with one_kernel_backends(self.device):
            timed = "GPU time" if self.device == "cuda" else "Time of calls"
            yield dict(backends=[one.name for one in self.implementations()], timed=timed)

    def implementations(self) -> list[Implementation]:
        """Return those to measure. Raises ValueError for one that is not known."""
        names = [name for name in list_backends() if name in OURS or name.startswith("sdpa:")]
        known = {one.name: one for one in (automatic(), *backend_implementations(names))}
        if unknown := set(self.backend) - {*known}:
            raise ValueError(f"--backend: {', '.join(sorted(unknown))}: the suite knows {', '.join(known)}")
        return [one for name, one in known.items() if not self.backend or name in self.backend]

    def problem(self, name: str, dim: int, **fields: Any) -> Problem:
        return CONFIGURATIONS[name].problem(dim, self.divisor, device=probe(self.device), **fields)

    def configuration(self, letter: str, dtype: str, dim: int, causal: bool, backward: bool) -> list[ResultRow]:
        problem = self.problem(letter, dim, dtype=dtype, is_causal=causal, requires_grad=backward)
        what = f"{letter}, {SHORT[dtype]}, d={dim}{', causal' * causal}{', backward' * backward}"
        facts = dict(what=what, of=letter, dtype=dtype, head_dim=dim, causal=causal, backward=backward)
        return self.compare(FORMS, facts, problem)

    def launch_bound(self) -> list[ResultRow]:
        """Measure a forward pass too short to fill the device, many in a row: launches are what takes the time."""
        problem = replace(self.problem("B", 64), seq=LAUNCH_BOUND // self.divisor)
        what = f"B, {problem.seq:,} tokens, fp32, d=64, launches too"
        return self.compare(LAUNCHES, dict(what=what, seq=problem.seq), problem)

    def compare(self, table: str, facts: Mapping[str, Any], problem: Problem) -> list[ResultRow]:
        """Check, then time: in `FORMS` GPU time, then with launches what is short or cannot be captured."""
        inputs, share, entries = Tensors.random(problem), BACKWARD_SHARE if problem.requires_grad else 1.0, Entries()
        for one in self.implementations():
            entry = admit(one, problem, inputs, self.budget, partial(self.expected_seconds, one, problem))
            entries[one.name] = entry.knowing(flops=share * one.flops(problem))
        rows = rows_of(table, facts, self.timed(table, entries, inputs, problem))
        if table == LAUNCHES:
            return rows
        timed = {row.who: row for row in rows if row.samples and row.who in entries}
        self.rates.update({(who, problem.dtype, problem.requires_grad): 1e9 * row.gflops for who, row in timed.items()})
        short = all(row.median_s <= EAGER_UP_TO for row in timed.values())
        eager = {who: entry for who, entry in entries.items() if entry.verdict == "measured" and (short or who not in timed)}
        return rows + rows_of(EAGER, facts, self.timed(EAGER, eager, inputs, problem))

    def expected_seconds(self, one: Implementation, problem: Problem) -> float:
        """Return seconds by the rate in the last case of this dtype and pass; before there is one, in a call of fewer tokens."""
        if not (rate := self.rates.get((one.name, problem.dtype, problem.requires_grad))):
            short = replace(problem, seq=max(problem.seq // 16, min(problem.seq, 1024)))
            call = partial(one.once, Tensors.random(short), short)
            call()
            rate = one.flops(short) / max(clock_of(self.device)(call, 1), 1e-9)
        return one.flops(problem) / rate

    def timed(self, table: str, entries: Entries, inputs: Tensors, problem: Problem) -> CaseFields:
        """Time, in `FORMS`, replays of CUDA graphs beside matmuls, in a rehearsal calls; in other tables calls in a row."""
        entries, calls, pool = dict(entries), dict[str, Call](), None
        replays = table == FORMS and self.device == "cuda"
        cuda: Any = torch.cuda
        stream, held = cuda.Stream() if replays else None, list[Call]()
        for one in self.implementations():
            if one.name not in entries or entries[one.name].verdict != "measured":
                continue
            try:
                call = timed_call(one, inputs, problem)
                if replays:
                    # Replays follow one another and nothing reads their results, so graphs share their memory, which torch does
                    # on one stream alone. A backward pass reads what its forward pass has left, outside of the graph.
                    graph = captured(call, pool, stream)
                    held.append(call)
                    call, pool = graph.replay, graph.pool()
                else:
                    call()
                calls[one.name] = call
            except Exception as error:  # what is timed may need more memory than what was checked
                why = "timed with launches alone, without a CUDA graph: " * replays + error_line(error)
                entries[one.name] = replace(failed(error), reasons=(why,), checks=entries[one.name].checks)
        ceilings, how = Ceilings(device="cuda"), dict[str, Any](warmup=3, min_time=0.01, device=self.device)
        if table == FORMS:
            ceilings, how = Ceilings(problem.dtype, self.device), dict(clock=cold_cuda_seconds if replays else None)
        timed = side_by_side(entries, calls, {}, ceilings, partial(time_interleaved, repeats=self.repeats, **how))
        held.clear()
        return timed

    def memory(self, dtype: str) -> list[ResultRow]:
        problem = self.problem("A", 64, dtype=dtype)
        inputs, facts = Tensors.random(problem), dict(what=f"A, {dtype}, head_dim 64", dtype=dtype)
        rows = []
        for one in (one for one in self.implementations() if not one.refusals(problem)):
            call = partial(one.once, inputs, problem)
            try:
                call()
                row = ResultRow(values=dict(scratch_bytes=memory.peak_memory(call, self.device) - results_bytes(problem)))
            except Exception as error:  # out of memory, or no way to measure it here: the others go on
                row = failed(error)
            rows.append(row_of("memory", facts, one.name, row))
        return rows


def timed_call(implementation: Implementation, inputs: Tensors, problem: Problem) -> Call:
    """Return the forward pass; or, where the problem asks for gradients, the backward pass alone.

    The first call of a backward pass makes its forward pass, of leaves of its own: autograd runs each node on the stream that
    it, or its leaf, was made on, which must be the stream of the capture.
    """
    if not problem.requires_grad:
        return partial(implementation.once, inputs, problem)

    @cache
    def forward() -> tuple[Tensor, tuple[Tensor, ...]]:
        q, k, v = (x.detach().requires_grad_() for x in inputs.qkv)
        return implementation.attend(replace(inputs, query=q, key=k, value=v), problem), (q, k, v)

    return lambda: torch.autograd.grad(*forward(), inputs.dout, retain_graph=True)
