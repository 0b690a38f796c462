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
from dilkit.tools.console.text import in_seconds
from dilkit.tools.report import views
from dilkit.tools.report.document import Axis
from dilkit.tools.report.headline import placed
from dilkit.tools.results.file import new_result
from dilkit.tools.results.problem import problem_text
from dilkit.tools.results.rows import CaseRows, RowsResult, row_of

if TYPE_CHECKING:
    from torch import Tensor

Pair = tuple[Callable[[], Any], Callable[[], Any]]
PUBLIC, DIRECT = "dilkit", "directly"


def measure(problem: Problem, backend: str | None, repeats: int) -> RowsResult:
    """Measure each way of calling the backend that computes `problem`, or the one of this name."""
    from dilkit.tools.measure.timing import time_interleaved
    from dilkit.tools.results.record import Entry

    with torch_threads(1):
        name, pairs = call_pairs(problem, backend)
        rows = []
        for mode, pair in pairs.items():
            calls = dict(zip((PUBLIC, DIRECT), pair, strict=True))
            timed = time_interleaved(calls, repeats, warmup=20, min_time=0.002, device=problem.device.type)
            rows += [row_of("call", dict(mode=mode), who, Entry(time=samples)) for who, samples in timed.items()]
        sizes = problem_text(problem, f"{problem.seq} tokens").partition(", ")[2]  # the passes are those of each mode
        facts = dict(problem=sizes, pattern=str(problem.pattern), scale=problem.scale, backend=name)
        return new_result(RowsResult, problem.device, kind="overhead", repeats=repeats, facts=facts, rows=tuple(rows))


def call_pairs(problem: Problem, backend: str | None = None) -> tuple[str, dict[str, Pair]]:
    """The backend that computes `problem`, and for each mode of calling it (through dilkit, directly).

    Raises `NoBackendError` when there is none.
    """
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

    def direct(posed: Problem) -> Any:
        return chosen.forward(direct_inputs, posed)

    def direct_both() -> Any:
        out, lse = direct(trained)
        return chosen.backward(inputs.dout, direct_inputs, out, lse, trained)

    modes: dict[str, Pair] = {
        "forward, no gradients": (torch.no_grad()(lambda: public(plain)), torch.no_grad()(lambda: direct(problem))),
        "forward, gradients recorded": (lambda: public(graph), torch.no_grad()(lambda: direct(trained))),
        "forward + backward": (lambda: torch.autograd.grad(public(graph), graph, inputs.dout), torch.no_grad()(direct_both)),
    }
    return chosen.name, modes


def overhead_s(case: CaseRows) -> float:
    """Median of the differences of samples of the same round, in seconds: a slow spell of the machine falls out."""
    pairs = zip(case.rows[PUBLIC].samples, case.rows[DIRECT].samples, strict=True)
    return statistics.median(public - direct for public, direct in pairs)


def _signed(seconds: float) -> str:
    return f"-{in_seconds(-seconds)}" if seconds < 0 else in_seconds(seconds)


COLUMNS = (
    *(views.label("a call", "{mode}"), views.Column(PUBLIC, views.TIME.cell), views.of(DIRECT, views.TIME)),
    views.Column("overhead", lambda row, case: _signed(overhead_s(case))),
    views.Column("of the fastest", lambda row, case: _signed(min(row.samples) - min(case.rows[DIRECT].samples))),
)


def sentence(result: RowsResult) -> str:
    """The sentence on docs/measurements.md."""
    overheads = [f"{1e6 * overhead_s(case):.1f} us ({case.label('{mode}')})" for case in result.cases()]
    backend = result.facts["backend"]
    return placed(result, f"`dilated_attention` adds to a call of its backend, {backend}: {', '.join(overheads)}")


REPORT = views.Report(
    subject=(
        "selection + op overhead of dilkit.dilated_attention over backend {backend} called directly",
        "{problem}, {pattern}",
    ),
    place="{device_name}, 1 thread",
    tables=(views.TableView("Time of a call", "call", COLUMNS, who=(PUBLIC,)),),
    plots=(
        views.PlotView(
            "Time of a call, with 95% intervals",
            "call",
            "{mode}",
            axes=(views.NAMES, Axis("time of a call", "seconds", log=False)),
        ),
    ),
    summary=sentence,
    method="One thread; both ways timed in turns. The overhead is the median difference of samples of the same round.",
)
