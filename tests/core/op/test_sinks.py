"""`sink=`."""

from dataclasses import replace

import pytest
import torch
from helpers.calls import TORCH_WARNS, close, differentiated, encode_call, random_leaves
from helpers.fakes import registered
from torch import Tensor

from dilkit import DilatedAttention, MultiheadDilatedAttention, Pattern, dilated_attention, order, ordered_dilated_attention
from dilkit.backends.reference import Reference
from dilkit.op.operators import forward_op
from dilkit.op.zero_keys import ZeroKeys, add_zero_keys
from dilkit.oracle import oracle_attention

PATTERN = Pattern([8, 24], [2, 4], offset="block", tail="zeros")
SEQ, HEADS = 29, 6


def tensors(seq=SEQ, heads=(HEADS, 3), seed=0, dtype=torch.float64):
    return random_leaves(*((2, seq, h, 5) for h in (heads[0], heads[1], heads[1])), heads[:1], seed=seed, dtype=dtype)


def call(attend, *arguments, **options):
    return lambda q, k, v, sink: attend(q, k, v, *arguments, sink=sink, **options)


class WithoutGradients(Reference):
    limits = replace(Reference.limits, gradients=False)


def test_only_the_sink_is_learned():
    """Its gradient needs no backend that has gradients."""
    *qkv, sink = tensors()
    frozen = [x.detach() for x in qkv]
    with registered(WithoutGradients(name="without gradients")) as name:
        out = dilated_attention(*frozen, PATTERN, sink=sink, backend=name)
    (found,) = torch.autograd.grad(out.square().sum(), sink)
    want, _ = oracle_attention(*frozen, PATTERN, sink=sink)
    torch.testing.assert_close(found, torch.autograd.grad(want.square().sum(), sink)[0], rtol=1e-12, atol=1e-12)


def test_the_backward_pass_is_one_and_what_it_saves(monkeypatch):
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        out = dilated_attention(*tensors()[:3], PATTERN, sink=tensors()[3])
    assert sorted(x.dim() for x in saved) == [1, 3, 4, 4, 4, 4]  # sink; lse; query, key, value, out
    passes = []
    from dilkit.op import attend

    for name in ("forward_op", "backward_op", "compute", "compute_gradients"):
        op = getattr(attend, name)
        monkeypatch.setattr(attend, name, lambda *x, op=op, name=name: passes.append(name) or op(*x))
    out.sum().backward()
    assert passes == ["compute_gradients"]


def test_sinks_that_unpack_to_another_shape_are_refused():
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x[:1] if x.dim() == 1 else x):
        out = dilated_attention(*tensors()[:3], PATTERN, sink=tensors()[3])
    with pytest.raises(ValueError, match=r"sink has shape \(1,\); \(heads,\) = \(6,\) is needed"):
        out.sum().backward()


@pytest.mark.parametrize("after", ["nothing", "the forward pass"])
def test_sinks_whose_memory_is_gone_are_refused(after):
    *qkv, sink = tensors()
    sink = sink.detach().float().requires_grad_()  # of another dtype than lse: it is converted
    if after == "the forward pass":
        out = dilated_attention(*qkv, PATTERN, sink=sink)
    sink.untyped_storage().resize_(0)
    if after == "nothing":
        with pytest.raises(ValueError, match=r"sink has shape \(6,\), .*, beyond the 0 bytes of its storage"):
            dilated_attention(*qkv, PATTERN, sink=sink)
    else:
        with pytest.raises(RuntimeError, match="out of bounds for storage of size 0"):
            out.sum().backward()


@pytest.mark.parametrize("masked", [False, True])
def test_along_token_orders(masked):
    """Heads 4 and 5 see the sink alone, and the last places of an order are its tail."""
    pattern = Pattern([8, 28], [1, 3], heads=[(0, 4), (0, 3)], tail="zeros")
    orders, mask = [order((5, 6)), order((5, 6), "snake")], torch.arange(30).expand(2, -1) % 3 == 0 if masked else None
    ordered = call(ordered_dilated_attention, pattern, orders, key_padding_mask=mask, return_lse=True)
    found = differentiated(ordered, tensors(30, (6, 3)))

    def by_head(q, k, v, sink):
        results = []
        for h in range(6):
            along = orders[h // 2 % 2]
            moved = None if mask is None else along.apply(mask)
            out, lse = oracle_attention(*map(along.apply, (q, k, v)), pattern, key_padding_mask=moved, sink=sink)
            results.append((along.restore(out)[:, :, h], along.restore(lse, dim=2)[:, h]))
        return torch.stack([out for out, _ in results], 2), torch.stack([lse for _, lse in results], 1)

    close(found, differentiated(by_head, tensors(30, (6, 3))))


@TORCH_WARNS
def test_opcheck_and_compiled():
    *qkv, sink = tensors(dtype=torch.float32)
    torch.library.opcheck(forward_op, (*qkv, None, 0.3, encode_call(PATTERN, False, True, "native")), dict(sink=sink))
    attend = call(dilated_attention, PATTERN, return_lse=True)
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    close(differentiated(compiled, [*qkv, sink]), differentiated(attend, [*qkv, sink]), 1e-6)


@pytest.mark.parametrize("mapped", [False, True])
def test_vmap(mapped):
    *qkv, sink = (torch.stack([x.detach(), x.detach() * 2]) for x in tensors())
    attend = call(dilated_attention, PATTERN)
    found = torch.func.vmap(attend, in_dims=(0, 0, 0, 0 if mapped else None))(*qkv, sink if mapped else sink[0])
    each = [attend(*(x[i] for x in qkv), sink[i if mapped else 0]) for i in range(2)]
    torch.testing.assert_close(found, torch.stack(each), rtol=1e-12, atol=1e-12)


def test_extreme_sinks():
    *qkv, sink = tensors()
    plain = dilated_attention(*qkv, PATTERN, return_lse=True)
    none = dilated_attention(*qkv, PATTERN, sink=torch.full_like(sink, -torch.inf), return_lse=True)
    close(list(plain), list(none), 1e-15)
    absent = torch.full_like(sink, -torch.inf).requires_grad_()
    dilated_attention(*qkv, Pattern([16], [8]), sink=absent).sum().backward()  # of which some heads keep few rows
    assert not absent.grad.any()
    assert not oracle_attention(*(x.detach() for x in qkv), Pattern([16], [8]), sink=absent.detach())[0].isnan().any()
    out = dilated_attention(*qkv, PATTERN, sink=sink.detach() * 0 + 1e4)
    assert out.abs().max() < 1e-300


def test_bits_do_not_depend_on_the_rows_beside():
    out, lse, logits = torch.randn(1, 4099, 2, 3), torch.randn(1, 2, 4099), 3 * torch.randn(2, 4099)
    whole = out.clone(), lse.clone()
    add_zero_keys(*whole, ZeroKeys(0, logits))
    for start in range(0, 4099, 7):  # as threads and ranks cut them
        rows = slice(start, start + 7)
        add_zero_keys(out[:, rows], lse[:, :, rows], ZeroKeys(0, logits[:, rows]))
    assert torch.equal(out, whole[0])
    assert torch.equal(lse, whole[1])


@pytest.mark.parametrize(
    ("sink", "error", "text"),
    [
        ([0.0] * HEADS, TypeError, r"sink is a list; a torch.Tensor of one logit for each head \(torch.zeros\(6\)\) is needed"),
        (torch.zeros(HEADS, dtype=torch.int64), TypeError, r"sink is torch.int64, .* is needed \(sink.float\(\)\)"),
        (torch.zeros(3), ValueError, r"sink has shape \(3,\); \(heads,\) = \(6,\) is needed, one logit for each head of query"),
        (torch.zeros(1, HEADS), ValueError, r"sink has shape \(1, 6\)"),
        (torch.zeros(HEADS, device="meta"), ValueError, r"sink is on meta but query on cpu; move it with .to\(query.device\)"),
    ],
)
def test_bad_sinks_are_refused(sink, error, text):
    qkv = [x.detach() for x in tensors()[:3]]
    with pytest.raises(error, match=text):
        dilated_attention(*qkv, PATTERN, sink=sink)
    if isinstance(sink, Tensor) and sink.device.type == "cpu":
        with pytest.raises(error, match=text):
            forward_op(*qkv, None, 0.3, encode_call(PATTERN, False, False, ""), sink=sink)


def test_modules_have_sinks():
    layer = MultiheadDilatedAttention(24, 4, DilatedAttention(PATTERN), sink=True).double()
    assert layer.state_dict()["sinks"].tolist() == [0.0] * 4
    assert "sink=True" in repr(layer)
    assert "sinks" not in MultiheadDilatedAttention(24, 4, DilatedAttention(PATTERN)).state_dict()
    x, heads = torch.randn(2, SEQ, 24, dtype=torch.float64), []
    with torch.no_grad():
        layer.sinks.copy_(torch.arange(4.0))
    layer.attention.register_forward_hook(lambda module, given, out: heads.append((given, out)))
    out, _ = layer(x)
    (qkv, found) = heads[0]
    torch.testing.assert_close(found, oracle_attention(*qkv, PATTERN, sink=layer.sinks)[0], rtol=1e-12, atol=1e-12)
    out.sum().backward()
    assert layer.sinks.grad.abs().min() > 0
    with pytest.raises(TypeError, match="sink='yes' is a str; True or False is needed"):
        MultiheadDilatedAttention(24, 4, DilatedAttention(PATTERN), sink="yes")
