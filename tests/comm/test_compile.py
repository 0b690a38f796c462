"""Attention over ranks under torch.compile, on one rank."""

import gc
from functools import partial

import pytest
import torch
from helpers.calls import TORCH_WARNS
from torch.utils.checkpoint import checkpoint

from dilkit import MultiheadDilatedAttention, Pattern, dilated_attention, order
from dilkit.comm import RingDilatedAttention, positions, ring_dilated_attention
from dilkit.comm.arguments import Arguments
from dilkit.comm.operators import attention as call, order as order_of_exchanges
from dilkit.comm.operators.attention import backward_op, forward_op
from dilkit.comm.operators.positions import positions_op
from dilkit.comm.transports.threads import ThreadComm, _Mailbox
from dilkit.inputs import Inputs

PATTERN = Pattern([8, 24], [1, 2])
pytestmark = [pytest.mark.usefixtures("fresh_compiler"), TORCH_WARNS]


@pytest.fixture
def comm():
    return ThreadComm(_Mailbox(1, ()), 0, 5.0)


def rows(seq=20, **options):
    return torch.randn(2, seq, 4, 8, **options)


def test_a_step_is_one_graph(comm):
    layer = MultiheadDilatedAttention(32, 4, RingDilatedAttention(PATTERN, comm), rotary=True)
    found = torch._dynamo.explain(lambda x: layer(x.sin())[0].cos())(torch.randn(1, 20, 32))
    assert (found.graph_count, found.graph_break_count) == (1, 0), found.break_reasons


@pytest.mark.slow
def test_what_the_operators_cannot_be_given_breaks_the_graph_and_is_computed(comm):
    grid, x = order((4, 5)), rows()

    def along(x):
        return ring_dilated_attention(x, x, x, PATTERN, comm, order=grid) * 2

    torch.testing.assert_close(torch.compile(along, backend="aot_eager")(x), along(x))
    compiled = torch.compile(ring_dilated_attention, backend="aot_eager")
    with pytest.raises(TypeError, match="scale='1' is a str"):
        compiled(x, x, x, PATTERN, comm, scale="1")
    with pytest.raises(TypeError, match="pattern=None is a NoneType"):
        compiled(x, x, x, None, comm)
    with pytest.raises(ValueError, match=r"rows=-1 must be at least 0"):
        torch.compile(positions, backend="aot_eager")(-1, comm)


def graphs_of(step):
    from functorch.compile import min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    graphs = {}

    def keep(phase, graph, _):
        graphs[phase] = [node for node in graph.graph.nodes if "over_ranks" in str(node.target)]
        return graph

    compilers = dict(fw_compiler=partial(keep, "forward"), bw_compiler=partial(keep, "backward"))
    backend = aot_autograd(**compilers, partition_fn=min_cut_rematerialization_partition)
    torch.compile(step, fullgraph=True, backend=backend)(rows(requires_grad=True)).sum().backward()
    return graphs


def test_the_order_of_exchanges_is_that_of_the_program(comm):
    """Independent operators get a token of the one before, in both passes."""

    def aside(x):
        return sum(ring_dilated_attention(x * n, x, x, PATTERN, comm) for n in range(3)) + positions(2, comm).sum()

    graphs = graphs_of(aside)
    assert [len(graphs[phase]) for phase in ("forward", "backward")] == [4, 3]
    for first, *others in graphs.values():
        assert first.args[-1] is None
        for before, node in zip([first, *others], others, strict=False):
            (result,) = node.args[-1].args
            assert before in (result, *result.args)
    gc.collect()
    assert not any(map(len, order_of_exchanges._LATEST.values()))


def test_layers_are_computed_again_one_by_one(comm):
    """The order of exchanges asks for no layer before the backward pass comes to it."""

    def layers(x):
        for _ in range(3):
            x = checkpoint(lambda x: ring_dilated_attention(x.sin(), x, x, PATTERN, comm).cos(), x, use_reentrant=False)
        return x

    again, gradient = forward_op, backward_op
    assert [node.target for node in graphs_of(layers)["backward"]] == [again, gradient] * 3


def test_a_backward_pass_that_computes_again_draws_no_other_seed(comm):
    def wave(x):
        out = ring_dilated_attention(x.sin(), x.cos(), x.sin(), PATTERN, comm, dropout_p=0.5)
        return (out.sin() * out.cos()).exp()

    x, found = rows(requires_grad=True), []
    with torch._functorch.config.patch(activation_memory_budget=0.1):
        for step in (wave, torch.compile(wave, backend="aot_eager_decomp_partition")):
            torch.manual_seed(3)
            found += torch.autograd.grad(step(x).sum(), x)
    torch.testing.assert_close(*found)


def test_opcheck(comm):
    mask, sink = torch.rand(2, 20) < 0.3, torch.randn(4, requires_grad=True)
    inputs = [rows(requires_grad=True) for _ in range(3)]
    given = Arguments(Inputs(*inputs, mask, sink=sink), PATTERN, True, 0.3, 0.0, "reference", "auto", True, None, True)
    text = call.encode(given, comm)
    torch.library.opcheck(forward_op, (*inputs, mask, sink, 0.3, 0.0, text, None, None))
    results = forward_op(*inputs, mask, sink, 0.3, 0.0, text, None, None)
    saved = [x.detach() for x in (*inputs, mask, sink, *results)]
    torch.library.opcheck(backward_op, (torch.randn_like(saved[0]), None, *saved, 0.3, 0.0, text, True, None))
    torch.library.opcheck(positions_op, (torch.empty(0), 5, comm.handle, None))


@pytest.mark.slow
def test_under_autocast_and_without_gradients(comm):
    x = rows(requires_grad=True)

    def attend(x):
        return ring_dilated_attention(x, x, x.double().float(), PATTERN, comm)

    for mode in (torch.no_grad(), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16)):
        torch._dynamo.reset()
        with mode:
            found, expected = torch.compile(attend, fullgraph=True, backend="aot_eager")(x), attend(x)
            assert found.dtype == expected.dtype
            torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.slow
def test_numbers_and_lengths_may_change_from_call_to_call(comm):
    def attend(x, scale, dropout_p=0.0):
        return ring_dilated_attention(x, x, x, PATTERN, comm, scale=scale, dropout_p=dropout_p)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for seq, scale, dropout_p in ((20, 0.5, 0.0), (20, 0.25, 0.5), (33, 0.75, 0.25), (50, 3, 0.125)):
        x, found = rows(seq), []
        for function in (compiled, attend):
            torch.manual_seed(1)
            found.append(function(x, scale, dropout_p))
        torch.testing.assert_close(*found, rtol=0, atol=0)
    x = rows(24)
    torch._dynamo.mark_dynamic(x, 1)
    marked = torch.compile(lambda x: attend(x, 0.5), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(marked(x), dilated_attention(x, x, x, PATTERN, scale=0.5))


def test_two_transports_of_one_process_are_not_taken_for_each_other(comm):
    other = ThreadComm(_Mailbox(1, ()), 0, 5.0)
    compiled = torch.compile(lambda x, comm: positions(2, comm) + x, fullgraph=True, backend="aot_eager")
    for one in (comm, other, comm):
        before = one.exchanges
        compiled(torch.zeros(2), one)
        assert one.exchanges == before + 1


def test_a_transport_that_is_gone_is_named():
    handle = ThreadComm(_Mailbox(1, ()), 0, 5.0).handle
    gc.collect()
    with pytest.raises(RuntimeError, match=rf"comm: no transport of this process has the handle '{handle}'"):
        positions_op(torch.empty(0), 2, handle, None)
    with pytest.raises(ValueError, match="call='nonsense' is not what dilkit writes"):
        call.decode("nonsense")
