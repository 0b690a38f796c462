"""`tail="zeros"`: what rows see of padding, results and gradients against the oracle, and what stays as it was."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.backends_here import on
from helpers.definition import brute_force_padding
from helpers.strategies import Heads, patterns_with_heads
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dilkit import Pattern, PatternError, dilated_attention, order, ordered_dilated_attention
from dilkit.op.operators import backward_op, encode_call, forward_op
from dilkit.oracle import oracle_attention

TAIL = Pattern([8, 24, 64], [1, 2, 4], offset="block", tail="zeros")
SEQ, HEADS = 41, 6
"""No multiple of a segment, nor of a rate; and heads that are none of the last rate."""


def tensors(seq: int = SEQ, heads: Heads = (HEADS, HEADS), seed: int = 0, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Query, key and value, of which gradients are wanted."""
    draw = torch.Generator().manual_seed(seed)
    shapes = [(2, seq, h, 5) for h in (heads[0], heads[1], heads[1])]
    return [torch.randn(shape, generator=draw, dtype=dtype).requires_grad_() for shape in shapes]


def differentiated(attend: Any, inputs: list[Tensor], *arguments: Any, **options: Any) -> list[Tensor]:
    """`out`, `lse` and the gradients of a loss of both."""
    out, lse = attend(*inputs, *arguments, **options)
    draw = torch.Generator().manual_seed(7)
    dout, dlse = (torch.randn(x.shape, generator=draw, dtype=x.dtype) for x in (out, lse))
    loss = (out * dout).sum() + (lse.masked_fill(lse == -torch.inf, 0.0) * dlse).sum()
    return [out.detach(), lse.detach(), *torch.autograd.grad(loss, inputs)]


@settings(max_examples=30, deadline=None)
@given(patterns_with_heads(), st.integers(1, 40), st.booleans())
def test_zero_keys_are_the_padding(drawn: tuple[Pattern, Heads], seq: int, is_causal: bool) -> None:
    pattern, heads = drawn
    expected = brute_force_padding(pattern, seq, heads, is_causal)
    options: dict[str, Any] = dict(kv_heads=heads[1], is_causal=is_causal)
    found = pattern.zero_keys(seq, heads[0], **options)
    assert found.dtype == torch.int32
    np.testing.assert_array_equal(found.numpy(), expected)
    some = pattern.zero_keys(seq, heads[0], rows=torch.arange(seq)[1::2], **options)
    np.testing.assert_array_equal(some.numpy(), expected[:, 1::2])


@settings(max_examples=25, deadline=None)
@given(patterns_with_heads(), st.integers(1, 40), st.booleans(), st.booleans(), st.integers(0, 99))
def test_any_pattern_agrees_with_explicit_zero_keys(
    drawn: tuple[Pattern, Heads], seq: int, is_causal: bool, masked: bool, seed: int
) -> None:
    pattern, heads = drawn
    inputs = tensors(seq, heads, seed)
    mask = torch.rand(2, seq, generator=torch.Generator().manual_seed(seed)) < 0.4 if masked else None
    options: dict[str, Any] = dict(is_causal=is_causal, key_padding_mask=mask)
    found = differentiated(dilated_attention, inputs, pattern, return_lse=True, backend="native", **options)
    for got, want in zip(found, differentiated(oracle_attention, inputs, pattern, **options), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", on("cpu"))
def test_gradients_of_every_backend(backend: str) -> None:
    inputs = tensors()
    found = differentiated(dilated_attention, inputs, TAIL, return_lse=True, backend=backend)
    for got, want in zip(found, differentiated(oracle_attention, inputs, TAIL), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", on("cpu"))
def test_rows_that_see_no_token_and_rows_that_see_no_padding(backend: str) -> None:
    inputs, mask = tensors(), torch.zeros(2, SEQ, dtype=torch.bool)
    mask[0] = True
    number = TAIL.zero_keys(SEQ, HEADS)
    assert bool((number == 0).any())
    out, lse = dilated_attention(*inputs, TAIL, key_padding_mask=mask, return_lse=True, backend=backend)
    assert not out[0].any()
    torch.testing.assert_close(lse[0], number.double().log())  # -inf where there are none
    exact = dilated_attention(*inputs, replace(TAIL, tail="exact"), key_padding_mask=mask, return_lse=True, backend=backend)
    untouched = number == 0
    assert torch.equal(out[1].transpose(0, 1)[untouched], exact[0][1].transpose(0, 1)[untouched])
    assert torch.equal(lse[1][untouched], exact[1][1][untouched])
    assert not torch.equal(lse[1][~untouched], exact[1][1][~untouched])
    grads = torch.autograd.grad(out.sum(), inputs)
    assert all(grad.isfinite().all() and not grad[0].any() for grad in grads)


def test_whole_segments_and_causal_calls_are_as_with_an_exact_tail() -> None:
    pattern = Pattern([8, 16], [1, 4], tail="zeros")
    whole = tensors(48)
    assert torch.equal(dilated_attention(*whole, pattern), dilated_attention(*whole, replace(pattern, tail="exact")))
    inputs = tensors()
    causal = [dilated_attention(*inputs, x, is_causal=True) for x in (TAIL, replace(TAIL, tail="exact"))]
    assert torch.equal(*causal)


@pytest.mark.parametrize("masked", [False, True])
def test_along_token_orders_the_last_places_are_the_tail(masked: bool) -> None:
    inputs, mask = tensors(30), torch.arange(30).expand(2, -1) % 3 == 0 if masked else None
    orders = [order((5, 6)), order((5, 6), "snake")]
    options: dict[str, Any] = dict(key_padding_mask=mask)
    found = differentiated(ordered_dilated_attention, inputs, TAIL, orders, return_lse=True, **options)

    def by_head(*given: Tensor) -> tuple[Tensor, Tensor]:
        shards = [[x[:, :, h : h + 1] for x in given] for h in range(HEADS)]
        alone = [replace(TAIL, head_shard=(h, HEADS)) for h in range(HEADS)]
        results = []
        for h, (qkv, pattern) in enumerate(zip(shards, alone, strict=True)):
            along = orders[h % 2]
            moved = None if mask is None else along.apply(mask)
            out, lse = oracle_attention(*map(along.apply, qkv), pattern, key_padding_mask=moved)
            results.append((along.restore(out), along.restore(lse, dim=2)))
        return torch.cat([out for out, _ in results], 2), torch.cat([lse for _, lse in results], 1)

    for got, want in zip(found, differentiated(by_head, inputs), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch", "ignore::UserWarning:torch")
@pytest.mark.slow
def test_operators_pass_opcheck() -> None:
    inputs = tensors(dtype=torch.float32)
    call = encode_call(TAIL, False, True, "native")
    torch.library.opcheck(forward_op, (*inputs, None, 0.3, call))
    out, lse = forward_op(*inputs, None, 0.3, call)
    saved = [x.detach() for x in (*inputs, out, lse)]
    torch.library.opcheck(backward_op, (torch.randn_like(saved[3]), *saved, None, 0.3, call))


def test_vmap_and_inference_mode() -> None:
    stacked = [torch.stack([x.detach(), x.detach() + 1]) for x in tensors()]
    found = torch.func.vmap(lambda q, k, v: dilated_attention(q, k, v, TAIL))(*stacked)
    with torch.inference_mode():
        each = [dilated_attention(*(x[i] for x in stacked), TAIL) for i in range(2)]
    torch.testing.assert_close(found, torch.stack(each), rtol=1e-12, atol=1e-12)


def test_bad_tails_are_refused() -> None:
    with pytest.raises(PatternError, match="tail='padded' is not known; choose from 'exact', 'zeros'"):
        Pattern([8], [2], tail="padded")
    with pytest.raises(PatternError, match=r"tail='zeros' with overlap='once' .* overlap='count' or tail='exact' is needed"):
        Pattern([8], [2], overlap="once", tail="zeros")
    with pytest.raises(TypeError):
        Pattern([8], [2], "modulo", "count", None, None, "zeros")


def test_older_json_has_an_exact_tail() -> None:
    fields = json.loads(Pattern([8], [2]).to_json())
    del fields["tail"]
    assert Pattern.from_json(json.dumps(fields)) == Pattern([8], [2])
    assert Pattern([8], [2]).tail == "exact"


def test_tails_are_told_in_words() -> None:
    assert TAIL.describe().endswith("; tail: zero keys in the place of missing ones")
    assert str(TAIL) == "Pattern([8, 24, 64], [1, 2, 4], offset='block', tail='zeros')"
