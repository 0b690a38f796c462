"""Calls in the ways that programs make them."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from helpers.gpu_calls import PATH, compare_ranks, small_problem

from dilkit import Pattern, Problem, environment
from dilkit.comm.launch import processes, task
from dilkit.device import cuda_count, device_named
from dilkit.testing.accuracy import expected_rows, shortened
from dilkit.testing.tensors import Tensors
from dilkit.tools.measure.implementation import automatic, backend_implementations

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120, method="thread")]

LATE = 100_000_000
"""Cycles for which a stream is kept busy: what does not wait for it comes too early."""
SMALL_CACHE = 1 << 16
LENGTHS = tuple(range(1500, 2048, 36))
LONGEST = 1 << 24
LONG = Pattern([2048, 8192, 32768, 131072, 524288], [1, 4, 16, 64, 256])


def attend(backend, asked, inputs):
    out = backend_implementations([backend])[0].attend(inputs, asked)
    return (out, *torch.autograd.grad(out, inputs.qkv, inputs.dout)) if asked.requires_grad else (out,)


def different(found, wanted):
    """Return the names of results that differ from those of a plain call in a bit."""
    return [name for name, x, y in zip(("out", "dq", "dk", "dv"), found, wanted, strict=False) if not torch.equal(x, y)]


def other_numbers(into, asked):
    other = Tensors.random(asked, seed=1)
    with torch.no_grad():
        for x, y in zip((*into.qkv, into.dout), (*other.qkv, other.dout), strict=True):
            x.copy_(y)


def side_stream():
    make = torch.cuda.Stream
    return make()


def sleep():
    torch.cuda._sleep(LATE)


def test_in_a_cuda_graph_replayed_on_other_numbers(cuda, backend, asked):
    inputs, side = Tensors.random(asked), side_stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        attend(backend, asked, inputs)
    torch.cuda.current_stream().wait_stream(side)
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        result = attend(backend, asked, inputs)
    other_numbers(inputs, asked)
    recorded.replay()
    assert not different(result, attend(backend, asked, inputs))


def test_on_a_side_stream_whose_inputs_are_late(cuda, backend, asked):
    inputs = Tensors.random(asked)
    attend(backend, asked, inputs)  # what is compiled and loaded now does not hide what comes too early
    side = side_stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        sleep()
        other_numbers(inputs, asked)
        result = attend(backend, asked, inputs)
    side.synchronize()
    assert not different(result, attend(backend, asked, inputs))


def test_on_the_second_device_while_the_first_is_the_current_one(cuda, backend, asked):
    if cuda_count() < 2:
        pytest.skip(f"torch sees {cuda_count()} CUDA device")
    inputs = Tensors.random(asked)
    q, k, v, dout = (x.detach().to("cuda:1").requires_grad_(x.requires_grad) for x in (*inputs.qkv, inputs.dout))
    found = attend(backend, replace(asked, device=device_named("cuda:1")), Tensors(q, k, v, None, dout))
    wanted = attend(backend, asked, inputs)
    assert not different(tuple(x.to(wanted[0].device) for x in found), wanted)


@pytest.fixture
def _nothing_traced():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_nothing_traced")
def test_in_code_that_torch_compiled(backend, asked, rehearsal):
    """A rehearsal traces the code alone."""
    inputs, implementation = Tensors.random(asked), backend_implementations([backend])[0]

    def doubled(q, k, v):
        return 2 * implementation.attend(replace(inputs, query=q + 0, key=k + 0, value=v + 0), asked)

    def results(function):
        out = function(*inputs.qkv)
        return (out, *torch.autograd.grad(out, inputs.qkv, inputs.dout)) if asked.requires_grad else (out,)

    compiled = torch.compile(doubled, fullgraph=True, backend="aot_eager" if rehearsal else "inductor")
    assert not different(results(compiled), results(doubled))


def test_many_lengths_with_a_cache_that_holds_hardly_one_table(backend, asked, rehearsal, monkeypatch):
    """All calls are queued before the first one runs."""
    problems = [replace(asked, seq=seq) for seq in LENGTHS[: 2 if rehearsal else None]]
    inputs = [Tensors.random(problem) for problem in problems]
    wanted = [attend(backend, *pair) for pair in zip(problems, inputs, strict=True)]
    monkeypatch.setenv(environment.CACHE_BYTES.name, str(SMALL_CACHE))
    if not rehearsal:
        sleep()
    results = [attend(backend, *pair) for pair in zip(problems, inputs, strict=True)]
    assert not [different(x, y) for x, y in zip(results, wanted, strict=True) if different(x, y)]


@pytest.mark.parametrize(
    ("who", "head_dim", "gradients"),
    [("cupy_raw", 64, False), ("automatic", 64, False), ("automatic", 128, False), ("automatic", 64, True)],
)
def test_sixteen_million_tokens(cuda, who, head_dim, gradients, device, note):
    """Rows of both ends are the oracle's. With gradients four million tokens; where a length does not fit, half of it does."""
    one = automatic() if who == "automatic" else backend_implementations([who])[0]
    facts = dict(pattern=LONG, heads=8, head_dim=head_dim, dtype="bfloat16", device=device_named(device))
    asked = Problem(seq=LONGEST // 4 if gradients else LONGEST, requires_grad=gradients, **facts)
    if reasons := one.refusals(asked):
        pytest.skip("; ".join(reasons))
    try:
        inputs, found = long_pass(one, asked, device)
    except torch.cuda.OutOfMemoryError:
        inputs = None  # outside of this block nothing refers to the tensors of the pass
    if inputs is None:
        asked = replace(asked, seq=asked.seq // 2)
        inputs, found = long_pass(one, asked, device)
    longest = max(LONG.segment_lengths)
    for rows in (slice(0, longest), slice(asked.seq - longest, asked.seq)):
        part, alone = end_of(inputs, rows), replace(asked, seq=longest)
        chosen = torch.tensor([0, 1, longest // 2 + 1, longest - 1], device=device)
        at_rows = {name: x[:, rows][:, chosen] for name, x in found.items()}
        wrong = [check.complaint for check in expected_rows(alone, part, chosen).checks(at_rows, longest) if not check.passed]
        assert not wrong, f"{who}: rows from {rows.start}: {wrong}"
        if who != "automatic":
            assert torch.equal(one.once(part, alone), found["out"][:, rows]), f"{who}: rows from {rows.start} differ"
    numbers = {} if gradients else dict(tokens=float(asked.seq))
    note(f"{who}, head_dim {head_dim}, tokens", f"{asked.seq:,}", **numbers)


def end_of(inputs, rows):
    q, k, v, dout = (x.detach()[:, rows].requires_grad_(x.requires_grad) for x in (*inputs.qkv, inputs.dout))
    return Tensors(q, k, v, None, dout)


def long_pass(one, problem, device):
    """Return inputs, made in their own dtype as they would not fit in fp32, and results: `out`, and `dq` of a backward pass."""
    shape = 1, problem.seq, problem.heads, problem.head_dim
    q, k, v = (torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in range(3))
    inputs = Tensors(*(x.requires_grad_(problem.requires_grad) for x in (q, k, v)), None, q.detach())
    if not problem.requires_grad:
        return inputs, dict(out=one.once(inputs, problem))
    out = one.attend(inputs, problem)
    return inputs, dict(out=out.detach(), dq=torch.autograd.grad(out, inputs.qkv, inputs.dout)[0])


def test_two_ranks_that_share_the_device(backend, dtype, device, monkeypatch):
    for name, value in (*PATH.items(), (environment.BACKEND.name, backend)):
        monkeypatch.setenv(name, value)  # which the ranks inherit
    problem = shortened(small_problem(device, dtype=dtype, requires_grad=True))
    compare = partial(compare_ranks, problems=[problem, replace(problem, is_causal=True)])
    assert task.run(processes.transports()[0], 2, compare, limit=100.0) == []
