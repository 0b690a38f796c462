"""Tensors that operators are given without `dilated_attention`."""

import pytest
import torch
from helpers.calls import PATTERN, encode_call, tensors
from helpers.pairwise import every_pair
from torch.autograd.graph import saved_tensors_hooks

from dilkit import Pattern, dilated_attention
from dilkit.op._facts import tensor_key
from dilkit.op.boundary import INPUTS
from dilkit.op.operators import backward_op, forward_op

BACKENDS = ("native", "sdpa", "reference")
Q, K, V = tensors()
OUT, LSE = torch.zeros_like(Q), torch.zeros(2, 4, 20)


def call(backend):
    return None, 0.3, encode_call(PATTERN, False, True, backend)


def strided(x):
    return x.mT.contiguous().mT if x.dim() == 4 else x


def shrunk(x):
    x = x.clone()
    x.untyped_storage().resize_(100)
    return x


@pytest.mark.parametrize(
    "other",
    [
        lambda x: x.double(),
        lambda x: x[:, :1],
        lambda x: x[..., None],
        lambda x: x.mT.contiguous().mT,
        lambda x: x.reshape(3, 2, 4),
        lambda x: x.to("meta"),
        lambda x: x.reshape(1, 1, 2, 3, 4),
    ],
)
def test_the_key_of_tensors_is_another_for_other_tensors(other):
    x = torch.zeros(2, 3, 4)
    keys = [tensor_key(pair) for pair in ((x, x), (other(x), x), (x, other(x)), (x,), (other(x),))]
    assert len(set(keys)) == len(keys)
    assert tensor_key((torch.ones(2, 3, 4), other(torch.ones(2, 3, 4)))) == keys[2]


ODD = (strided, lambda x: torch._efficientzerotensor(x.shape))


@pytest.mark.parametrize(("backend", "at", "odd"), every_pair(BACKENDS, range(3), ODD))
def test_the_forward_reads_any_layout(backend, at, odd):
    inputs = [odd(x) if i == at else x for i, x in enumerate((Q, K, V))]
    plain = [torch.zeros_like(x) + y for x, y in zip((Q, K, V), inputs, strict=True)]
    for found, right in zip(forward_op(*inputs, *call(backend)), forward_op(*plain, *call(backend)), strict=True):
        torch.testing.assert_close(found, right, rtol=0, atol=0)


@pytest.mark.parametrize(("backend", "at", "odd"), every_pair(BACKENDS, range(5), ODD))
def test_the_backward_reads_any_layout(backend, at, odd):
    out, lse = forward_op(Q, K, V, *call(backend))
    given = [torch.randn_like(out), Q, K, V, out]
    inputs = [odd(x) if i == at else x for i, x in enumerate(given)]
    plain = [torch.zeros_like(x) + y for x, y in zip(given, inputs, strict=True)]
    for found, right in zip(backward_op(*inputs, lse, *call(backend)), backward_op(*plain, lse, *call(backend)), strict=True):
        torch.testing.assert_close(found, right, rtol=0, atol=0)


WRONG = {
    "shorter": (lambda x: x[:, :3], "shape|seq"),
    "of fewer sequences": (lambda x: x[:1], "shape|batch"),
    "fewer dimensions": (lambda x: x[0], "shape"),
    "dtype": (lambda x: x.double(), "float64"),
    "memory gone": (shrunk, "beyond the 100 bytes of its storage"),
    "undefined": (lambda x: None, "is a NoneType; a torch.Tensor is needed"),
}


@pytest.mark.parametrize(("change", "text"), WRONG.values(), ids=WRONG)
def test_an_operator_refuses_tensors_that_do_not_fit(change, text):
    for operator, given in ((forward_op, (Q, K, V)), (backward_op, (OUT, Q, K, V, OUT, LSE))):
        for at in range(len(given)):
            inputs = [change(x) if i == at else x for i, x in enumerate(given)]
            if len(inputs) == 3 and inputs[0] is not None and inputs[0].shape[:2] == (2, 3):
                continue  # fewer queries than keys are a call
            with pytest.raises((ValueError, TypeError, RuntimeError, NotImplementedError), match=text):
                operator(*inputs, *call("native"))


def test_an_operator_refuses_a_mask_that_does_not_fit():
    for mask in (torch.zeros(2, 19, dtype=torch.bool), torch.zeros(2, 20)):
        with pytest.raises((ValueError, TypeError), match="key_padding_mask"):
            forward_op(Q, K, V, mask, *call("native")[1:])


def gradients(backend, pack, unpack):
    inputs = [x.clone().requires_grad_() for x in (Q, K, V)]
    with saved_tensors_hooks(pack, unpack):
        out = dilated_attention(*inputs, PATTERN, backend=backend)
    return torch.autograd.grad(out.sin().sum(), inputs)


@pytest.mark.parametrize("backend", BACKENDS)
def test_hooks_may_change_the_layout_of_what_is_saved(backend):
    plain = gradients(backend, lambda x: x, lambda x: x)
    for found, right in zip(gradients(backend, lambda x: x, strided), plain, strict=True):
        torch.testing.assert_close(found, right, rtol=0, atol=0)


def test_hooks_that_lose_the_memory_of_a_mask_are_refused():
    mask, inputs = torch.zeros(Q.shape[:2], dtype=torch.bool), [x.clone().requires_grad_() for x in (Q, K, V)]
    with saved_tensors_hooks(lambda x: x, lambda x: x.to("meta") if x.dtype == torch.bool else x):
        out = dilated_attention(*inputs, PATTERN, key_padding_mask=mask)
    with pytest.raises(ValueError, match="of the call are on device meta; saved_tensors_hooks"):
        torch.autograd.grad(out.sum(), inputs)


def test_the_operator_refuses_others_without_memory_beside_a_query_with_some():
    assert forward_op(*(x.to("meta") for x in (Q, K, V)), *call("native"))[0].is_meta
    for nones in range(6):
        with pytest.raises(ValueError, match="of the call are on device meta"):
            forward_op(Q, K, V, *call("native"), *[None] * 2, *[None] * nones, torch.zeros(4, device="meta"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_hooks_that_change_the_dtype_of_what_is_saved_are_refused(backend):
    with pytest.raises(TypeError, match=r"query is torch.bfloat16.*saved_tensors_hooks"):
        gradients(backend, lambda x: x.bfloat16() if x.is_floating_point() else x, lambda x: x)


@pytest.mark.parametrize("at", range(3))
def test_a_call_whose_memory_is_gone_is_refused(at):
    inputs = [shrunk(x) if i == at else x for i, x in enumerate((Q, K, V))]
    with pytest.raises(ValueError, match=rf"{INPUTS[at]} has shape .* beyond the 100 bytes of its storage"):
        dilated_attention(*inputs, PATTERN)


def test_hooks_that_lose_the_memory_of_what_is_saved_are_refused():
    with pytest.raises(ValueError, match=r"query has shape .* beyond the 100 bytes of its storage"):
        gradients("native", lambda x: x, shrunk)


def test_a_view_of_no_rows_may_begin_anywhere():
    """The shard of a joint projection that begins at the sequence's end has no memory beyond it."""
    rows = torch.zeros(1, 20, 6, 8)[:, 20:, 2:4]
    assert rows.storage_offset() > 20 * 6 * 8
    assert dilated_attention(rows, rows, rows, PATTERN).shape == (1, 0, 2, 8)


def test_dimensions_in_torchs_order_are_warned_of():
    """Nothing but the number of heads tells them apart."""
    rows = torch.zeros(1, 2, 300, 4)  # (batch, heads, seq, head_dim) of scaled_dot_product_attention
    with pytest.warns(
        UserWarning, match=r"300 heads of 2 tokens. Tensors are \(batch, seq, heads, head_dim\).*transpose\(1, 2\)"
    ):
        dilated_attention(rows, rows, rows, Pattern([2], [2]))
    dilated_attention(*[rows.transpose(1, 2).contiguous()] * 3, Pattern([2], [2]))
