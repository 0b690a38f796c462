"""Calls in the ways that programs make them: in a graph, on a side stream, on a second device, compiled, with a small cache."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from dilkit import Problem, environment
from dilkit.device import cuda_count, device_named
from dilkit.testing.tensors import Tensors
from dilkit.tools.bench.gpu import GpuSuite
from dilkit.tools.console.text import error_line, in_seconds
from dilkit.tools.gpu_day import backends
from dilkit.tools.gpu_day.step import Context, Item, absent, judged, noted
from dilkit.tools.measure.implementation import backend_implementations

DTYPES, PASSES = ("bfloat16", "float32"), (False, True)
LATE = 100_000_000
"""Cycles for which a stream is kept busy: what does not wait for it comes too early."""
SMALL_CACHE = 1 << 16
LENGTHS = tuple(range(1500, 2048, 36))
Results = tuple[Tensor, ...]


def attend(backend: str, asked: Problem, inputs: Tensors) -> Results:
    """`out`, and where they are asked for its gradients."""
    (implementation,) = backend_implementations([backend])
    return _with_gradients(implementation.attend(inputs, asked), asked, inputs)


def _with_gradients(out: Tensor, asked: Problem, inputs: Tensors) -> Results:
    return (out, *torch.autograd.grad(out, inputs.qkv, inputs.dout)) if asked.requires_grad else (out,)


def _each(context: Context, way: Callable[[str, Problem], str]) -> Iterator[Item]:
    """What is wrong with a way of calling, for each of our backends, forward and with gradients."""
    device = device_named(context.device)
    for name in backends.ours(context):
        for dtype, requires_grad in product(DTYPES[: 1 if context.rehearse else None], PASSES):
            asked = backends.problem(device, dtype=dtype, requires_grad=requires_grad)
            try:
                wrong = way(name, asked)
            except Exception as error:
                wrong = error_line(error)
            what = f"{name}, {dtype}, {'forward and gradients' if requires_grad else 'forward'}"
            yield judged(what, wrong, name, dtype, "the same bits as a plain call")


def _difference(found: Results, wanted: Results) -> str:
    names = [name for name, x, y in zip(("out", "dq", "dk", "dv"), found, wanted, strict=False) if not torch.equal(x, y)]
    return f"{', '.join(names)} differ from those of a plain call" if names else ""


def _other_numbers(into: Tensors, asked: Problem) -> None:
    """Other random numbers, in the memory of the inputs."""
    other = Tensors.random(asked, seed=1)
    with torch.no_grad():
        for x, y in zip((*into.qkv, into.dout), (*other.qkv, other.dout), strict=True):
            x.copy_(y)


def graph(context: Context) -> Iterator[Item]:
    """Captured in a CUDA graph, then replayed on other numbers."""
    yield from _each(context, _captured) if context.kind == "cuda" else [absent("CUDA graph", "no CUDA device")]


def _captured(name: str, asked: Problem) -> str:
    inputs, side = Tensors.random(asked), _stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        attend(name, asked, inputs)
    torch.cuda.current_stream().wait_stream(side)
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        result = attend(name, asked, inputs)
    _other_numbers(inputs, asked)
    recorded.replay()
    return _difference(result, attend(name, asked, inputs))


def _stream() -> Any:
    make: Any = torch.cuda.Stream
    return make()


def stream(context: Context) -> Iterator[Item]:
    """On a side stream, whose inputs are late."""
    yield from _each(context, _on_a_side_stream) if context.kind == "cuda" else [absent("streams", "no CUDA device")]


def _on_a_side_stream(name: str, asked: Problem) -> str:
    inputs = Tensors.random(asked)
    attend(name, asked, inputs)  # what is compiled and loaded now does not hide what comes too early
    side = _stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(LATE)  # type: ignore[no-untyped-call]
        _other_numbers(inputs, asked)
        result = attend(name, asked, inputs)
    side.synchronize()
    return _difference(result, attend(name, asked, inputs))


def second_device(context: Context) -> Iterator[Item]:
    """On the second device while the first one is the current one."""
    if context.kind != "cuda" or cuda_count() < 2:
        yield absent("second device", f"torch sees {cuda_count()} CUDA devices")
        return
    yield from _each(context, _elsewhere)


def _elsewhere(name: str, asked: Problem) -> str:
    there = replace(asked, device=device_named("cuda:1"))
    wanted, found = attend(name, asked, Tensors.random(asked)), attend(name, there, _moved(Tensors.random(asked), "cuda:1"))
    return _difference(tuple(x.to(wanted[0].device) for x in found), wanted)


def _moved(inputs: Tensors, device: str) -> Tensors:
    q, k, v, dout = (x.detach().to(device).requires_grad_(x.requires_grad) for x in (*inputs.qkv, inputs.dout))
    return Tensors(q, k, v, None, dout)


def in_compiled_code(context: Context) -> Iterator[Item]:
    """In code that torch.compile compiled; in a rehearsal traced alone."""
    how = "aot_eager" if context.rehearse else "inductor"
    yield from _each(context, partial(_traced, how))


def _traced(how: str, name: str, asked: Problem) -> str:
    inputs = Tensors.random(asked)
    (implementation,) = backend_implementations([name])

    def doubled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return 2 * implementation.attend(replace(inputs, query=q + 0, key=k + 0, value=v + 0), asked)

    run = torch.compile(doubled, fullgraph=True, backend=how)
    result, wanted = (_with_gradients(function(*inputs.qkv), asked, inputs) for function in (run, doubled))
    return _difference(result, wanted)


def small_cache(context: Context) -> Iterator[Item]:
    """Calls of many lengths, one queued behind the other, with a cache that holds the tables of hardly one of them."""
    yield from _each(context, partial(_evicted, context.kind == "cuda", LENGTHS[: 2 if context.rehearse else None]))


def _evicted(queue: bool, lengths: Sequence[int], name: str, asked: Problem) -> str:
    posed = [replace(asked, seq=seq) for seq in lengths]
    inputs = [Tensors.random(one) for one in posed]
    wanted = [attend(name, one, x) for one, x in zip(posed, inputs, strict=True)]
    os.environ[environment.CACHE_BYTES.name] = str(SMALL_CACHE)
    try:
        if queue:
            torch.cuda._sleep(LATE)  # type: ignore[no-untyped-call]
        results = [attend(name, one, x) for one, x in zip(posed, inputs, strict=True)]
    finally:
        del os.environ[environment.CACHE_BYTES.name]
    return "; ".join(filter(None, (_difference(x, y) for x, y in zip(results, wanted, strict=True))))


def longest(context: Context) -> Iterator[Item]:
    """Sixteen million tokens in bf16, both ends beside what they are alone."""
    if context.kind != "cuda":
        yield absent("the longest sequence", "no CUDA device")
        return
    (measured,) = GpuSuite().long()
    seq = measured.case["seq"]
    if measured.verdict in ("refused", "failed"):
        yield absent(f"{seq:,} tokens", "; ".join(measured.reasons))
        return
    wrong = "; ".join(measured.reasons) if measured.verdict == "wrong" else ""
    time = in_seconds(measured.median_s)
    yield judged(f"{seq:,} tokens", wrong, "cupy_raw", "bfloat16", f"both ends are right, {time}")
    yield noted("tokens", f"{seq:,}", tokens=float(seq))
