"""What selection and the torch op cost: `dilated_attention` beside calling its backend directly, on a tiny problem.

One thread computes: what is looked for happens in one, and waking others takes longer than that on a busy machine.
"""

from __future__ import annotations

import json
import statistics
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from dilkit.problem import Problem
from dilkit.tools.console.arguments import make_folder
from dilkit.tools.console.interrupt import load_torch
from dilkit.tools.measure.timing import time_interleaved
from dilkit.tools.results import untyped as results
from dilkit.tools.results.decode import encode
from dilkit.tools.results.record import Samples

Pair = tuple[Callable[[], Any], Callable[[], Any]]


def run(args: Namespace, problem: Problem, repeats: int) -> int:
    """Measure, write overhead.json into `args.out` and print microseconds."""
    for option, given in (("--baseline", args.baseline), ("--backward", args.train), ("--budget", args.budget)):
        if given:
            raise ValueError(
                f"{option}: does not go with --overhead, which compares one backend with itself both ways; leave it out"
            )
    if (args.backend is not None and len(args.backend) != 1) or (args.seqs is not None and len(args.seqs) != 1):
        names, lengths = ",".join(args.backend or ("all",)), ",".join(map(str, args.seqs or (problem.seq,)))
        raise ValueError(f"--overhead: one backend at one length is measured, not {names} at {lengths} tokens; name one of each")
    backend = args.backend[0] if args.backend else None
    make_folder("--out", args.out)
    load_torch()
    with one_thread():
        name, pairs = call_pairs(problem, backend)
        modes = {mode: compare(pair, repeats, problem.device.type) for mode, pair in pairs.items()}
        told = dict(problem=results.describe_problem(problem), seq=problem.seq, backend=name, modes=modes)
        result = results.new("overhead", problem.device, **told)
    results.save(result, args.out / "overhead.json")
    print(json.dumps(result, allow_nan=False) if args.json else text(result))
    print(f"wrote overhead.json in {args.out}", file=sys.stderr)
    return 0


@contextmanager
def one_thread() -> Iterator[None]:
    """Within the block, torch computes with one thread."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def call_pairs(problem: Problem, backend: str | None = None) -> tuple[str, dict[str, Pair]]:
    """The backend that computes `problem`, and for each way of calling it (through dilkit, directly).

    Raises `NoBackendError` when there is none.
    """
    import torch

    from dilkit.attention import dilated_attention
    from dilkit.selector import requested_backends, select
    from dilkit.tools.measure.implementation import Inputs

    trained = replace(problem, requires_grad=True)
    chosen = select(trained, requested_backends(backend))
    inputs = Inputs.random(trained)
    graph = inputs.query, inputs.key, inputs.value
    plain, mask = tuple(x.detach() for x in graph), inputs.key_padding_mask
    options = dict(is_causal=problem.is_causal, key_padding_mask=mask, backend=backend)

    def public(tensors: tuple[Any, ...]) -> Any:
        return dilated_attention(*tensors, problem.pattern, **options)

    def direct(at: Problem) -> Any:
        return chosen.forward(*plain, at, mask)

    def direct_both() -> Any:
        out, lse = direct(trained)
        return chosen.backward(inputs.dout, *plain, out, lse, trained, mask)

    modes: dict[str, Pair] = {
        "forward, no gradients": (torch.no_grad()(lambda: public(plain)), torch.no_grad()(lambda: direct(problem))),
        "forward, gradients recorded": (lambda: public(graph), torch.no_grad()(lambda: direct(trained))),
        "forward + backward": (lambda: torch.autograd.grad(public(graph), graph, inputs.dout), torch.no_grad()(direct_both)),
    }
    return chosen.name, modes


def compare(pair: Pair, repeats: int, device: str) -> dict[str, Any]:
    """Both timed in interleaved rounds, and what the first took longer: see `overhead`, and between the fastest samples."""
    functions = dict(zip(("public", "direct"), pair, strict=True))
    timed = time_interleaved(functions, repeats, warmup=20, min_time=0.002, device=device)
    fastest = min(timed["public"].samples_s) - min(timed["direct"].samples_s)
    both = {name: encode(samples) for name, samples in timed.items()}
    return dict(**both, overhead_s=overhead(**timed), overhead_of_fastest_s=fastest)


def overhead(public: Samples, direct: Samples) -> float:
    """The median difference of samples taken in the same round, so that a slow spell of the machine falls out."""
    return statistics.median(a - b for a, b in zip(public.samples_s, direct.samples_s, strict=True))


def text(result: dict[str, Any]) -> str:
    """The result for people, in microseconds a call."""
    problem = result["problem"]
    size = f"{problem['batch']} x {result['seq']} tokens x {problem['heads']} heads x {problem['head_dim']}, {problem['dtype']}"
    lines = [
        f"selection + op overhead of dilkit.dilated_attention over backend {result['backend']} called directly",
        f"{size}, {problem['pattern']['text']}",
        "",
        f"{'microseconds a call':<28}{'dilkit':>10}{'direct':>10}{'overhead':>10}{'of fastest':>12}",
    ]
    for mode, found in result["modes"].items():
        values = found["public"]["median_s"], found["direct"]["median_s"], found["overhead_s"]
        fastest = f"{1e6 * found['overhead_of_fastest_s']:>12.1f}"
        lines.append(f"{mode:<28}" + "".join(f"{1e6 * value:>10.1f}" for value in values) + fastest)
    return "\n".join(lines)
