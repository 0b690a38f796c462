"""What selection and the torch op cost: `dilated_attention` beside calling its backend directly, on a tiny problem.

One thread computes: what is looked for happens in one, and waking others takes longer than that on a busy machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dilkit.problem import Problem
from dilkit.threads import torch_threads
from dilkit.tools.bench.overhead.record import Calls, OverheadResult
from dilkit.tools.measure.timing import time_interleaved
from dilkit.tools.results.file import new_result
from dilkit.tools.results.problem import ProblemFacts

if TYPE_CHECKING:
    from torch import Tensor

Pair = tuple[Callable[[], Any], Callable[[], Any]]


def measure(problem: Problem, backend: str | None, repeats: int) -> OverheadResult:
    """The overhead of each way of calling the backend that computes `problem`, or the one of this name."""
    with torch_threads(1):
        name, pairs = call_pairs(problem, backend)
        modes = {mode: compare(pair, repeats, problem.device.type) for mode, pair in pairs.items()}
        facts = ProblemFacts.of(problem)
        return new_result(OverheadResult, problem.device, problem=facts, seq=problem.seq, backend=name, modes=modes)


def call_pairs(problem: Problem, backend: str | None = None) -> tuple[str, dict[str, Pair]]:
    """The backend that computes `problem`, and for each way of calling it (through dilkit, directly).

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
    given = Inputs(*plain, mask)
    options: dict[str, Any] = dict(is_causal=problem.is_causal, key_padding_mask=mask, backend=backend)

    def public(tensors: tuple[Tensor, Tensor, Tensor]) -> Any:
        return dilated_attention(*tensors, problem.pattern, **options)

    def direct(at: Problem) -> Any:
        return chosen.forward(given, at)

    def direct_both() -> Any:
        out, lse = direct(trained)
        return chosen.backward(inputs.dout, given, out, lse, trained)

    modes: dict[str, Pair] = {
        "forward, no gradients": (torch.no_grad()(lambda: public(plain)), torch.no_grad()(lambda: direct(problem))),
        "forward, gradients recorded": (lambda: public(graph), torch.no_grad()(lambda: direct(trained))),
        "forward + backward": (lambda: torch.autograd.grad(public(graph), graph, inputs.dout), torch.no_grad()(direct_both)),
    }
    return chosen.name, modes


def compare(pair: Pair, repeats: int, device: str) -> Calls:
    """Both timed in interleaved rounds."""
    functions = dict(zip(("public", "direct"), pair, strict=True))
    return Calls.of(**time_interleaved(functions, repeats, warmup=20, min_time=0.002, device=device))
