"""`tail="zeros"`."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.backends_here import on
from helpers.calls import random_leaves
from helpers.definition import brute_force_padding
from helpers.strategies import patterns_with_heads
from hypothesis import given, settings, strategies as st

from dilkit import Pattern, PatternError, dilated_attention

TAIL = Pattern([8, 24, 64], [1, 2, 4], offset="block", tail="zeros")
SEQ, HEADS = 41, 6
"""No multiple of a segment, nor of a rate; and heads that are none of the last rate."""


def tensors(seq=SEQ, heads=(HEADS, HEADS), seed=0, dtype=torch.float64):
    return random_leaves(*((2, seq, h, 5) for h in (heads[0], heads[1], heads[1])), seed=seed, dtype=dtype)


@settings(max_examples=30, deadline=None)
@given(patterns_with_heads(), st.integers(1, 40), st.booleans())
def test_zero_keys_are_the_padding(drawn, seq, is_causal):
    pattern, heads = drawn
    expected = brute_force_padding(pattern, seq, heads, is_causal)
    options = dict(kv_heads=heads[1], is_causal=is_causal)
    found = pattern.zero_keys(seq, heads[0], **options)
    assert found.dtype == torch.int32
    np.testing.assert_array_equal(found.numpy(), expected)
    some = pattern.zero_keys(seq, heads[0], rows=torch.arange(seq)[1::2], **options)
    np.testing.assert_array_equal(some.numpy(), expected[:, 1::2])


@pytest.mark.parametrize("backend", on("cpu"))
def test_rows_that_see_no_token_and_rows_that_see_no_padding(backend):
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


def test_bad_tails_are_refused():
    with pytest.raises(PatternError, match="tail='padded' is not known; choose from 'exact', 'zeros'"):
        Pattern([8], [2], tail="padded")
    with pytest.raises(PatternError, match=r"tail='zeros' with overlap='once' .* overlap='count' or tail='exact' is needed"):
        Pattern([8], [2], overlap="once", tail="zeros")
    with pytest.raises(TypeError):
        Pattern([8], [2], "modulo", "count", None, None, "zeros")


def test_tails_are_told_in_words():
    assert TAIL.describe().endswith("; tail: zero keys in the place of missing ones")
    assert str(TAIL) == "Pattern([8, 24, 64], [1, 2, 4], offset='block', tail='zeros')"
