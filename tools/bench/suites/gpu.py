"""`dilkit bench --suite gpu`: the CUDA kernels beside each of torch's own, and a matmul."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
from dilkit.tools.console.text import error_line
from dilkit.tools.measure.case import admit, failed, results_bytes, side_by_side
from dilkit.tools.measure.ceilings import Ceilings
from dilkit.tools.measure.implementation import BACKWARD_FLOPS, Implementation, automatic, backend_implementations
from dilkit.tools.measure.timing import Call, cold_cuda_seconds, time_interleaved
from dilkit.tools.report import views
from dilkit.tools.results.rows import CaseRows, Entries, Row, RowsResult, rows_of

CONFIGURATIONS = {
    "A": Configuration(131072, (2048, 4096, 8192, 16384, 32768), (1, 2, 4, 8, 16)),
    "B": Configuration(32768, (512, 1024), (1, 2)),
    "C": Configuration(1 << 20, (2048, 8192, 32768, 131072, 524288), (1, 4, 16, 64, 256)),
}
OURS = ("cupy_raw", "triton")
TORCHS = tuple(f"sdpa:{kernel.name}" for kernel in KERNELS)
EFFICIENT, CUDNN, AUTOMATIC = "sdpa:memory-efficient", "sdpa:cudnn", "automatic"
FORMS, LAUNCHES = "configurations", "launches"
SHORT = {"float32": "fp32", "bfloat16": "bf16"}
LAUNCH_BOUND = 8192
"""Tokens with the pattern of B at which launches take the time."""
LEAST_FLOPS = 2e12, 5e12
"""FLOP/s that others, and cupy_raw, are expected to reach at least, for the budget."""
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
COLUMNS = (
    *(WHAT, views.WHO, views.TIME, views.QUARTILES),
    views.Column("TFLOP/s", lambda row, case: f"{row.gflops / 1000:,.1f}"),
    *(views.OF_MATMUL, views.over(OURS[0], "time / cupy_raw's")),
)
BEYOND = views.value("scratch_bytes", "beyond out and lse", "bytes")
SPEED_UPS = "Speed-up of cupy_raw over {who}, with 95% intervals"
REPORT = views.Report(
    place="{device_name}, capability {capability}, CUDA {cuda}",
    tables=(
        views.TableView("All times", (FORMS, LAUNCHES), COLUMNS),
        views.TableView("Memory of a forward pass", "memory", (WHAT, views.WHO, BEYOND), timed=False),
    ),
    plots=(views.PlotView(SPEED_UPS, FORMS, "{what}", views.faster(OURS[0]), (views.NAMES, views.TIMES), mark=1.0),),
    sentences={
        TARGETS[4].name: "in fp32 torch's memory-efficient kernel takes at least {} as long as the CUDA kernels",
        TARGETS[6].name: "in bf16 torch's fastest {}",
    },
    method="CUDA events around each call by itself, the L2 cache flushed before it, implementations in turns, medians; a "
    "matmul of the same dtype, 4096 square, is timed in the same rounds. Each implementation is "
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
    SUMMARY = "the CUDA kernels against each of torch's own, and a matmul"
    TARGETS = TARGETS
    MAY_FAIL = (AUTOMATIC, *TORCHS)

    repeats: int = 15
    budget: float = 20.0
    backend: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    device: str = field(default="cuda", metadata=NO_OPTION)

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

    def launch_bound(self) -> list[Row]:
        """Measure a forward pass too short to fill the device, many in a row: launches are what takes the time."""
        problem = replace(self.problem("B", 64), seq=LAUNCH_BOUND // self.divisor)
        what = f"B, {problem.seq:,} tokens, fp32, d=64, launches too"
        return self.compare(LAUNCHES, dict(what=what, seq=problem.seq), problem)

    def compare(self, table: str, facts: Mapping[str, Any], problem: Problem) -> list[Row]:
        """Check, then time in turns, beside a matmul; each call behind a flush of the L2 cache, launches in a row."""
        inputs, share = Tensors.random(problem), BACKWARD_SHARE if problem.requires_grad else 1.0
        entries, calls, flops = Entries(), dict[str, Call](), dict[str, float]()
        for one in self.implementations():
            flops[one.name] = share * one.flops(problem)
            expected_s = partial(float, one.flops(problem) / LEAST_FLOPS[one.name == OURS[0]])
            entry = admit(one, problem, inputs, self.budget, expected_s)
            if entry.verdict == "measured":
                try:
                    calls[one.name] = timed_call(one, inputs, problem)
                    calls[one.name]()
                except Exception as error:  # what is timed may need more memory than what was checked
                    entry = replace(failed(error), checks=entry.checks)
            entries[one.name] = entry
        timer = partial(time_interleaved, repeats=self.repeats, clock=cold_cuda_seconds if self.device == "cuda" else None)
        if table == LAUNCHES:
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


def timed_call(implementation: Implementation, inputs: Tensors, problem: Problem) -> Call:
    """Return the forward pass; or, where the problem asks for gradients, the backward pass alone."""
    if not problem.requires_grad:
        return partial(implementation.once, inputs, problem)
    out = implementation.attend(inputs, problem)
    return partial(torch.autograd.grad, out, inputs.qkv, inputs.dout, retain_graph=True)
