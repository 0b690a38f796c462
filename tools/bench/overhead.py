"""`dilkit bench --overhead`: the cost of selection and of the torch op on a tiny problem, on one thread."""

import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dilkit.attention import dilated_attention
from dilkit.inputs import Inputs
from dilkit.problem import Problem
from dilkit.selector import requested_backends, select
from dilkit.testing.tensors import Tensors
from dilkit.threads import torch_threads
from dilkit.tools.bench.one_pattern import problem_text
from dilkit.tools.console.text import in_seconds
from dilkit.tools.measure.timing import time_interleaved
from dilkit.tools.report import views
from dilkit.tools.report.headline import placed
from dilkit.tools.results.file import new_result
from dilkit.tools.results.rows import CaseRows, ResultRow, RowsResult, row_of

PUBLIC, DIRECT = "dilkit", "directly"


@torch_threads(1)
def measure(problem: Problem, backend: str | None, repeats: int) -> RowsResult:
    """Measure each mode of calling the backend that computes `problem`, or the one of this name."""
    trained = replace(problem, requires_grad=True)
    chosen = select(trained, requested_backends(backend))
    inputs = Tensors.random(trained)
    graph, plain = inputs.qkv, [x.detach() for x in inputs.qkv]
    direct_inputs = Inputs(plain[0], plain[1], plain[2], inputs.mask)
    options: dict[str, Any] = dict(is_causal=problem.is_causal, key_padding_mask=inputs.mask, backend=backend)

    def public(query: Tensor, key: Tensor, value: Tensor) -> Any:
        return dilated_attention(query, key, value, problem.pattern, **options)

    @torch.no_grad()
    def direct(posed: Problem, backward: bool = False) -> Any:
        out, lse = chosen.forward(direct_inputs, posed)
        return chosen.backward(inputs.dout, direct_inputs, out, lse, posed) if backward else (out, lse)

    modes: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "forward, no gradients": (torch.no_grad()(lambda: public(*plain)), lambda: direct(problem)),
        "forward, gradients recorded": (lambda: public(*graph), lambda: direct(trained)),
        "forward + backward": (
            lambda: torch.autograd.grad(public(*graph), graph, inputs.dout),
            lambda: direct(trained, backward=True),
        ),
    }
    rows = []
    for mode, calls in modes.items():
        named = dict(zip((PUBLIC, DIRECT), calls, strict=True))
        timed = time_interleaved(named, repeats, warmup=20, min_time=0.002, device=problem.device.type)
        rows += [row_of("call", dict(mode=mode), who, ResultRow().timed(samples)) for who, samples in timed.items()]
    sizes = problem_text(problem, f"{problem.seq} tokens").partition(", ")[2]  # the passes are those of each mode
    facts = dict(problem=sizes, pattern=str(problem.pattern), scale=problem.scale, backend=chosen.name)
    return new_result(RowsResult, problem.device, kind="overhead", repeats=repeats, facts=facts, rows=tuple(rows))


def overhead_s(case: CaseRows) -> float:
    """Return the median of the differences of samples of the same round, in seconds: a slow spell falls out."""
    pairs = zip(case.rows[PUBLIC].samples, case.rows[DIRECT].samples, strict=True)
    return statistics.median(public - direct for public, direct in pairs)


def sentence(result: RowsResult) -> str:
    overheads = [f"{1e6 * overhead_s(case):.1f} us ({case.label('{mode}')})" for case in result.cases()]
    backend = result.facts["backend"]
    return placed(result, f"`dilated_attention` adds to a call of its backend, {backend}: {', '.join(overheads)}")


COLUMNS = (
    *(views.fact("mode", "a call"), views.Column(PUBLIC, views.TIME.cell), views.of(DIRECT, views.TIME)),
    views.Column("overhead", lambda row, case: f"{'-' * (overhead_s(case) < 0)}{in_seconds(abs(overhead_s(case)))}"),
)
REPORT = views.Report(
    subject=(
        "selection + op overhead of dilkit.dilated_attention over backend {backend} called directly",
        "{problem}, {pattern}",
    ),
    place="{device_name}, 1 thread",
    tables=(views.ResultTable("Time of a call", "call", COLUMNS, who=(PUBLIC,)),),
    plots=(views.PlotView("Time of a call, with 95% intervals", "call", "{mode}"),),
    summary=sentence,
    method="One thread; both ways timed in turns. The overhead is the median difference of samples of the same round.",
)
