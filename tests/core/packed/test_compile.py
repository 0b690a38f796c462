"""`dilated_attention_varlen` under torch.compile with changing lengths, autocast, vmap, and torch's own checks of operators."""

import pytest
import torch
from helpers.calls import NEEDS_COMPILER, TORCH_WARNS, encode_call, starts_of

from dilkit import DilatedAttention, MultiheadDilatedAttention, Pattern, dilated_attention_varlen
from dilkit.op.operators import backward_op, forward_op

PATTERN = Pattern([8, 16], [1, 2])
pytestmark = [pytest.mark.usefixtures("fresh_compiler"), TORCH_WARNS]


def tensors(total, **options):
    return [torch.randn(total, heads, 8, **options) for heads in (4, 2, 2)]


@pytest.mark.parametrize("max_seqlen", [pytest.param(None, marks=pytest.mark.slow), 13])
def test_opcheck(max_seqlen):
    inputs = [x[None].detach().requires_grad_() for x in tensors(20)]
    call, packed = encode_call(PATTERN, True, True, "reference"), (starts_of([7, 0, 13]), max_seqlen)
    torch.library.opcheck(forward_op, (*inputs, None, 0.3, call, *packed))
    out, lse = forward_op(*inputs, None, 0.3, call, *packed)
    saved = [x.detach() for x in (*inputs, out, lse)]
    torch.library.opcheck(backward_op, (torch.randn_like(saved[3]), *saved, None, 0.3, call, *packed))


@pytest.fixture
def stats():
    torch._dynamo.utils.counters.clear()
    return torch._dynamo.utils.counters["stats"]


MANY = [[3 * i, 0, *range(1, i)] for i in range(2, 12)]


@pytest.mark.parametrize("hinted", [pytest.param(False, marks=pytest.mark.slow), True])
def test_changing_lengths_do_not_compile_anew(hinted, stats):
    def step(q, k, v, cu_seqlens, max_seqlen):
        out = dilated_attention_varlen(q * 2, k, v, PATTERN, cu_seqlens, max_seqlen, is_causal=True)
        return (out * 3).sum()

    fast = torch.compile(step, backend="aot_eager", fullgraph=True)
    for lengths in MANY:
        inputs = [x.requires_grad_() for x in tensors(sum(lengths))]
        given = starts_of(lengths), max(lengths) if hinted else None
        found = torch.autograd.grad(fast(*inputs, *given), inputs)
        for got, right in zip(found, torch.autograd.grad(step(*inputs, *given), inputs), strict=True):
            torch.testing.assert_close(got, right)
    assert stats["unique_graphs"] == 2  # of the first lengths, and of any


WRONG = {
    "cu_seqlens decreases at index 2, from 9 to 5": [0, 9, 5, 12],
    "cu_seqlens begins with 1": [1, 5, 6, 12],
    "cu_seqlens ends with 5": [0, 5, 5, 5],
    "cu_seqlens ends with 40": [0, 5, 12, 40],
    "cu_seqlens decreases at index 1, from 0 to -40": [0, -40, 50, 12],
}


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=[NEEDS_COMPILER, pytest.mark.slow])])
def test_wrong_starts_are_named_in_compiled_code(backend):
    layer = MultiheadDilatedAttention(16, 4, DilatedAttention(PATTERN), rotary=True)
    fast, x = torch.compile(layer, backend=backend, fullgraph=True), torch.randn(12, 16)
    for text, wrong in WRONG.items():
        with pytest.raises(ValueError, match=text), torch.no_grad():
            fast(x, cu_seqlens=torch.tensor(wrong, dtype=torch.int32))


def test_lengths_without_numbers():
    with torch.device("meta"):
        out, lse = dilated_attention_varlen(*tensors(20), PATTERN, torch.empty(4, dtype=torch.int32), 9, return_lse=True)
    assert (out.shape, lse.shape) == ((20, 4, 8), (4, 20))


def test_vmap_is_a_call_for_each_element():
    inputs, lengths = [torch.stack([x, -x]) for x in tensors(20)], [(7, 13), (0, 20)]
    each = torch.stack([starts_of(both) for both in lengths])
    mapped = torch.vmap(lambda q, k, v, cu: dilated_attention_varlen(q, k, v, PATTERN, cu))(*inputs, each)
    for i, both in enumerate(lengths):
        right = dilated_attention_varlen(*(x[i] for x in inputs), PATTERN, starts_of(both))
        torch.testing.assert_close(mapped[i], right)
