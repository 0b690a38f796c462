"""`dilkit bench --overhead`: the cost of selection and of the torch op, beside calling a backend directly on a tiny problem.

One thread computes: the costs arise in one, and waking others takes longer than that on a busy machine.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dilkit.problem import Problem
from dilkit.threads import torch_threads
from dilkit.tools.bench.one_pattern import problem_text
from dilkit.tools.console.text import in_seconds
from dilkit.tools.report import views
from dilkit.tools.report.headline import placed
from dilkit.tools.results.file import new_result
from dilkit.tools.results.rows import CaseRows, RowsResult, row_of

if TYPE_CHECKING:
    from torch import Tensor

PUBLIC, DIRECT = "dilkit", "directly"


def measure(problem: Problem, backend: str | None, repeats: int) -> RowsResult:
    """Measure each mode of calling the backend that computes `problem`, or the one of this name."""
    from dilkit.tools.measure.timing import time_interleaved
    from dilkit.tools.results.record import Entry

    with torch_threads(1):
        name, modes = _calls(problem, backend)
        rows = []
        for mode, calls in modes.items():
            timed = time_interleaved(calls, repeats, warmup=20, min_time=0.002, device=problem.device.type)
            rows += [row_of("call", dict(mode=mode), who, Entry(time=samples)) for who, samples in timed.items()]
        sizes = problem_text(problem, f"{problem.seq} tokens").partition(", ")[2]  # the passes are those of each mode
        facts = dict(problem=sizes, pattern=str(problem.pattern), scale=problem.scale, backend=name)
        return new_result(RowsResult, problem.device, kind="overhead", repeats=repeats, facts=facts, rows=tuple(rows))


def _calls(problem: Problem, backend: str | None) -> tuple[str, dict[str, dict[str, Callable[[], Any]]]]:
    """Return the backend that computes `problem`, and for each mode the calls through dilkit and directly."""
    import torch

    from dilkit.attention import dilated_attention
    from dilkit.inputs import Inputs
    from dilkit.selector import requested_backends, select
    from dilkit.testing.tensors import Tensors

    trained = replace(problem, requires_grad=True)
    chosen = select(trained, requested_backends(backend))
    inputs = Tensors.random(trained)
    graph = inputs.query, inputs.key, inputs.value
    plain, mask = (graph[0].detach(), graph[1].detach(), graph[2].detach()), inputs.mask
    direct_inputs = Inputs(*plain, mask)
    options: dict[str, Any] = dict(is_causal=problem.is_causal, key_padding_mask=mask, backend=backend)

    def public(tensors: tuple[Tensor, Tensor, Tensor]) -> Any:
        return dilated_attention(*tensors, problem.pattern, **options)

    @torch.no_grad()
    def direct(posed: Problem, backward: bool = False) -> Any:
        out, lse = chosen.forward(direct_inputs, posed)
        return chosen.backward(inputs.dout, direct_inputs, out, lse, posed) if backward else (out, lse)

    return chosen.name, {
        "forward, no gradients": {PUBLIC: torch.no_grad()(lambda: public(plain)), DIRECT: lambda: direct(problem)},
        "forward, gradients recorded": {PUBLIC: lambda: public(graph), DIRECT: lambda: direct(trained)},
        "forward + backward": {
            PUBLIC: lambda: torch.autograd.grad(public(graph), graph, inputs.dout),
            DIRECT: lambda: direct(trained, backward=True),
        },
    }


def overhead_s(case: CaseRows) -> float:
    """Return the median of the differences of samples of the same round, in seconds: a slow spell falls out."""
    pairs = zip(case.rows[PUBLIC].samples, case.rows[DIRECT].samples, strict=True)
    return statistics.median(public - direct for public, direct in pairs)


def _signed(seconds: float) -> str:
    return f"-{in_seconds(-seconds)}" if seconds < 0 else in_seconds(seconds)


def sentence(result: RowsResult) -> str:
    """Return the sentence on docs/measurements.md."""
    overheads = [f"{1e6 * overhead_s(case):.1f} us ({case.label('{mode}')})" for case in result.cases()]
    backend = result.facts["backend"]
    return placed(result, f"`dilated_attention` adds to a call of its backend, {backend}: {', '.join(overheads)}")


COLUMNS = (
    *(views.label("a call", "{mode}"), views.Column(PUBLIC, views.TIME.cell), views.of(DIRECT, views.TIME)),
    views.Column("overhead", lambda row, case: _signed(overhead_s(case))),
    views.Column("of the fastest", lambda row, case: _signed(min(row.samples) - min(case.rows[DIRECT].samples))),
)
REPORT = views.Report(
    subject=(
        "selection + op overhead of dilkit.dilated_attention over backend {backend} called directly",
        "{problem}, {pattern}",
    ),
    place="{device_name}, 1 thread",
    tables=(views.TableView("Time of a call", "call", COLUMNS, who=(PUBLIC,)),),
    plots=(views.PlotView("Time of a call, with 95% intervals", "call", "{mode}"),),
    summary=sentence,
    method="One thread; both ways timed in turns. The overhead is the median difference of samples of the same round.",
)
