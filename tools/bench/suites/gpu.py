"""`dilkit bench --suite gpu`: the CUDA kernels beside each of torch's own, a matmul and a copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any

import torch

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
from dilkit.tools.console.text import error_line, in_bytes, in_seconds
from dilkit.tools.measure.case import admit, failed, results_bytes, side_by_side
from dilkit.tools.measure.ceilings import Ceilings
from dilkit.tools.measure.implementation import BACKWARD_FLOPS, Implementation, automatic, backend_implementations
from dilkit.tools.measure.timing import Call, cold_cuda_seconds, time_interleaved
from dilkit.tools.report import views
from dilkit.tools.results.record import Entries
from dilkit.tools.results.rows import CaseRows, Row, RowsResult, rows_of

CONFIGURATIONS = {
    "A": Configuration(131072, (2048, 4096, 8192, 16384, 32768), (1, 2, 4, 8, 16)),
    "B": Configuration(32768, (512, 1024), (1, 2)),
    "C": Configuration(1 << 20, (2048, 8192, 32768, 131072, 524288), (1, 4, 16, 64, 256)),
}
OURS = ("cupy_raw", "numba_cuda", "triton")
TORCHS = tuple(f"sdpa:{kernel.name}" for kernel in KERNELS)
EFFICIENT, CUDNN, AUTOMATIC = "sdpa:memory-efficient", "sdpa:cudnn", "automatic"
FORMS, LAUNCHES, LENGTHS = "configurations", "launches", "lengths"
SHORT = {"float32": "fp32", "bfloat16": "bf16"}
HEAD_DIMS = (64, 128)
SEQS, LAUNCH_BOUND = (1024, 2048, 4096, 8192, 16384, 32768), 8192
"""Tokens with the pattern of B: of tables that users of earlier implementations know, and where launches take the time."""
LONG = 1 << 24
"""Tokens with the pattern of C."""
LEAST_FLOPS = {"cupy_raw": 5e12, "numba_cuda": 5e11}
"""FLOP/s that each is expected to reach at least, for the budget; 2e12 for the others."""
BACKWARD_SHARE = BACKWARD_FLOPS / (1 + BACKWARD_FLOPS)
H100_TFLOPS = 67.0
"""fp32 on the CUDA cores of an H100 SXM, nominal."""


def _worst(slow: str, fast: str, **facts: Any) -> Callable[[RowsResult], Values]:
    """Read the least ratio of times of all configurations in fp32, by head_dim."""
    return time_ratio(FORMS, slow, fast, "{head_dim}", combine=min, dtype="float32", **facts)


def _best_of_torch(case: CaseRows) -> float | None:
    """Time of the fastest of torch's kernels over ours; None where either was not measured."""
    return min((case.ratio(name, OURS[0]) for name in case.rows if name in TORCHS and case.timed(name, OURS[0])), default=None)


def _training(result: RowsResult) -> Values:
    """Time of cuDNN's forward and backward pass over those of the automatic choice, in A at head_dim 64."""
    cases = [case for case in result.cases(FORMS, **A64) if case.timed(CUDNN, AUTOMATIC)]
    if {case.case["backward"] for case in cases} != {False, True}:
        return {}
    slow, fast = (sum(case.rows[name].median_s for case in cases) for name in (CUDNN, AUTOMATIC))
    return {"64": slow / fast}


FORWARD: dict[str, Any] = dict(of="A", backward=False, causal=False)
A64: dict[str, Any] = dict(of="A", dtype="bfloat16", head_dim=64, causal=False)
OVER_AUTOMATIC = "time over the automatic choice's"
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
        _worst(EFFICIENT, OURS[0], backward=False),
    ),
    Target("fp32 backward: the same", 1.5, 2.5, _worst(EFFICIENT, OURS[0], backward=True)),
    Target(
        "A: bf16 forward, the fastest sdpa kernel's time over cupy_raw's", 0.9, 1.3,
        each(FORMS, _best_of_torch, "64", **A64, backward=False),
    ),
    Target(
        "B at 8,192 tokens, launches and all: the fastest sdpa kernel's time over cupy_raw's", 2, 4,
        each(LAUNCHES, _best_of_torch, "64"),
    ),
    Target(
        "fp32 forward: cupy_raw's time over numba_cuda's, worst of A-C", 0.3, 0.5,
        _worst(OURS[0], OURS[1], backward=False, causal=False), "",
    ),
    Target(
        "A: forward's memory beyond out and lse", 1, 0,
        each("memory", stored(OURS[0], ("scratch_bytes",), lambda size: size / MIB), "64", max), " MiB", lower=True,
    ),
    Target(
        "the longest sequence, bf16 forward on one GPU", 2**23, 2**24,
        each("long", lambda case: case.case["seq"] if case.rows[OURS[0]].verdict == "measured" else None, "64", max), " tokens",
    ),
)  # fmt: skip


def _notes(result: RowsResult) -> Iterator[str]:
    for case in result.cases("memory"):
        sizes = {who: row.values.get("scratch_bytes") for who, row in case.rows.items()}
        held = (f"{who} {'?' if size is None else in_bytes(size)}" for who, size in sizes.items())
        yield f"{case.case['what']}: forward's memory beyond out and lse: {', '.join(held)}"
    for row in (row for row in result.rows if row.table == "long" and row.samples):
        yield f"{row.case['what']}: {row.verdict}: {in_seconds(row.median_s)}, {row.gflops / 1000:,.0f} TFLOP/s"


SPEED_UP = "Speed-up of cupy_raw"
REPORT = views.Report(
    place="{device_name}, capability {capability}, CUDA {cuda}",
    tables=(
        views.TableView(
            "All times",
            (FORMS, LAUNCHES, LENGTHS),
            (
                *(views.fact("what", "configuration"), views.WHO, views.TIME, views.QUARTILES),
                views.Column("TFLOP/s", lambda row, case: f"{row.gflops / 1000:,.1f}"),
                *(views.OF_MATMUL, views.over(OURS[0], "time / cupy_raw's")),
            ),
        ),
        views.TableView(
            SPEED_UP,
            FORMS,
            (views.fact("what", "configuration"), views.Column("over", views.WHO.cell), views.times_faster(OURS[0])),
            note="Ratios of medians, with 95% intervals by resampling each side's samples.",
            who=(AUTOMATIC, *OURS[1:], *TORCHS),
        ),
    ),
    plots=(
        views.PlotView(
            f"{SPEED_UP} over {{who}}, with 95% intervals",
            FORMS,
            "{what}",
            views.faster(OURS[0]),
            (views.NAMES, views.TIMES),
            mark=1.0,
        ),
    ),
    sentences={
        TARGETS[4].name: "in fp32 torch's memory-efficient kernel takes at least {} as long as the CUDA kernels",
        TARGETS[6].name: "in bf16 torch's fastest {}",
        TARGETS[10].name: "the longest sequence measured has {}",
    },
    notes=_notes,
    figure_columns=("head_dim 64", "head_dim 128"),
    method="CUDA events around each call by itself, the L2 cache flushed before it, implementations in turns, medians; a "
    "matmul of the same dtype, 4096 square, and a copy of 1 GiB are timed in the same rounds. Each implementation is "
    "checked against fp64 arithmetic just before it is timed, a short problem as a whole and rows at the real length. "
    "TFLOP/s count the pattern's nominal FLOPs, keys of several branches each time; a backward pass counts 2.5 times "
    "a forward pass. sdpa:NAME is torch's kernel of that name on strided views, one call a block, merged by lse. "
    "Where launches count, calls follow each other without a pause.",
)


@dataclass(frozen=True)
class GpuSuite(Suite):
    """The shortest measurements first. --quick takes one head_dim alone.

    `backend`: the implementations to measure, by default `automatic` (what a call runs that names none), our kernels, and each of
    torch's. `rows`: words that the name of a step must have, all of them, to be measured. `device`: where, in a rehearsal "cpu".
    """

    NAME = "gpu"
    SUMMARY = "the CUDA kernels against each of torch's own, a matmul and a copy"
    TARGETS = TARGETS
    MAY_FAIL = (AUTOMATIC, *TORCHS)

    repeats: int = 15
    budget: float = 20.0
    backend: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    device: str = field(default="cuda", metadata=NO_OPTION)

    def steps(self) -> Iterator[SuiteStep]:
        chosen = [step for step in self.every_step() if all(word in f"{step.table} {step.what}" for word in self.rows)]
        if not chosen:
            raise ValueError(f"--rows: no step of the suite has all of {', '.join(map(repr, self.rows))} in its name")
        yield from chosen

    def every_step(self) -> Iterator[SuiteStep]:
        """Yield every step, whatever `rows` says."""
        yield SuiteStep(LAUNCHES, f"{LAUNCH_BOUND:,} tokens, launches", self.launch_bound)
        for dtype in SHORT:
            yield SuiteStep("memory", f"memory of A, {dtype}", partial(self.memory, dtype))
        for seq in SEQS[: 2 if self.quick else None]:
            yield SuiteStep(LENGTHS, f"{seq:,} tokens", partial(self.forward, seq))
        dims = HEAD_DIMS[: 1 if self.quick else None]
        for backward, letter, dtype, dim, causal in product((False, True), "BAC", SHORT, dims, (False, True)):
            what = f"{letter}, {dtype}, head_dim {dim}{', causal' * causal}, {'backward' if backward else 'forward'}"
            yield SuiteStep(FORMS, what, partial(self.configuration, letter, dtype, dim, causal, backward))
        yield SuiteStep("long", "the longest sequence", self.long)

    def where(self) -> str:
        return self.device

    @contextmanager
    def prepared(self) -> Iterator[dict[str, Any]]:
        """Make each of torch's kernels a backend of its own."""
        if self.device == "cuda" and not cuda_count():
            raise ValueError("--suite gpu: torch sees no CUDA device; run it where `dilkit info` lists one")
        with one_kernel_backends(self.device):
            yield dict(backends=[one.name for one in self.implementations()])

    def implementations(self) -> list[Implementation]:
        """Return those to measure. Raises ValueError for one that is not known."""
        names = [name for name in list_backends() if name in OURS or name.startswith("sdpa:")]
        known = {one.name: one for one in (automatic(), *backend_implementations(names))}
        if unknown := set(self.backend) - {*known}:
            raise ValueError(f"--backend: {', '.join(sorted(unknown))}: the suite knows {', '.join(known)}")
        return [one for name, one in known.items() if not self.backend or name in self.backend]

    def problem(self, name: str, dim: int, **fields: Any) -> Problem:
        """Return a configuration on the first device of the suite's kind."""
        return CONFIGURATIONS[name].problem(dim, self.divisor, device=probe(self.device), **fields)

    def configuration(self, letter: str, dtype: str, dim: int, causal: bool, backward: bool) -> list[Row]:
        """Measure all implementations on one configuration: the forward pass, or the backward pass alone."""
        problem = self.problem(letter, dim, dtype=dtype, is_causal=causal, requires_grad=backward)
        what = f"{letter}, {SHORT[dtype]}, d={dim}{', causal' * causal}{', backward' * backward}"
        facts = dict(what=what, of=letter, dtype=dtype, head_dim=dim, causal=causal, backward=backward)
        return self.compare(FORMS, facts, problem)

    def forward(self, seq: int) -> list[Row]:
        """Measure the pattern of B in fp32, whatever its length."""
        problem = replace(self.problem("B", 64), seq=seq)
        return self.compare(LENGTHS, dict(what=f"B, {seq:,} tokens, fp32, d=64", seq=seq), problem)

    def launch_bound(self) -> list[Row]:
        """Measure a forward pass too short to fill the device, many in a row: launches are what takes the time."""
        problem = replace(self.problem("B", 64), seq=LAUNCH_BOUND // self.divisor)
        what = f"B, {problem.seq:,} tokens, fp32, d=64, launches too"
        return self.compare(LAUNCHES, dict(what=what, seq=problem.seq), problem, in_a_row=True)

    def compare(self, table: str, facts: Mapping[str, Any], problem: Problem, in_a_row: bool = False) -> list[Row]:
        """Check, then time in turns, beside a matmul and a copy; each call behind a flush of the L2 cache, or many in a row."""
        inputs, share = Tensors.random(problem), BACKWARD_SHARE if problem.requires_grad else 1.0
        entries, calls, flops = Entries(), dict[str, Call](), dict[str, float]()
        for one in self.implementations():
            flops[one.name] = share * one.flops(problem)
            expected_s = partial(float, one.flops(problem) / LEAST_FLOPS.get(one.name, 2e12))
            entry = admit(one, problem, inputs, self.budget, expected_s)
            if entry.verdict == "measured":
                try:
                    calls[one.name] = timed_call(one, inputs, problem)
                    calls[one.name]()
                except Exception as error:  # what is timed may need more memory than what was checked
                    entry = replace(failed(error), check=entry.check)
            entries[one.name] = entry
        timer = partial(time_interleaved, repeats=self.repeats, clock=cold_cuda_seconds if self.device == "cuda" else None)
        if in_a_row:
            timer = partial(time_interleaved, repeats=self.repeats, warmup=3, min_time=0.02, device=self.device)
        measured = side_by_side(entries, calls, flops, Ceilings(problem.dtype, self.device), timer)
        return rows_of(table, facts, measured)

    def memory(self, dtype: str) -> list[Row]:
        """Measure memory that a forward pass on A holds beyond out and lse."""
        problem = self.problem("A", 64, dtype=dtype)
        inputs, facts = Tensors.random(problem), dict(what=f"A, {dtype}, head_dim 64", dtype=dtype)
        rows = []
        for one in (one for one in self.implementations() if not one.refusals(problem)):
            row, call = Row(table="memory", case=facts, who=one.name), partial(one.once, inputs, problem)
            try:
                call()
                held = memory.peak_memory(call, self.device) - results_bytes(problem)
                rows.append(replace(row, values=dict(scratch_bytes=held)))
            except Exception as error:  # out of memory, or no way to measure it here: the others go on
                rows.append(replace(row, verdict="failed", reasons=(error_line(error),)))
        return rows

    def long(self) -> list[Row]:
        """Measure one forward pass over sixteen million tokens in bf16, or over eight where those do not fit."""
        row = self.forward_over(LONG // self.divisor)
        return [self.forward_over(LONG // self.divisor // 2) if row.verdict == "failed" else row]

    def forward_over(self, seq: int) -> Row:
        """Measure one forward pass over so many tokens; both ends must be what they are alone."""
        problem = replace(self.problem("C", 64, dtype="bfloat16"), seq=seq)
        (ours,) = backend_implementations(OURS[:1])
        row = Row(table="long", case=dict(what=f"{seq:,} tokens, bf16 forward", seq=seq), who=ours.name)
        if reasons := ours.refusals(problem):
            return replace(row, verdict="refused", reasons=tuple(reasons))
        try:
            inputs = long_inputs(problem)
            different = check_ends(ours, problem, inputs, ours.once(inputs, problem))
            time = time_interleaved({"": partial(ours.once, inputs, problem)}, repeats=3, device=self.device)[""]
        except torch.cuda.OutOfMemoryError as error:
            return replace(row, verdict="failed", reasons=(str(error).splitlines()[0],))
        wrong = tuple(f"{what}: {bits} results differ" for what, bits in different.items() if bits)
        values, verdict = dict(flops=ours.flops(problem)), "wrong" if wrong else "measured"
        return replace(row, verdict=verdict, reasons=wrong, samples=time.samples_s, values=values)


def timed_call(implementation: Implementation, inputs: Tensors, problem: Problem) -> Call:
    """Return the forward pass; or, where the problem asks for gradients, the backward pass alone."""
    if not problem.requires_grad:
        return partial(implementation.once, inputs, problem)
    out = implementation.attend(inputs, problem)
    return partial(torch.autograd.grad, out, inputs.qkv, inputs.dout, retain_graph=True)


def check_ends(ours: Implementation, problem: Problem, inputs: Tensors, out: Any) -> dict[str, int]:
    """Count the results of the first and the last segments that differ from those of these tokens alone."""
    longest = max(problem.pattern.segment_lengths)
    ends = {}
    for what, start in (("the first tokens", 0), ("the last tokens", problem.seq // longest * longest - longest)):
        rows = slice(start, start + longest)
        query, key, value, dout = (x[:, rows] for x in (*inputs.qkv, inputs.dout))
        alone = ours.once(Tensors(query, key, value, None, dout), replace(problem, seq=longest))
        ends[what] = int((alone != out[:, rows]).sum())
    return ends


def long_inputs(problem: Problem) -> Tensors:
    """Return random tensors made in their own dtype: in fp32 first, they would not fit."""
    shape = problem.batch, problem.seq, problem.heads, problem.head_dim
    query, key, value = (torch.randn(shape, dtype=torch.bfloat16, device=problem.device.type) for _ in range(3))
    return Tensors(query, key, value, None, query)
